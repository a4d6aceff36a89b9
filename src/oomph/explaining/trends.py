"""Run -> what shows only over time: it hangs, memory grows, steps slow down, some steps stall.

Thresholds are judgement, relative to the run's own pace. A rule that lacks its data is silent,
and none applies while the command was halted (Ctrl-Z).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oomph.explaining.figures import (
    IDLE_RATIO,
    halts_in,
    is_idle,
    lasted,
    lasted_s,
    mean_of,
    phases_of,
    quantile,
    wait_ratio,
)
from oomph.explaining.findings import FIND_WHAT_GROWS, PREFETCH_MORE
from oomph.records.report import Finding, GpuFigures
from oomph.records.run import GpuSpan, Run, StepSpan, halted_s, outside, shortened
from oomph.units import GIB, format_bytes, format_duration, format_ratio


def over_time(run: Run, used: Sequence[GpuFigures], silence: Silence | None) -> Iterator[Finding]:
    """Find what shows over time on the GPUs in use, up to the moment the run hung, if it did."""
    until_s = math.inf if silence is None else silence.began_s
    found = [_hang(run, silence), _host_leak(run, until_s)]
    found += [_slowing_down(run, until_s), _stalls(run, until_s)]
    found += [_leak(run, one, until_s) for one in used]
    yield from (one for one in found if one is not None)


# ---- hang ------------------------------------------------------------------------------------

# The log of a long run is written once a minute: a shorter silence means nothing.
QUIET_S = 120.0
_QUIET_STEPS = 20.0  # times the usual step: longer is a hang, not a step
_QUIET_PAUSES = 3.0  # times the longest pause before
_SPINS_RATIO = 0.99  # of the time: a kernel that waits for another rank never ends
_SPINNING_RATIO = 0.9  # of the time that it hangs
_SPINS_POWER = 0.6  # of the power before
_WITHIN = ("training", "start-up")  # phases in which steps are expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """No step, or no kernel, from some moment to the end of the recording."""

    began_s: float
    lasts_s: float
    usual_s: float | None  # usual step time; None: the script does not record its steps
    is_busy: bool | None  # a kernel ran all the time; None: unknown
    rank: int | None = None  # the rank that stopped first, if ranks differ


def silence_of(run: Run) -> Silence | None:
    """Return the silence if the run hangs, or hung until it was ended; None if it ended well."""
    has_ended_well = run.ending is not None and run.ending.exit_code == 0
    was_stopped = any(event.kind == "stopped" for event in run.events)
    if has_ended_well or was_stopped:
        return None
    if run.step_spans:
        return _without_steps(run)
    # Without steps, a run still under way may just be idle, like a notebook or a server.
    return None if run.ending is None else _without_kernels(run)


def _hang(run: Run, silence: Silence | None) -> Finding | None:
    if silence is None:
        return None
    how_long, is_over = format_duration(silence.lasts_s), run.ending is not None
    rank = "" if silence.rank is None else f"; rank {silence.rank} stopped first"
    if silence.usual_s is not None:
        hangs = "it hung" if is_over else "it may hang"
        sentence = f"{hangs}: no step finished in the last {how_long}{rank}"
        evidence = [f"until then a step took {silence.usual_s:.3g} s"]
    else:
        hangs = "it may have hung" if is_over else "it may hang"
        what = "one kernel ran all the time" if silence.is_busy else "no kernel ran"
        sentence = f"{hangs}: {what} in the last {how_long}"
        evidence = [
            "kernel-active 100% without a break, and the power has fallen"
            if silence.is_busy
            else "it still holds its memory on the GPU"
        ]
    if silence.usual_s is not None and silence.is_busy:
        evidence.append("a kernel runs all the time: a rank that waits for another spins in NCCL")
    elif silence.usual_s is not None and silence.is_busy is not None:
        evidence.append("no kernel has run since")
    return Finding(
        kind="hang",
        sentence=sentence,
        evidence=(*evidence, f"since {format_duration(silence.began_s)} after the start"),
        confidence="weak" if silence.usual_s is None else "inferred",
        advice=(
            "see where each process is stuck: py-spy dump --pid PID",
            (
                "with several ranks: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and"
                " TORCH_NCCL_DUMP_ON_TIMEOUT=1 tell which collective nobody joined"
            ),
        ),
        gpus=tuple(place for place, gpu in enumerate(run.gpus) if gpu.is_used),
    )


def _without_steps(run: Run) -> Silence | None:
    """Find a hang in a script that records steps: the steps have stopped."""
    spans = [span for span in run.step_spans if span.num_steps > 0]
    if not spans:
        return None
    ends = {rank: max(s.ended_s for s in own) for rank, own in _by_rank(spans).items()}
    last_s, end_s = max(ends.values()), lasted_s(run)
    phases = [phase for phase in phases_of(run) if phase.ended_s > last_s]
    if any(phase.name not in _WITHIN for phase in phases if phase.ended_s >= end_s):
        return None  # it evaluates or saves, in a phase of its own
    # A finished evaluation was not silence: count from its end.
    began_s = max([last_s, *(phase.began_s for phase in phases)])
    lasts_s = end_s - began_s - _halted_since(run, began_s)
    usual_s = _usual_step_s(spans)
    pauses = (after.began_s - before.ended_s for before, after in _neighbours(spans))
    longest_s = max((pause for pause in pauses), default=0.0)
    slowest_s = max(span.longest_step_s for span in spans)
    if lasts_s < max(
        QUIET_S, _QUIET_STEPS * usual_s, _QUIET_PAUSES * longest_s, _QUIET_PAUSES * slowest_s
    ):
        return None
    doing = _since(run, began_s)
    if "works" in doing:
        return None
    first = min(ends, key=lambda rank: ends[rank])
    is_first = len(ends) > 1 and last_s - ends[first] > max(usual_s, 1.0)
    return Silence(
        began_s=began_s,
        lasts_s=lasts_s,
        usual_s=usual_s,
        is_busy="spins" in doing if doing else None,
        rank=first if is_first else None,
    )


def _without_kernels(run: Run) -> Silence | None:
    """Find a hang without recorded steps: at the end, all GPUs are idle or all spin."""
    found = [_stuck(run, place) for place, gpu in enumerate(run.gpus) if gpu.is_used]
    if not found or any(one is None for one in found):
        return None
    return max((one for one in found if one is not None), key=lambda one: one.began_s)


def _stuck(run: Run, place: int) -> Silence | None:
    halts, end_s = halts_in(run), lasted_s(run)
    seen = [span for span in run.gpu_spans if span.gpu == place and span.busy_ratio is not None]
    known = outside(sorted(seen, key=lambda span: span.began_s), halts)
    if not known or end_s - known[-1].ended_s > QUIET_S / 2:  # the end was not seen
        return None
    for is_so, is_busy in ((is_idle, False), (_spins, True)):
        tail = _tail(known, is_so)
        before = known[: len(known) - len(tail)]
        lasts_s = sum(map(lasted, tail))
        worked = [span for span in before if not is_idle(span)]
        if lasts_s < QUIET_S or sum(map(lasted, worked)) < QUIET_S / 4:
            continue
        longest_s = max((end - start for start, end in _stretches(before, is_idle)), default=0.0)
        if not is_busy and lasts_s < _QUIET_PAUSES * longest_s:
            continue
        if (_has_less_power(tail, worked) if is_busy else _holds_memory(tail, worked)) is True:
            began_s = tail[0].began_s
            return Silence(began_s=began_s, lasts_s=lasts_s, usual_s=None, is_busy=is_busy)
    return None


def _spins(span: GpuSpan) -> bool:
    least = span.busy_ratio if span.least_busy_ratio is None else span.least_busy_ratio
    return (least or 0.0) >= _SPINS_RATIO


def _has_less_power(tail: Sequence[GpuSpan], before: Sequence[GpuSpan]) -> bool:
    now_w, then_w = (mean_of(spans, lambda span: span.power_w) for spans in (tail, before))
    return now_w is not None and then_w is not None and now_w <= _SPINS_POWER * then_w


def _holds_memory(tail: Sequence[GpuSpan], before: Sequence[GpuSpan]) -> bool:
    now, then = (mean_of(spans, lambda span: span.used_bytes) for spans in (tail, before))
    return now is not None and then is not None and now >= 0.5 * then


def _tail(spans: Sequence[GpuSpan], is_so: Callable[[GpuSpan], bool]) -> Sequence[GpuSpan]:
    number = next((n for n, span in enumerate(reversed(spans)) if not is_so(span)), len(spans))
    return spans[len(spans) - number :]


def _stretches(
    spans: Sequence[GpuSpan], is_so: Callable[[GpuSpan], bool]
) -> Iterator[tuple[float, float]]:
    """Yield the stretches after the first span that does not match; before it is start-up."""
    began_s, has_worked = None, False
    for span in spans:
        if is_so(span):
            began_s = span.began_s if began_s is None and has_worked else began_s
            continue
        has_worked = True
        if began_s is not None:
            yield began_s, span.began_s
        began_s = None


def _since(run: Run, began_s: float) -> set[str]:
    """Return what the run's GPUs do from then on: "idle", "spins" or "works".

    "works" can be an evaluation without a named phase.
    """
    found = set()
    for place, gpu in enumerate(run.gpus):
        spans = [s for s in run.gpu_spans if s.gpu == place and s.began_s >= began_s]
        ratio = mean_of(spans, lambda span: span.busy_ratio)
        if gpu.is_used and ratio is not None:
            spinning = sum(lasted(span) for span in spans if _spins(span))
            is_spinning = spinning >= _SPINNING_RATIO * sum(map(lasted, spans))
            found.add("idle" if ratio < IDLE_RATIO else "spins" if is_spinning else "works")
    return found


def _halted_since(run: Run, began_s: float) -> float:
    cut = (max(halt.ended_s - max(halt.began_s, began_s), 0.0) for halt in halts_in(run))
    return min(sum(cut), halted_s(halts_in(run)))


def _by_rank(spans: Sequence[StepSpan]) -> dict[int, list[StepSpan]]:
    found: dict[int, list[StepSpan]] = {}
    for span in spans:
        found.setdefault(span.rank, []).append(span)
    return found


def _neighbours(spans: Sequence[StepSpan]) -> Iterator[tuple[StepSpan, StepSpan]]:
    """Yield consecutive spans of the same rank."""
    for own in _by_rank(spans).values():
        yield from pairwise(sorted(own, key=lambda span: span.began_s))


def _usual_step_s(spans: Sequence[StepSpan]) -> float:
    """Return the median over steps, which a few stalled steps do not change."""
    return quantile([(span.step_s, span.num_steps) for span in spans], 0.5)


# ---- memory that grows -----------------------------------------------------------------------

_LEAST_S = 120.0  # of training
_WARM_UP = 0.2  # of it: caches fill, optimizers create their states
_SEGMENTS = 8
_RISING = 6  # of the seven differences between them
_LATE_RATIO = 0.40  # share of the growth in the second half; steady growth has half
_GREW_RATIO = 0.05  # of the GPU's memory
_HOST_GREW_BYTES = 2 * GIB
_HOST_GREW_RATIO = 0.25  # of the memory before
_FRAGMENTED_RATIO = 0.7  # below this share of the reserved memory in tensors, it is fragmented


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory that has not stopped growing."""

    from_bytes: float
    to_bytes: float
    over_s: float

    @property
    def grew_bytes(self) -> float:
        return self.to_bytes - self.from_bytes

    @property
    def per_hour_bytes(self) -> float:
        return self.grew_bytes / self.over_s * 3600


def growth_of(points: Sequence[tuple[float, float]]) -> Growth | None:
    """(time, bytes) in order -> growth that is steady to the end, unlike a cache that fills.

    >>> growth_of([(t, 10.0 + t) for t in range(300)]).grew_bytes > 200
    True
    >>> growth_of([(t, 10.0 + min(t, 100)) for t in range(300)]) is None
    True
    """
    if len(points) < 2 * _SEGMENTS or points[-1][0] - points[0][0] < _LEAST_S:
        return None
    first_s = points[0][0] + _WARM_UP * (points[-1][0] - points[0][0])
    kept = [point for point in points if point[0] >= first_s]
    over_s = kept[-1][0] - kept[0][0]
    if len(kept) < 2 * _SEGMENTS or over_s <= 0:
        return None
    segments: list[list[float]] = [[] for _ in range(_SEGMENTS)]
    for at_s, used in kept:
        place = int((at_s - kept[0][0]) / over_s * _SEGMENTS)
        segments[min(place, _SEGMENTS - 1)].append(used)
    if not all(segments):
        return None
    levels = [statistics.fmean(segment) for segment in segments]
    grew, half = levels[-1] - levels[0], len(levels) // 2
    rising = sum(after > before for before, after in pairwise(levels))
    late = levels[-1] - (levels[half - 1] + levels[half]) / 2
    if grew <= 0 or rising < _RISING or late < _LATE_RATIO * grew:
        return None
    # Measured between the middles of the first and the last segment.
    return Growth(
        from_bytes=levels[0],
        to_bytes=levels[-1],
        over_s=over_s * (_SEGMENTS - 1) / _SEGMENTS,
    )


def _leak(run: Run, gpu: GpuFigures, until_s: float) -> Finding | None:
    """Report growing GPU memory: a leak, or fragmentation if tensors use far less than reserved."""
    total = gpu.memory.total_bytes
    grown = growth_of(_used_on(run, gpu.gpu, until_s))
    if grown is None or not total or grown.grew_bytes < _GREW_RATIO * total:
        return None
    evidence = [
        (
            f"from {format_bytes(round(grown.from_bytes))} to {format_bytes(round(grown.to_bytes))}"
            f" in {format_duration(grown.over_s)}, and it has not stopped"
        ),
        _until_full(total - grown.to_bytes, grown),
    ]
    allocated, reserved = gpu.memory.allocated_bytes, gpu.memory.peak_bytes
    is_fragmented = (
        gpu.memory.peak_source == "torch"
        and allocated is not None
        and reserved is not None
        and allocated < _FRAGMENTED_RATIO * reserved
    )
    if is_fragmented:
        return Finding(
            kind="fragmentation",
            sentence="reserved GPU memory keeps growing, while tensors do not need it",
            evidence=(
                *evidence,
                (
                    f"tensors took at most {format_bytes(allocated or 0)}"
                    f" of the {format_bytes(reserved or 0)} that torch reserved"
                ),
            ),
            confidence="inferred",
            advice=(
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                "batches of fewer different shapes",
            ),
            gpus=(gpu.gpu,),
        )
    knows_tensors = allocated is not None and gpu.memory.peak_source == "torch"
    or_fragments = "" if knows_tensors else ", or torch's allocator fragments"
    return Finding(
        kind="leak",
        sentence=f"GPU memory keeps growing: something is kept from step to step{or_fragments}",
        evidence=tuple(evidence),
        confidence="inferred",
        advice=(
            (
                "a loss or an output that is kept holds its whole graph: keep loss.item() or"
                " loss.detach()"
            ),
            (
                "see who allocates it: torch.cuda.memory._record_memory_history(), then"
                " torch.cuda.memory._dump_snapshot()"
            ),
        ),
        gpus=(gpu.gpu,),
    )


def _host_leak(run: Run, until_s: float) -> Finding | None:
    halts = halts_in(run)
    seen = [span for span in run.host_spans if span.memory_bytes is not None]
    spans = [span for span in outside(seen, halts) if span.ended_s <= until_s]
    grown = growth_of([(span.began_s, float(span.memory_bytes or 0)) for span in spans])
    if grown is None or grown.grew_bytes < _HOST_GREW_BYTES:
        return None
    if grown.grew_bytes < _HOST_GREW_RATIO * grown.from_bytes:
        return None
    return Finding(
        kind="host-leak",
        sentence="host memory keeps growing",
        evidence=(
            (
                f"its processes held {format_bytes(round(grown.from_bytes))}, then"
                f" {format_bytes(round(grown.to_bytes))}"
                f" ({format_bytes(round(grown.per_hour_bytes))} an hour), and it has not stopped"
            ),
            "pages that processes share are counted for each of them",
        ),
        confidence="inferred",
        advice=(
            (
                "a dataset of Python objects is copied into each loader worker, page by page, as"
                " it is read: keep it in one array or tensor"
            ),
            "do not append tensors, losses or batches to a list that lives on",
        ),
    )


def _used_on(run: Run, place: int, until_s: float) -> list[tuple[float, float]]:
    """Return this run's memory over time, if known; all memory in use if the GPU is not shared."""
    halts = halts_in(run)
    seen = [s for s in run.gpu_spans if s.gpu == place and s.ended_s <= until_s]
    spans = outside(sorted(seen, key=lambda span: span.began_s), halts)
    first = next((n for n, span in enumerate(spans) if not is_idle(span)), len(spans))
    is_alone = not any(span.num_others for span in spans)
    used = [(s.began_s, s.used_bytes if is_alone else s.run_bytes) for s in spans[first:]]
    return [(at_s, float(number)) for at_s, number in used if number is not None]


def _until_full(left_bytes: float, grown: Growth) -> str:
    if left_bytes <= 0:
        return "the GPU is full"
    left_s = left_bytes / grown.grew_bytes * grown.over_s
    return f"at this rate the GPU is full in {format_duration(left_s)}"


# ---- steps that slow down --------------------------------------------------------------------

_SLOWER_RATIO = 1.25
_FEWEST_SPANS = 12


def _slowing_down(run: Run, until_s: float) -> Finding | None:
    """Compare the last third of the steps with the first, after warm-up; by sample if known."""
    spans = _timed(run, until_s)
    if len(spans) < _FEWEST_SPANS or spans[-1].ended_s - spans[0].began_s < _LEAST_S:
        return None
    spans = [s for s in spans if s.began_s >= _after(spans, _WARM_UP / 2)]
    early, middle, late = (_pace(part) for part in _thirds(spans))
    if early is None or middle is None or late is None:
        return None
    if late < _SLOWER_RATIO * early or not 0.95 * early <= middle <= 1.05 * late:
        return None
    first, _, last = _thirds(spans)
    was_s, now_s = _usual_step_s(first), _usual_step_s(last)
    waits = [wait_ratio(part) for part in (first, last)]
    evidence = [f"{was_s:.3g} s a step at first, {now_s:.3g} s at the end"]
    is_input = waits[0] is not None and waits[1] is not None and waits[1] - waits[0] > 0.1
    if waits[0] is not None and waits[1] is not None:
        shares = [format_ratio(wait or 0.0) for wait in waits]
        evidence.append(
            f"waiting for data took {shares[0]} of a step at first, {shares[1]} at the end"
        )
    return Finding(
        kind="slowing-down",
        sentence=f"steps became {late / early:.1f} times as slow over the run",
        evidence=tuple(evidence),
        confidence="measured",
        advice=("the input slows it down: look at the storage, and at caches that fill up",)
        if is_input
        else (FIND_WHAT_GROWS,),
    )


def _timed(run: Run, until_s: float) -> list[StepSpan]:
    halts = halts_in(run)
    spans = [s for s in run.step_spans if s.num_steps > 0 and s.ended_s <= until_s]
    # A step that lay in a halt has no time left, and no pace.
    timed = [s for s in (shortened(s, halts) for s in spans) if s.step_s > 0]
    return sorted(timed, key=lambda span: span.began_s)


def _after(spans: Sequence[StepSpan], share: float) -> float:
    return spans[0].began_s + share * (spans[-1].ended_s - spans[0].began_s)


def _thirds(spans: Sequence[StepSpan]) -> tuple[list[StepSpan], list[StepSpan], list[StepSpan]]:
    parts: tuple[list[StepSpan], list[StepSpan], list[StepSpan]] = ([], [], [])
    if spans:
        began_s, over_s = spans[0].began_s, max(spans[-1].ended_s - spans[0].began_s, 1e-9)
        for span in spans:
            parts[min(int((span.began_s - began_s) / over_s * 3), 2)].append(span)
    return parts


def _pace(spans: Sequence[StepSpan]) -> float | None:
    """Return the median seconds per sample, or per step if samples are not counted."""
    if len(spans) < _FEWEST_SPANS // 4:
        return None
    if all(span.num_samples for span in spans):
        per = [(s.step_s * s.num_steps / (s.num_samples or 1), s.num_steps) for s in spans]
        return quantile(per, 0.5)
    return _usual_step_s(spans)


# ---- some steps that stall -------------------------------------------------------------------

_STALL_RATIO = 3.0  # times the usual step
_STALL_S = 0.2  # and at least this much longer
_FEWEST_STALLS = 3
_STALLED_RATIO = 0.05  # of the total step time


def _stalls(run: Run, until_s: float) -> Finding | None:
    """Report that now and then a step takes many times as long as the others."""
    spans = _timed(run, until_s)
    if not spans or spans[-1].ended_s - spans[0].began_s < _LEAST_S / 2:
        return None
    spans = [s for s in spans if s.began_s >= _after(spans, _WARM_UP / 2)]
    if not spans:
        return None
    usual_s = _usual_step_s(spans)
    least_s = max(_STALL_RATIO * usual_s, usual_s + _STALL_S)
    stalled = [span for span in spans if span.longest_step_s >= least_s]
    lost_s = sum(span.longest_step_s - usual_s for span in stalled)
    took_s = sum(span.num_steps * span.step_s for span in spans)
    num_steps = sum(span.num_steps for span in spans)
    # If many steps are like this, it is the normal pace, and the usual step is misleading.
    if len(stalled) < _FEWEST_STALLS or len(stalled) > num_steps / 5 or took_s <= 0:
        return None
    if lost_s < _STALLED_RATIO * took_s:
        return None
    by_data = _waits_for_data(stalled, usual_s)
    longest_s = max(span.longest_step_s for span in stalled)
    evidence = [
        f"at least {len(stalled)} steps took up to {longest_s:.3g} s; usual are {usual_s:.3g} s",
        f"that is {format_ratio(min(lost_s / took_s, 1.0))} of the time of all steps",
    ]
    if by_data is not None:
        evidence.append("they wait for data" if by_data else "they do not wait for data")
    return Finding(
        kind="stalls",
        sentence="now and then a step takes many times as long as the others",
        evidence=tuple(evidence),
        confidence="measured",
        advice=_against_stalls(by_data),
    )


def _waits_for_data(stalled: Sequence[StepSpan], usual_s: float) -> bool | None:
    if any(span.data_wait_s is None for span in stalled):
        return None
    waited_s = sum(span.data_wait_s or 0.0 for span in stalled)
    return waited_s >= 0.5 * sum(span.longest_step_s - usual_s for span in stalled)


def _against_stalls(by_data: bool | None) -> tuple[str, ...]:
    if by_data:
        return (
            "loader workers that start anew each epoch: persistent_workers=True",
            PREFETCH_MORE,
        )
    return (
        (
            "Python's garbage collection: gc.freeze() after set-up, or gc.disable() and"
            " gc.collect() every few hundred steps"
        ),
        "saving, logging or copying to the host within a step",
    )
