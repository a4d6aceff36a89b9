"""Puts a test on a machine of its own: NVML's C ABI, GPUs and processes by script."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from nvml.machine import Gpu, NvmlMachine

from oomph.sensing import ownership
from oomph.sensing.backends import session

OnMachine = Callable[..., NvmlMachine]


def pytest_configure() -> None:
    """Signals work in what tests start, also where this runs in the background or under nohup.

    Shells have SIGINT and SIGQUIT ignored there, nohup SIGHUP, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def plain_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No variable of the machine that the tests run on decides what they see."""
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        ownership.RUN_TOKEN,
        "OOMPH_RUN_DIR",
        "OOMPH_WATCHING",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "NO_COLOR",
        "COLUMNS",
        "OOMPH_RUNS",
        "OOMPH_RUN_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / "no data"))


@pytest.fixture
def on_machine(tmp_path: Path) -> Iterator[OnMachine]:
    """Put this process on a machine: `machine = on_machine([Gpu(), Gpu()], driver=...)`."""
    with ExitStack() as stack:

        def enter(gpus: Sequence[Gpu] = (Gpu(),), **options: Any) -> NvmlMachine:
            machine = NvmlMachine(tmp_path, gpus, **options)
            stack.enter_context(machine.active())
            session.forget()
            return machine

        ownership.forget()
        yield enter
    session.forget()


@pytest.fixture
def start_process() -> Iterator[Callable[..., int]]:
    """Start a process of that name, which does nothing until the test ends."""
    started: list[subprocess.Popen[bytes]] = []
    sleep = shutil.which("sleep")  # any user may run it, which is not so of this Python

    def start(name: str = "train.py", **options: Any) -> int:
        process = subprocess.Popen([name, "600"], executable=sleep, **options)
        started.append(process)
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.001)  # it is there before its arguments are
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def allocator_as_it_was() -> Iterator[None]:
    """A plan that is applied sets the allocator of its process: not that of the next test."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    before = {name: os.environ.pop(name, None) for name in names}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps the device and the precision of the first that asked, for all others."""
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    _forget_accelerate()
    yield
    _forget_accelerate()


def _forget_accelerate() -> None:
    if "accelerate.state" in sys.modules:  # a child of this process would see it, too
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
