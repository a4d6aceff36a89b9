"""What a search shows: on the front, nothing beside it that is better, and the batch kept."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.errors import UsageError
from oomph.planning.choices import Choices, choices_for, variants
from oomph.planning.ranking import (
    NEAR_RATIO,
    STABILITIES,
    Candidate,
    Checked,
    Found,
    changes_in,
    find_front,
    search,
    stabilities_in,
    stability_of,
    varied,
)
from oomph.records.plan import Preference
from oomph.records.workload import Variant
from oomph.tricks.definition import Request
from oomph.tricks.trick import BATCH_SIZE, tricks_on
from planning.plans import whatever_it_takes
from planning.test_choices import BERT, plain, requests

PREFERENCES: tuple[Preference, ...] = ("balance", "time", "memory", "resources")
MOST = 4


@dataclass(frozen=True)
class World:
    """What each variant takes, drawn from a seed: any figures will do."""

    seed: int
    limit_bytes: int
    has_times: bool = True

    def _drawn(self, variant: Variant, what: str, most: int) -> int:
        # Not `hash`, which is another in every process.
        return zlib.crc32(f"{self.seed} {what} {variant}".encode()) % most

    def device_bytes(self, variant: Variant) -> int:
        return 20 + self._drawn(variant, "bytes", 80)

    def knows(self, variant: Variant) -> bool:
        return self._drawn(variant, "known", 20) > 0

    def least_bytes(self, variant: Variant) -> int:
        return self.device_bytes(variant) - self._drawn(variant, "gap", 9)

    def reserved_bytes(self, variant: Variant) -> int:
        return self.device_bytes(variant)

    def host_bytes(self, variant: Variant) -> int:
        return 7 * variant.offload_optimizer

    def seconds(self, variant: Variant) -> float | None:
        is_timed = self.has_times or variant.num_gpus == 1
        return (1 + self._drawn(variant, "time", 40)) / 10 if is_timed else None

    def has_host_for(self, _: Variant) -> bool:
        return True

    def paced_seconds(self, variant: Variant) -> tuple[float, ...]:
        seconds = self.seconds(variant)
        return () if seconds is None else (seconds,)

    def check(self, variant: Variant) -> Checked:
        device = self.device_bytes(variant)
        if device > self.limit_bytes:
            return Checked(device_bytes=device, fits="no")
        is_tight = device > self.limit_bytes - 3
        return Checked(device_bytes=device, fits="uncertain" if is_tight else "yes")


def limited(choices: Choices, **settings: tuple[Any, ...]) -> Choices:
    """The same choices, with these values of some settings."""
    return replace(choices, settings={**choices.settings, **settings})


worlds = st.builds(World, seed=st.integers(), limit_bytes=st.integers(10, 110))
# Few enough combinations that every one can be tried.
SMALL = limited(
    choices_for(plain(batch_size=8, max_gpus=4), ("blocks",)),
    precision=("fp32", "bf16"),
    optimizer=("as-is", "8-bit"),
    attention=("as-is",),
    loss=("as-is",),
    optimizer_in_backward=(False,),
    offload_activations=(False,),
    expandable_segments=(False,),
)


def found_in(world: World, prefer: Preference, choices: Choices = SMALL) -> Found:
    return search(choices, world, world.limit_bytes, prefer, MOST)


def axes(variant: Variant, world: World) -> tuple[float, ...]:
    """The time, the memory, and what else a plan may cost; the less the better."""
    tricks, seconds = tricks_on(variant), world.seconds(variant)
    return (
        inf if seconds is None else seconds * 8 / variant.batch_size,
        world.device_bytes(variant),
        STABILITIES.index("changes" if variant.batch_size != 8 else stability_of(tricks)),
        variant.num_gpus,
        world.host_bytes(variant),
        len(tricks),
        sum(trick.stability != "same" for trick in tricks),
    )


@whatever_it_takes
@given(worlds, st.sampled_from(PREFERENCES))
def test_nothing_that_fits_is_faster_and_smaller_than_the_best_at_no_other_cost(
    world: World, prefer: Preference
) -> None:
    found = found_in(world, prefer)
    known = [one for one in variants(SMALL) if world.knows(one)]
    accepted = ("yes",) if found.is_certain else ("yes", "uncertain")
    fitting = [one for one in known if world.check(one).fits in accepted]
    assert (found.best is None) == (not fitting)
    if found.best is None:
        assert found.shown == ()
        return
    best_s, best_bytes, *best_rest = axes(found.best, world)
    for one in fitting:
        seconds, size, *rest = axes(one, world)
        is_no_dearer = all(mine <= its for mine, its in zip(rest, best_rest, strict=True))
        assert not (seconds < best_s and size < best_bytes and is_no_dearer), one


@whatever_it_takes
@given(worlds, st.sampled_from(PREFERENCES))
def test_what_is_shown_beside_the_best_is_on_the_front(world: World, prefer: Preference) -> None:
    found = found_in(world, prefer)
    assert len(found.shown) <= MOST
    assert len(set(found.shown)) == len(found.shown)
    assert found.best is None or found.shown[0] == found.best
    for shown in found.shown[1:]:
        assert world.check(shown).fits == "yes"
        its = axes(shown, world)[:5]
        for other in variants(SMALL):
            if world.knows(other) and world.check(other).fits == "yes":
                mine = axes(other, world)[:5]
                is_no_dearer = all(a <= b for a, b in zip(mine[2:], its[2:], strict=True))
                beats = is_no_dearer and mine[0] < its[0] and mine[1] < its[1]
                assert not beats, (shown, other)


@whatever_it_takes
@given(worlds, requests(), st.sampled_from(PREFERENCES))
def test_every_plan_that_is_shown_keeps_the_batch_unless_another_was_allowed(
    world: World, request: Request, prefer: Preference
) -> None:
    asked = replace(request, batch_size=request.batch_size % 24 + 1)
    choices = choices_for(asked, ("blocks",))
    try:
        found = found_in(world, prefer, choices)
    except UsageError:  # nothing of it is known in this world
        return
    for shown in found.shown:
        assert shown.batch_size == asked.batch_size or BATCH_SIZE in asked.allow


# ---- the recommended plan against its own table ------------------------------------------------

ALLOWED = limited(
    choices_for(
        plain(batch_size=8, allow=frozenset({"lora", "sgd", "pure-bf16", BATCH_SIZE})), ("blocks",)
    ),
    precision=("fp32", "bf16", "pure-bf16"),
    optimizer=("as-is", "fused", "sgd"),
    attention=("as-is",),
    loss=("as-is", "chunked"),
    optimizer_in_backward=(False,),
    offload_activations=(False,),
)


@whatever_it_takes
@given(worlds, st.sampled_from(PREFERENCES), st.sampled_from([SMALL, ALLOWED]))
def test_no_row_of_the_table_is_better_than_the_recommended_plan_at_no_cost(
    world: World, prefer: Preference, choices: Choices
) -> None:
    found = found_in(world, prefer, choices)
    if found.best is None or not tricks_on(found.best):  # nothing to do is worth something
        return

    def all_axes(one: Variant) -> tuple[Any, ...]:
        kept = stabilities_in(one, choices)
        return (*axes(one, world)[:5], changes_in(one, choices), len(kept) - kept.count("same"))

    best = all_axes(found.best)
    for shown in found.shown[1:]:
        its = all_axes(shown)
        assert not (its != best and all(a <= b for a, b in zip(its, best, strict=True))), shown


@whatever_it_takes
@given(worlds, st.sampled_from(PREFERENCES))
def test_what_was_allowed_is_recommended_only_where_it_is_needed(
    world: World, prefer: Preference
) -> None:
    found = found_in(world, prefer, ALLOWED)
    if found.best is None:
        return
    known = [one for one in variants(ALLOWED) if world.knows(one)]
    accepted = ("yes",) if found.is_certain else ("yes", "uncertain")
    fitting = [one for one in known if world.check(one).fits in accepted]
    mildest = min(changes_in(one, ALLOWED) for one in fitting)
    assert changes_in(found.best, ALLOWED) == mildest


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (("lora", "qlora"), "lora"),
        (("sgd", "lora"), "lora"),
        (("adafactor", "qlora"), "adafactor"),
        (("pure-bf16", "adafactor"), "pure-bf16"),
        ((BATCH_SIZE, "sgd"), BATCH_SIZE),
    ],
)
def test_of_two_allowed_changes_that_fit_the_milder_one_is_recommended(
    allowed: tuple[str, ...], expected: str
) -> None:
    """Although the more severe one is faster and smaller."""
    choices = choices_for(plain(batch_size=8, allow=frozenset(allowed)), ())

    def names(variant: Variant) -> set[str]:
        found = {trick.name for trick in tricks_on(variant)}
        return found | ({BATCH_SIZE} if variant.batch_size != 8 else set())

    class Tight(World):
        def knows(self, _: Variant) -> bool:
            return True

        def least_bytes(self, variant: Variant) -> int:
            used = {*allowed} & names(variant)
            if len(used) != 1:
                return 999
            return 90 if expected in used else 50

        def seconds(self, variant: Variant) -> float:
            return 10.0 if expected in names(variant) else 1.0

        def check(self, variant: Variant) -> Checked:
            size = self.least_bytes(variant)
            return Checked(device_bytes=size, fits="yes" if size <= 100 else "no")

    found = search(choices, Tight(0, 100), 100)
    assert found.best is not None
    assert expected in names(found.best)


def test_a_batch_that_fits_is_not_made_smaller_for_a_little_time() -> None:
    choices = limited(
        ALLOWED, precision=("fp32",), optimizer=("as-is",), loss=("as-is",), adapters=("none",)
    )

    class Alike(World):
        def knows(self, _: Variant) -> bool:
            return True

        def least_bytes(self, _: Variant) -> int:
            return 50

        def seconds(self, variant: Variant) -> float:
            return variant.accumulation * (1.0 if variant.batch_size == 8 else 0.4)

        def check(self, _: Variant) -> Checked:
            return Checked(device_bytes=50, fits="yes")

    found = search(choices, Alike(0, 100), 100)
    assert found.best == Variant(micro_batch=8)
    assert any(one.batch_size < 8 for one in found.shown)  # it is an offer


# ---- how many ----------------------------------------------------------------------------------


@whatever_it_takes
@given(worlds, st.integers(1, 6))
def test_no_more_are_shown_than_asked_for_and_the_best_is_one_of_them(
    world: World, most: int
) -> None:
    candidates = [
        Candidate(
            variant=one,
            stability=stability_of(tricks_on(one)),
            num_tricks=len(tricks_on(one)),
            step_s=world.seconds(one) or 0.0,
            least_bytes=world.device_bytes(one),
        )
        for one in variants(SMALL)
    ]
    front = find_front(candidates, lambda one: world.check(one.variant), world.limit_bytes)
    for best in candidates[:3]:
        shown = varied(front, best, most)
        assert shown[0] is best
        assert len(shown) <= most
        assert all(one in [each for each, _ in front] for one in shown[1:])
    assert varied(front, None, most) == []


@whatever_it_takes
@given(worlds, st.sampled_from(PREFERENCES))
def test_what_is_much_faster_than_the_best_is_shown_beside_it(
    world: World, prefer: Preference
) -> None:
    found = found_in(world, prefer)
    if found.best is None:
        return
    shown_s = min(world.seconds(one) or 0.0 for one in found.shown)
    for one in variants(SMALL):
        if world.knows(one) and world.check(one).fits == "yes":
            seconds = world.seconds(one) or 0.0
            assert shown_s <= seconds * (1 + NEAR_RATIO) + 1e-9, one


@whatever_it_takes
@given(worlds)
def test_what_all_gpus_would_give_is_shown_unless_fewer_give_as_much(world: World) -> None:
    found = found_in(world, "balance")
    if found.best is None or found.best.num_gpus == 4:
        return
    fitting = [
        one for one in variants(SMALL) if world.knows(one) and world.check(one).fits == "yes"
    ]
    fewer_s = min((world.seconds(one) or inf for one in fitting if one.num_gpus < 4), default=inf)
    on_all_s = min((world.seconds(one) or inf for one in fitting if one.num_gpus == 4), default=inf)
    if on_all_s < fewer_s:  # nothing beats it, so it is on the front
        assert any(shown.num_gpus == 4 for shown in found.shown)


# ---- times that nobody knows -------------------------------------------------------------------


@whatever_it_takes
@given(worlds)
def test_a_time_that_nobody_knows_is_never_the_fastest(world: World) -> None:
    untimed = replace(world, has_times=False)  # on several GPUs
    found = found_in(untimed, "time")
    alone = [one for one in variants(SMALL) if one.num_gpus == 1]
    timed = [one for one in alone if untimed.knows(one)]
    assert 0 < found.fastest_s == min((untimed.seconds(one) or inf) for one in timed)
    if any(untimed.check(one).fits == "yes" for one in timed):
        assert found.best is not None
        assert found.best.num_gpus == 1
    elif found.best is not None and found.best.num_gpus > 1:
        assert found.best_s is None


def test_where_nothing_is_known_one_clear_error_says_why() -> None:
    class Unknown(World):
        def knows(self, _: Variant) -> bool:
            return False

    with pytest.raises(UsageError, match="no two variants to compare"):
        search(SMALL, Unknown(0, 100), 100)


def test_batch_norm_makes_every_way_to_split_the_batch_a_change() -> None:
    model = replace(BERT, batch_norm_names=("stem.norm",))
    splitting = frozenset({"accumulation", "ddp", "fsdp", "hybrid"})
    request = plain(batch_size=8, max_gpus=4, possible=model, allow=splitting)
    found = found_in(World(0, 110), "balance", choices_for(request, ()))
    assert found.choices.changing == splitting
