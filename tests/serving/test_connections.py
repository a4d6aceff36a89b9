"""Clients that take too long, or too much: they are cut off, and nobody else notices."""

from __future__ import annotations

import os
import socket
from itertools import pairwise
from pathlib import Path

import pytest
from nvml.machine import Gpu, Proc

from serving.served import events, is_cut_off, serving

SHORT = "import oomph.serving.server as c; c.REQUEST_S = c.READING_S = c.IDLE_S = 0.5"
PARTIAL = [
    b"",  # it connects, and says nothing
    b"GET / HTTP/1.1\r\nHost: localh",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT",  # its second request
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nbody",
]


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the other side ends it."""
    received = b""
    try:
        while more := connection.recv(65_536):
            received += more
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize("said", PARTIAL)
def test_a_request_that_is_never_finished_is_cut_off(tmp_path: Path, said: bytes) -> None:
    with serving(tmp_path, [Gpu()], first=SHORT) as server:
        slow = [server.connect() for _ in range(20)]
        for connection in slow:
            connection.sendall(said)
        assert server.get().status == 200
        for connection in slow:
            answers = rest_of(connection).count(b"HTTP/1.1 200")
            assert answers == said.count(b"\r\n\r\n")
        assert server.get().status == 200


def test_bytes_that_trickle_do_not_buy_time(tmp_path: Path) -> None:
    with serving(tmp_path, [Gpu()], first=SHORT) as server:
        slow = server.connect()
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert is_cut_off(slow, b"X-More: 1\r\n", every_s=0.05)
        assert server.get().status == 200


def test_a_viewer_that_reads_is_not_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path, [Gpu()], first=SHORT) as server:
        viewer = server.watch()
        stream = events(viewer)
        assert next(stream)[0] == "history"
        numbers = [next(stream)[1]["number"] for _ in range(4)]
        assert numbers == list(range(numbers[0], numbers[0] + 4))
        assert server.metric("oomph_serve_viewers") == 1


# Enough that a second of it fills all buffers of the kernel.
CROWD = [Gpu(processes=[Proc(4_000_000 + n, 1 << 20) for n in range(500)]) for _ in range(8)]


def test_a_viewer_that_never_reads_is_cut_off_while_others_go_on(tmp_path: Path) -> None:
    with serving(tmp_path, CROWD, first=SHORT) as server:
        server.watch(receive_bytes=4096)
        reading = events(server.watch())
        assert next(reading)[0] == "history"
        seen = [server.metric("oomph_serve_viewers")]
        while seen[-1] != 1:
            assert next(reading)[0] == "now"
            seen.append(server.metric("oomph_serve_viewers"))
        assert seen[0] == 2
        assert next(reading)[0] == "now"


def test_a_viewer_that_is_slow_misses_frames_and_gets_the_newest(tmp_path: Path) -> None:
    with serving(tmp_path, CROWD) as server:
        slow, quick = server.watch(receive_bytes=4096), events(server.watch())
        assert next(quick)[0] == "history"
        newest = [next(quick)[1]["number"] for _ in range(7)][-1]
        found = (data["number"] for name, data in events(slow) if name == "now")
        numbers: list[int] = []
        while not numbers or numbers[-1] < newest:
            numbers.append(next(found))
        steps = [later - earlier for earlier, later in pairwise(numbers)]
        assert max(steps) > 1
        assert min(steps) >= 1


def test_too_many_connections_are_refused_in_words_until_some_end(tmp_path: Path) -> None:
    few = "import oomph.serving.server as c; c.MOST_CONNECTIONS = 5"
    with serving(tmp_path, [Gpu()], first=few) as server:
        viewers = [server.watch() for _ in range(5)]
        for viewer in viewers:
            assert next(events(viewer))[0] == "history"
        refused = rest_of(server.connect())
        assert refused.startswith(b"HTTP/1.1 503")
        assert refused.endswith(b"oomph: too many connections\n")
        assert int(refused.partition(b"content-length: ")[2].split(b"\r\n")[0]) == len(
            refused.partition(b"\r\n\r\n")[2]
        )
        assert next(data for name, data in events(viewers[0]) if name == "now")
        viewers[1].close()
        while rest := server.connect():
            rest.sendall(
                b"GET /api/machine HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            if rest_of(rest).startswith(b"HTTP/1.1 200"):
                break


def test_too_many_viewers_are_refused_and_pages_are_not(tmp_path: Path) -> None:
    few = "import oomph.serving.server as c; c.MOST_VIEWERS = 2"
    with serving(tmp_path, [Gpu()], first=few) as server:
        for viewer in [server.watch(), server.watch()]:
            assert next(events(viewer))[0] == "history"
        assert server.get("/api/live").status == 503
        assert server.get("/").status == 200


def test_it_opens_no_more_files_however_many_come_and_go(tmp_path: Path) -> None:
    with serving(tmp_path, [Gpu()]) as server:
        place = Path(f"/proc/{server.process.pid}/fd")
        server.get()
        before = len(os.listdir(place))  # noqa: PTH208 - names are enough
        for _ in range(30):
            viewer = server.watch()
            assert next(events(viewer))[0] == "history"
            viewer.close()
        while server.metric("oomph_serve_viewers"):
            pass
        assert len(os.listdir(place)) <= before + 2  # noqa: PTH208
