"""Run -> Report: the figures, and what follows from them. Out of memory or not stands first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from oomph.explaining.across import head_room, imbalance
from oomph.explaining.case import Case, Rule
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
    perhaps_narrow,
    throttled,
)
from oomph.explaining.listing import longest, longest_of_each
from oomph.explaining.underuse import (
    input_bound,
    input_bound_inferred,
    launch_bound,
    never_busy,
    phases,
    unexplained,
)
from oomph.explaining.worth import shared_gpu, too_short
from oomph.records.report import Finding, GpuFigures, HostFigures, Mark, Report, StepFigures
from oomph.records.run import Run
from oomph.units import format_duration

# Why the GPU was not used to the full, in the order in which it is told.
_CAUSES: Sequence[Rule] = (
    never_busy,
    input_bound,
    input_bound_inferred,
    launch_bound,
    memory_bound,
    narrow_kernels,
    perhaps_narrow,
)
_WITHOUT_CAUSE: Sequence[Rule] = (unexplained, busy)  # what is said where none of them spoke
_BESIDE: Sequence[Rule] = (throttled, phases)
_WORTH = ("shared-gpu", "too-short")  # told before what they make doubtful
_MOST_MARKS = 200  # events that a report repeats


def diagnose(run: Run) -> Report:
    """All that can be said of a run. Any Run gives a Report, also of one that is still going."""
    all_gpus = tuple(gpu_figures(run, place) for place in range(len(run.gpus)))
    used = tuple(one for one in all_gpus if one.is_used)
    steps, host = step_figures(run), host_figures(run)
    first = out_of_memory(run, used)
    findings = [first, *_lost(run), *_of_gpus(run, used, steps, host)]
    if first.kind in ("no-out-of-memory", "not-ended") and not _seen_too_little(findings):
        findings += [found for found in [head_room(used)] if found]
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
        findings=tuple(findings),
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


def _seen_too_little(findings: Sequence[Finding]) -> bool:
    return any(found.kind in ("too-short", "no-gpu") for found in findings)


def _of_gpus(
    run: Run, used: Sequence[GpuFigures], steps: Sequence[StepFigures], host: HostFigures
) -> Iterator[Finding]:
    """Why the GPUs were not used to the full; those of one kind together."""
    if not used:
        yield _no_gpu(run)
        return
    cases = [
        Case(gpu=one, steps=_steps_of(one, steps), host=host, lasted_s=worked_s(run))
        for one in used
    ]
    found = [finding for case in cases for finding in _of_one(case)]
    yield from together(sorted(found, key=lambda finding: finding.kind not in _WORTH))
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
    causes = [found for rule in _CAUSES if (found := rule(case))]
    if not causes:
        causes = [found for rule in _WITHOUT_CAUSE if (found := rule(case))]
    yield from causes
    yield from (found for rule in _BESIDE if (found := rule(case)))


def together(findings: Sequence[Finding]) -> Iterator[Finding]:
    """The same of several GPUs as one finding, with the evidence of the first."""
    by_kind: dict[tuple[str, str], list[Finding]] = {}
    for found in findings:
        by_kind.setdefault((found.kind, found.confidence), []).append(found)
    for alike in by_kind.values():
        yield replace(alike[0], gpus=tuple(gpu for found in alike for gpu in found.gpus))


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
