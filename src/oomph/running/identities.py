"""A process in a fresh user namespace -> who it is there: the same as outside.

Every user is mapped to himself, never to root. Root can map everyone, so that files of others
keep their owners inside; whoever else can map only himself, and the rest become nobody.
"""

from __future__ import annotations

import os
from pathlib import Path


def map_everyone(pid: int) -> bool:
    """Map all users and groups of this namespace. Whether this process may."""
    try:
        for name in ("uid_map", "gid_map"):
            ranges = (line.split() for line in Path("/proc/self", name).read_text().splitlines())
            same = "".join(f"{first} {first} {count}\n" for first, _, count in ranges)
            Path(f"/proc/{pid}", name).write_text(same)
    except PermissionError:
        return False
    return True


def map_ourselves(pid: int) -> None:
    """Map this user and group alone, which everybody may (user_namespaces(7))."""
    Path(f"/proc/{pid}/setgroups").write_text("deny")
    for name, number in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        Path(f"/proc/{pid}", name).write_text(f"{number} {number} 1\n")
