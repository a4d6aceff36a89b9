"""The house: imports flow one way, pure rooms are pure, and importing oomph is nearly free."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import oomph

SOURCE = Path(oomph.__file__).parent
MODULES = {
    ".".join(("oomph", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in SOURCE.rglob("*.py")
}

GROUND = {"errors", "units", "store"}
ROOMS = {
    "sensing",
    "tracing",
    "predicting",
    "planning",
    "training",
    "stability",
    "running",
    "explaining",
    "serving",
}
# Who may import whom. A room may import what is below it, never another room.
ALLOWED = {
    "errors": set(),
    "units": {"errors"},
    "store": {"errors"},
    "records": {"records", *GROUND},
    **{room: {room, "records", *GROUND} for room in ROOMS},
    # A Stepper proves by what `oomph check` proves by: one idea of what a loss divides by, and of
    # where examples meet, is in one place.
    "training": {"training", "stability", "records", *GROUND},
    "showing": {"showing", "records", *GROUND},
    "verbs": {"verbs", *ROOMS, "showing", "records", *GROUND},
    "cli": {"cli", "verbs", "showing", "records", *GROUND},
    "__init__": {"verbs", "errors", "records"},
    "__main__": {"cli"},
}
PURE = {"records", "predicting", "planning", "explaining"}
WEB = {"starlette", "uvicorn", "prometheus_client"}
HEAVY = {"torch", "pynvml", "rich", "psutil", "numpy", "argcomplete", *WEB}


def part_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in MODULES else node.module), node


def top_level(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_imports_only_what_is_below_it(module: str) -> None:
    allowed = ALLOWED[part_of(module)]
    for imported, node in imports_of(MODULES[module]):
        if imported == "oomph" or not imported.startswith("oomph."):
            continue
        assert part_of(imported) in allowed, f"{module}:{node.lineno} imports {imported}"


def test_there_are_no_import_cycles() -> None:
    graph = {
        module: {name for name, _ in imports_of(path) if name in MODULES and name != module}
        for module, path in MODULES.items()
    }
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in finished:
            for imported in graph[module] - {"oomph"}:
                visit(imported, (*trail, module))
            finished.add(module)

    for module in graph.keys() - {"oomph"}:
        visit(module, ())


# The rooms that need torch, or what the extra `web` installs. Nobody imports them but inside a
# function.
NEED_MORE = {"tracing", "training", "stability", "serving"}


@pytest.mark.parametrize("module", sorted(m for m in MODULES if part_of(m) not in NEED_MORE))
def test_nothing_heavy_is_imported_at_the_top_of_a_module(module: str) -> None:
    for node in top_level(MODULES[module]):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] not in HEAVY, f"{module}:{node.lineno} imports {name}"
            assert part_of(name) not in NEED_MORE, f"{module}:{node.lineno} imports {name}"


@pytest.mark.parametrize("module", sorted(m for m in MODULES if part_of(m) in PURE))
def test_pure_rooms_touch_no_hardware_and_print_nothing(module: str) -> None:
    imported = {name.split(".")[0] for name, _ in imports_of(MODULES[module])}
    assert not imported & {"torch", "pynvml", "psutil", "rich", "subprocess", "socket"}
    calls = (n for n in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(n, ast.Call))
    assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


def test_only_one_module_imports_pynvml() -> None:
    importers = {m for m, p in MODULES.items() for name, _ in imports_of(p) if name == "pynvml"}
    assert importers == {"oomph.sensing.nvml"}


def test_no_module_has_a_name_that_explains_nothing() -> None:
    empty_names = {"utils", "util", "helpers", "common", "misc", "manager", "core", "base"}
    assert not {path.stem for path in MODULES.values()} & empty_names


def test_every_module_opens_with_a_docstring() -> None:
    undocumented = [
        m for m, p in MODULES.items() if not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert undocumented == []


@pytest.mark.parametrize(
    "code",
    ["import oomph", "import oomph.cli; oomph.cli.main(['--help'])"],
    ids=["import oomph", "oomph --help"],
)
def test_it_starts_without_anything_heavy(code: str) -> None:
    report = (
        "import sys, contextlib\n"
        f"with contextlib.suppress(SystemExit): {code}\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    # dataclasses alone costs as much as the interpreter's own start.
    assert not loaded & {*HEAVY, "dataclasses", "typing", "json", "ctypes", "subprocess", "shutil"}


def test_the_public_names_are_those_that_are_declared() -> None:
    for name in oomph.__all__:
        assert getattr(oomph, name) is not None
    assert set(dir(oomph)) == set(oomph.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = oomph.nonsense
