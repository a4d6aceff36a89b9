"""An install from a clean clone is whole: pages are drawn and served without make or Node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling is not installed: pip would download it")

ROOT = Path(__file__).parents[1]
PAGES = ("plan.html", "report.html", "dashboard.html", "dashboard.js", "dashboard.css")
WORKLOAD = """
import torch, oomph
workload = oomph.Workload(
    model=lambda: torch.nn.Linear(64, 1),
    batch=lambda n: torch.zeros(n, 64),
    loss=lambda model, batch: model(batch).mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=8,
)
"""


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git has or would take, as they are now, and nothing that make has built."""
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    try:
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no clone: nobody can tell which files git has")
    target = tmp_path_factory.mktemp("clone")
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def built(kind: str, source: Path, out: Path) -> Path:
    """The one file that `build_wheel` or `build_sdist` makes of a source tree."""
    code = f"import sys, hatchling.build as b; print(b.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "HATCH_METADATA_CLASSIFIERS_NO_VERIFY": "1"},
    )
    return out / done.stdout.split()[-1]


def unpacked(sdist: Path, where: Path) -> Path:
    shutil.unpack_archive(sdist, where, filter="data")
    (tree,) = where.iterdir()
    return tree


@pytest.fixture(scope="session", params=["wheel", pytest.param("sdist", marks=pytest.mark.slow)])
def package(
    request: pytest.FixtureRequest, clone: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What the clone gives to install."""
    return built(request.param, clone, tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="session")
def installed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`oomph` in an environment that has nothing else but what oomph depends on."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    # What oomph depends on, and what builds it, comes from here instead of an index; the editable
    # oomph does not.
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"))
    subprocess.run(
        [*pip, "install", "--quiet", *offline, str(package)], check=True, capture_output=True
    )
    return home / "bin" / "oomph"


def oomph(installed: Path, where: Path, *args: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    state = {"XDG_CACHE_HOME": str(where / "cache"), "XDG_STATE_HOME": str(where / "state")}
    return subprocess.run(
        [str(installed), *args],
        cwd=where,
        env={**clean, **state},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_page_that_git_has_is_installed(installed: Path) -> None:
    (pages,) = installed.parents[1].glob("lib/python*/site-packages/oomph/showing/page")
    for name in PAGES:
        ours = ROOT / "src" / "oomph" / "showing" / "page" / name
        assert (pages / name).read_bytes() == ours.read_bytes()


def test_a_source_package_has_the_examples_and_what_checks_it(clone: Path, tmp_path: Path) -> None:
    source = unpacked(built("sdist", clone, tmp_path), tmp_path / "unpacked")
    for name in ("examples/small_gpt.py", "Makefile", "mkdocs.yml", "tests/conftest.py", "LICENSE"):
        assert (source / name).is_file(), name


def test_the_installed_oomph_is_the_one_that_answers(installed: Path, tmp_path: Path) -> None:
    code = "import oomph; print(oomph.__file__)"
    done = subprocess.run(
        [str(installed.with_name("python")), "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(installed.parents[1])


def test_an_installed_oomph_draws_a_plan(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "linear.py").write_text(WORKLOAD)
    files = ("--html", "plan.html", "-o", "plan.json")
    done = oomph(installed, tmp_path, "plan", "linear.py:workload", "--gpu", "rtx4090", *files)
    assert done.returncode == 0, done.stderr
    assert "recommended" in done.stdout or "fits as it is" in done.stdout
    assert "<script" in (tmp_path / "plan.html").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == 1
    assert "wrote plan.json\nwrote plan.html\n" in done.stdout


def test_an_installed_oomph_draws_the_report_of_a_run(installed: Path, tmp_path: Path) -> None:
    args = ("watch", "--html", "report.html", "--", sys.executable, "-c", "pass")
    done = oomph(installed, tmp_path, *args)
    assert done.returncode == 0, done.stderr
    done = oomph(installed, tmp_path, "report", "last", "--html", "again.html")
    assert done.returncode == 0, done.stderr
    assert "<script" in (tmp_path / "again.html").read_text()


def test_an_installed_oomph_serves_its_dashboard(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="the extra `web` is not installed")
    with subprocess.Popen(
        [str(installed), "serve", "--port", "0", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": ""},
    ) as server:
        assert server.stdout is not None
        try:
            answer = "".join(iter(server.stdout.readline, "}\n")) + "}"
            address = json.loads(answer)["url"]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address) as page:  # noqa: S310 - our own, on this machine
                assert b"dashboard.js" in page.read()
        finally:
            server.terminate()


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_build_without_a_page_fails_and_says_how_to_make_it(
    clone: Path, tmp_path: Path, kind: str
) -> None:
    source = shutil.copytree(clone, tmp_path / "source")
    (source / "src" / "oomph" / "showing" / "page" / "report.html").unlink()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        built(kind, source, tmp_path)
    assert "report.html: run `make web` first" in failed.value.stderr
