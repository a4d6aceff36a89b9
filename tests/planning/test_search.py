"""The search finds what trying everything would find, and proves what it skips."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from oomph.planning.ranking import (
    NEAR_RATIO,
    STABILITIES,
    WORTH_MEMORY_RATIO,
    WORTH_TIME_RATIO,
    Candidate,
    Checked,
    find_best,
    find_front,
    unbeaten,
    varied,
)
from oomph.records.plan import Preference
from oomph.records.workload import Variant


@dataclass(frozen=True)
class Truth:
    """A candidate, and what its replay would say."""

    candidate: Candidate
    device_bytes: int


@st.composite
def truths(draw: st.DrawFn) -> Truth:
    least = draw(st.integers(1, 40))
    return Truth(
        Candidate(
            variant=Variant(
                micro_batch=draw(st.integers(1, 64)), num_gpus=draw(st.sampled_from([1, 2, 4]))
            ),
            stability=draw(st.sampled_from(STABILITIES)),
            num_tricks=draw(st.integers(0, 4)),
            step_s=draw(st.integers(1, 30)) / 10,
            least_bytes=least,
            host_bytes=draw(st.sampled_from([0, 0, 5])),
        ),
        device_bytes=least + draw(st.integers(0, 10)),
    )


class Replays:
    """Answers checks, and counts them."""

    def __init__(self, found: list[Truth], limit_bytes: int) -> None:
        self.by_candidate = {id(one.candidate): one.device_bytes for one in found}
        self.limit_bytes = limit_bytes

    def __call__(self, candidate: Candidate) -> Checked:
        device = self.by_candidate[id(candidate)]
        if device > self.limit_bytes:
            return Checked(device_bytes=device, fits="no")
        is_tight = device > self.limit_bytes - 2
        return Checked(device_bytes=device, fits="uncertain" if is_tight else "yes")


def tried_all(found: list[Truth], check: Replays, prefer: Preference) -> Candidate | None:
    """The best, by trying everything."""
    for accepted in (("yes",), ("yes", "uncertain")):
        fitting = [one for one in found if check(one.candidate).fits in accepted]
        if fitting:
            return _best_of(fitting, prefer)
    return None


def _best_of(fitting: list[Truth], prefer: Preference) -> Candidate:
    def mild(one: Truth) -> tuple[float, ...]:
        c = one.candidate
        return (STABILITIES.index(c.stability), c.num_tricks, c.step_s, c.least_bytes)

    def fast(one: Truth) -> tuple[float, ...]:
        return (one.candidate.step_s, *mild(one)[:2], one.candidate.least_bytes)

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
    near_s = min(one.candidate.step_s for one in fitting) * (1 + NEAR_RATIO)
    return min((one for one in fitting if one.candidate.step_s <= near_s), key=mild).candidate


@given(
    st.lists(truths(), max_size=30),
    st.integers(1, 50),
    st.sampled_from(["balance", "time", "memory", "resources"]),
)
def test_the_best_is_the_one_that_trying_everything_finds(
    found: list[Truth], limit_bytes: int, prefer: Preference
) -> None:
    check = Replays(found, limit_bytes)
    best = find_best([one.candidate for one in found], check, limit_bytes, prefer)
    expected = tried_all(found, check, prefer)
    if expected is None:
        assert best is None
    else:
        assert best is not None
        assert (best.step_s, best.stability, best.num_tricks, best.variant.num_gpus) == (
            expected.step_s,
            expected.stability,
            expected.num_tricks,
            expected.variant.num_gpus,
        )


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
            plan.step_s <= one.candidate.step_s * (1 + WORTH_TIME_RATIO) + 1e-9
            and checked.device_bytes <= one.device_bytes * (1 + WORTH_MEMORY_RATIO) + 1e-9
            and plan.variant.num_gpus <= one.candidate.variant.num_gpus
            and plan.host_bytes <= one.candidate.host_bytes
            and STABILITIES.index(plan.stability) <= STABILITIES.index(one.candidate.stability)
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


def test_a_plan_with_fewer_tricks_may_be_a_twentieth_slower() -> None:
    fastest, mild, slow = candidate(1.0, num_tricks=2), candidate(1.04), candidate(1.06)
    assert find_best([fastest, mild], fits, 200) is mild
    assert find_best([fastest, slow], fits, 200) is fastest


def test_a_plan_that_saves_less_than_a_tenth_of_the_memory_gets_no_line() -> None:
    fastest = candidate(1.0, 100)
    for device_bytes, num_shown in ((93, 1), (88, 2)):
        front = find_front([fastest, candidate(1.1, device_bytes)], fits, 200)
        assert len(front) == num_shown


def test_only_a_clearly_faster_plan_replaces_the_best() -> None:
    best = candidate(1.0, 100)
    for step_s, is_replaced in ((0.98, False), (0.96, True)):
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
