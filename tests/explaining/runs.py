"""Runs made by hand: a GPU that does the same for a while, second by second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oomph.records.run import (
    Ending,
    Event,
    GpuSpan,
    HostSpan,
    Peak,
    Run,
    StepSpan,
    WatchedGpu,
)
from oomph.units import GIB

TOTAL_BYTES = 80 * GIB


def gpu(index: int = 0, **changes: Any) -> WatchedGpu:
    return replace(
        WatchedGpu(
            index=index,
            uuid=f"GPU-{index}",
            name="NVIDIA A100-SXM4-80GB",
            total_bytes=TOTAL_BYTES,
            power_limit_w=400.0,
            busy_source="buffered",
            is_used=True,
            cuda_index=index,
        ),
        **changes,
    )


def span(
    began_s: float, busy: float | None, *, ended_s: float | None = None, **more: Any
) -> GpuSpan:
    """One second, or until `ended_s`."""
    return replace(
        GpuSpan(
            gpu=0,
            began_s=began_s,
            ended_s=began_s + 1 if ended_s is None else ended_s,
            used_bytes=60 * GIB,
            most_used_bytes=70 * GIB,
            run_bytes=60 * GIB,
            others_bytes=0,
            num_others=0,
            busy_ratio=busy,
            least_busy_ratio=busy,
            most_busy_ratio=busy,
            power_w=300.0,
            temperature_c=60,
            throttled_ratio=0.0,
        ),
        **more,
    )


def spans(*stretches: tuple[int, float | None], **more: Any) -> tuple[GpuSpan, ...]:
    """(seconds, kernel-active time), one after another, in spans of a second."""
    found: list[GpuSpan] = []
    for seconds, busy in stretches:
        found += [span(float(len(found) + i), busy, **more) for i in range(seconds)]
    return tuple(found)


def host(cores: float | None = 1.0, busiest: float | None = 0.5, lasted_s: float = 60) -> HostSpan:
    return HostSpan(
        began_s=0.0,
        ended_s=lasted_s,
        cpu_cores=cores,
        busiest_cpu_cores=busiest,
        memory_bytes=8 * GIB,
        num_processes=5,
    )


def steps(
    wait_ratio: float | None = None, *, rank: int = 0, step_s: float = 0.5, num_steps: int = 100
) -> StepSpan:
    whole_s = num_steps * step_s
    return StepSpan(
        rank=rank,
        began_s=0.0,
        ended_s=whole_s,
        num_steps=num_steps,
        num_samples=num_steps * 8,
        step_s=step_s,
        longest_step_s=2 * step_s,
        data_wait_s=None if wait_ratio is None else whole_s * wait_ratio,
    )


def peak(used_bytes: int = 70 * GIB, **more: Any) -> Peak:
    told = Peak(source="torch", gpu=0, rank=0, pid=4100, used_bytes=used_bytes)
    return replace(told, allocated_bytes=used_bytes - GIB, **more)


def event(at_s: float, kind: Any, text: str = "", **more: Any) -> Event:
    return Event(at_s=at_s, kind=kind, text=text, **more)


def run_of(
    gpu_spans: Sequence[GpuSpan] = (),
    *,
    step_spans: Sequence[StepSpan] = (),
    host_spans: Sequence[HostSpan] | None = None,
    peaks: Sequence[Peak] = (),
    events: Sequence[Event] = (),
    gpus: Sequence[WatchedGpu] | None = None,
    **changes: Any,
) -> Run:
    """A run of as many seconds as its spans, on one GPU, that ended well."""
    lasted_s = max((one.ended_s for one in gpu_spans), default=60.0)
    made = Run(
        id="20261116-060000-train",
        command=("python", "train.py", "--epochs", "3"),
        directory="/home/ada/project",
        host="node7",
        user="ada",
        started_at=1_794_800_000.0,
        oomph_version="0.1.0",
        num_cpus=8,
        gpus=tuple((gpu(),) if gpus is None else gpus),
        gpu_spans=tuple(gpu_spans),
        host_spans=tuple((host(lasted_s=lasted_s),) if host_spans is None else host_spans),
        step_spans=tuple(step_spans),
        peaks=tuple(peaks),
        events=tuple(events),
        ending=Ending(at_s=lasted_s, exit_code=0),
        last_seen_s=lasted_s,
    )
    return replace(made, **changes)
