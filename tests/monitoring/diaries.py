"""Run directories to write and to spoil."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from oomph.monitoring.diary import Diary, RunStart, this_host
from oomph.monitoring.step_log import StepLog
from oomph.records.run import GpuSpan, HostSpan, WatchedGpu

CLOCK_S = 1000.0


def start_of(**changes: Any) -> RunStart:
    fields: dict[str, Any] = {
        "id": "20260101-000000-abcd",
        "command": ("python", "train.py"),
        "directory": "/home/me",
        "host": this_host(),
        "user": "me",
        "started_at": time.time(),
        "clock_s": CLOCK_S,
        "pid": 4242,
        "oomph_version": "0.1.0",
        "num_cpus": 8,
    }
    return RunStart(**{**fields, **changes})


def gpu(index: int = 0, **changes: Any) -> WatchedGpu:
    fields: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "A100",
        "total_bytes": 80,
        "power_limit_w": 400.0,
        "busy_source": "buffered",
        "is_used": True,
        "cuda_index": index,
    }
    return WatchedGpu(**{**fields, **changes})


def gpu_span(second: float, **changes: Any) -> GpuSpan:
    fields: dict[str, Any] = {
        "gpu": 0,
        "began_s": float(second),
        "ended_s": float(second + 1),
        "used_bytes": 10,
        "most_used_bytes": 20,
        "run_bytes": 5,
        "others_bytes": 5,
        "num_others": 1,
        "busy_ratio": 0.5,
        "least_busy_ratio": 0.0,
        "most_busy_ratio": 1.0,
        "power_w": 250.5,
        "temperature_c": 60,
        "throttled_ratio": 1.0,
        "throttled_by": ("heat", "power"),
        "sm_active_ratio": 0.25,
        "memory_active_ratio": None,
        "received_bytes": 7,
    }
    return GpuSpan(**{**fields, **changes})


def host_span(second: float) -> HostSpan:
    return HostSpan(
        began_s=float(second),
        ended_s=float(second + 1),
        cpu_cores=1.5,
        busiest_cpu_cores=1.0,
        memory_bytes=1 << 30,
        num_processes=3,
    )


def new_diary(directory: Path, **changes: Any) -> Diary:
    diary = Diary(directory, start_of(**changes))
    diary.add_gpus([gpu()])
    return diary


def add_step(
    log: StepLog,
    began: float,
    ended: float,
    *,
    num_samples: int | None = None,
    data_wait_s: float | None = None,
) -> None:
    log.steps([(ended, ended - began, data_wait_s, num_samples)])
