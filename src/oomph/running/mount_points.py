"""/proc/self/mountinfo -> the paths on which something is mounted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")


def mount_points(table: str) -> tuple[str, ...]:
    r"""The mount points of a mountinfo table, as paths.

    >>> mount_points("36 35 98:0 / /mnt/my\\040disk rw,noatime - ext3 /dev/root rw")
    ('/mnt/my disk',)
    """
    # The fifth field; blanks, tabs, newlines and backslashes are written in octal (proc(5)).
    fields = (line.split(" ") for line in table.splitlines())
    return tuple(_OCTAL.sub(lambda m: chr(int(m[1], 8)), f[4]) for f in fields if len(f) > 4)


def read_mount_points() -> tuple[str, ...]:
    """Those of this process."""
    table = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    return mount_points(table)


def is_above_a_mount(directory: str, points: Iterable[str]) -> bool:
    """Whether something is mounted strictly below a directory.

    >>> is_above_a_mount("/home/u", ["/", "/home/u", "/home/user/disk"])
    False
    >>> is_above_a_mount("/home", ["/home/user/disk"])
    True
    """
    below = directory.rstrip("/") + "/"
    return any(point.startswith(below) and point != below for point in points)
