"""A run to draw, second by second: start-up, training, two evaluations, a neighbour.

python tests/web/report_sample.py report.html
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from oomph.explaining.diagnose import diagnose
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
from oomph.showing.report import write_report_page
from oomph.units import GIB

LASTED_S = 1500
START_UP_S = 45
EVALUATIONS = ((520, 548), (1040, 1070))
NEIGHBOUR_S = 1380
COMMAND = ("torchrun", "--nproc-per-node", "2", "train.py", "--config", "base.yaml")


def wave(at_s: float, period_s: float, phase: float = 0.0) -> float:
    return math.sin(at_s / period_s * 2 * math.pi + phase)


def busy_at(at_s: float, gpu: int) -> tuple[float, float, float]:
    """Lowest, mean and highest of a second."""
    if at_s < START_UP_S or any(began <= at_s < ended for began, ended in EVALUATIONS):
        return 0.0, 0.01, 0.04
    mean = 0.47 - 0.06 * gpu + 0.05 * wave(at_s, 37, gpu) + 0.03 * wave(at_s, 5.3)
    return max(mean - 0.3, 0.0), mean, min(mean + 0.35, 1.0)


def used_at(at_s: float, gpu: int) -> int:
    if at_s < 20:
        return GIB // 2
    if at_s < START_UP_S:
        return int((0.5 + 21 * (at_s - 20) / (START_UP_S - 20)) * GIB)
    return int((38.5 + gpu + 2.2 * wave(at_s, 3.1)) * GIB)


def gpu_span(second: int, gpu: int) -> GpuSpan:
    low, mean, high = busy_at(second, gpu)
    used = used_at(second, gpu)
    others = int(second >= NEIGHBOUR_S and gpu == 1)
    return GpuSpan(
        gpu=gpu,
        began_s=float(second),
        ended_s=float(second + 1),
        used_bytes=used,
        most_used_bytes=used + (GIB if second > START_UP_S else 0),
        run_bytes=used,
        others_bytes=3 * GIB * others,
        num_others=others,
        busy_ratio=mean,
        least_busy_ratio=low,
        most_busy_ratio=high,
        power_w=72 + 320 * mean + 8 * wave(second, 4),
        temperature_c=int(38 + 25 * mean),
        throttled_ratio=0.0,
    )


def step_span(began_s: int, rank: int) -> StepSpan:
    step_s = 0.42 + 0.05 * wave(began_s, 37, rank)
    num_steps = int(5 / step_s)
    return StepSpan(
        rank=rank,
        began_s=float(began_s),
        ended_s=float(began_s + 5),
        num_steps=num_steps,
        num_samples=num_steps * 16,
        step_s=step_s,
        longest_step_s=step_s * 1.7,
        data_wait_s=num_steps * (step_s - 0.25),
    )


def is_training(second: int) -> bool:
    return busy_at(second, 0)[1] > 0.1


def sample(command: Sequence[str] = COMMAND, *, num_gpus: int = 2, lasted_s: int = LASTED_S) -> Run:
    seconds, ranks = range(lasted_s), range(num_gpus)
    phases = [(0.0, "start-up"), (float(START_UP_S), "training")]
    for began, ended in EVALUATIONS:
        phases += [(float(began), "evaluation"), (float(ended), "training")]
    events = [Event(at_s=at_s, kind="phase", text=text) for at_s, text in phases]
    came = Event(at_s=float(NEIGHBOUR_S), kind="neighbour", text="bob: python infer.py", gpu=1)
    return Run(
        id="20261116-0612-train-7f3a",
        command=tuple(command),
        directory="/home/ada/project",
        host="node7",
        user="ada",
        started_at=1_794_800_000.0,
        oomph_version="0.1.0",
        num_cpus=8,
        gpus=tuple(
            WatchedGpu(
                index=index + 2,
                uuid=f"GPU-{index}",
                name="NVIDIA A100-SXM4-80GB",
                total_bytes=80 * GIB,
                power_limit_w=400.0,
                busy_source="buffered",
                is_used=True,
                cuda_index=index,
            )
            for index in ranks
        ),
        gpu_spans=tuple(gpu_span(second, gpu) for second in seconds for gpu in ranks),
        host_spans=tuple(
            HostSpan(
                began_s=float(second),
                ended_s=float(second + 1),
                cpu_cores=6.1 + 0.8 * wave(second, 37),
                busiest_cpu_cores=0.97,
                memory_bytes=21 * GIB,
                num_processes=18,
            )
            for second in seconds
        ),
        step_spans=tuple(
            step_span(began_s, rank)
            for began_s in range(0, lasted_s, 5)
            for rank in ranks
            if is_training(began_s)
        ),
        peaks=tuple(
            Peak(
                source="torch",
                gpu=rank,
                rank=rank,
                pid=4100 + rank,
                allocated_bytes=37 * GIB,
                used_bytes=(40 + rank) * GIB,
                before_steps_bytes=21 * GIB,
            )
            for rank in ranks
        ),
        events=(*events, came),
        ending=Ending(at_s=float(lasted_s), exit_code=0),
        last_seen_s=float(lasted_s),
    )


if __name__ == "__main__":
    made = sample()
    write_report_page(diagnose(made), made, Path(sys.argv[1]))
