"""What changed between two runs, and what makes that worth less."""

from __future__ import annotations

import pytest

from explaining.runs import gpu, peak, run_of, spans, steps
from oomph.explaining.compare import compare
from oomph.explaining.diagnose import diagnose
from oomph.records.report import Change, Comparison
from oomph.units import GIB


def changes(found: Comparison) -> dict[str, Change]:
    return {change.what: change for change in found.changes}


SLOW = run_of(spans((60, 0.25)), step_spans=[steps(0.4, step_s=1.0)], peaks=[peak(70 * GIB)])
FAST = run_of(spans((60, 0.95)), step_spans=[steps(0.01, step_s=0.5)], peaks=[peak(75 * GIB)])


def test_faster_steps_are_better_and_the_cause_is_gone() -> None:
    found = compare(diagnose(SLOW), diagnose(FAST))
    told = changes(found)
    step = told["time of a step"]
    assert (step.before, step.after, step.is_better) == (1.0, 0.5, True)
    assert told["samples a second"].is_better is True
    assert told["waiting for data"].is_better is True
    assert [one.kind for one in found.gone] == ["input-bound"]
    assert [one.kind for one in found.new] == ["busy"]
    assert found.cautions == ()


def test_the_other_way_round_it_is_worse() -> None:
    assert changes(compare(diagnose(FAST), diagnose(SLOW)))["time of a step"].is_better is False


def test_more_memory_or_kernel_active_time_is_neither_better_nor_worse() -> None:
    told = changes(compare(diagnose(SLOW), diagnose(FAST)))
    assert told["peak memory"].is_better is None
    assert told["kernel-active"].is_better is None


@pytest.mark.parametrize(("after_s", "is_better"), [(0.952, None), (0.948, True), (1.054, False)])
def test_a_few_percent_are_taken_as_the_same(after_s: float, is_better: bool | None) -> None:
    after = run_of(spans((60, 0.25)), step_spans=[steps(0.4, step_s=after_s)])
    told = changes(compare(diagnose(SLOW), diagnose(after)))
    assert told["time of a step"].is_better is is_better


def test_a_figure_that_only_one_has_is_told_without_a_verdict() -> None:
    told = changes(compare(diagnose(SLOW), diagnose(run_of(spans((60, 0.25))))))
    step = told["time of a step"]
    assert (step.before, step.after, step.is_better) == (1.0, None, None)


def test_what_is_not_the_same_is_a_caution() -> None:
    other = run_of(
        spans((20, 0.9), num_others=1), gpus=[gpu(name="Tesla V100")], host="b", ending=None
    )
    cautions = " / ".join(compare(diagnose(SLOW), diagnose(other)).cautions)
    for word in ("other GPUs", "on node7, then on b", "sources", "seen to end", "short", "shared"):
        assert word in cautions


@pytest.mark.parametrize(("after_s", "is_better"), [(4, None), (30, False)])
def test_a_start_up_of_some_seconds_more_is_noise(after_s: int, is_better: bool | None) -> None:
    quick, slow = (run_of(spans((wait_s, 0.0), (60, 0.95))) for wait_s in (2, after_s))
    told = changes(compare(diagnose(quick), diagnose(slow)))
    assert told["start-up"].before == 2.0
    assert told["start-up"].is_better is is_better
