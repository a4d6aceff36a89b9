"""Figures of a run: weighed by time, and nothing where nothing was read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from explaining.runs import event, gpu, host, peak, run_of, span, spans, steps
from oomph.explaining.diagnose import diagnose
from oomph.explaining.figures import are_rare, gpu_figures, phases_of, spread, step_figures
from oomph.records.report import Gap
from oomph.records.run import Halt, StepSpan
from oomph.units import GIB


def test_a_long_span_weighs_as_much_as_it_lasts() -> None:
    run = run_of([span(0, 1.0), span(1, 0.1, ended_s=10.0)])
    busy = gpu_figures(run, 0).busy
    assert busy
    assert busy.whole.mean == pytest.approx(0.19)
    assert (busy.whole.p10, busy.whole.p50, busy.whole.p90) == (0.1, 0.1, 0.1)
    assert busy.coarsest_s == 9.0


def test_quantiles_are_shares_of_the_time() -> None:
    found = spread([(0.9, 5.0), (0.1, 1.0), (0.5, 4.0)])
    assert found
    assert (found.p10, found.p50, found.p90) == (0.1, 0.5, 0.9)


def test_the_mean_while_working_leaves_start_up_end_and_rare_gaps_out() -> None:
    run = run_of(spans((20, 0.0), (40, 0.8), (10, 0.0), (40, 0.6), (10, 0.0)))
    busy = gpu_figures(run, 0).busy
    assert busy
    assert busy.working
    assert busy.working.mean == pytest.approx(0.7)
    assert busy.whole.mean == pytest.approx(56 / 120)
    assert busy.start_up_s == 20.0
    assert [(gap.began_s, gap.ended_s) for gap in busy.gaps] == [(60.0, 70.0), (110.0, 120.0)]


def gaps_of(*idle: tuple[float, float]) -> list[tuple[float, float]]:
    """Of a GPU that stands still from and until these times, and works for 40 s on both sides."""
    before = [span(float(t), 0.9) for t in range(40)]
    still = [span(began_s, 0.0, ended_s=ended_s) for began_s, ended_s in idle]
    after = [span(100.0 + t, 0.9) for t in range(40)]
    busy = gpu_figures(run_of([*before, *still, *after]), 0).busy
    assert busy
    return [(gap.began_s, gap.ended_s) for gap in busy.gaps]


def test_a_gap_has_two_seconds_and_no_hole_of_more_than_one() -> None:
    assert gaps_of((40.0, 42.0)) == [(40.0, 42.0)]
    assert gaps_of((40.0, 41.9)) == []
    assert gaps_of((40.0, 41.5), (42.5, 44.0)) == [(40.0, 44.0)]
    assert gaps_of((40.0, 41.5), (42.55, 44.0)) == []


def test_the_time_in_which_the_command_was_halted_is_not_called_idle() -> None:
    halted = (event(60, "halted", "SIGTSTP"), event(160, "resumed", "SIGCONT"))
    run = run_of(spans((60, 0.8), (100, 0.0), (40, 0.8)), events=halted)
    busy = gpu_figures(run, 0).busy
    assert busy
    assert busy.whole.mean == pytest.approx(0.8)
    assert (busy.gaps, busy.num_gaps) == ((), 0)
    report = diagnose(run)
    assert report.halted_s == 100.0
    assert "phases" not in [finding.kind for finding in report.findings]
    assert "stood still" not in " ".join(finding.sentence for finding in report.findings)


def test_one_long_span_over_a_halt_counts_as_little_as_many_short_ones() -> None:
    """The watcher stands still as well, after Ctrl-Z: its first span afterwards covers it all."""
    halted = (event(60.2, "halted", "SIGTSTP"), event(159.9, "resumed", "SIGCONT"))
    long = span(60, 0.01, ended_s=161.0)
    run = run_of([*spans((60, 0.8)), long, span(161, 0.8), span(162, 0.8)], events=halted)
    busy = gpu_figures(run, 0).busy
    assert busy
    assert busy.whole.mean == pytest.approx(0.8)


def test_a_step_that_was_halted_is_as_long_as_it_worked() -> None:
    halts = (event(10, "halted"), event(14, "resumed"), event(30, "halted"), event(60, "resumed"))
    within, between = (
        StepSpan(
            rank=0,
            began_s=began_s,
            ended_s=ended_s,
            num_steps=10,
            num_samples=80,
            step_s=step_s,
            longest_step_s=longest_s,
            data_wait_s=0.0,
        )
        for began_s, ended_s, step_s, longest_s in ((9, 18, 0.9, 4.5), (29, 64, 0.5, 0.6))
    )
    run = run_of(spans((64, 0.8)), step_spans=[within, between], events=halts)
    (figures,) = step_figures(run)
    assert figures.step_s == pytest.approx(0.5)
    assert figures.longest_step_s == pytest.approx(0.6)
    assert figures.samples_per_s == pytest.approx(16)


def test_of_thousands_of_gaps_the_longest_are_listed_and_all_are_counted() -> None:
    pauses = [stretch for n in range(1000) for stretch in ((3, 0.9), (2 + n // 900, 0.0))]
    busy = gpu_figures(run_of(spans(*pauses, (3, 0.9))), 0).busy
    assert busy
    assert len(busy.gaps) == 200
    assert sum(gap.lasted_s for gap in busy.gaps) == 100 * 3 + 100 * 2
    assert (busy.num_gaps, busy.gaps_s) == (1000, 900 * 2 + 100 * 3)


def test_gaps_half_a_minute_apart_are_rare() -> None:
    three = [Gap(began_s=t, ended_s=t + 3, phase=None) for t in (0.0, 30.0, 60.0)]
    assert are_rare(three, 90.0)
    assert not are_rare(three, 89.0)
    assert are_rare(three[:2], 1.0)


def test_a_pause_says_nothing_of_a_span_that_is_longer_than_two_seconds() -> None:
    def pausing(length_s: float) -> float | None:
        one = span(0.0, 0.5, ended_s=length_s, least_busy_ratio=0.0)
        busy = gpu_figures(run_of([one]), 0).busy
        assert busy
        return busy.pausing_ratio

    assert pausing(2.0) == 1.0
    assert pausing(2.1) is None


def test_unknown_stays_unknown() -> None:
    unread = {"power_w": None, "temperature_c": None, "throttled_ratio": None}
    none = {"used_bytes": None, "most_used_bytes": None, "run_bytes": None}
    others = {"others_bytes": None, "num_others": None}
    figures = gpu_figures(run_of(spans((60, None), **unread, **none, **others)), 0)
    assert figures.busy is None
    assert figures.memory.peak_bytes is None
    assert figures.memory.peak_misses is None
    assert (figures.power.mean_w, figures.power.energy_j, figures.power.most_c) == (None,) * 3
    assert (figures.power.throttled_ratio, figures.shared_ratio) == (None, None)
    assert (figures.others_bytes, figures.received_bytes) == (None, None)


def test_energy_is_power_over_time() -> None:
    assert gpu_figures(run_of(spans((60, 0.9), power_w=250.0)), 0).power.energy_j == 15_000.0


def test_each_gpu_has_its_own_figures() -> None:
    run = run_of(
        [*spans((60, 0.9)), *spans((60, 0.5), gpu=1, power_w=100.0)],
        gpus=[gpu(3), gpu(5, cuda_index=None)],
        peaks=[peak(10 * GIB), peak(20 * GIB, gpu=1, rank=1)],
    )
    zero, one = diagnose(run).gpus
    assert (zero.index, zero.rank, zero.memory.peak_bytes) == (3, 0, 10 * GIB)
    assert (one.index, one.rank, one.memory.peak_bytes) == (5, 1, 20 * GIB)
    assert one.power.mean_w == 100.0


def test_gpus_that_the_run_did_not_use_are_left_out() -> None:
    run = run_of(spans((60, 0.9)), gpus=[gpu(0), gpu(1, is_used=False)])
    assert [one.index for one in diagnose(run).gpus] == [0]


def test_steps_are_summed_by_rank() -> None:
    run = run_of(step_spans=[steps(0.1), steps(0.5, step_s=1.0), steps(None, rank=1)])
    zero, one = step_figures(run)
    assert (zero.num_steps, zero.step_s, zero.longest_step_s) == (200, 0.75, 2.0)
    assert zero.data_wait_ratio == pytest.approx(55 / 150)
    assert zero.samples_per_s == pytest.approx(1600 / 150)
    assert (one.rank, one.data_wait_ratio) == (1, None)


def test_a_phase_lasts_until_the_next_of_its_rank() -> None:
    events = [event(5, "phase", "b", rank=1), event(1, "phase", "a", rank=0)]
    events += [event(9, "phase", "c", rank=0)]
    found = phases_of(run_of(spans((20, 0.9)), events=events))
    assert [(p.name, p.began_s, p.ended_s) for p in found] == [
        ("a", 1, 9),
        ("b", 5, 20.0),
        ("c", 9, 20.0),
    ]


def test_the_end_of_an_epoch_is_a_mark_and_begins_no_phase() -> None:
    events = [event(1, "phase", "training"), event(9, "phase", "epoch 1 ended")]
    report = diagnose(run_of(spans((20, 0.9)), events=events))
    assert [(phase.name, phase.ended_s) for phase in report.phases] == [("training", 20.0)]
    assert [mark.text for mark in report.marks] == ["epoch 1 ended"]


def test_the_host_is_told_by_its_most_and_its_mean() -> None:
    figures = diagnose(run_of(spans((60, 0.9)), host_spans=[host(2.0), host(4.0)])).host_figures
    assert (figures.cpu_cores, figures.num_cpus, figures.memory_bytes) == (3.0, 8, 8 * GIB)


def test_a_run_of_weeks_repeats_only_the_first_events() -> None:
    events = [event(i, "neighbour") for i in range(500)] + [event(1, "phase", "training")]
    report = diagnose(run_of(spans((60, 0.9)), events=events))
    assert (len(report.marks), report.num_marks) == (200, 500)


def test_of_thousands_of_phases_the_longest_of_each_name_are_listed_and_all_are_counted() -> None:
    events = [
        event(10 * n + after_s, "phase", name)
        for n in range(1000)
        for after_s, name in ((0, "training"), (8, "evaluation"))
    ]
    report = diagnose(run_of(spans((10_000, 0.9)), events=events))
    names = [phase.name for phase in report.phases]
    assert (names.count("training"), names.count("evaluation")) == (100, 100)
    assert report.num_phases == 2000
    began_s = [phase.began_s for phase in report.phases]
    assert began_s == sorted(began_s)


def test_a_report_says_when_the_command_was_halted() -> None:
    halts = (event(10, "halted"), event(14, "resumed"), event(30, "halted"))
    report = diagnose(run_of(spans((64, 0.8)), events=halts))
    assert report.halts == (Halt(10, 14), Halt(30, 64))
    assert report.halted_s == 38


def test_a_wait_for_data_that_was_halted_is_as_long_as_it_waited() -> None:
    halted = (event(10, "halted"), event(40, "resumed"))
    waited = replace(steps(), ended_s=80.0, step_s=0.8, longest_step_s=31.0, data_wait_s=60.0)
    (figures,) = step_figures(run_of(spans((80, 0.8)), step_spans=[waited], events=halted))
    assert figures.step_s == pytest.approx(0.5)
    assert figures.data_wait_ratio == pytest.approx(30 / 50)


def test_a_polled_peak_says_how_far_apart_the_looks_were() -> None:
    def misses(**more: Any) -> str | None:
        run = run_of(spans((60, 0.9)), gpus=[gpu(**more)])
        return gpu_figures(run, 0).memory.peak_misses

    assert misses() == "a peak shorter than 200 ms can have been missed"
    assert misses(looks_apart_s=1.0) == "a peak shorter than 1000 ms can have been missed"


def test_pauses_have_the_names_of_their_phases_also_where_torch_told_no_peak() -> None:
    events = [event(40, "phase", "evaluation", rank=0), event(60, "phase", "training", rank=0)]
    events += [event(40, "phase", "training", rank=1)]
    run = run_of(spans((40, 0.9), (20, 0.0), (40, 0.9)), events=events)
    (figures,) = diagnose(run).gpus
    assert figures.busy
    assert [gap.phase for gap in figures.busy.gaps] == ["evaluation"]
