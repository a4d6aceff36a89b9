"""A sampler that has found what a test says. NVML is not asked by a feed at all."""

from __future__ import annotations

from oomph.records.machine import Device, Machine, Process
from oomph.records.run import Event, GpuSpan, WatchedGpu
from oomph.sensing.sampling import Sampler, Taken
from oomph.units import GIB


def no_greeting() -> bytes:
    return b""


class FakeSampler(Sampler):
    """What a feed takes from. It is never started."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        watched: tuple[WatchedGpu, ...],
        problem: str | None = None,
    ) -> None:
        super().__init__(clock=lambda: self.now_s)
        self.devices, self.watched = devices, watched
        self.now_s, self.problem = 0.0, problem
        self.spans: list[GpuSpan] = []
        self.events: list[Event] = []

    def take(self) -> Taken:
        taken = Taken(tuple(self.spans), tuple(self.events))
        self.spans.clear()
        self.events.clear()
        return taken

    def gpus(self) -> tuple[WatchedGpu, ...]:
        return self.watched

    def machine(self) -> Machine:
        return Machine(gpus=self.devices, problem=self.problem)


def device(index: int = 0, processes: tuple[Process, ...] | None = (), **more: object) -> Device:
    fields: dict[str, object] = {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA A100",
        "total_bytes": 80 * GIB,
        "used_bytes": 20 * GIB,
        "memory_source": "nvml-v2",
        "busy_ratio": 0.5,
        "temperature_c": 50,
        "power_w": 200.0,
        "processes": processes,
        "problem": None,
    }
    return Device(**{**fields, **more})  # type: ignore[arg-type] # by name


def watched(index: int = 0, **more: object) -> WatchedGpu:
    fields: dict[str, object] = {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA A100",
        "total_bytes": 80 * GIB,
        "power_limit_w": 400.0,
        "busy_source": "buffered",
        "is_used": False,
    }
    return WatchedGpu(**{**fields, **more})  # type: ignore[arg-type] # by name


def span(gpu: int = 0, began_s: float = 0.0, lasted_s: float = 1.0, **more: object) -> GpuSpan:
    fields: dict[str, object] = {
        "gpu": gpu,
        "began_s": began_s,
        "ended_s": began_s + lasted_s,
        "used_bytes": 20 * GIB,
        "most_used_bytes": 21 * GIB,
        "run_bytes": None,
        "others_bytes": None,
        "num_others": None,
        "busy_ratio": 0.5,
        "least_busy_ratio": 0.1,
        "most_busy_ratio": 0.9,
        "power_w": 200.0,
        "temperature_c": 50,
        "throttled_ratio": 0.0,
    }
    return GpuSpan(**{**fields, **more})  # type: ignore[arg-type] # by name


def process(pid: int = 7, **more: object) -> Process:
    fields: dict[str, object] = {
        "pid": pid,
        "owner": "mine",
        "user": "ada",
        "command": "python train.py",
        "used_bytes": 10 * GIB,
        "started_at": 1e9,
        "kind": "compute",
    }
    return Process(**{**fields, **more})  # type: ignore[arg-type] # by name
