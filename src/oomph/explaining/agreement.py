"""Findings of all rules -> those that can stand in one report: one leads, none denies another.

What must not stand together is data, not code: `GIVES_WAY` for findings, `WITHHELD` for advice.
So advice that would do harm (a larger batch where memory leaks, fewer evaluations where it hangs)
cannot be printed, whatever a rule says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from oomph.records.report import Finding, FindingKind

# What is known beside the findings, and is none by itself.
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

# Advice -> beside which findings and facts it is not given.
WITHHELD: Mapping[str, tuple[FindingKind | Fact, ...]] = {
    LARGER_BATCH: (*_SHORT_OF_MEMORY, "hang"),
    LARGEST_BATCH: (*_SHORT_OF_MEMORY, "hang"),
    MORE_WORKERS: (*_SHORT_OF_CPU, "host-leak", "hang"),
    PREFETCH: ("swapping", "host-leak", "hang"),  # both take host memory
    PREFETCH_MORE: ("swapping", "host-leak", "hang"),
    EVALUATE_LESS: ("hang",),
    # These slow steps down by themselves.
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

# From what leads to what is said last.
ORDER: Sequence[FindingKind] = (
    "out-of-memory",
    "recovered",
    "no-out-of-memory",
    "maybe-out-of-memory",
    "not-ended",
    "hang",
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
    "busy",
)
ENDINGS: Sequence[FindingKind] = ORDER[:5]  # one of them stands first, and is not weighed here

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
    kind for kind in ORDER[5:] if kind not in ("head-room", "busy", "lost-gpu")
)

# Finding -> beside which others of the same GPU it is not said.
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
# The same, of whichever GPU: the batch is that of all of them.
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
    """Those that are said, in their order, each with the advice that does no harm here."""
    said = [found for found in findings if not _gives_way(found, findings)]
    known = {found.kind for found in findings} | set(facts)
    kept = (_without_harm(found, known) for found in said)
    return sorted(kept, key=lambda found: ORDER.index(found.kind))


def _gives_way(found: Finding, all_found: Iterable[Finding]) -> bool:
    beside = GIVES_WAY.get(found.kind, ())
    anywhere = GIVES_WAY_ANYWHERE.get(found.kind, ())
    return any(
        other.kind in anywhere or (other.kind in beside and _is_of_same_gpu(found, other))
        for other in all_found
        if other is not found
    )


def _is_of_same_gpu(one: Finding, other: Finding) -> bool:
    """Those that name no GPU are of all."""
    return not one.gpus or not other.gpus or bool(set(one.gpus) & set(other.gpus))


def _without_harm(found: Finding, known: Collection[str]) -> Finding:
    given = tuple(a for a in found.advice if not set(WITHHELD.get(a, ())) & set(known))
    return found if given == found.advice else replace(found, advice=given)
