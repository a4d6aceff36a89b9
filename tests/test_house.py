"""The house: rooms in a declared order, nothing slips around it, and importing it is free."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import oomph

SOURCE = Path(oomph.__file__).parent
MODULES = {
    ".".join(("oomph", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in SOURCE.rglob("*.py")
}


class Room(NamedTuple):
    """What a room is for, and the rooms below it that it may import."""

    purpose: str
    may_import: tuple[str, ...] = ()


GROUND = {
    "errors": "the exceptions, and the exit code of each",
    "units": "sizes and durations <-> text",
    "store": "the one cache, and the one atomic write",
    "oom_message": "the text of an out-of-memory error -> its figures",
    "progress": "how far the work is -> a line on standard error",
    "out_of_memory": "exception -> which memory ran out",
}
# The order of the rooms. A room may import itself, the ground floor, `records`, and the rooms that
# its row names; all of those stand above it in this table, so imports flow one way.
# docs/architecture.md shows this table.
ROOMS: dict[str, Room] = {
    "predicting": Room("trace -> prediction: replayed allocator, peak, step time"),
    "snapshots": Room("a memory snapshot of torch -> its events, read in a child process"),
    "explaining": Room("run -> report; message, snapshot -> why memory ran out", ("predicting",)),
    "sandbox": Room("run a stranger's program so that nothing of it stays"),
    "tricks": Room("one file per trick: when it is possible, how it is put on, its caveat"),
    "showing": Room("records -> terminal, HTML pages, Prometheus", ("tricks",)),
    "sensing": Room("GPUs and processes -> readings; the catalogue of GPUs", ("predicting",)),
    "pretending": Room("the one stand-in for CUDA, to rehearse and to emulate", ("predicting",)),
    "rehearsing": Room(
        "workload or unchanged script -> trace, without a GPU",
        ("predicting", "sensing", "tricks", "pretending", "sandbox"),
    ),
    "stability": Room(
        "is training still the same with a trick, and stable without?",
        ("tricks", "pretending", "rehearsing"),
    ),
    "monitoring": Room(
        "a command or script -> its run directory",
        ("sensing", "explaining", "showing", "stability"),
    ),
    "launching": Room(
        "plan -> processes: torchrun here, or a scheduler's job",
        ("tricks", "sensing", "monitoring"),
    ),
    "exporting": Room(
        "plan -> settings of other tools, edits of a script", ("tricks", "launching")
    ),
    "planning": Room(
        "predictions -> plans: choices, search, ranking, reasons",
        ("predicting", "sensing", "tricks", "rehearsing", "exporting"),
    ),
    "verifying": Room(
        "a prediction beside a few real steps on the GPU here: was it right?",
        ("predicting", "sensing", "tricks", "pretending", "sandbox", "rehearsing", "planning"),
    ),
    "training": Room(
        "a batch -> one optimizer step, whatever fits, recovered after an OOM",
        ("predicting", "tricks", "pretending", "stability"),
    ),
    "serving": Room(
        "the dashboard",
        (
            *("sensing", "explaining", "showing", "monitoring"),
            *("sandbox", "rehearsing", "exporting", "planning"),  # "Will it fit?"
        ),
    ),
}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "store": {"errors", "units"},
    "oom_message": {"units"},
    "progress": {"units"},
    "out_of_memory": {"oom_message"},
    "records": {"records", *GROUND},
    **{name: {name, "records", *room.may_import, *GROUND} for name, room in ROOMS.items()},
    "verbs": {"verbs", "records", *ROOMS, *GROUND},
    "cli": {"cli", "verbs", "showing", "records", *GROUND},
    "__init__": {"verbs", "monitoring", "records", "errors"},
    "__main__": {"cli"},
}
PURE = {"records", "predicting", "planning", "explaining", "exporting", "showing"}
WEB = {"starlette", "uvicorn", "prometheus_client"}
HEAVY = {"torch", "pynvml", "rich", "psutil", "numpy", "argcomplete", *WEB}
# Rooms that need torch, or what the extra `web` installs: imported inside functions only.
NEED_MORE = {
    *("pretending", "rehearsing", "training", "stability", "verifying"),
    *("serving", "out_of_memory"),
}


def part_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports_of(module: str) -> Iterator[tuple[str, ast.stmt]]:
    """Every module that a module imports, at its top or inside a function."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in MODULES else node.module), node


@functools.cache
def imported_at_the_top(module: str) -> set[str]:
    """What importing a module imports at once, not counting `if TYPE_CHECKING`."""
    found: set[str] = set()
    for node in tree_of(module).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (full & MODULES.keys()) or {node.module}
    return found


# ---- the order of the rooms ----------------------------------------------------------------------


def test_every_room_stands_above_those_that_it_may_import() -> None:
    order = list(ROOMS)
    for name, room in ROOMS.items():
        assert set(room.may_import) <= set(order[: order.index(name)]), name


def test_every_part_of_the_package_is_in_the_table() -> None:
    assert {part_of(module) for module in MODULES} == ALLOWED.keys()


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_a_room_imports_only_what_the_table_allows(part: str) -> None:
    for module in (module for module in MODULES if part_of(module) == part):
        for imported, node in imports_of(module):
            if imported.startswith("oomph."):
                where = f"{module}:{node.lineno} imports {imported}"
                assert part_of(imported) in ALLOWED[part], where


def test_there_are_no_import_cycles() -> None:
    graph = {
        module: {name for name, _ in imports_of(module) if name in MODULES and name != module}
        for module in MODULES
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


# ---- nothing slips around it ---------------------------------------------------------------------


class ModulesPassed(ast.NodeVisitor):
    """Where a module of oomph is used as a value: passed, returned or stored."""

    def __init__(self) -> None:
        self.scopes: list[set[str]] = [set()]
        self.lines: list[int] = []

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if f"{node.module}.{alias.name}" in MODULES:
                self.scopes[-1].add(alias.asname or alias.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name == "__getattr__":  # hands out the public names of a module, lazily
            return
        arguments = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
        assigned = {each.id for each in names if isinstance(each.ctx, ast.Store)}
        self.scopes.append(self.scopes[-1] - arguments - assigned)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.value, ast.Name):  # `module.function` is a use, not a value
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in self.scopes[-1]:
            self.lines.append(node.lineno)


def test_no_module_is_passed_around() -> None:
    passed = []
    for module in MODULES:
        found = ModulesPassed()
        found.visit(tree_of(module))
        passed += [f"{module}:{line}" for line in found.lines]
    assert passed == []


# What a record of functions is good for: what the user hands over, and what a trick declares.
MAY_HOLD_FUNCTIONS = {"oomph.records.workload.Workload", "oomph.tricks.definition.Definition"}


def test_no_bundle_of_functions_stands_in_for_an_import() -> None:
    bundles = []
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef) and f"{module}.{node.name}" not in MAY_HOLD_FUNCTIONS:
                fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
                # A default that subclasses replace is a method, and no bundle.
                own = [field for field in fields if "staticmethod" not in ast.unparse(field)]
                if sum("Callable" in ast.unparse(field.annotation) for field in own) > 1:
                    bundles.append(f"{module}.{node.name}")
    assert bundles == []


# ---- what importing costs ------------------------------------------------------------------------


def heavy_with(module: str) -> set[str]:
    """The heavy libraries that are imported as soon as a module is."""
    seen, waiting = set[str](), [module]
    while waiting:
        new = imported_at_the_top(waiting.pop()) - seen
        seen |= new
        waiting += new & MODULES.keys()
    return {name.split(".")[0] for name in seen} & HEAVY


def test_nothing_heavy_is_imported_with_a_light_module() -> None:
    needs_torch = {"oomph.tricks.apply", "oomph.tricks.blocks"}  # what is put on needs a model
    light = [m for m in MODULES.keys() - needs_torch if part_of(m) not in NEED_MORE]
    assert {module: heavy for module in light if (heavy := heavy_with(module))} == {}


@pytest.mark.parametrize("room", sorted(PURE))
def test_a_pure_room_touches_no_hardware(room: str) -> None:
    for module in (module for module in MODULES if part_of(module) == room):
        imported = {name.split(".")[0] for name, _ in imports_of(module)}
        assert not imported & {"torch", "pynvml", "psutil", "subprocess", "socket"}, module
        if room != "showing":
            assert "rich" not in imported, module
            calls = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.Call)]
            names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
            assert "print" not in names, module


def test_only_the_backend_of_nvml_imports_pynvml() -> None:
    importers = {m for m in MODULES for name, _ in imports_of(m) if name == "pynvml"}
    assert importers == {"oomph.sensing.backends.nvml"}


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


# ---- names and sizes -----------------------------------------------------------------------------

# The same noun in several rooms, on purpose: the command, the verb, the view, the record.
# A module elsewhere that takes one of these names must be about the same thing.
SHARED_NAMES = {
    "accelerate", "accumulation", "alignment", "calibrate", "calibration", "check",
    "checkpointing", "compare", "explain", "gpus", "hf", "launch", "lightning", "live", "loop",
    "notebook", "plan", "planned", "precision", "predict", "prediction", "ranks", "recorder",
    "reductions", "report", "run", "runs", "script", "serve", "sharding", "snapshot",
    "stability", "tensors", "verify", "watch",
}  # fmt: skip


def test_unrelated_modules_do_not_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if path.stem != "__init__":
            homes.setdefault(path.stem, []).append(module)
    shared = {stem: found for stem, found in homes.items() if len(found) > 1}
    assert {stem: found for stem, found in shared.items() if stem not in SHARED_NAMES} == {}


def test_no_module_has_a_name_that_explains_nothing() -> None:
    empty_names = {"utils", "util", "helpers", "common", "misc", "manager", "core", "base"}
    assert not {path.stem for path in MODULES.values()} & empty_names


def test_every_module_opens_with_a_docstring() -> None:
    assert [m for m in MODULES if not ast.get_docstring(tree_of(m))] == []


def test_verbs_are_thin() -> None:
    lengths = {
        module: MODULES[module].read_text().count("\n")
        for module in MODULES
        if part_of(module) == "verbs"
    }
    assert {module: length for module, length in lengths.items() if length > 150} == {}


def test_the_public_names_are_those_that_are_declared() -> None:
    for name in oomph.__all__:
        assert getattr(oomph, name) is not None
    assert set(dir(oomph)) == set(oomph.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = oomph.nonsense


def test_no_room_has_the_name_of_a_public_function() -> None:
    """Importing `oomph.x.y` would put the room `oomph.x` in the function's place."""
    assert not {module.split(".")[1] for module in MODULES if "." in module} & set(oomph.__all__)
