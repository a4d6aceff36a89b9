"""/proc/self/mountinfo -> the paths on which something is mounted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")


def mount_points(table: str) -> tuple[str, ...]:
    r"""The mount points of a mountinfo table, as paths.

    >>> mount_points("36 35 98:0 / /mnt/my\\040disk rw,noatime - ext3 /dev/root rw")
    ('/mnt/my disk',)
    """
    return tuple(path for _, path in _roots_and_points(table))


def bound_points(table: str) -> tuple[str, ...]:
    """Those that show a part of a file system: a single file or socket can be mounted so.

    >>> bound_points("41 35 0:25 /docker.sock /run/docker.sock rw - tmpfs tmpfs rw")
    ('/run/docker.sock',)
    """
    return tuple(path for root, path in _roots_and_points(table) if root != "/")


def _roots_and_points(table: str) -> Iterator[tuple[str, str]]:
    """The fourth and fifth field; blanks and backslashes in them are written in octal (proc(5))."""
    for fields in (line.split(" ") for line in table.splitlines()):
        if len(fields) > 4:
            root, point = (_OCTAL.sub(lambda m: chr(int(m[1], 8)), text) for text in fields[3:5])
            yield root, point


def read_mount_table() -> str:
    """That of this process."""
    return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")


def is_above_a_mount(directory: str, points: Iterable[str]) -> bool:
    """Whether something is mounted strictly below a directory.

    >>> is_above_a_mount("/home/u", ["/", "/home/u", "/home/user/disk"])
    False
    >>> is_above_a_mount("/home", ["/home/user/disk"])
    True
    """
    below = directory.rstrip("/") + "/"
    return any(point.startswith(below) and point != below for point in points)
