"""Each rule of the diagnosis: a run that fires it, and one just beside that does not."""

from __future__ import annotations

from typing import Any

import pytest

from explaining.runs import event, gpu, host, peak, run_of, span, spans, steps
from oomph.explaining.diagnose import diagnose
from oomph.records.report import Finding
from oomph.records.run import Ending, GpuSpan, Run
from oomph.units import GIB


def kinds(run: Run) -> list[tuple[str, str]]:
    return [(found.kind, found.confidence) for found in diagnose(run).findings[1:]]


def the(run: Run, kind: str) -> Finding:
    (found,) = (found for found in diagnose(run).findings if found.kind == kind)
    return found


def has(run: Run, kind: str) -> bool:
    return any(found.kind == kind for found in diagnose(run).findings)


# ---- too short -------------------------------------------------------------------------------


def test_a_run_below_thirty_seconds_gets_no_verdict_but_the_reason() -> None:
    assert "lasted 29 s" in the(run_of(spans((29, 0.1))), "too-short").evidence[0]
    assert not has(run_of(spans((29, 0.1))), "unexplained")
    assert not has(run_of(spans((30, 0.1))), "too-short")


def test_too_few_samples_give_no_verdict() -> None:
    assert "only 19 samples" in the(run_of(spans((19, 0.1), (60, None))), "too-short").evidence[0]
    assert not has(run_of(spans((20, 0.1), (60, None))), "too-short")


def test_where_nobody_could_read_it_that_is_the_reason() -> None:
    assert "could not be read" in the(run_of(spans((60, None))), "too-short").evidence[0]


def test_a_long_span_counts_as_its_seconds() -> None:
    assert not has(run_of([span(0, 0.5, ended_s=60.0)]), "too-short")


# ---- input-bound -----------------------------------------------------------------------------


def test_a_measured_wait_for_data_is_input_bound() -> None:
    run = run_of(spans((60, 0.25)), step_spans=[steps(0.2)])
    found = the(run, "input-bound")
    assert (found.confidence, "20%" in found.sentence) == ("measured", True)
    assert "kernel-active 25%" in found.evidence[0]
    assert not has(run, "unexplained")


@pytest.mark.parametrize(("busy", "waits"), [(0.25, 0.19), (0.9, 0.5)])
def test_a_short_wait_or_a_busy_gpu_is_not_input_bound(busy: float, waits: float) -> None:
    assert not has(run_of(spans((60, busy)), step_spans=[steps(waits)]), "input-bound")


PAUSING: dict[str, Any] = {"least_busy_ratio": 0.0, "most_busy_ratio": 0.9}


@pytest.mark.parametrize("cpu", [(1.2, 0.9), (7.2, 0.1)], ids=["one core", "all cores"])
def test_pauses_and_a_cpu_at_its_limit_are_probably_input_bound(cpu: tuple[float, float]) -> None:
    run = run_of(spans((60, 0.29), **PAUSING), host_spans=[host(*cpu)])
    found = the(run, "input-bound")
    assert found.confidence == "inferred"
    assert "probably" in found.sentence
    assert any("oomph.watching()" in line for line in found.advice)


@pytest.mark.parametrize(
    ("busy", "cpu", "more", "step_spans"),
    [
        (0.31, (1.2, 0.9), PAUSING, []),
        (0.29, (7.1, 0.89), PAUSING, []),
        (0.29, (None, None), PAUSING, []),
        (0.29, (1.2, 0.9), {}, []),
    ],
    ids=["busier", "idle CPU", "unknown CPU", "no pauses"],
)
def test_without_each_sign_it_is_not_inferred(
    busy: float, cpu: tuple[float, float], more: dict[str, Any], step_spans: list[Any]
) -> None:
    run = run_of(spans((60, busy), **more), host_spans=[host(*cpu)], step_spans=step_spans)
    assert kinds(run) == [("unexplained", "measured")]


def test_pauses_although_the_data_is_there_are_of_the_step_itself() -> None:
    run = run_of(spans((60, 0.29), **PAUSING), host_spans=[host(1.2, 0.9)], step_spans=[steps(0.1)])
    assert kinds(run) == [("pauses-in-step", "inferred")]
    assert "works on the CPU" in the(run, "pauses-in-step").sentence


def test_gaps_close_to_each_other_are_a_sign_and_no_phases() -> None:
    stalls = spans(*[(7, 0.3), (3, 0.0)] * 9)
    found = diagnose(run_of(stalls, host_spans=[host(1.5, 1.0, 90)])).findings
    assert [one.kind for one in found[1:]] == ["input-bound"]
    assert "9 gaps of 2 s and more" in found[1].evidence[1]


# ---- launch-bound ----------------------------------------------------------------------------


def test_low_without_a_wait_for_data_is_launch_bound() -> None:
    run = run_of(spans((60, 0.29)), step_spans=[steps(0.049)])
    assert kinds(run) == [("launch-bound", "inferred")]
    assert any("torch.compile" in line for line in the(run, "launch-bound").advice)


@pytest.mark.parametrize(
    ("gpu_spans", "waits"),
    [
        (spans((60, 0.30)), 0.04),
        (spans((60, 0.29)), 0.05),
        (spans(*[(7, 0.3), (3, 0.0)] * 9), 0.01),
    ],
    ids=["busier", "waits", "gaps"],
)
def test_just_beside_it_is_not_launch_bound(gpu_spans: tuple[GpuSpan, ...], waits: float) -> None:
    assert kinds(run_of(gpu_spans, step_spans=[steps(waits)])) == [("unexplained", "measured")]


@pytest.mark.parametrize(("works_s", "is_launch_bound"), [(18, False), (19, True)])
def test_gaps_that_take_a_tenth_of_the_time_are_not_short(
    works_s: int, is_launch_bound: bool
) -> None:
    run = run_of(spans(*[(works_s, 0.3), (2, 0.0)] * 15), step_spans=[steps(0.01)])
    assert has(run, "launch-bound") is is_launch_bound


@pytest.mark.parametrize(("pausing_s", "is_input_bound"), [(30, True), (29, False)])
def test_pauses_in_half_of_the_seconds_are_the_way_it_trains(
    pausing_s: int, is_input_bound: bool
) -> None:
    gpu_spans = [
        span(float(t), 0.25, least_busy_ratio=0.0 if t < pausing_s else 0.2) for t in range(60)
    ]
    run = run_of(gpu_spans, host_spans=[host(1.0, 1.0)])
    assert has(run, "input-bound") is is_input_bound


# ---- phases ----------------------------------------------------------------------------------


def test_rare_long_gaps_are_phases_with_their_times_and_names() -> None:
    run = run_of(
        spans((10, 0.0), (100, 0.95), (20, 0.0), (100, 0.95)),
        events=[
            event(10, "phase", "training"),
            event(109, "phase", "evaluation"),
            event(131, "phase", "training"),
        ],
    )
    found = the(run, "phases")
    assert found.evidence == (
        "start-up: 10 s until the first kernels",
        "at 1 min 50 s for 20 s (evaluation)",
        "kernel-active 95% of the time while it worked",  # which they are not held against
    )
    assert "13% of the run" in found.sentence
    assert not has(run, "busy")


def test_a_gap_below_two_seconds_and_a_short_start_are_no_phases() -> None:
    assert not has(run_of(spans((2, 0.0), (100, 0.95), (1, 0.0), (100, 0.95))), "phases")


@pytest.mark.parametrize(("start_up_s", "said"), [(50, True), (49, False)])
def test_phases_are_told_from_a_twentieth_of_the_run_on(start_up_s: int, said: bool) -> None:
    run = run_of(spans((start_up_s, 0.0), (1000 - start_up_s, 0.95)))
    assert has(run, "phases") is said


def test_five_percent_active_is_no_gap() -> None:
    (figures,) = diagnose(run_of(spans((40, 0.9), (10, 0.05), (40, 0.9)))).gpus
    assert figures.busy
    assert figures.busy.gaps == ()
    (figures,) = diagnose(run_of(spans((40, 0.9), (10, 0.049), (40, 0.9)))).gpus
    assert figures.busy
    assert [(gap.began_s, gap.ended_s) for gap in figures.busy.gaps] == [(40.0, 50.0)]


def test_time_that_nobody_saw_is_no_gap() -> None:
    idle = [span(40.0, 0.0), span(49.0, 0.0)]
    run = run_of([*spans((40, 0.9)), *idle, *(span(float(t), 0.9) for t in range(50, 90))])
    (figures,) = diagnose(run).gpus
    assert figures.busy
    assert figures.busy.gaps == ()


# ---- busy, but -------------------------------------------------------------------------------


def test_few_active_multiprocessors_are_narrow_kernels() -> None:
    assert kinds(run_of(spans((60, 0.9), sm_active_ratio=0.39))) == [("narrow-kernels", "measured")]


@pytest.mark.parametrize(
    ("busy", "more"),
    [
        (0.9, {"sm_active_ratio": 0.40}),
        (0.89, {"sm_active_ratio": 0.39}),
        (0.9, {"sm_active_ratio": 0.39, "num_others": 1}),
    ],
)
def test_just_beside_kernels_are_not_narrow(busy: float, more: dict[str, Any]) -> None:
    assert not has(run_of(spans((60, busy), **more)), "narrow-kernels")


def test_little_power_alone_is_only_a_weak_hint() -> None:
    run = run_of(spans((60, 0.95), power_w=199.0))
    assert kinds(run) == [("narrow-kernels", "weak")]
    assert any("no proof" in line for line in the(run, "narrow-kernels").evidence)


@pytest.mark.parametrize(
    "more",
    [
        {"power_w": 200.0},
        {"power_w": None},
        {"power_w": 100.0, "sm_active_ratio": 0.6},
        {"power_w": 100.0, "throttled_ratio": 0.06},
        {"power_w": 100.0, "num_others": 1},
    ],
    ids=["enough", "unknown", "wide by GPM", "throttled", "shared"],
)
def test_power_says_nothing_where_it_is_enough_or_something_else_explains_it(
    more: dict[str, Any],
) -> None:
    assert not has(run_of(spans((60, 0.95), **more)), "narrow-kernels")


def test_moving_data_most_of_the_time_is_memory_bound_and_not_narrow() -> None:
    run = run_of(spans((60, 0.95), memory_active_ratio=0.71, sm_active_ratio=0.3))
    assert kinds(run) == [("memory-bound", "measured")]
    assert not has(run_of(spans((60, 0.95), memory_active_ratio=0.70)), "memory-bound")
    assert not has(run_of(spans((60, 0.89), memory_active_ratio=0.9)), "memory-bound")


def test_clocks_held_down_are_told_with_the_reason() -> None:
    held = {"throttled_ratio": 0.06, "throttled_by": ("heat",)}
    run = run_of(spans((60, 0.95), **held))
    assert the(run, "throttled").sentence == "clocks were held down by heat for 6% of the time"
    assert has(run_of(spans((60, 0.95), throttled_ratio=0.051)), "throttled")
    assert not has(run_of(spans((60, 0.95), throttled_ratio=0.05)), "throttled")
    assert not has(run_of(spans((60, 0.95), throttled_ratio=None)), "throttled")


def test_a_gpu_that_always_works_is_called_busy_and_not_efficient() -> None:
    run = run_of(spans((60, 0.97)))
    assert kinds(run) == [("busy", "measured")]
    assert "efficien" not in " ".join(the(run, "busy").evidence)


# ---- others, and the other GPUs --------------------------------------------------------------


def test_others_on_the_gpu_are_told() -> None:
    shared = [*spans((56, 0.95)), *(span(56.0 + i, 0.95, num_others=2) for i in range(4))]
    assert "up to 2 processes of others" in the(run_of(shared), "shared-gpu").evidence[0]
    assert not has(run_of([*spans((57, 0.95)), *shared[57:]]), "shared-gpu")
    long = [span(float(t), 0.95, num_others=int(t < 51)) for t in range(1000)]
    assert has(run_of(long), "shared-gpu")
    assert not has(run_of(spans((60, 0.95), num_others=None)), "shared-gpu")


def of_gpu(place: int, busy: float, **more: Any) -> tuple[GpuSpan, ...]:
    return spans((60, busy), gpu=place, **more)


def test_one_gpu_that_is_less_busy_than_the_others_is_named() -> None:
    ratios = [0.95, 0.95, 0.80, 0.94]
    all_spans = [one for place, busy in enumerate(ratios) for one in of_gpu(place, busy)]
    run = run_of(all_spans, gpus=[gpu(i) for i in range(4)], peaks=[peak(gpu=2, rank=2)])
    found = the(run, "imbalance")
    assert found.gpus == (2,)
    assert "rank 2" in found.sentence
    assert "kernel-active 80%; the others 95%" in found.evidence[0]


def test_gpus_that_differ_by_fifteen_percent_are_balanced() -> None:
    run = run_of([*of_gpu(0, 1.0), *of_gpu(1, 0.86)], gpus=[gpu(0), gpu(1)])
    assert not has(run, "imbalance")
    run = run_of([*of_gpu(0, 1.0), *of_gpu(1, 0.84)], gpus=[gpu(0), gpu(1)])
    assert the(run, "imbalance").gpus == (1,)


def test_the_rank_with_slower_steps_is_named() -> None:
    told = [steps(0.0, rank=0), steps(0.0, rank=1, step_s=0.6), steps(0.0, rank=2)]
    run = run_of(spans((60, 0.95)), step_spans=told)
    assert the(run, "imbalance").sentence == "rank 1 does not keep step with the other ranks"
    told[1] = steps(0.0, rank=1, step_s=0.58)
    assert not has(run_of(spans((60, 0.95)), step_spans=told), "imbalance")


def test_the_rank_that_waits_for_its_data_is_named_though_all_steps_take_as_long() -> None:
    told = [steps(0.02, rank=0), steps(0.4, rank=1), steps(0.02, rank=2), steps(0.03, rank=3)]
    found = the(run_of(spans((60, 0.95)), step_spans=told), "imbalance")
    assert found.sentence.startswith("rank 1 keeps the other ranks waiting")
    assert found.evidence == ("200 ms of a step of 500 ms; the others: 10 ms",)
    told[1] = steps(0.16, rank=1)
    assert not has(run_of(spans((60, 0.95)), step_spans=told), "imbalance")
    told[1] = steps(None, rank=1)  # its waits are not known
    assert not has(run_of(spans((60, 0.95)), step_spans=told), "imbalance")


def test_the_slow_rank_of_a_training_on_the_cpu_is_named() -> None:
    told = [steps(0.0, rank=0), steps(0.4, rank=1)]
    assert the(run_of(gpus=[], step_spans=told), "imbalance").gpus == ()


def test_the_same_of_several_gpus_is_told_once() -> None:
    run = run_of([*of_gpu(0, 0.97), *of_gpu(1, 0.96)], gpus=[gpu(0), gpu(1)])
    (found,) = diagnose(run).findings[1:]
    assert (found.kind, found.gpus) == ("busy", (0, 1))


def test_a_gpu_that_was_held_but_never_worked_is_told() -> None:
    assert kinds(run_of(spans((60, 0.049)))) == [("never-busy", "measured")]
    polled = run_of(spans((60, 0.0)), gpus=[gpu(busy_source="polled")])
    assert kinds(polled) == [("never-busy", "weak")]
    assert not has(run_of(spans((59, 0.0), (1, 0.05))), "never-busy")


def test_a_run_without_a_gpu_is_told() -> None:
    assert kinds(run_of(spans((60, 0.9)), gpus=[gpu(is_used=False)])) == [("no-gpu", "measured")]
    assert kinds(run_of(gpus=[])) == [("no-gpu", "weak")]


def test_a_gpu_that_was_lost_is_told_with_its_times() -> None:
    events = [event(20, "lost", "GPU is lost", gpu=0), event(31, "back", gpu=0)]
    found = the(run_of(spans((60, 0.95)), events=events), "lost-gpu")
    assert found.evidence == (
        "GPU 0 did not answer at 20 s: GPU is lost",
        "GPU 0 answered again at 31 s",
    )
    assert not has(run_of(spans((60, 0.95)), events=events[1:]), "lost-gpu")


# ---- head-room -------------------------------------------------------------------------------


# As a driver counts: what torch reserved, and half a GiB for the CUDA context.
def seen(torch_bytes: int, **more: Any) -> tuple[GpuSpan, ...]:
    return spans((60, 0.95), most_used_bytes=torch_bytes + GIB // 2, **more)


def test_the_micro_batch_could_grow_by_what_is_left_over_what_grows() -> None:
    run = run_of(seen(40 * GIB), peaks=[peak(40 * GIB, before_steps_bytes=20 * GIB)])
    found = the(run, "head-room")
    assert found.grows_by_ratio == pytest.approx((0.92 * 80 - 20) / (40 - 20))
    assert "up to about 2.7 times as large" in found.sentence
    assert found.confidence == "inferred"
    assert any("oomph plan" in line for line in found.advice)


@pytest.mark.parametrize(
    ("peak_gib", "said"), [(16, "more than 10 times"), (17, "about 9.1 times")]
)
def test_far_from_what_was_measured_the_factor_is_not_told(peak_gib: int, said: str) -> None:
    told = peak(peak_gib * GIB, before_steps_bytes=10 * GIB)
    assert said in the(run_of(seen(peak_gib * GIB), peaks=[told]), "head-room").sentence


def test_where_the_fixed_part_is_unknown_there_is_no_factor() -> None:
    found = the(run_of(seen(40 * GIB), peaks=[peak(40 * GIB)]), "head-room")
    assert (found.grows_by_ratio, found.unused_bytes) == (None, 79 * GIB // 2)
    assert found.sentence == "39.5 GiB of memory were never used"
    assert found.confidence == "measured"


def test_what_polling_saw_is_weak_and_says_what_it_can_miss() -> None:
    found = the(run_of(seen(40 * GIB)), "head-room")
    assert found.confidence == "weak"
    assert "200 ms" in found.evidence[-1]


@pytest.mark.parametrize(("used", "said"), [(64 * GIB - 1, True), (64 * GIB, False)])
def test_from_four_fifths_on_there_is_no_head_room(used: int, said: bool) -> None:
    run = run_of(seen(30 * GIB), peaks=[peak(used)])
    assert has(run, "head-room") is said


def test_what_torch_does_not_count_is_no_head_room() -> None:
    run = run_of(seen(65 * GIB), peaks=[peak(20 * GIB, before_steps_bytes=10 * GIB)])
    assert not has(run, "head-room")


def test_the_fullest_gpu_decides() -> None:
    gpus = [gpu(0), gpu(1)]
    both = [*seen(30 * GIB), *seen(50 * GIB, gpu=1)]
    some = peak(30 * GIB, before_steps_bytes=10 * GIB)
    more = peak(50 * GIB, before_steps_bytes=10 * GIB, gpu=1, rank=1)
    found = the(run_of(both, gpus=gpus, peaks=[some, more]), "head-room")
    assert found.gpus == (1,)
    assert found.grows_by_ratio == pytest.approx((0.92 * 80 - 10) / 40)
    full = peak(70 * GIB, gpu=1, rank=1)
    assert not has(run_of(both, gpus=gpus, peaks=[some, full]), "head-room")


def test_memory_of_others_is_no_head_room() -> None:
    alone = seen(40 * GIB, num_others=1, others_bytes=0)
    assert has(run_of(alone, peaks=[peak(40 * GIB)]), "head-room")
    shared = seen(40 * GIB, num_others=1, others_bytes=30 * GIB)
    assert not has(run_of(shared, peaks=[peak(40 * GIB)]), "head-room")


def test_after_running_out_of_memory_there_is_no_talk_of_head_room() -> None:
    ending = Ending(at_s=60, exit_code=1, out_of_memory="gpu")
    run = run_of(seen(40 * GIB), peaks=[peak(40 * GIB)], ending=ending)
    assert not has(run, "head-room")
