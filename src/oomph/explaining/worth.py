"""What makes the figures of a GPU worth less: too little was seen, or others were on it."""

from __future__ import annotations

from oomph.explaining.case import FEWEST_SAMPLES, SHORTEST_RUN_S, Case
from oomph.records.report import Finding
from oomph.units import format_ratio


def too_short(case: Case) -> Finding | None:
    """No verdict, and why."""
    samples = case.busy.num_samples if case.busy else 0
    if case.lasted_s >= SHORTEST_RUN_S and samples >= FEWEST_SAMPLES:
        return None
    if case.lasted_s < SHORTEST_RUN_S:
        because = f"the run lasted {case.lasted_s:.0f} s, and start-up alone can take that long"
    elif case.busy is None:
        because = "nobody could read how busy the GPU was"
    else:
        because = f"only {samples} samples of kernel-active time were seen"
    return Finding(
        kind="too-short",
        sentence="no verdict on how well the GPU was used",
        evidence=(because,),
        confidence="measured",
        advice=(f"watch at least {SHORTEST_RUN_S:.0f} s of training",),
        gpus=(case.gpu.gpu,),
    )


def shared_gpu(case: Case) -> Finding | None:
    if not case.is_shared:
        return None
    how_long = format_ratio(case.gpu.shared_ratio or 0.0)
    most = case.gpu.most_others or 0
    who = "one process" if most == 1 else f"up to {most} processes"
    return Finding(
        kind="shared-gpu",
        sentence=f"the GPU was shared for {how_long} of the time: its figures mix jobs",
        evidence=(f"{who} of others at a time",),
        confidence="measured",
        advice=("choose a GPU that nobody uses: oomph gpus --free", "or wait until this one is"),
        gpus=(case.gpu.gpu,),
    )
