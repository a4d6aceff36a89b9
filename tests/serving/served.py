"""`oomph serve` in a process of its own, on a machine of the C-level NVML library."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvml.machine import Gpu, NvmlMachine

GUARD_S = 60  # so that a server that hangs fails a test instead of stopping all of them


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    machine: NvmlMachine
    url: str
    token: str | None
    _sockets: list[socket.socket] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.partition("://")[2].partition("/")[0].rpartition(":")[2])

    def get(
        self, path: str = "/", *, method: str = "GET", host: str = "127.0.0.1", **headers: str
    ) -> Answer:
        """Underscores in the names of headers stand for dashes."""
        connection = http.client.HTTPConnection(host, self.port, timeout=GUARD_S)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        """A bare connection."""
        opened = socket.socket()
        self._sockets.append(opened)
        if receive_bytes is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        opened.settimeout(GUARD_S)
        opened.connect(("127.0.0.1", self.port))
        return opened

    def watch(self, receive_bytes: int | None = None) -> socket.socket:
        """A viewer of the live stream, which has read nothing yet."""
        opened = self.connect(receive_bytes)
        opened.sendall(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return opened

    def metric(self, name: str, **labels: str) -> float:
        """A metric that is there once, with these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        (found,) = [
            s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
        ]
        return float(found)

    def end(self, by: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Its exit code, and what it said on standard error."""
        self.process.send_signal(by)
        _, said = self.process.communicate(timeout=GUARD_S)
        return self.process.returncode, said

    def close(self) -> None:
        for opened in self._sockets:
            opened.close()
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def serving(
    directory: Path,
    gpus: Sequence[Gpu] = (Gpu(),),
    *arguments: str,
    first: str = "",
    log: bool = False,
    **environment: str,
) -> Iterator[Server]:
    """A server that has begun to listen; `first` is Python that it runs before."""
    machine = NvmlMachine(directory, gpus, log=log)
    code = f"import sys\n{first}\nfrom oomph.cli import main\nsys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--json", "--port", "0", *arguments],
        env={
            **os.environ,
            **machine.env(),
            "OOMPH_RUNS": str(directory / "runs"),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    told = _told(process)
    if told is None:
        raise AssertionError(process.communicate()[1])
    server = Server(process, machine, told["url"], told["token"])
    try:
        yield server
    finally:
        server.close()


def _told(process: subprocess.Popen[str]) -> Any:
    """What it prints when it listens: one JSON object over several lines."""
    assert process.stdout
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("}"):
            return json.loads("".join(lines))
    return None


def is_cut_off(connection: socket.socket, said: bytes, every_s: float = 0.0) -> bool:
    """Whether the other side ends it while it says this again and again."""
    for _ in range(10_000):
        try:
            connection.sendall(said)
        except ConnectionError:
            return True
        time.sleep(every_s)
    return False


def frames(viewer: socket.socket) -> Iterator[Any]:
    """What is told of the machine, second by second."""
    return (data for name, data in events(viewer) if name == "now")


def until(stream: Iterator[Any], is_right: Callable[[Any], object]) -> Any:
    """The first frame that is right."""
    frame = None
    for _, frame in zip(range(GUARD_S), stream, strict=False):
        if is_right(frame):
            return frame
    raise AssertionError(f"it did not come; the last was {frame!r:.2000}")


def events(viewer: socket.socket) -> Iterator[tuple[str, Any]]:
    """The events of a stream, as they come: names and data."""
    buffer = b""
    while True:
        # Chunks end in lines of their own, which begin no event: only whole lines count.
        while b"\n\n" in buffer:
            block, _, buffer = buffer.partition(b"\n\n")
            lines = [line.strip() for line in block.splitlines()]
            names = [line[7:].decode() for line in lines if line.startswith(b"event: ")]
            data = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
            if names and data:
                yield names[0], data[0]
        received = viewer.recv(1 << 16)
        if not received:
            return
        buffer += received
