"""What it costs to keep a live view open, and to look once: 8 GPUs and 20 processes.

All views are open at once, each on a terminal of its own, and are measured over the same seconds,
on the same stub of NVML: each tool's own cost, not the driver's. On a real machine the number of
NVML calls is the cost, so they are counted too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nvml.machine import NvmlMachine

from benchmarks.reading import NUM_GPUS, busy_machine, sleeping
from benchmarks.start import BIN, cpu_ms
from benchmarks.tables import Measured, as_table

ROUNDS = 5
ROUND_S = 6.0
WARM_UP_S = 6.0
ONCE_ROUNDS = 10
LINES, COLUMNS = 40, 120
# gpustat asks its terminal this at the start, and waits for the answer.
CURSOR_ASKED, CURSOR_TOLD = b"\x1b[6n", b"\x1b[1;1R"
FLOOR = "bare nvidia-ml-py, in a loop (floor)"
ONCE_FLOOR = "python -c pass (floor)"

# What a reading is made of, once a second, and nothing shown.
BARE = """
import time, pynvml as n
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
while True:
    for h in handles:
        n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
        n.nvmlDeviceGetUtilizationRates(h)
        n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)
        n.nvmlDeviceGetPowerUsage(h)
        n.nvmlDeviceGetComputeRunningProcesses(h)
        n.nvmlDeviceGetGraphicsRunningProcesses(h)
    time.sleep(1)
"""

VIEWS: Mapping[str, list[str]] = {
    FLOOR: [sys.executable, "-c", BARE],
    "oomph watch": [str(BIN / "oomph"), "watch"],
    "nvitop --interval 1": [str(BIN / "nvitop"), "--interval", "1"],
    "gpustat --interval 1": [str(BIN / "gpustat"), "--interval", "1"],
}
ONCE: Mapping[str, list[str]] = {
    ONCE_FLOOR: [sys.executable, "-c", "pass"],
    "oomph watch --once": [str(BIN / "oomph"), "watch", "--once"],
    "nvitop -1": [str(BIN / "nvitop"), "-1"],
    "gpustat": [str(BIN / "gpustat")],
}


@dataclass(slots=True)
class View:
    """A program on a terminal whose output somebody reads."""

    process: subprocess.Popen[bytes]
    machine: NvmlMachine
    best_ms: float = float("inf")  # CPU, of a second

    def cpu_ms(self) -> float:
        """Of all its threads so far, by the scheduler's own count in nanoseconds."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((t / "schedstat").read_text().split()[0]) for t in threads) / 1e6

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure() -> str:
    with tempfile.TemporaryDirectory() as directory, sleeping(20) as pids:
        views = _costs(Path(directory), pids)
        environment = {**os.environ, **busy_machine(Path(directory), pids).env()}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        best = {name: float("inf") for name in ONCE}
        for _ in range(ONCE_ROUNDS):  # in turns, so that a noisy moment hits all of them
            for name, command in ONCE.items():
                best[name] = min(best[name], cpu_ms(command, environment))
    rows = [Measured(name, milliseconds) for name, milliseconds in best.items()]
    return f"{views}\n\n{as_table(f'one look, best of {ONCE_ROUNDS}', ONCE_FLOOR, rows)}"


def _costs(directory: Path, pids: tuple[int, ...]) -> str:
    calls = _calls_per_gpu_s(directory, pids)
    with _opened(directory, pids, log=False) as views:
        time.sleep(WARM_UP_S)
        for _ in range(ROUNDS):
            before = {name: view.cpu_ms() for name, view in views.items()}
            time.sleep(ROUND_S)
            for name, view in views.items():
                view.best_ms = min(view.best_ms, (view.cpu_ms() - before[name]) / ROUND_S)
        return _as_table(views, calls)


def _calls_per_gpu_s(directory: Path, pids: tuple[int, ...]) -> dict[str, float]:
    """NVML calls about a GPU, in a second: counted apart, for to log a call costs CPU."""
    with _opened(directory, pids, log=True) as views:
        time.sleep(WARM_UP_S)
        for view in views.values():
            view.machine.clear_calls()
        time.sleep(ROUND_S)
        counts = {
            name: sum(call.gpu is not None for call in view.machine.calls())
            for name, view in views.items()
        }
    return {name: count / NUM_GPUS / ROUND_S for name, count in counts.items()}


@contextlib.contextmanager
def _opened(directory: Path, pids: tuple[int, ...], *, log: bool) -> Iterator[dict[str, View]]:
    """Every view on a terminal of its own, which a thread keeps empty."""
    views: dict[str, View] = {}
    masters = []
    try:
        for i, (name, command) in enumerate(VIEWS.items()):
            place = directory / f"{'logged' if log else 'bare'}-{i}"
            place.mkdir()
            machine = busy_machine(place, pids)
            machine.log = log
            master, slave = pty.openpty()
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
            environment = {**os.environ, **machine.env(), "TERM": "xterm-256color"}
            process = subprocess.Popen(
                command, env=environment, stdin=slave, stdout=slave, stderr=slave
            )
            os.close(slave)
            masters.append(master)
            views[name] = View(process, machine)
        reader = threading.Thread(target=_empty, args=(masters,), daemon=True)
        reader.start()
        yield views
    finally:
        for view in views.values():
            view.process.kill()
            view.process.wait()


def _empty(masters: list[int]) -> None:
    """Read what the programs write, and answer those that ask where the cursor is."""
    while masters:
        for master in select.select(masters, [], [])[0]:
            written = _read(master)
            if written is None:
                masters.remove(master)
                os.close(master)
            elif CURSOR_ASKED in written:
                os.write(master, CURSOR_TOLD * written.count(CURSOR_ASKED))


def _read(master: int) -> bytes | None:
    try:
        return os.read(master, 1 << 16)
    except OSError:  # its program has ended
        return None


def _as_table(views: Mapping[str, View], calls: Mapping[str, float]) -> str:
    title = f"a live view, best of {ROUNDS} x {ROUND_S:.0f} s"
    width = max(len(title), *map(len, views))
    floor_ms = views[FLOOR].best_ms
    lines = [
        f"| {title:<{width}} | CPU ms/s | x floor | RSS MiB | NVML calls/GPU/s |",
        f"|{'-' * (width + 2)}|---------:|--------:|--------:|-----------------:|",
    ]
    for name, view in views.items():
        lines.append(
            f"| {name:<{width}} | {view.best_ms:>8.2f} | {view.best_ms / floor_ms:7.2f} |"
            f" {view.rss_mib():7.0f} | {calls[name]:16.1f} |"
        )
    return "\n".join(lines)
