"""Findings -> those that may appear in one report, in order, each with advice that does no harm."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from oomph.records.report import Finding, FindingKind

# Exclusions are data, not code: `GIVES_WAY` for findings, `WITHHELD` for advice. So harmful advice
# (a larger batch when memory leaks, fewer evaluations when the run hangs) cannot be printed,
# whatever a rule says.

# Known facts that are not findings.
Fact = Literal["memory-full", "cpu-saturated"]

# ---- advice that depends on the rest of the report -------------------------------------------

LARGER_BATCH = "a larger micro-batch"
LARGEST_BATCH = "find the largest micro-batch before trying it: oomph plan"
MORE_WORKERS = "more loader workers: DataLoader(num_workers=...), persistent_workers=True"
PREFETCH = "pin_memory=True and .to(device, non_blocking=True); a larger prefetch_factor"
PREFETCH_MORE = "some samples take long to load: a larger prefetch_factor evens them out"
FIND_WHAT_GROWS = (
    "look for what grows with each step: a list that is kept, metrics or logs over the whole"
    " history, a graph that is never freed"
)
EVALUATE_LESS = "evaluate less often, or on fewer batches"

_SHORT_OF_MEMORY: tuple[FindingKind | Fact, ...] = (
    "leak",
    "fragmentation",
    "spill",
    "out-of-memory",
    "maybe-out-of-memory",
    "recovered",
    "memory-full",
)
_SHORT_OF_CPU: tuple[FindingKind | Fact, ...] = (
    "host-contention",
    "cpu-limit",
    "swapping",
    "cpu-saturated",
)

# Advice -> findings and facts that suppress it.
WITHHELD: Mapping[str, tuple[FindingKind | Fact, ...]] = {
    LARGER_BATCH: (*_SHORT_OF_MEMORY, "hang"),
    LARGEST_BATCH: (*_SHORT_OF_MEMORY, "hang"),
    MORE_WORKERS: (*_SHORT_OF_CPU, "host-leak", "hang"),
    PREFETCH: ("swapping", "host-leak", "hang"),  # both take host memory
    PREFETCH_MORE: ("swapping", "host-leak", "hang"),
    EVALUATE_LESS: ("hang",),
    # These already slow steps down.
    FIND_WHAT_GROWS: (
        "throttled",
        "shared-gpu",
        "host-contention",
        "cpu-limit",
        "swapping",
        "spill",
    ),
}

# ---- findings --------------------------------------------------------------------------------

# In order of appearance in a report. One of the first five, how the run ended, always comes first.
ORDER: Sequence[FindingKind] = (
    "out-of-memory",
    "recovered",
    "no-out-of-memory",
    "maybe-out-of-memory",
    "not-ended",
    "hang",
    "unstable",
    "lost-gpu",
    "no-gpu",
    "shared-gpu",
    "too-short",
    "spill",
    "leak",
    "fragmentation",
    "swapping",
    "cpu-limit",
    "host-contention",
    "never-busy",
    "input-bound",
    "pcie-bound",
    "pauses-in-step",
    "launch-bound",
    "throttled",
    "stalls",
    "slowing-down",
    "phases",
    "imbalance",
    "memory-bound",
    "narrow-kernels",
    "host-leak",
    "unexplained",
    "head-room",
    "noise-scale",
    "busy",
)

_STARVED: tuple[FindingKind, ...] = ("swapping", "cpu-limit", "host-contention")
_IDLE: tuple[FindingKind, ...] = (
    *_STARVED,
    "never-busy",
    "input-bound",
    "pcie-bound",
    "pauses-in-step",
    "launch-bound",
)
_TROUBLE: tuple[FindingKind, ...] = tuple(
    kind
    for kind in ORDER[5:]
    if kind not in ("head-room", "noise-scale", "unstable", "busy", "lost-gpu")
)

# Finding -> findings on the same GPU that suppress it.
GIVES_WAY: Mapping[FindingKind, tuple[FindingKind, ...]] = {
    "busy": _TROUBLE,
    "unexplained": (*_IDLE, "hang", "spill", "stalls"),
    "launch-bound": (*_STARVED, "pauses-in-step", "input-bound", "pcie-bound", "spill", "hang"),
    "pauses-in-step": (*_STARVED, "input-bound", "pcie-bound", "spill", "stalls"),
    "pcie-bound": ("spill",),
    "memory-bound": ("spill",),
    "narrow-kernels": ("spill", "memory-bound", "throttled", "shared-gpu", "hang"),
    "imbalance": ("hang",),
    "host-leak": ("swapping",),
}
# Finding -> findings on any GPU that suppress it: all GPUs share the batch.
GIVES_WAY_ANYWHERE: Mapping[FindingKind, tuple[FindingKind, ...]] = {
    "head-room": (
        "leak",
        "fragmentation",
        "spill",
        "hang",
        "never-busy",
        "too-short",
        "no-gpu",
        "out-of-memory",
        "maybe-out-of-memory",
        "recovered",
    ),
    "busy": ("imbalance",),
}


def agreed(findings: Sequence[Finding], facts: Collection[Fact]) -> list[Finding]:
    """Return the findings to report, in order, each with only the advice that does no harm."""
    known = {found.kind for found in findings} | set(facts)
    reported = [
        replace(
            found, advice=tuple(a for a in found.advice if known.isdisjoint(WITHHELD.get(a, ())))
        )
        for found in findings
        if not _gives_way(found, findings)
    ]
    return sorted(reported, key=lambda found: ORDER.index(found.kind))


def _gives_way(found: Finding, all_found: Iterable[Finding]) -> bool:
    beside = GIVES_WAY.get(found.kind, ())
    anywhere = GIVES_WAY_ANYWHERE.get(found.kind, ())
    return any(
        other.kind in anywhere or (other.kind in beside and _is_of_same_gpu(found, other))
        for other in all_found
        if other is not found
    )


def _is_of_same_gpu(one: Finding, other: Finding) -> bool:
    """Return whether both concern a common GPU; a finding without GPUs concerns all."""
    return not one.gpus or not other.gpus or bool(set(one.gpus) & set(other.gpus))
