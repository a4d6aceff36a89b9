"""The search finds what trying everything would find, and proves what it skips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.planning.ranking import (
    NEAR_RATIO,
    STABILITIES,
    WORTH_MEMORY_RATIO,
    Candidate,
    Checked,
    find_best,
    find_front,
    is_slower,
    unbeaten,
    varied,
)
from oomph.records.plan import Preference
from oomph.records.workload import Variant
from oomph.tricks.definition import Severity


@dataclass(frozen=True)
class Truth:
    """A candidate, and what its replay would say."""

    candidate: Candidate
    device_bytes: int
    paced_s: tuple[float, ...] = ()  # at the paces that the host may have


@st.composite
def truths(draw: st.DrawFn) -> Truth:
    least, step_s = draw(st.integers(1, 40)), draw(st.integers(1, 30)) / 10
    offloads, stability = draw(st.booleans()), draw(st.sampled_from(STABILITIES))
    severities = st.lists(st.sampled_from(Severity), min_size=1, max_size=2)
    changes = draw(severities) if stability == "changes" else []
    return Truth(
        Candidate(
            variant=Variant(
                micro_batch=draw(st.integers(1, 64)),
                num_gpus=draw(st.sampled_from([1, 2, 4])),
                offload_activations=offloads,
            ),
            stability=stability,
            num_tricks=draw(st.integers(1, 4)),
            step_s=step_s,
            least_bytes=least,
            host_bytes=draw(st.sampled_from([3, 5])) if offloads else 0,
            changes=tuple(sorted(changes, reverse=True)),
            num_inexact=len(changes) + draw(st.integers(0, 2)),
            is_split=draw(st.booleans()),
        ),
        device_bytes=least + draw(st.integers(0, 10)),
        paced_s=(step_s, step_s * draw(st.floats(0.5, 1)), step_s * draw(st.floats(1, 2.6))),
    )


class Replays:
    """Answers checks, and counts them."""

    def __init__(self, found: list[Truth], limit_bytes: int) -> None:
        self.by_candidate = {id(one.candidate): one.device_bytes for one in found}
        self.paced_s = {id(one.candidate): one.paced_s for one in found}
        self.limit_bytes = limit_bytes

    def __call__(self, candidate: Candidate) -> Checked:
        device = self.by_candidate[id(candidate)]
        if device > self.limit_bytes:
            return Checked(device_bytes=device, fits="no")
        is_tight = device > self.limit_bytes - 2
        return Checked(device_bytes=device, fits="uncertain" if is_tight else "yes")

    def times(self, candidate: Candidate) -> Sequence[float]:
        return self.paced_s[id(candidate)]


def tried_all(found: list[Truth], check: Replays, prefer: Preference) -> Candidate | None:
    """The best, by trying everything."""
    for accepted in (("yes",), ("yes", "uncertain")):
        fitting = [one for one in found if check(one.candidate).fits in accepted]
        if fitting:
            mildest = min(one.candidate.changes for one in fitting)
            return _best_of([o for o in fitting if o.candidate.changes == mildest], prefer)
    return None


def _best_of(fitting: list[Truth], prefer: Preference) -> Candidate:
    """The documented order: docs/planning.md, "Which plan is recommended"."""

    def order(one: Truth) -> tuple[float, ...]:
        c = one.candidate
        return (
            STABILITIES.index(c.stability),
            c.variant.offload_activations,
            c.num_tricks - c.is_split,
            c.num_inexact,
            c.host_bytes,
            c.is_split,
        )

    def mild(one: Truth) -> tuple[float, ...]:
        return (*order(one), one.candidate.step_s, one.candidate.least_bytes)

    def fast(one: Truth) -> tuple[float, ...]:
        return (one.candidate.step_s, *order(one), one.candidate.least_bytes)

    if prefer == "memory":
        return min(fitting, key=lambda one: (one.device_bytes, *fast(one))).candidate
    if prefer == "resources":
        return min(
            fitting,
            key=lambda o: (o.candidate.variant.num_gpus, o.candidate.host_bytes, *fast(o)),
        ).candidate
    if prefer == "balance":
        fewest = min(one.candidate.variant.num_gpus for one in fitting)
        fitting = [one for one in fitting if one.candidate.variant.num_gpus == fewest]
    fastest = min(fitting, key=fast)
    near = [one for one in fitting if middle_ratio(one, fastest) <= 1 + NEAR_RATIO]
    return min(near, key=mild).candidate


def middle_ratio(one: Truth, other: Truth) -> float:
    ratios = [a / b for a, b in zip(one.paced_s, other.paced_s, strict=True)]
    return sqrt(min(ratios) * max(ratios))


@given(
    st.lists(truths(), max_size=30),
    st.integers(1, 50),
    st.sampled_from(["balance", "time", "memory", "resources"]),
)
def test_the_best_is_the_one_that_trying_everything_finds(
    found: list[Truth], limit_bytes: int, prefer: Preference
) -> None:
    check = Replays(found, limit_bytes)
    candidates = [one.candidate for one in found]
    best = find_best(candidates, check, limit_bytes, prefer, check.times)
    expected = tried_all(found, check, prefer)
    if expected is None:
        assert best is None
    else:
        assert best is not None
        names = ("step_s", "stability", "changes", "num_tricks", "num_inexact", "is_over_bus")
        for name in (*names, "host_bytes", "is_split", "least_bytes"):
            assert getattr(best, name) == getattr(expected, name), name
        assert best.variant.num_gpus == expected.variant.num_gpus


@given(
    st.lists(truths(), max_size=30),
    st.integers(1, 50),
    st.sampled_from(["balance", "time", "memory", "resources"]),
)
def test_no_milder_change_that_fits_is_passed_over(
    found: list[Truth], limit_bytes: int, prefer: Preference
) -> None:
    check = Replays(found, limit_bytes)
    candidates = [one.candidate for one in found]
    best = find_best(candidates, check, limit_bytes, prefer, check.times)
    for one in candidates:
        if check(one).fits == "yes":
            assert best is not None
            assert best.changes <= one.changes
            if not one.changes:  # what leaves training unchanged always leads
                assert best.stability != "changes"


@given(st.lists(truths(), max_size=30), st.integers(1, 50))
def test_whatever_fits_is_on_the_front_or_hardly_better_than_it(
    found: list[Truth], limit_bytes: int
) -> None:
    check = Replays(found, limit_bytes)
    front = find_front([one.candidate for one in found], check, limit_bytes)
    assert all(checked.fits == "yes" for _, checked in front)
    for one in found:
        if check(one.candidate).fits != "yes":
            continue
        assert any(
            plan.step_s <= one.candidate.step_s
            and checked.device_bytes <= one.device_bytes * (1 + WORTH_MEMORY_RATIO) + 1e-9
            and plan.variant.num_gpus <= one.candidate.variant.num_gpus
            and plan.host_bytes <= one.candidate.host_bytes
            and STABILITIES.index(plan.stability) <= STABILITIES.index(one.candidate.stability)
            and plan.changes <= one.candidate.changes
            for plan, checked in front
        )


def test_what_cannot_fit_is_not_replayed() -> None:
    too_large = Candidate(
        variant=Variant(micro_batch=8), stability="same", num_tricks=0, step_s=1, least_bytes=100
    )

    def check(candidate: Candidate) -> Checked:
        raise AssertionError(candidate)

    assert find_best([too_large], check, 99) is None
    assert find_front([too_large], check, 99) == []


# ---- the constants of judgement: half or double of any is seen -----------------------------------


def candidate(step_s: float, least_bytes: int = 100, *, num_tricks: int = 1) -> Candidate:
    return Candidate(
        variant=Variant(micro_batch=8),
        stability="same",
        num_tricks=num_tricks,
        step_s=step_s,
        least_bytes=least_bytes,
    )


def fits(one: Candidate) -> Checked:
    return Checked(device_bytes=one.least_bytes, fits="yes")


def test_a_plan_with_fewer_tricks_may_be_a_tenth_slower() -> None:
    fastest, mild, slow = candidate(1.0, num_tricks=2), candidate(1.1), candidate(1.12)
    assert find_best([fastest, mild], fits, 200) is mild
    assert find_best([fastest, slow], fits, 200) is fastest


# ---- which of two plans is slower ----------------------------------------------------------------


def test_what_slows_both_plans_down_makes_neither_of_them_slower() -> None:
    """On a machine where kernels and host are twice as slow, both plans are."""
    one, other = candidate(1.1), candidate(1.0)
    paced = {id(one): (1.1, 2.2), id(other): (1.0, 2.0)}
    assert not is_slower(one, other, lambda c: paced[id(c)])


def test_traffic_whose_pace_is_uncertain_does_not_make_a_plan_the_faster_one() -> None:
    """Offload is 20 % faster if the bus is as fast as its datasheet, and twice as slow if not."""
    recomputed, offloaded = candidate(1.2), candidate(1.0)
    paced = {id(recomputed): (1.2, 1.2, 1.2), id(offloaded): (1.0, 0.9, 2.0)}
    assert is_slower(recomputed, offloaded)  # by the likely time alone
    assert not is_slower(recomputed, offloaded, lambda c: paced[id(c)])


def test_a_plan_that_only_the_fastest_host_makes_as_fast_is_the_slower_one() -> None:
    small_pieces, whole = candidate(1.5), candidate(1.0)
    paced = {id(small_pieces): (1.5, 1.05, 2.5), id(whole): (1.0, 1.0, 1.0)}
    assert is_slower(small_pieces, whole, lambda c: paced[id(c)])


def test_an_unknown_time_is_slower_than_a_known_one_and_not_than_another() -> None:
    unknown, known = candidate(inf), candidate(9.0)
    assert is_slower(unknown, known)
    assert not is_slower(known, unknown)
    assert not is_slower(unknown, unknown)


@pytest.mark.parametrize("trick", ["offload_activations", "offload_optimizer", "zero_offload"])
def test_among_equally_fast_plans_recomputing_comes_before_traffic_over_the_bus(trick: str) -> None:
    recomputed = candidate(1.05, num_tricks=3)
    variant = replace(Variant(micro_batch=8), **{trick: True})  # type: ignore[arg-type]
    offloaded = replace(candidate(1.0), variant=variant, host_bytes=9)
    assert find_best([offloaded, recomputed], fits, 200) is recomputed


def test_splitting_the_batch_is_no_trick_of_its_own_but_the_whole_batch_comes_first() -> None:
    split = replace(candidate(1.0, num_tricks=2), is_split=True)
    two_tricks, whole = candidate(1.0, num_tricks=2), candidate(1.05)
    assert find_best([two_tricks, split], fits, 200) is split
    assert find_best([split, whole], fits, 200) is whole


def test_a_plan_that_saves_less_than_a_tenth_of_the_memory_gets_no_line() -> None:
    fastest = candidate(1.0, 100)
    for device_bytes, num_shown in ((93, 1), (88, 2)):
        front = find_front([fastest, candidate(1.1, device_bytes)], fits, 200)
        assert len(front) == num_shown


def test_only_a_clearly_faster_plan_replaces_the_best() -> None:
    best = candidate(1.0, 100)
    for step_s, is_replaced in ((0.91, False), (0.89, True)):
        faster = candidate(step_s, 100, num_tricks=2)
        assert (unbeaten(best, 100, [(faster, fits(faster))])[0] is faster) == is_replaced


def test_shown_plans_differ_by_a_seventh_of_the_memory() -> None:
    every = [candidate(1 + size / 10, 100 - size) for size in (0, 10, 16, 20)]
    shown = varied([(one, fits(one)) for one in every], every[0], 5)
    # also the smallest of all
    assert [one.least_bytes for one in shown] == [100, 84, 80]


def test_a_table_of_plans_has_five_rows() -> None:
    every = [candidate(1 + place / 10, 1000 >> place) for place in range(8)]
    shown = varied([(one, fits(one)) for one in every], every[0])
    assert [one.least_bytes for one in shown] == [1000, 500, 250, 125, 7]  # and the smallest
