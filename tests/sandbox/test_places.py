"""Which directories are covered for whom, and what the table of mounts says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oomph.sandbox.covering import Places, find_places, mount_points, to_cover


def places(cwd: Path, **others: object) -> Places:
    given = {"home": None, "temporary": str(cwd), "uid": os.getuid(), "gid": os.getgid(), **others}
    return Places(cwd=str(cwd), **given)  # type: ignore[arg-type]


def test_only_the_topmost_directory_that_can_be_written_is_covered(tmp_path: Path) -> None:
    """Overlays within overlays are needed only where owners change."""
    project = tmp_path / "a" / "b"
    project.mkdir(parents=True)
    covered = to_cover(places(project))
    assert str(project) not in covered
    assert any(str(project).startswith(f"{path}/") for path in covered)


def test_a_directory_that_is_anothers_is_covered_for_itself(tmp_path: Path) -> None:
    """As seen by somebody who owns none of them, yet may write."""
    project = tmp_path / "a" / "b"
    project.mkdir(parents=True)
    covered = to_cover(places(project, uid=os.getuid() + 1))
    assert {str(project), str(project.parent), str(tmp_path)} <= set(covered)
    assert list(covered) == sorted(covered)


def test_a_directory_that_an_argument_names_is_covered(tmp_path: Path) -> None:
    named = places(Path("/"), named=(str(tmp_path),), temporary="/")
    assert any(f"{tmp_path}/".startswith(f"{path}/") for path in to_cover(named))


def test_nothing_that_the_kernel_makes_up_is_covered() -> None:
    made_up = places(Path("/proc/self"), temporary="/dev/shm", home="/sys")  # noqa: S108
    assert to_cover(made_up) == ()


def test_looking_for_the_places_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path.stat().st_mtime_ns
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert find_places().temporary == str(tmp_path)
    assert tmp_path.stat().st_mtime_ns == before


def test_mount_points_with_odd_names_are_read() -> None:
    table = (
        "36 35 98:0 / / rw - ext4 /dev/root rw\n"
        "40 36 0:9 / /a\\040b\\134c rw,relatime shared:1 master:2 - tmpfs none rw\n"
    )
    assert mount_points(table) == ("/", "/a b\\c")
