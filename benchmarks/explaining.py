"""Reading, attributing and replaying a snapshot, beside torch's own reader on the same file.

python -m benchmarks.explaining [EVENTS]: a million by default.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from oomph.units import KIB, MIB, format_bytes

_TESTS = Path(__file__).resolve().parents[1] / "tests"
NUM_EVENTS = 1_000_000
_DEPTH = 37  # frames of a stack: the mean of a real recording with C++ stacks

_OOMPH = """
import sys
from oomph.explaining.holdings import Naming, allocations_of, holders_of, live_at, peak_of
from oomph.predicting.recorded import recorded_settings
from oomph.predicting.reproduction import reproduce
from oomph.snapshots.loading import load
snapshot = load(sys.argv[1])
(device,) = snapshot.devices
events = device.events()
allocations = allocations_of(events, device.segments)
assert holders_of(live_at(allocations, peak_of(allocations, len(events))), Naming(snapshot, device))
settings = recorded_settings(snapshot.settings, device.segments)
found = reproduce(device.segments, events, settings)
assert found.is_exact and found.num_exact_allocs == found.num_allocs, found
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process and all that it started."""

    what: str
    cpu_s: float
    memory_bytes: int  # the most that one of its processes held


def write_recording(path: Path, num_events: int) -> None:
    """Write a snapshot of this many events, with deep stacks that are not shared, as real ones."""
    sys.path.insert(0, str(_TESTS))
    from snapshots.written import training

    writer = training(steps=6, layers=24)
    per_step = len(writer.trace) / 6
    content = training(steps=max(round(num_events / per_step), 2), layers=24).snapshot()
    below = [{"filename": "/env/call.cpp", "line": n, "name": f"call{n}"} for n in range(_DEPTH)]
    for event in content["device_traces"][0]:
        event["frames"] = [*event["frames"], *below][:_DEPTH]
    with path.open("wb") as file:
        pickle.dump(content, file, protocol=4)


def cost_of(what: str, command: Sequence[str]) -> Cost:
    """Run a command to its end."""
    before = os.times()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{what} ended with {child.returncode}")
    after = os.times()
    cpu_s = after.children_user + after.children_system
    cpu_s -= before.children_user + before.children_system
    return Cost(what, cpu_s, used.ru_maxrss * KIB)


def measure(num_events: int = NUM_EVENTS) -> str:
    with TemporaryDirectory() as directory:
        path = Path(directory, "recorded.pickle")
        write_recording(path, num_events)
        size = format_bytes(path.stat().st_size)
        torch_reads = [sys.executable, "-m", "torch.cuda._memory_viz", "stats", str(path)]
        rows = (
            cost_of("oomph: read, attribute, replay", [sys.executable, "-c", _OOMPH, str(path)]),
            cost_of("torch.cuda._memory_viz stats", torch_reads),
        )
    title = f"a snapshot of {num_events:,} events, {size}"
    width = max(len(title), *(len(row.what) for row in rows))
    lines = [f"| {title:<{width}} | CPU s | memory |", f"|{'-' * (width + 2)}|------:|-------:|"]
    for row in rows:
        memory = format_bytes(round(row.memory_bytes / MIB) * MIB)
        lines.append(f"| {row.what:<{width}} | {row.cpu_s:5.1f} | {memory} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(measure(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_EVENTS))
