"""Run -> Report: the figures, and what follows from them. Out of memory or not stands first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from oomph.explaining.across import head_room, imbalance
from oomph.explaining.agreement import Fact, agreed
from oomph.explaining.case import FULL_RATIO, Case, Rule
from oomph.explaining.ending import out_of_memory
from oomph.explaining.figures import (
    gpu_figures,
    halts_in,
    host_figures,
    is_phase,
    lasted_s,
    phases_of,
    step_figures,
    worked_s,
)
from oomph.explaining.held_back import (
    busy,
    memory_bound,
    narrow_kernels,
    pcie_bound,
    perhaps_narrow,
    spill,
    throttled,
)
from oomph.explaining.listing import longest, longest_of_each
from oomph.explaining.trends import (
    Silence,
    hang,
    host_leak,
    leak,
    silence_of,
    slowing_down,
    stalls,
)
from oomph.explaining.underuse import (
    cpu_limit,
    host_contention,
    input_bound,
    input_bound_inferred,
    is_saturated,
    launch_bound,
    never_busy,
    pauses_in_step,
    phases,
    swapping,
    unexplained,
)
from oomph.explaining.worth import shared_gpu, too_short
from oomph.records.report import Finding, GpuFigures, HostFigures, Mark, Report, StepFigures
from oomph.records.run import Run
from oomph.units import format_duration

# Of each GPU. Which of them can be said together, and in which order, is in agreement.py.
_RULES: Sequence[Rule] = (
    spill,
    swapping,
    cpu_limit,
    host_contention,
    never_busy,
    input_bound,
    input_bound_inferred,
    pcie_bound,
    pauses_in_step,
    launch_bound,
    throttled,
    phases,
    memory_bound,
    narrow_kernels,
    perhaps_narrow,
    unexplained,
    busy,
)
_MOST_MARKS = 200  # events that a report repeats


def diagnose(run: Run) -> Report:
    """All that can be said of a run. Any Run gives a Report, also of one that is still going."""
    silence = silence_of(run)
    until_s = math.inf if silence is None else silence.began_s
    all_gpus = tuple(gpu_figures(run, place, until_s) for place in range(len(run.gpus)))
    used = tuple(one for one in all_gpus if one.is_used)
    steps, host = step_figures(run), host_figures(run)
    first = out_of_memory(run, used)
    found = [first, *_lost(run), *_over_time(run, used, silence)]
    cases = _cases(run, used, steps, host, found, until_s)
    found += _of_gpus(run, cases, steps)
    found += [room for room in [head_room(used)] if room]
    findings = tuple(together(agreed(found, _facts(cases, host))))
    told = [event for event in run.events if not is_phase(event)]
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
            for event in told[:_MOST_MARKS]
        ),
        num_marks=len(told),
    )


def _over_time(run: Run, used: Sequence[GpuFigures], silence: Silence | None) -> Iterator[Finding]:
    """What shows only over time; until it hung, if it did."""
    until_s = math.inf if silence is None else silence.began_s
    found = [hang(run, silence), host_leak(run, until_s)]
    found += [slowing_down(run, until_s), stalls(run, until_s)]
    found += [leak(run, one, until_s) for one in used]
    yield from (one for one in found if one is not None)


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
    """Why the GPUs were not used to the full."""
    if not cases:
        yield _no_gpu(run)
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
    yield from (found for rule in _RULES if (found := rule(case)))


def together(findings: Sequence[Finding]) -> Iterator[Finding]:
    """The same of several GPUs as one finding, with the evidence of the first."""
    by_kind: dict[tuple[object, ...], list[Finding]] = {}
    for found in findings:
        key = (found.kind, found.confidence, found.advice)
        by_kind.setdefault(key, []).append(found)
    for alike in by_kind.values():
        gpus = (gpu for found in alike for gpu in found.gpus)
        yield replace(alike[0], gpus=tuple(dict.fromkeys(gpus)))


def _steps_of(gpu: GpuFigures, steps: Sequence[StepFigures]) -> StepFigures | None:
    """Those of its rank; where it is not known which that is, those of the rank that waits most."""
    if gpu.rank is not None:
        return next((one for one in steps if one.rank == gpu.rank), None)
    return max(steps, key=lambda one: one.data_wait_ratio or 0.0, default=None)


def _no_gpu(run: Run) -> Finding:
    seen = f"{len(run.gpus)} GPUs were watched" if run.gpus else "no GPU could be watched"
    warned = tuple(event.text for event in run.events if event.kind == "warning")[:1]
    return Finding(
        kind="no-gpu",
        sentence="the run was not seen to use a GPU",
        evidence=(seen, *warned),
        confidence="measured" if run.gpus else "weak",
        advice=('python -c "import torch; print(torch.cuda.is_available())"',),
    )


def _lost(run: Run) -> Iterator[Finding]:
    """When a GPU, or NVML as a whole, did not answer."""
    lost = [event for event in run.events if event.kind in ("lost", "back")]
    if not any(event.kind == "lost" for event in lost):
        return
    told = tuple(
        f"{_who(run, event.gpu)} {_DID[event.kind]} at {format_duration(event.at_s)}"
        + (f": {event.text}" if event.text else "")
        for event in lost[:10]
    )
    yield Finding(
        kind="lost-gpu",
        sentence="a GPU could not be read for a while: figures lack that time",
        evidence=told,
        confidence="measured",
        gpus=tuple(sorted({event.gpu for event in lost if event.gpu is not None})),
    )


_DID = {"lost": "did not answer", "back": "answered again"}


def _who(run: Run, gpu: int | None) -> str:
    if gpu is None or not 0 <= gpu < len(run.gpus):
        return "NVML"
    return f"GPU {run.gpus[gpu].index}"
