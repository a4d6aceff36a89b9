"""The pages that git carries are those that web/ builds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from oomph.showing.html_page import PAGES

WEB = Path(__file__).parents[2] / "web"


def test_the_pages_in_the_package_are_what_web_builds(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (WEB / "node_modules" / "esbuild").is_dir():
        pytest.skip("the pages cannot be built here: make test-web installs what they need")
    built = tmp_path / "built"
    subprocess.run([node, "build.mjs", str(built)], cwd=WEB, check=True, capture_output=True)
    names = {path.name for path in built.iterdir()}
    assert names == {path.name for path in PAGES.iterdir()}, "run `make web` and commit the pages"
    for name in names:
        same = (built / name).read_bytes() == (PAGES / name).read_bytes()
        assert same, f"{name} is not what web/ builds: run `make web` and commit it"
