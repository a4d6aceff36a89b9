"""Whose the other end of a connection is, by real sockets of real users."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomph.serving.guarding import is_own, user_of

PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable  # noqa: PTH110


@pytest.fixture(params=["127.0.0.1", "::1"])
def listening(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as opened:
        try:
            opened.bind((request.param, 0))
        except OSError:
            pytest.skip(f"there is no {request.param} here")
        opened.listen()
        yield opened


def address(name: tuple[str, int]) -> tuple[str, int]:
    return name[0], name[1]


def test_a_connection_of_this_user_is_known(listening: socket.socket) -> None:
    with socket.create_connection(address(listening.getsockname())) as client:
        ends = address(client.getsockname()), address(listening.getsockname())
        assert user_of(*ends) == os.geteuid()
        assert is_own(*ends)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_connection_of_another_user_is_not_taken_for_ones_own(listening: socket.socket) -> None:
    host, port = address(listening.getsockname())
    code = (
        "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])));"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [PYTHON, "-I", "-c", code, host, str(port)],
        user="nobody",
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout
        ends = (host, int(other.stdout.readline())), (host, port)
        assert user_of(*ends) not in (None, os.geteuid())
        assert not is_own(*ends)
        other.communicate()


def test_what_the_kernel_does_not_list_is_nobodys() -> None:
    ends = ("127.0.0.1", 1), ("127.0.0.1", 2)
    assert user_of(*ends) is None
    assert not is_own(*ends)


def test_a_socket_that_slipped_through_the_table_once_is_looked_for_again(
    listening: socket.socket,
) -> None:
    looks: list[str] = []

    def read(path: str) -> str:
        looks.append(path)
        return "header\n" if len(looks) == 1 else Path(path).read_text(encoding="ascii")

    with socket.create_connection(address(listening.getsockname())) as client:
        ends = address(client.getsockname()), address(listening.getsockname())
        assert user_of(*ends, read=read) == os.geteuid()
    assert len(looks) == 2
