"""Known causes and their near misses: what the report says, and that it never denies itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explaining.causes import (
    CAUSES,
    NEAR_MISSES,
    Cause,
    Pause,
    Training,
    every,
    killed,
    simulated,
)
from explaining.runs import TOTAL_BYTES, event, peak
from explaining.test_any_run import MANY, RUNS
from oomph.explaining.diagnose import diagnose
from oomph.records.report import Finding, GpuFigures, Report
from oomph.records.run import Ending, Run
from oomph.units import GIB, MIB


def words_of(report: Report) -> str:
    return "\n".join(line for found in report.findings for line in (found.sentence, *found.advice))


@pytest.mark.parametrize("cause", [*CAUSES, *NEAR_MISSES], ids=lambda cause: cause.name)
def test_a_known_cause_leads_and_nothing_wrong_is_said_beside_it(cause: Cause) -> None:
    report = cause.report()
    kinds = [found.kind for found in report.findings]
    assert report.verdict.kind == cause.verdict
    assert not set(kinds) & set(cause.silent)
    assert [words for words in cause.unsaid if words in words_of(report)] == []


# ---- no report denies itself -----------------------------------------------------------------

# Written by hand from what readers stumbled over, and not from the table in findings.py: the
# first is not said beside any of the others, by kind or by words.
DENIES: Sequence[tuple[str, tuple[str, ...]]] = (
    (
        "kept busy",
        ("stood still", "shared", "hung", "may hang", "slow", "waits for data", "many times"),
    ),
    (
        "larger micro-batch",
        ("GPU memory keeps growing", "hung", "may hang", "out of GPU memory", "is full"),
    ),
    (
        "times as large",
        ("GPU memory keeps growing", "hung", "may hang", "out of GPU memory", "is full"),
    ),
    (
        "evaluate less often",
        (
            "hung",
            "may hang",
        ),
    ),
    ("more loader workers", ("short of CPU", "CPU limit", "swaps", "host memory keeps growing")),
    ("prefetch_factor", ("swaps", "host memory keeps growing")),
    ("between kernels", ("within each step", "waits for data", "swaps", "short of CPU")),
    (
        "does not say why",
        ("waits for data", "short of CPU", "between kernels", "hung", "may hang", "swaps"),
    ),
    ("fill few of its", ("hung", "may hang", "is full, and data")),
    ("may be narrow", ("hung", "may hang", "is full, and data", "held down")),
)


def denials(report: Report) -> list[tuple[str, str]]:
    """Of findings of the same GPU, or of all."""
    found = []
    for one in report.findings:
        said = "\n".join((one.sentence, *one.advice))
        for other in report.findings:
            apart = one.gpus and other.gpus and not set(one.gpus) & set(other.gpus)
            for words, denied in DENIES:
                if one is not other and not apart and words in said:
                    found += [(words, d) for d in denied if d in other.sentence]
    return found


def against_figures(report: Report) -> list[str]:
    """What findings say, held against the figures that stand below them."""
    host, wrong = report.host_figures, list[str]()
    cores = (host.cpu_cores or 0) + (host.others_cpu_cores or 0) + (host.stolen_cpu_cores or 0)
    for found in report.findings:
        wrong += [
            says
            for gpu in report.gpus
            if gpu.gpu in found.gpus
            for says in _against_gpu(found, gpu, report.lasted_s - report.halted_s)
        ]
        adds_workers = any("more loader workers" in line for line in found.advice)
        if adds_workers and host.num_cpus and cores >= 0.9 * host.num_cpus:
            wrong.append("more workers for CPUs that are all busy")
    return wrong


def _against_gpu(found: Finding, gpu: GpuFigures, worked_s: float) -> Iterator[str]:
    busy, memory = gpu.busy, gpu.memory
    if found.kind == "busy" and busy and busy.gaps_are_rare:
        still_s = busy.gaps_s + busy.start_up_s
        if still_s >= 0.05 * worked_s > 0:
            yield "kept busy, and stood still"
    if found.kind == "busy" and (gpu.shared_ratio or 0) > 0.05:
        yield "kept busy by others"
    if found.kind == "launch-bound" and busy and (busy.pausing_ratio or 0) >= 0.5:
        yield "launch-bound with pauses"
    fullest = max(memory.peak_bytes or 0, memory.seen_bytes or 0)
    is_full = bool(memory.total_bytes) and fullest >= 0.8 * (memory.total_bytes or 0)
    if "a larger micro-batch" in found.advice and is_full:
        yield "a larger batch for a full GPU"


@MANY
@given(RUNS)
def test_a_report_of_any_run_does_not_deny_itself(run: Run) -> None:
    report = diagnose(run)
    assert denials(report) == []
    assert against_figures(report) == []


# Any of the causes at once, in any strength: where rules meet.
CHOICES: dict[str, list[Any]] = {
    "lasts_s": [40, 200, 500],
    "starts_s": [2.0, 20.0, 100.0],
    "stops": [None, None, 0.2, 0.5, 0.7],
    "step_s": [0.1, 0.5, 2.0],
    "slows": [0.0, 0.5, 1.0],
    "waits": [0.0, 0.03, 0.3, 0.7],
    "active": [0.1, 0.25, 0.6, 0.97, 1.0],
    "is_even": [True, False],
    "then_active": [0.0, 1.0],
    "pauses_s": [9, 25, 60, 1000],
    "pause": [
        {"lasts_s": 3.0, "in_step": True},
        {"lasts_s": 0.5},
        {"lasts_s": 15.0},
        {"lasts_s": 3.0, "phase": "evaluation"},
        {"lasts_s": 15.0, "phase": "save checkpoint"},
    ],
    "full": [0.2, 0.7, 0.98],
    "leaks": [0.0, 0.0, 0.3],
    "tells": [True, False],
    "num_others": [0, 0, 2],
    "received_bytes": [0, 20_000_000_000],
    "power_w": [None, 90.0, 350.0],
    "throttled_ratio": [0.0, 0.5],
    "sm_active_ratio": [None, 0.2, 0.9],
    "memory_active_ratio": [None, 0.2, 0.9],
    "cpu_cores": [0.2, 2.0, 7.8],
    "busiest_cpu_cores": [0.1, 1.0],
    "others_cpu_cores": [None, 0.2, 6.5],
    "cpu_limited": [None, 0.0, 0.6],
    "swapped_in_bytes": [0, 0, 90 * MIB],
    "host_leaks": [0.0, 0.1],
    "ends": ["well", "well", "killed", "out of memory", "not"],
    "is_halted": [True, False],
}
TROUBLES = st.fixed_dictionaries({name: st.sampled_from(of) for name, of in CHOICES.items()})


def in_trouble(one: dict[str, Any]) -> Run:
    lasts_s: int = one["lasts_s"]
    times = range(one["pauses_s"], lasts_s, one["pauses_s"])
    training = Training(
        lasts_s=lasts_s,
        starts_s=one["starts_s"],
        stops_s=None if one["stops"] is None else one["stops"] * lasts_s,
        step_s=lambda t: one["step_s"] * (1 + one["slows"] * t / lasts_s),
        waits=one["waits"],
        active=one["active"],
        is_even=one["is_even"],
        then_active=one["then_active"],
        pauses=[Pause(at_s=at_s, **one["pause"]) for at_s in times],
    )

    def used(at_s: float) -> float:
        return float(min(one["full"] + one["leaks"] * at_s / lasts_s, 1.0) * TOTAL_BYTES)

    gpu_names = ["num_others", "received_bytes", "power_w", "throttled_ratio"]
    gpu_names += ["sm_active_ratio", "memory_active_ratio"]
    host_names = ["cpu_cores", "busiest_cpu_cores", "others_cpu_cores", "swapped_in_bytes"]
    endings = {
        "well": Ending(at_s=float(lasts_s), exit_code=0),
        "killed": killed(float(lasts_s)),
        "out of memory": Ending(at_s=float(lasts_s), exit_code=1, out_of_memory="gpu"),
        "not": None,
    }
    torchs = peak(max(int(used(lasts_s)) - GIB, GIB), before_steps_bytes=8 * GIB)
    halted = [event(lasts_s * 0.5, "halted"), event(lasts_s * 0.6, "resumed")]
    return simulated(
        training,
        tells=one["tells"],
        gpu_figures={"used": used, **{name: one[name] for name in gpu_names}},
        host={
            **{name: one[name] for name in host_names},
            "throttled_ratio": one["cpu_limited"],
            "memory_bytes": lambda at_s: (9 + at_s * one["host_leaks"]) * GIB,
        },
        peaks=[torchs] if one["tells"] else [],
        ending=endings[one["ends"]],
        events=halted if one["is_halted"] else [],
    )


@settings(max_examples=80, deadline=None)
@given(TROUBLES)
def test_causes_that_meet_do_not_deny_each_other(trouble: dict[str, Any]) -> None:
    report = diagnose(in_trouble(trouble))
    assert denials(report) == []
    assert against_figures(report) == []


# ---- the same causes in other strengths ------------------------------------------------------

GROWS: dict[str, Callable[[float], float]] = {
    "slowly": lambda x: 60 + 10 * x,
    "fast": lambda x: 10 + 60 * x,
    "noisily": lambda x: 40 + 30 * x + 1.5 * math.sin(700 * x),
}
STAYS: dict[str, Callable[[float], float]] = {
    "fills": lambda x: 30 + 40 * (1 - math.exp(-8 * x)),
    "once": lambda x: 40 + 20 * (x > 0.5),
    "saw": lambda x: 40 + 10 * (7 * x % 1),
    "wave": lambda x: 50 + 8 * math.sin(97 * x),
    "falls": lambda x: 70 - 30 * x,
    "ever more slowly": lambda x: 30 + 8 * math.log1p(400 * x),
}


@pytest.mark.parametrize("lasts_s", [200, 1500])
@pytest.mark.parametrize("shape", [*GROWS, *STAYS])
def test_only_memory_that_never_stops_to_grow_leaks(shape: str, lasts_s: int) -> None:
    level = (GROWS | STAYS)[shape]
    used = lambda at_s: level(at_s / lasts_s) * GIB  # noqa: E731
    run = simulated(Training(lasts_s=lasts_s), gpu_figures={"used": used})
    assert (diagnose(run).verdict.kind == "leak") is (shape in GROWS)


@pytest.mark.parametrize("ends", [killed(1200), None, Ending(at_s=1200, exit_code=1)])
@pytest.mark.parametrize("active", [0.0, 1.0], ids=["idle", "spinning"])
@pytest.mark.parametrize(
    ("step_s", "quiet_s", "hangs"),
    [(0.05, 300, True), (0.5, 130, True), (0.5, 100, False), (10, 500, True), (10, 150, False)],
)
def test_it_hangs_by_its_own_pace(
    step_s: float, quiet_s: int, hangs: bool, active: float, ends: Ending | None
) -> None:
    training = Training(
        lasts_s=1200, stops_s=1200 - quiet_s, step_s=step_s, active=0.98, then_active=active
    )
    found = {one.kind for one in diagnose(simulated(training, ending=ends)).findings}
    assert ("hang" in found) is hangs


@pytest.mark.parametrize("step_s", [0.05, 0.4])
@pytest.mark.parametrize(("every_s", "lasts_s"), [(5, 0.8), (30, 3.0), (100, 8.0)])
def test_stalls_are_told_however_often_they_come(
    step_s: float, every_s: float, lasts_s: float
) -> None:
    pauses = every(every_s, lasts_s, 600, in_step=True)
    assert diagnose(simulated(Training(step_s=step_s, pauses=pauses))).verdict.kind == "stalls"
