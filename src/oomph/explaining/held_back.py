"""A GPU that always had something to do -> what kept it from doing more.

One small function per rule. Nothing is concluded from power alone but where to look, and nothing
at all of a GPU that others used as well: its figures are of all jobs together.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.explaining.agreement import LARGER_BATCH
from oomph.explaining.case import (
    LINK_RATIO,
    LOW_POWER_RATIO,
    MEMORY_BOUND_RATIO,
    NARROW_RATIO,
    SPILLS_FULL_RATIO,
    SPILLS_LINK_RATIO,
    Case,
    active,
)
from oomph.records.report import Finding
from oomph.units import format_ratio


def memory_bound(case: Case) -> Finding | None:
    moving = case.gpu.memory_active_ratio
    if not case.is_high or case.is_shared or moving is None or moving <= MEMORY_BOUND_RATIO:
        return None
    return Finding(
        kind="memory-bound",
        sentence="the GPU is busy moving data: its memory bandwidth is the limit",
        evidence=(active(case), f"DRAM was moving data {format_ratio(moving)} of the time"),
        confidence="measured",
        advice=(
            "fused kernels: torch.compile, fused attention, a fused optimizer",
            "lower precision; a larger batch will not help much",
        ),
        gpus=(case.gpu.gpu,),
    )


def narrow_kernels(case: Case) -> Finding | None:
    width = case.gpu.sm_active_ratio
    if not case.is_high or case.is_shared or width is None or width >= NARROW_RATIO:
        return None
    if memory_bound(case) is not None:  # says why, and its advice is another
        return None
    return Finding(
        kind="narrow-kernels",
        sentence="the GPU is always busy, but with kernels that fill few of its multiprocessors",
        evidence=(active(case), f"{format_ratio(width)} of the multiprocessors were active"),
        confidence="measured",
        advice=(LARGER_BATCH, "fused kernels: torch.compile", "bf16 instead of fp32"),
        gpus=(case.gpu.gpu,),
    )


def perhaps_narrow(case: Case) -> Finding | None:
    """Without a figure of the multiprocessors there is no claim, only a place to look."""
    power = case.gpu.power
    if not case.is_high or case.is_shared or case.is_throttled:
        return None
    if case.gpu.sm_active_ratio is not None or power.working_w is None or not power.limit_w:
        return None
    if power.working_w / power.limit_w >= LOW_POWER_RATIO:
        return None
    return Finding(
        kind="narrow-kernels",
        sentence="the GPU is always busy but draws little power: its kernels may be narrow",
        evidence=(
            active(case),
            f"{power.working_w:.0f} W of {power.limit_w:.0f} W while it worked",
            "work that is bound by memory draws less as well, so this is no proof",
        ),
        confidence="weak",
        advice=("look at one step with torch.profiler before changing anything",),
        gpus=(case.gpu.gpu,),
    )


def throttled(case: Case) -> Finding | None:
    if not case.is_throttled:
        return None
    by = case.gpu.power.throttled_by
    because = f" by {' and '.join(by)}" if by else ""
    share = format_ratio(case.gpu.power.throttled_ratio or 0.0)
    hottest = case.gpu.power.most_c
    evidence = [] if hottest is None else [f"up to {hottest} C"]
    return Finding(
        kind="throttled",
        sentence=f"clocks were held down{because} for {share} of the time",
        evidence=(*evidence, *_drawn(case)),
        confidence="measured",
        advice=_against_throttling(by),
        gpus=(case.gpu.gpu,),
    )


def spill(case: Case) -> Finding | None:
    """Nothing of the driver says "spilled": full memory and a busy link are its signs."""
    moved, full = case.gpu.link_ratio, case.full_ratio
    if case.is_shared or case.working_ratio is None or moved is None or full is None:
        return None
    if full < SPILLS_FULL_RATIO or moved < SPILLS_LINK_RATIO:
        return None
    return Finding(
        kind="spill",
        sentence="GPU memory is full, and data moves to and from the host all the time",
        evidence=(
            (
                f"{format_ratio(full)} of the memory is taken; PCIe carries {format_ratio(moved)}"
                " of what it can"
            ),
            active(case),
            "offloading on purpose looks the same",
        ),
        confidence="inferred",
        advice=(
            "if nothing is offloaded on purpose, the job does not fit: oomph plan finds what does",
            (
                "under WSL and Windows: switch off the driver's CUDA sysmem fallback, so that it"
                " fails instead of crawling"
            ),
        ),
        gpus=(case.gpu.gpu,),
    )


def pcie_bound(case: Case) -> Finding | None:
    moved = case.gpu.link_ratio
    if case.is_shared or case.is_high or case.working_ratio is None:
        return None
    if moved is None or moved < LINK_RATIO:
        return None
    return Finding(
        kind="pcie-bound",
        sentence="the GPU waits for data that comes over PCIe",
        evidence=(f"PCIe carries {format_ratio(moved)} of what it can", active(case)),
        confidence="inferred",
        advice=(
            "copy less: smaller types (uint8 images), and augment on the GPU",
            "keep on the GPU what is copied again in each step; offload less, if memory allows",
        ),
        gpus=(case.gpu.gpu,),
    )


def busy(case: Case) -> Finding | None:
    if not case.is_high:
        return None
    return Finding(
        kind="busy",
        sentence="the GPU was kept busy: a kernel was running almost all the time",
        evidence=(active(case), "which says nothing on how much of the GPU each kernel fills"),
        confidence="measured",
        gpus=(case.gpu.gpu,),
    )


def _drawn(case: Case) -> list[str]:
    power = case.gpu.power
    if power.mean_w is None:
        return []
    limit = f" of {power.limit_w:.0f} W" if power.limit_w else ""
    return [f"{power.mean_w:.0f} W{limit} on average"]


def _against_throttling(by: Sequence[str]) -> tuple[str, ...]:
    cures = {
        "power": "power: usual under full load; the limit can be seen with nvidia-smi -q -d POWER",
        "heat": "heat: look at fans, airflow and neighbours in the same machine",
        "hardware": "hardware: the power supply or the cooling of the machine needs a look",
    }
    return tuple(cures[why] for why in by if why in cures)
