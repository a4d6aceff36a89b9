"""A home with a project in it, for whoever the test runs as."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.insiders import USER, give, in_a_process


class Home:
    """Somebody's home, and a way to do things there as its owner."""

    def __init__(self, root: Path, user: int | None) -> None:
        self.root = root
        self.user = user
        self.path = root / "home"
        self.project = self.path / "project"

    def do(self, work: Callable[[], Any], *, before: Callable[[], None] | None = None) -> Any:
        """In the project, as the owner; `before` as who runs the tests, with mounts of its own."""

        def as_owner() -> Any:
            os.environ["HOME"] = str(self.path)
            os.chdir(self.project)
            return work()

        if before is None:
            return in_a_process(as_owner, user=self.user)

        def prepared() -> Any:
            before()
            return in_a_process(as_owner, user=self.user)

        return in_a_process(prepared)


@pytest.fixture(params=["root", "user"])
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    if os.geteuid() != 0 and request.param == "root":
        pytest.skip("only root can be root")
    user = USER if os.geteuid() == 0 and request.param == "user" else None
    root = Path(tempfile.mkdtemp(prefix="oomph-test-"))
    root.chmod(0o755)
    built = Home(root, user)
    (built.project / "data").mkdir(parents=True)
    (built.project / "runs").mkdir()
    (built.path / ".config").mkdir()
    for name in ("notes", "project/train.py", "project/data/x", "project/runs/log", ".config/key"):
        (built.path / name).write_text(f"this is {name}\n" * 10)
    (built.project / "link").symlink_to(built.path / "notes")
    if user is not None:
        give(built.path, user)
    yield built
    shutil.rmtree(root)
