"""On small models and any budget, the best plan is the one that trying everything finds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.planning.choices import Choices, choices_for, variants
from oomph.planning.ranking import (
    NEAR_RATIO,
    STABILITIES,
    WORTH_MEMORY_RATIO,
    Checked,
    search,
    stability_of,
)
from oomph.predicting.combinations import Combinations
from oomph.records.plan import Preference
from oomph.records.prediction import Verdict
from oomph.records.workload import Variant
from oomph.tricks.definition import Request
from oomph.tricks.trick import NAMES, tricks_on
from planning.plans import whatever_it_takes
from planning.recorded import CAPABILITY, MODELS, all_ways, checkpointings
from planning.test_choices import BERT

BATCH_SIZE = 4096  # of models so small that less of it is lost in a segment of 2 MiB
TIGHT_RATIO = 0.03  # above so much of the budget a replay says "uncertain"
# What was not rehearsed is left out.
FORBIDDEN = frozenset(NAMES) - {
    "accumulation",
    "bf16",
    "checkpointing",
    "fused-optimizer",
    "for-loop-optimizer",
    "expandable-segments",
}


@dataclass(frozen=True)
class Tried:
    """One combination, replayed."""

    variant: Variant
    step_s: float
    reserved_bytes: int
    paced_s: tuple[float, ...]

    @property
    def mildness(self) -> tuple[int, ...]:
        tricks = tricks_on(self.variant)
        is_split = self.variant.accumulation > 1
        num_inexact = sum(trick.stability != "same" for trick in tricks)
        return (
            STABILITIES.index(stability_of(tricks)),
            len(tricks) - is_split,
            num_inexact,
            is_split,
        )

    def is_near(self, fastest: Tried) -> bool:
        ratios = [a / b for a, b in zip(self.paced_s, fastest.paced_s, strict=True)]
        return sqrt(min(ratios) * max(ratios)) <= 1 + NEAR_RATIO


@pytest.fixture(scope="module")
def tried() -> dict[str, list[Tried]]:
    """Every combination for each model, by an allocator that is asked anew each time."""
    return {name: _tried(name, ways) for name, ways in all_ways().items()}


def _choices(model: str) -> Choices:
    request = Request(
        batch_size=BATCH_SIZE,
        capability=CAPABILITY,
        possible=BERT,
        clips_gradients=False,
        forbid=FORBIDDEN,
    )
    found = choices_for(request, checkpointings(model)[1:])
    return replace(found, least_micro_batch=2)


def _tried(model: str, ways: Combinations) -> list[Tried]:
    found = []
    for variant in variants(_choices(model)):
        seconds = ways.seconds(variant)
        assert seconds is not None
        reserved = ways.reserved_bytes(variant)
        found.append(Tried(variant, seconds, reserved, ways.paced_seconds(variant)))
    return found


def _best(every: list[Tried], budget: int, prefer: Preference) -> Tried | None:
    """Certain ones before uncertain ones; then as the preference says."""
    for limit in (budget - int(budget * TIGHT_RATIO), budget):
        fitting = [one for one in every if one.reserved_bytes <= limit]
        if not fitting:
            continue
        if prefer == "memory":
            return min(fitting, key=lambda one: (one.reserved_bytes, one.step_s, *one.mildness))
        fastest = min(fitting, key=lambda one: (one.step_s, *one.mildness))
        if prefer == "resources":
            return fastest
        near = [one for one in fitting if one.is_near(fastest)]
        return min(near, key=lambda one: (*one.mildness, one.step_s))
    return None


@dataclass(frozen=True)
class Budgeted:
    """The ways of a model, on a device of so many bytes."""

    ways: Combinations
    sizes: dict[Variant, int]
    budget: int

    def knows(self, variant: Variant) -> bool:
        return self.ways.knows(variant)

    def seconds(self, variant: Variant) -> float | None:
        return self.ways.seconds(variant)

    def has_host_for(self, _: Variant) -> bool:
        return True

    def paced_seconds(self, variant: Variant) -> tuple[float, ...]:
        return self.ways.paced_seconds(variant)

    def host_bytes(self, _: Variant) -> int:
        return 0

    def least_bytes(self, variant: Variant) -> int:
        return self.ways.least_bytes(variant)

    def reserved_bytes(self, variant: Variant) -> int:
        return self.sizes[variant]

    def check(self, variant: Variant) -> Checked:
        size, sure = self.sizes[variant], self.budget - int(self.budget * TIGHT_RATIO)
        fits: Verdict = "yes" if size <= sure else "uncertain" if size <= self.budget else "no"
        return Checked(device_bytes=size, fits=fits)


@whatever_it_takes
@given(
    model=st.sampled_from(MODELS),
    share=st.floats(0.0, 1.1),
    prefer=st.sampled_from(["balance", "time", "memory", "resources"]),
)
def test_the_best_plan_is_the_best_of_all(
    tried: dict[str, list[Tried]], model: str, share: float, prefer: Preference
) -> None:
    ways, every = all_ways()[model], tried[model]
    sizes = [one.reserved_bytes for one in every]
    # From a little below the smallest to a little above the largest.
    budget = int(min(sizes) * 0.95 + share * (max(sizes) - min(sizes) * 0.95))
    by_variant = {one.variant: one.reserved_bytes for one in every}

    found = search(_choices(model), Budgeted(ways, by_variant, budget), budget, prefer)
    assert found.num_candidates == len(every)
    expected = _best(every, budget, prefer)
    if expected is None:
        assert found.best is None
        assert found.shown == ()
        return
    assert found.best is not None
    chosen = next(one for one in every if one.variant == found.best)
    if (chosen.step_s, *chosen.mildness) != (expected.step_s, *expected.mildness):
        # With more tricks it is worse in nothing else, and clearly better in something.
        assert tricks_on(expected.variant)
        assert chosen.mildness[1:] > expected.mildness[1:]
        assert chosen.mildness[0] <= expected.mildness[0]
        assert chosen.step_s <= expected.step_s
        assert chosen.reserved_bytes <= expected.reserved_bytes
        is_smaller = chosen.reserved_bytes * (1 + WORTH_MEMORY_RATIO) < expected.reserved_bytes
        assert is_smaller or not expected.is_near(chosen)
    if prefer == "memory":
        assert chosen.reserved_bytes == expected.reserved_bytes
    assert found.shown[0] == found.best


@pytest.mark.parametrize("model", MODELS)
def test_there_is_something_to_choose_from(tried: dict[str, list[Tried]], model: str) -> None:
    every = tried[model]
    assert len(every) >= 12 * 2 * 3 * 2 * len(checkpointings(model))
    assert max(one.reserved_bytes for one in every) > min(one.reserved_bytes for one in every)
    assert len({one.step_s for one in every}) > len(every) // 4
