"""Run -> the first finding: did it run out of memory, or not, or can nobody tell?"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.records.report import Finding, GpuFigures
from oomph.records.run import Ending, Event, Run
from oomph.units import format_bytes, format_duration, format_ratio

SOURCES = {
    "torch": "by torch's allocator: exact",
    "accounting": "by the driver's accounting: exact",
    "polled": "as polled",
}
_PLAN = "find what fits before trying it: oomph plan SCRIPT --gpu GPU"


def out_of_memory(run: Run, gpus: Sequence[GpuFigures]) -> Finding:
    """Out of memory or not."""
    told = [event for event in run.events if event.kind == "out-of-memory"]
    ending = run.ending
    if ending is None:
        return _not_ended(run, gpus, told)
    if ending.out_of_memory == "host":
        return _of_host(ending, run, _guesses(run))
    has_failed = ending.exit_code not in (0, None) or ending.signal is not None
    if ending.out_of_memory == "gpu" or (told and has_failed):
        return _of_gpu(ending, gpus, told, _guesses(run))
    if told:
        return _went_on(gpus, told)
    if ending.signal == "SIGKILL":
        return _killed(ending, gpus)
    return _no(ending, gpus, run)


def fullness(gpus: Sequence[GpuFigures]) -> tuple[str, ...]:
    """The peak of the fullest GPU of the run, with who says so and what that can miss."""
    known = [one for one in gpus if one.memory.peak_bytes is not None]
    if not gpus:
        return ()
    if not known:
        return ("nobody could read how much memory it took",)
    most = max(known, key=lambda one: _share(one) or 0.0)
    memory, share = most.memory, _share(most)
    total = "" if share is None else f" of {format_bytes(memory.total_bytes or 0)}"
    ratio = "" if share is None else f" ({format_ratio(share)})"
    peak = format_bytes(memory.peak_bytes or 0)
    source = SOURCES[memory.peak_source or "polled"]
    said = f"at most {peak}{total}{ratio} on GPU {most.index}, {source}"
    return (said, memory.peak_misses) if memory.peak_misses else (said,)


def _share(gpu: GpuFigures) -> float | None:
    peak, total = gpu.memory.peak_bytes, gpu.memory.total_bytes
    return None if peak is None or not total else peak / total


def _guesses(run: Run) -> tuple[str, ...]:
    """What was only likely when it ended, as whoever watched it has said."""
    return tuple(
        event.text
        for event in run.events
        if event.kind == "warning" and event.text.startswith("probably ")
    )


def _of_gpu(
    ending: Ending, gpus: Sequence[GpuFigures], told: Sequence[Event], guesses: Sequence[str]
) -> Finding:
    at = f" after {format_duration(told[0].at_s if told else ending.at_s)}"
    said = tuple(event.text for event in told[:1]) or tuple(guesses)
    named = sorted({event.gpu for event in told if event.gpu is not None})
    its_gpus = [one for one in gpus if one.gpu in named] or gpus
    return Finding(
        kind="out-of-memory",
        sentence=f"{'' if told else 'probably '}out of GPU memory{at}",
        evidence=(*said, *fullness(its_gpus)),
        confidence="measured" if told else "inferred",
        advice=(_PLAN, "or let oomph.Stepper split the batch when it happens"),
        gpus=tuple(named),
    )


def _of_host(ending: Ending, run: Run, guesses: Sequence[str]) -> Finding:
    most = max((span.memory_bytes or 0 for span in run.host_spans), default=0)
    held = (f"its processes held up to {format_bytes(most)}",) if most else ()
    return Finding(
        kind="out-of-memory",
        sentence=f"out of the host's memory after {format_duration(ending.at_s)}: the kernel"
        " killed it",
        evidence=(*guesses, *held),
        confidence="inferred" if guesses else "measured",
        advice=("fewer loader workers or a smaller prefetch_factor", "more memory for the job"),
    )


def _went_on(gpus: Sequence[GpuFigures], told: Sequence[Event]) -> Finding:
    times = "once" if len(told) == 1 else f"{len(told)} times"
    return Finding(
        kind="recovered",
        sentence=f"ran out of GPU memory {times}, and went on",
        evidence=(*(event.text for event in told[:1]), *fullness(gpus)),
        confidence="measured",
        advice=(_PLAN,),
    )


def _killed(ending: Ending, gpus: Sequence[GpuFigures]) -> Finding:
    return Finding(
        kind="maybe-out-of-memory",
        sentence=f"killed after {format_duration(ending.at_s)}, and nobody saw by whom",
        evidence=("SIGKILL is what the kernel sends when memory runs out", *fullness(gpus)),
        confidence="weak",
        advice=("look for oom-kill in dmesg, or in the log of the scheduler",),
    )


def _not_ended(run: Run, gpus: Sequence[GpuFigures], told: Sequence[Event]) -> Finding:
    so_far = "it has run out of memory" if told else "it has not run out of memory as far as seen"
    return Finding(
        kind="not-ended",
        sentence=f"it was not seen to end; until {format_duration(run.last_seen_s)} {so_far}",
        evidence=("it still runs, or whoever watched it was killed", *fullness(gpus)),
        confidence="weak",
    )


def _no(ending: Ending, gpus: Sequence[GpuFigures], run: Run) -> Finding:
    was_stopped = any(event.kind == "stopped" for event in run.events)
    if was_stopped:
        how = "stopped by oomph as was asked"
    elif ending.signal:
        how = f"ended by {ending.signal}"
    elif ending.exit_code is None:
        how = "nobody saw how it ended"
    else:
        how = "it ended well" if ending.exit_code == 0 else f"it failed with {ending.exit_code}"
    return Finding(
        kind="no-out-of-memory",
        sentence=f"did not run out of memory in {format_duration(ending.at_s)}; {how}",
        evidence=fullness(gpus),
        confidence="measured" if ending.exit_code == 0 or was_stopped else "inferred",
    )
