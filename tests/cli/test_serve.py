"""oomph serve, as it is started and as it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from nvml.machine import Gpu, NvmlMachine, Proc
from serving.served import GUARD_S, events, serving

import oomph

CROWD = [Gpu(processes=[Proc(4_000_000 + n, 1 << 20) for n in range(500)]) for _ in range(8)]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oomph", "serve", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_every_stream_to_its_last_byte(
    tmp_path: Path, by: signal.Signals
) -> None:
    with serving(tmp_path) as server:
        viewers = [server.watch() for _ in range(5)]
        for viewer in viewers:
            assert next(events(viewer))[0] == "history"
        code, said = server.end(by)
        for viewer in viewers:
            rest = b""
            while more := viewer.recv(65_536):
                rest += more
            assert rest.endswith(b"0\r\n\r\n")  # the end of a chunked answer, as it should be
        assert (code, said) == (0, "")


def test_a_viewer_that_does_not_read_cannot_keep_it_from_ending(tmp_path: Path) -> None:
    with serving(tmp_path, CROWD) as server:
        server.watch(receive_bytes=4096)
        reading = events(server.watch())
        for _ in range(4):
            next(reading)
        assert server.end() == (0, "")


def test_a_port_that_is_taken_is_one_clear_error(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu()])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--port", str(port), **machine.env())
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"oomph: port {port} of 127.0.0.1 cannot be listened on\n"
        "  because: Address already in use\n"
        "  try: oomph serve --port 0, which takes any that is free\n"
    )


def test_without_what_it_needs_it_says_what_to_install() -> None:
    """Without site-packages there is no starlette."""
    source = str(Path(oomph.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-S", "-m", "oomph", "serve"],
        env={"PYTHONPATH": source, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "missing: starlette, uvicorn, prometheus_client" in done.stderr
    assert "try: pip install 'oomph[web]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host", "no.such.host.invalid"], "there is no address 'no.such.host.invalid'"),
        (["--port", "70000"], "'70000' is not a port"),
        (["--port", "x"], "'x' is not a port"),
        (["--plans", "/no/such/place"], "/no/such/place is not a directory"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], told: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("token", ["", "short", "a token of mine\nwith a second line"])
def test_a_token_that_keeps_nobody_out_is_refused(token: str) -> None:
    done = run("--port", "0", OOMPH_TOKEN=token)
    assert done.returncode == 2
    assert "OOMPH_TOKEN is too weak to be a token" in done.stderr


def test_it_prints_its_address_for_people(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu()])
    command = [sys.executable, "-m", "oomph", "serve", "--port", "0"]
    with subprocess.Popen(
        command, env={**os.environ, **machine.env()}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        lines = process.stdout.readline(), process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(GUARD_S) == 0
    assert lines[0].startswith("http://127.0.0.1:")
    assert lines[1] == "only for you; Ctrl-C stops it\n"


def test_a_machine_without_a_driver_is_served_with_its_problem(tmp_path: Path) -> None:
    with serving(tmp_path, [], OOMPH_NVML_SCRIPT=str(tmp_path / "none")) as server:
        frame = server.get("/api/machine").json
        assert frame["gpus"] == []
        assert "driver" in frame["problem"]
        assert server.get("/").status == 200
        assert server.metric("oomph_info") == 1


def test_grafana_prints_a_dashboard_and_serves_nothing() -> None:
    done = run("--grafana")
    assert done.returncode == 0
    assert json.loads(done.stdout)["title"] == "oomph: GPUs"
