"""Run -> Report: the figures, then the findings; whether memory ran out comes first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from oomph.explaining.figures import (
    gpu_figures,
    halts_in,
    host_figures,
    is_phase,
    lasted_s,
    longest,
    longest_of_each,
    phases_of,
    step_figures,
    worked_s,
)
from oomph.explaining.findings import LARGEST_BATCH, Fact, agreed
from oomph.explaining.training_signs import training_signs
from oomph.explaining.trends import over_time, silence_of
from oomph.explaining.underuse import (
    FULL_RATIO,
    RULES,
    SHARED_RATIO,
    Case,
    is_saturated,
    shared_gpu,
    too_short,
)
from oomph.records.report import Finding, GpuFigures, HostFigures, Mark, Report, StepFigures
from oomph.records.run import Ending, Event, Run
from oomph.units import format_bytes, format_duration, format_ratio, format_time

# ---- how it ended: did it run out of memory, did it not, or is that unknown? ---------------------

_SOURCES = {
    "torch": "by torch's allocator: exact",
    "accounting": "by the driver's accounting: exact",
    "polled": "as polled",
}
_PLAN = "find what fits before trying it: oomph plan SCRIPT --gpu GPU"


def out_of_memory(run: Run, gpus: Sequence[GpuFigures]) -> Finding:
    """Return whether the run ran out of memory."""
    ooms = [event for event in run.events if event.kind == "out-of-memory"]
    ending = run.ending
    if ending is None:
        return _not_ended(run, gpus, ooms)
    if ending.out_of_memory == "host":
        return _of_host(ending, run, _guesses(run))
    has_failed = ending.exit_code not in (0, None) or ending.signal is not None
    if ending.out_of_memory == "gpu" or (ooms and has_failed):
        return _of_gpu(ending, gpus, ooms, _guesses(run))
    if ooms:
        return _went_on(gpus, ooms)
    if ending.signal == "SIGKILL":
        return _killed(ending, gpus)
    return _no(ending, gpus, run)


def _fullness(gpus: Sequence[GpuFigures]) -> tuple[str, ...]:
    """Return the peak of the run's fullest GPU, with its source and what that source can miss."""
    known = [one for one in gpus if one.memory.peak_bytes is not None]
    if not gpus:
        return ()
    if not known:
        return ("its memory use could not be read",)
    most = max(known, key=lambda one: _share(one) or 0.0)
    memory, share = most.memory, _share(most)
    total = "" if share is None else f" of {format_bytes(memory.total_bytes or 0)}"
    ratio = "" if share is None else f" ({format_ratio(share)})"
    peak = format_bytes(memory.peak_bytes or 0)
    source = _SOURCES[memory.peak_source or "polled"]
    most_used = f"at most {peak}{total}{ratio} on GPU {most.index}, {source}"
    return (most_used, memory.peak_misses) if memory.peak_misses else (most_used,)


def _share(gpu: GpuFigures) -> float | None:
    peak, total = gpu.memory.peak_bytes, gpu.memory.total_bytes
    return None if peak is None or not total else peak / total


def _guesses(run: Run) -> tuple[str, ...]:
    """Return the likely but unproven causes that the watcher recorded at the end."""
    return tuple(
        event.text
        for event in run.events
        if event.kind == "warning" and event.text.startswith("probably ")
    )


def _of_gpu(
    ending: Ending, gpus: Sequence[GpuFigures], ooms: Sequence[Event], guesses: Sequence[str]
) -> Finding:
    at = f" after {format_duration(ooms[0].at_s if ooms else ending.at_s)}"
    evidence = tuple(event.text for event in ooms[:1]) or tuple(guesses)
    named = sorted({event.gpu for event in ooms if event.gpu is not None})
    its_gpus = [one for one in gpus if one.gpu in named] or gpus
    return Finding(
        kind="out-of-memory",
        sentence=f"{'' if ooms else 'probably '}out of GPU memory{at}",
        evidence=(*evidence, *_fullness(its_gpus)),
        confidence="measured" if ooms else "inferred",
        advice=(_PLAN, "or let oomph.Stepper split the batch when it happens"),
        gpus=tuple(named),
    )


def _of_host(ending: Ending, run: Run, guesses: Sequence[str]) -> Finding:
    most = max((span.memory_bytes or 0 for span in run.host_spans), default=0)
    memory = (f"its processes held up to {format_bytes(most)}",) if most else ()
    return Finding(
        kind="out-of-memory",
        sentence=f"out of host memory after {format_duration(ending.at_s)}: the kernel killed it",
        evidence=(*guesses, *memory),
        confidence="inferred" if guesses else "measured",
        advice=("fewer loader workers or a smaller prefetch_factor", "more memory for the job"),
    )


def _went_on(gpus: Sequence[GpuFigures], ooms: Sequence[Event]) -> Finding:
    times = "once" if len(ooms) == 1 else f"{len(ooms)} times"
    return Finding(
        kind="recovered",
        sentence=f"ran out of GPU memory {times}, and went on",
        evidence=(*(event.text for event in ooms[:1]), *_fullness(gpus)),
        confidence="measured",
        advice=(_PLAN,),
    )


def _killed(ending: Ending, gpus: Sequence[GpuFigures]) -> Finding:
    return Finding(
        kind="maybe-out-of-memory",
        sentence=f"killed after {format_duration(ending.at_s)}, and it is not known by whom",
        evidence=("SIGKILL is what the kernel sends when memory runs out", *_fullness(gpus)),
        confidence="weak",
        advice=("look for oom-kill in dmesg, or in the log of the scheduler",),
    )


def _not_ended(run: Run, gpus: Sequence[GpuFigures], ooms: Sequence[Event]) -> Finding:
    so_far = "it had run out of memory" if ooms else "it had not run out of memory"
    return Finding(
        kind="not-ended",
        sentence=f"no end was seen; until {format_duration(run.last_seen_s)} {so_far}",
        evidence=("it is still running, or oomph watch was killed", *_fullness(gpus)),
        confidence="weak",
    )


def _no(ending: Ending, gpus: Sequence[GpuFigures], run: Run) -> Finding:
    was_stopped = any(event.kind == "stopped" for event in run.events)
    if was_stopped:
        ending_text = "stopped by oomph, as requested"
    elif ending.signal:
        ending_text = f"ended by {ending.signal}"
    elif ending.exit_code is None:
        ending_text = "how it ended is not known"
    else:
        ending_text = (
            "it ended well" if ending.exit_code == 0 else f"it failed with {ending.exit_code}"
        )
    return Finding(
        kind="no-out-of-memory",
        sentence=f"did not run out of memory in {format_duration(ending.at_s)}; {ending_text}",
        evidence=_fullness(gpus),
        confidence="measured" if ending.exit_code == 0 or was_stopped else "inferred",
    )


# ---- all GPUs together: imbalance and head-room --------------------------------------------------

DIFFERS_RATIO = 0.15  # from the other ranks: judgement
# Share that the micro-batch may fill: the CUDA context and fragmentation take the rest.
FILLABLE_RATIO = 0.92
_FAR = 10.0  # times: so far from the measurement, no factor can be trusted


def imbalance(gpus: Sequence[GpuFigures], steps: Sequence[StepFigures]) -> Finding | None:
    """Find a rank that the others wait for, or a GPU whose kernel-active time differs."""
    return _by_steps(gpus, steps) or _by_waits(gpus, steps) or _by_busy(gpus)


def _by_waits(gpus: Sequence[GpuFigures], steps: Sequence[StepFigures]) -> Finding | None:
    """Find the rank that waits for its data, while the others wait for it.

    Ranks that synchronise take equally long for a step, whichever of them is slow.
    """
    ratios = [one.data_wait_ratio for one in steps]
    if len(steps) < 2 or None in ratios:
        return None
    waits = {one.rank: (one.data_wait_ratio or 0.0) * one.step_s for one in steps}
    rank = max(waits, key=lambda key: waits[key])
    others = statistics.median(wait_s for other, wait_s in waits.items() if other != rank)
    step_s = next(one.step_s for one in steps if one.rank == rank)
    wait_s, usual = waits[rank], format_time(others)
    if wait_s - others <= DIFFERS_RATIO * step_s:
        return None
    return Finding(
        kind="imbalance",
        sentence=f"rank {rank} keeps the other ranks waiting: it waits longer for its data",
        evidence=(
            f"{format_time(wait_s)} of a step of {format_time(step_s)}; the others: {usual}",
        ),
        confidence="measured",
        advice=("compare that rank's share of the data, its storage and its loader's workers",),
        gpus=tuple(one.gpu for one in gpus if one.rank == rank),
    )


def _by_steps(gpus: Sequence[GpuFigures], steps: Sequence[StepFigures]) -> Finding | None:
    times = {one.rank: one.step_s for one in steps}
    rank = _odd_one(times, low_is_odder=False)
    if rank is None:
        return None
    others = statistics.median(time for other, time in times.items() if other != rank)
    return Finding(
        kind="imbalance",
        sentence=f"rank {rank} does not keep step with the other ranks",
        evidence=(f"{times[rank]:.3g} s a step; the others need {others:.3g} s",),
        confidence="measured",
        advice=("compare what that rank has to do: its share of the data, its CPUs, its GPU",),
        gpus=tuple(one.gpu for one in gpus if one.rank == rank),
    )


def _by_busy(gpus: Sequence[GpuFigures]) -> Finding | None:
    working = {
        one.gpu: one.busy.working.mean
        for one in gpus
        if one.busy and one.busy.working and (one.shared_ratio or 0.0) <= SHARED_RATIO
    }
    gpu = _odd_one(working, low_is_odder=True)
    if gpu is None:
        return None
    others = statistics.median(ratio for other, ratio in working.items() if other != gpu)
    (rank,) = (one.rank for one in gpus if one.gpu == gpu)
    who = "this GPU" if rank is None else f"this GPU, of rank {rank},"
    return Finding(
        kind="imbalance",
        sentence=f"{who} is not as busy as the others",
        evidence=(
            f"kernel-active {format_ratio(working[gpu])}; the others {format_ratio(others)}",
            "a rank that waits for another can be busy with waiting, in a kernel of NCCL",
        ),
        confidence="inferred",
        advice=("compare what that rank has to do: its share of the data, its CPUs, its GPU",),
        gpus=(gpu,),
    )


def _odd_one(values: Mapping[int, float], *, low_is_odder: bool) -> int | None:
    """Return the key farthest from the median, if the values differ enough."""
    if len(values) < 2:
        return None
    lowest, highest = min(values.values()), max(values.values())
    if highest <= 0 or (highest - lowest) / highest <= DIFFERS_RATIO:
        return None
    median = statistics.median(values.values())
    sign = -1 if low_is_odder else 1
    # Two values are equally far from their median: rounding must not choose between them.
    return max(values, key=lambda key: (round(abs(values[key] - median), 9), sign * values[key]))


def head_room(gpus: Sequence[GpuFigures]) -> Finding | None:
    """Return how much more would fit: the fullest GPU decides."""
    used = [one for one in gpus if one.memory.peak_bytes is not None and one.memory.total_bytes]
    if not used or len(used) < len(gpus):
        return None
    fullest = max(used, key=_filled)
    if _filled(fullest) >= FULL_RATIO:
        return None
    factors = [factor(one) for one in used]
    known = [one for one in factors if one is not None]
    grows = min(known) if len(known) == len(factors) else None
    return _head_room(fullest, grows if grows and grows > 1 else None)


def factor(gpu: GpuFigures) -> float | None:
    """Return how many times larger the micro-batch could be; None if the fixed part is unknown.

    Memory reserved before the first step counts as fixed, that is, independent of the batch. Most
    optimizers allocate their states during the first step, so the result is an underestimate.
    """
    memory = gpu.memory
    peak, fixed, total = memory.peak_bytes, memory.before_steps_bytes, memory.total_bytes
    is_exact = memory.peak_source == "torch" and memory.peak_misses is None
    if not is_exact or peak is None or fixed is None or total is None or peak <= fixed:
        return None
    beyond = _used_bytes(gpu) - peak  # the CUDA context, and memory of other processes
    return (min(FILLABLE_RATIO * total, total - beyond) - fixed) / (peak - fixed)


def _used_bytes(gpu: GpuFigures) -> int:
    """Return the most memory in use on the GPU, by this run and by others."""
    return max((gpu.memory.peak_bytes or 0) + (gpu.others_bytes or 0), gpu.memory.seen_bytes or 0)


def _filled(gpu: GpuFigures) -> float:
    return _used_bytes(gpu) / (gpu.memory.total_bytes or 1)


def _head_room(gpu: GpuFigures, grows: float | None) -> Finding:
    memory = gpu.memory
    peak, total = memory.peak_bytes or 0, memory.total_bytes or 0
    unused = max(total - _used_bytes(gpu), 0)
    by_others = f", and {format_bytes(gpu.others_bytes)} by others" if gpu.others_bytes else ""
    evidence = [f"at most {format_bytes(peak)} of {format_bytes(total)} were taken{by_others}"]
    if grows is not None:
        before = format_bytes(memory.before_steps_bytes or 0)
        evidence.append(f"{before} of it were allocated before the first step and do not grow")
    if memory.peak_misses:
        evidence.append(memory.peak_misses)
    is_exact = memory.peak_source in ("torch", "accounting") and memory.peak_misses is None
    return Finding(
        kind="head-room",
        sentence=_room_sentence(unused, grows),
        evidence=tuple(evidence),
        confidence="inferred" if grows is not None else "measured" if is_exact else "weak",
        advice=(LARGEST_BATCH,),
        gpus=(gpu.gpu,),
        grows_by_ratio=grows,
        unused_bytes=unused,
    )


def _room_sentence(unused_bytes: int, grows: float | None) -> str:
    unused = f"{format_bytes(unused_bytes)} of memory were never used"
    if grows is None:
        return unused
    times = f"more than {_FAR:.0f}" if grows > _FAR else f"up to about {grows:.1f}"
    return f"{unused}: the micro-batch could be {times} times as large"


_MOST_MARKS = 200  # events that a report repeats


def diagnose(run: Run) -> Report:
    """Return the report on a run. Any Run has one, even while it is still going."""
    silence = silence_of(run)
    until_s = math.inf if silence is None else silence.began_s
    all_gpus = tuple(gpu_figures(run, place, until_s) for place in range(len(run.gpus)))
    used = tuple(one for one in all_gpus if one.is_used)
    steps, host = step_figures(run), host_figures(run)
    first = out_of_memory(run, used)
    found = [first, *_lost(run), *over_time(run, used, silence), *training_signs(run)]
    cases = _cases(run, used, steps, host, found, until_s)
    found += _of_gpus(run, cases, steps)
    found += [room for room in [head_room(used)] if room]
    findings = tuple(together(agreed(found, _facts(cases, host))))
    marks = [event for event in run.events if not is_phase(event)]
    all_phases = phases_of(run)
    return Report(
        run=run.id,
        command=run.command,
        host=run.host,
        user=run.user,
        started_at=run.started_at,
        lasted_s=lasted_s(run),
        halted_s=lasted_s(run) - worked_s(run),
        halts=longest(halts_in(run)),
        exit_code=run.ending.exit_code if run.ending else None,
        signal=run.ending.signal if run.ending else None,
        has_ended=run.ending is not None,
        findings=findings,
        gpus=used or all_gpus,
        steps=steps,
        host_figures=host,
        phases=longest_of_each(all_phases, lambda phase: phase.name),
        num_phases=len(all_phases),
        marks=tuple(
            Mark(at_s=event.at_s, kind=event.kind, text=event.text, gpu=event.gpu)
            for event in marks[:_MOST_MARKS]
        ),
        num_marks=len(marks),
    )


def _cases(
    run: Run,
    used: Sequence[GpuFigures],
    steps: Sequence[StepFigures],
    host: HostFigures,
    found: Sequence[Finding],
    until_s: float,
) -> list[Case]:
    return [
        Case(
            gpu=one,
            steps=_steps_of(one, steps),
            host=host,
            lasted_s=worked_s(run),
            until_s=until_s,
            has_stalls=any(finding.kind == "stalls" for finding in found),
        )
        for one in used
    ]


def _facts(cases: Sequence[Case], host: HostFigures) -> set[Fact]:
    facts = set[Fact]()
    if any((case.full_ratio or 0.0) >= FULL_RATIO for case in cases):
        facts.add("memory-full")
    if is_saturated(host):
        facts.add("cpu-saturated")
    return facts


def _of_gpus(run: Run, cases: Sequence[Case], steps: Sequence[StepFigures]) -> Iterator[Finding]:
    """Find why the GPUs were not fully used."""
    if not cases:
        yield _no_gpu(run)
        if differing := imbalance((), steps):
            yield differing
        return
    for case in cases:
        yield from _of_one(case)
    seen = [case.gpu for case in cases if too_short(case) is None]
    differing = imbalance(seen, steps) if seen else None
    if differing:
        yield differing


def _of_one(case: Case) -> Iterator[Finding]:
    shared = shared_gpu(case)
    if shared:
        yield shared
    short = too_short(case)
    if short:
        yield short
        return
    yield from (found for rule in RULES if (found := rule(case)))


def together(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Merge equal findings of several GPUs into one, with the evidence of the first."""
    by_kind: dict[tuple[object, ...], list[Finding]] = {}
    for found in findings:
        key = (found.kind, found.confidence, found.advice)
        by_kind.setdefault(key, []).append(found)
    for alike in by_kind.values():
        gpus = (gpu for found in alike for gpu in found.gpus)
        yield replace(alike[0], gpus=tuple(dict.fromkeys(gpus)))


def _steps_of(gpu: GpuFigures, steps: Sequence[StepFigures]) -> StepFigures | None:
    """Return the steps of its rank; if the rank is unknown, those of the rank that waits most."""
    if gpu.rank is not None:
        return next((one for one in steps if one.rank == gpu.rank), None)
    return max(steps, key=lambda one: one.data_wait_ratio or 0.0, default=None)


def _no_gpu(run: Run) -> Finding:
    num = len(run.gpus)
    seen = (
        f"{num} GPU{'s were' if num > 1 else ' was'} watched" if num else "no GPU could be watched"
    )
    warned = tuple(event.text for event in run.events if event.kind == "warning")[:1]
    return Finding(
        kind="no-gpu",
        sentence="the run was not seen to use a GPU",
        evidence=(seen, *warned),
        confidence="measured" if run.gpus else "weak",
        advice=('python -c "import torch; print(torch.cuda.is_available())"',),
    )


def _lost(run: Run) -> Iterator[Finding]:
    """Report when a GPU, or the driver as a whole, did not answer."""
    lost = [event for event in run.events if event.kind in ("lost", "back")]
    if not any(event.kind == "lost" for event in lost):
        return
    events = tuple(
        f"{_who(run, event.gpu)} {_DID[event.kind]} at {format_duration(event.at_s)}"
        + (f": {event.text}" if event.text else "")
        for event in lost[:10]
    )
    yield Finding(
        kind="lost-gpu",
        sentence="it could not be read for a while; that time is missing from the figures",
        evidence=events,
        confidence="measured",
        gpus=tuple(sorted({event.gpu for event in lost if event.gpu is not None})),
    )


_DID = {"lost": "did not answer", "back": "answered again"}


def _who(run: Run, gpu: int | None) -> str:
    if gpu is None or not 0 <= gpu < len(run.gpus):
        return "the driver"
    return f"GPU {run.gpus[gpu].index}"
