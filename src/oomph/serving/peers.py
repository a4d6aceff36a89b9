"""A connection from this machine -> the user at its other end.

Everybody who is logged in can reach 127.0.0.1, but a command line or a run may hold secrets of its
user. The kernel tells who opened a socket: /proc/net/tcp has a line for each, with its user.

Limits: Linux. Where the line is not found, nobody is trusted.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

_ROOT = 0
# The kernel prints the table page by page, and a socket can slip through where others come and go.
_LOOKS = 5
_TABLES = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}


def _read(path: str) -> str:
    return Path(path).read_text(encoding="ascii")


def is_own(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """Is it this user, or root, who can read everything anyway?"""
    return user_of(client, server) in (os.geteuid(), _ROOT)


def user_of(
    client: tuple[str, int], server: tuple[str, int], read: Callable[[str], str] = _read
) -> int | None:
    """The number of the user whose socket is at `client`, connected to `server`."""
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    wanted = [_as_listed(family, *client), _as_listed(family, *server)]
    for _ in range(_LOOKS):
        try:
            lines = read(_TABLES[family]).splitlines()[1:]
        except OSError:
            return None
        # sl, local and remote address, state, queues, timer, retransmits, uid: proc_net_tcp.rst
        found = (line.split() for line in lines)
        users = {int(words[7]) for words in found if words[1:3] == wanted}
        if users:
            return users.pop() if len(users) == 1 else None
    return None


def _as_listed(family: socket.AddressFamily, host: str, port: int) -> str:
    """As the kernel prints it: words of four bytes, each in the machine's own order."""
    packed = socket.inet_pton(family, host.partition("%")[0])
    words = [packed[at : at + 4] for at in range(0, len(packed), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return f"{b''.join(words).hex().upper()}:{port:04X}"
