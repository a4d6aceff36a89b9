"""Two Reports -> what changed from one to the other, and why that may mean little.

Only times, rates and waits are called better or worse: more memory in use or more kernel-active
time is not a goal in itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from oomph.records.report import Change, Comparison, Finding, GpuFigures, Report
from oomph.records.run_spans import most

# Two runs of the same job differ by a few percent: smaller changes count as equal. Judgement.
_NOTABLE_RATIO = 0.05
# These differ by as much as this: a start-up by what the disk and its caches hold. Judgement.
_NOISE = {
    "start-up": 5.0,
    "standing still": 1.0,
    "waiting for data": 0.03,
    "clocks held down": 0.03,
}

_Unit = Literal["bytes", "s", "ratio", "w", "per-s", "cores", "steps"]
_Read = Callable[[Report], float | None]


def compare(before: Report, after: Report) -> Comparison:
    """Return the changes from `before` to `after`."""
    return Comparison(
        before=before.run,
        after=after.run,
        cautions=tuple(_cautions(before, after)),
        changes=tuple(_changes(before, after)),
        gone=_only_in(before, after),
        new=_only_in(after, before),
    )


def _changes(before: Report, after: Report) -> Iterable[Change]:
    for what, unit, lower_is_better, read in _FIGURES:
        was, now = read(before), read(after)
        if was is None and now is None:
            continue
        yield Change(
            what=what,
            unit=unit,
            before=was,
            after=now,
            is_better=_is_better(was, now, lower_is_better, _NOISE.get(what, 0.0)),
        )


def _is_better(
    was: float | None, now: float | None, lower_is_better: bool | None, noise: float
) -> bool | None:
    if was is None or now is None or lower_is_better is None:
        return None
    if abs(now - was) <= max(_NOTABLE_RATIO * max(abs(was), abs(now)), noise):
        return None
    return (now < was) == lower_is_better


def _only_in(one: Report, other: Report) -> tuple[Finding, ...]:
    """Return findings by kind: the same cause with other figures is neither new nor gone."""
    kinds = {found.kind for found in other.findings}
    return tuple(found for found in one.findings if found.kind not in kinds)


# ---- what is compared ------------------------------------------------------------------------


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _working(gpu: GpuFigures) -> float | None:
    return gpu.busy.working.mean if gpu.busy and gpu.busy.working else None


# Name, unit, whether less is better (None: neither is), and where to find it in a report.
_FIGURES: Sequence[tuple[str, _Unit, bool | None, _Read]] = (
    ("time of a step", "s", True, lambda r: _mean(one.step_s for one in r.steps)),
    ("samples a second", "per-s", False, lambda r: _sum([one.samples_per_s for one in r.steps])),
    ("waiting for data", "ratio", True, lambda r: most(one.data_wait_ratio for one in r.steps)),
    ("steps", "steps", None, lambda r: most(one.num_steps for one in r.steps)),
    ("peak memory", "bytes", None, lambda r: most(one.memory.peak_bytes for one in r.gpus)),
    ("kernel-active", "ratio", None, lambda r: _mean(map(_working, r.gpus))),
    ("standing still", "s", True, lambda r: _mean(g.busy.gaps_s for g in r.gpus if g.busy)),
    ("start-up", "s", True, lambda r: _mean(g.busy.start_up_s for g in r.gpus if g.busy)),
    ("power per GPU", "w", None, lambda r: _mean(one.power.mean_w for one in r.gpus)),
    ("clocks held down", "ratio", True, lambda r: most(g.power.throttled_ratio for g in r.gpus)),
    ("host CPUs", "cores", None, lambda r: r.host_figures.cpu_cores),
    ("host memory", "bytes", None, lambda r: r.host_figures.memory_bytes),
    ("lasted", "s", None, lambda r: r.lasted_s),
)


# ---- why a change may mean little ------------------------------------------------------------


def _cautions(before: Report, after: Report) -> Iterable[str]:
    names = [sorted({one.name or "unknown" for one in report.gpus}) for report in (before, after)]
    if names[0] != names[1]:
        yield f"other GPUs: {', '.join(names[0]) or 'none'}, then {', '.join(names[1]) or 'none'}"
    if len(before.gpus) != len(after.gpus):
        yield f"{len(before.gpus)} GPUs, then {len(after.gpus)}"
    if before.host != after.host:
        yield f"on {before.host}, then on {after.host}"
    sources = [{one.memory.peak_source for one in report.gpus} for report in (before, after)]
    if sources[0] != sources[1]:
        yield "their peaks come from different sources: polling can miss what counters see"
    for report in (before, after):
        yield from _cautions_of(report)


def _cautions_of(report: Report) -> Iterable[str]:
    kinds = {found.kind for found in report.findings}
    if not report.has_ended:
        yield f"{report.run} was not seen to end"
    if "too-short" in kinds:
        yield f"{report.run} is too short for a verdict"
    if "shared-gpu" in kinds:
        yield f"{report.run} shared a GPU with others"
