"""What is taken over from another number of GPUs is what a rehearsal there would have said."""

from __future__ import annotations

import functools
from dataclasses import fields, replace

import numpy as np
import pytest
from predicting.footprints import CAPABILITY, workload

from oomph.planning.rehearsals import footprint_of_one, pass_footprint_like, step_like
from oomph.predicting.combinations import pass_settings_of, step_of, with_step_of
from oomph.predicting.footprint import Footprint
from oomph.records.workload import Sharding, Variant
from oomph.rehearsing.child import in_a_child

OPTIMIZERS = ("as-is", "for-loop", "fused")
ON: tuple[tuple[Sharding, int], ...] = (
    *(("ddp", 2), ("ddp", 3), ("ddp", 8), ("fsdp", 2), ("hybrid", 4)),
    *(("hybrid", 16), ("hybrid", 24)),  # both in groups of 8
)


def way(sharding: Sharding, num_gpus: int, accumulation: int = 1, **how: str) -> Variant:
    return Variant(
        micro_batch=2,
        accumulation=accumulation,
        sharding=sharding,
        num_gpus=num_gpus,
        **how,  # type: ignore[arg-type] # names of settings
    )


@functools.cache
def stepped_alone() -> dict[Variant, Footprint]:
    """The optimizer's step without forward and backward, from one child."""

    def work() -> dict[Variant, Footprint]:
        from oomph.rehearsing.rehearse import prepare, rehearse

        prepare(CAPABILITY)
        return {
            each: footprint_of_one(rehearse(workload(), each, CAPABILITY, is_step_alone=True))
            for each in (way(*on, optimizer=name) for on in ON for name in OPTIMIZERS)
        }

    return in_a_child(work)


@functools.cache
def rehearsed() -> dict[Variant, Footprint]:
    """Everything that is compared here, from one child."""

    def work() -> dict[Variant, Footprint]:
        from oomph.rehearsing.rehearse import prepare, rehearse

        prepare(CAPABILITY)
        ways = [way(*on, accumulation=steps) for on in ON for steps in (1, 2)]
        ways += [way(*on, optimizer=name) for on in ON for name in OPTIMIZERS[1:]]
        return {each: footprint_of_one(rehearse(workload(), each, CAPABILITY)) for each in ways}

    return in_a_child(work)


def assert_same(one: Footprint, two: Footprint) -> None:
    """The same requests, and the same work in the same order."""
    for field in fields(Footprint):
        before, after = getattr(one, field.name), getattr(two, field.name)
        if field.name in ("label", "module"):
            assert [one.names[i] for i in before] == [two.names[i] for i in after], field.name
        elif isinstance(before, np.ndarray) and field.name != "op":
            np.testing.assert_array_equal(before, after, err_msg=field.name)
    assert [one.kernels[number] for number in one.op] == [two.kernels[number] for number in two.op]
    assert one.host_bytes == two.host_bytes


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("known", "wanted"), [(2, 8), (8, 2), (2, 3), (3, 8)])
def test_ddp_on_another_number_of_gpus_is_as_if_rehearsed_there(
    known: int, wanted: int, accumulation: int
) -> None:
    given, asked = (way("ddp", number, accumulation) for number in (known, wanted))
    found = pass_footprint_like(
        pass_settings_of(asked), {pass_settings_of(given): rehearsed()[given]}
    )
    assert found is not None
    assert_same(found, rehearsed()[asked])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("known", "wanted"), [(16, 24), (24, 16)])
def test_hybrid_in_groups_of_the_same_size_is_as_if_rehearsed_there(
    known: int, wanted: int, accumulation: int
) -> None:
    given, asked = (way("hybrid", number, accumulation) for number in (known, wanted))
    found = pass_footprint_like(
        pass_settings_of(asked), {pass_settings_of(given): rehearsed()[given]}
    )
    assert found is not None
    assert_same(found, rehearsed()[asked])
    four = way("hybrid", 4, accumulation)  # in groups of 2
    assert pass_footprint_like(pass_settings_of(asked), {pass_settings_of(four): found}) is None


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "hybrid"])
def test_other_machines_of_the_same_groups_need_no_rehearsal(sharding: Sharding) -> None:
    given = way(sharding, 2 if sharding == "fsdp" else 4)
    asked = replace(given, gpus_per_node=2)
    footprint = rehearsed()[way("fsdp", 2)]  # whose it is does not matter
    assert pass_footprint_like(pass_settings_of(asked), {pass_settings_of(given): footprint}) is (
        footprint
    )
    assert step_like(step_of(asked), {step_of(given): footprint}) is footprint


def test_smaller_machines_make_other_groups() -> None:
    given = way("hybrid", 16)
    asked = replace(given, gpus_per_node=4)
    footprint = rehearsed()[given]
    known = {pass_settings_of(given): footprint}
    assert pass_footprint_like(pass_settings_of(asked), known) is None
    assert step_like(step_of(asked), {step_of(given): footprint}) is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("on", ON)
def test_a_step_alone_is_the_one_after_forward_and_backward(
    on: tuple[Sharding, int], optimizer: str
) -> None:
    one = way(*on, optimizer=optimizer)
    forward = rehearsed()[way(*on)]
    assert_same(
        with_step_of(forward, stepped_alone()[one]), with_step_of(forward, rehearsed()[one])
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("known", "wanted"), [(("ddp", 2), ("ddp", 8)), (("fsdp", 2), ("hybrid", 4))]
)
def test_a_step_of_equal_pieces_is_as_if_rehearsed_there(
    known: tuple[Sharding, int], wanted: tuple[Sharding, int], optimizer: str
) -> None:
    given, asked = (way(*on, optimizer=optimizer) for on in (known, wanted))
    found = step_like(step_of(asked), {step_of(given): rehearsed()[given]})
    assert found is not None
    forward = rehearsed()[replace(asked, optimizer="as-is")]
    assert_same(with_step_of(forward, found), with_step_of(forward, rehearsed()[asked]))


def test_what_divides_parameters_is_rehearsed_for_each_number_of_gpus() -> None:
    two, four = way("fsdp", 2), way("fsdp", 4)
    assert (
        pass_footprint_like(pass_settings_of(four), {pass_settings_of(two): rehearsed()[two]})
        is None
    )
    assert step_like(step_of(four), {step_of(two): rehearsed()[two]}) is None
    hybrid = way("hybrid", 4)
    assert (
        pass_footprint_like(pass_settings_of(hybrid), {pass_settings_of(two): rehearsed()[two]})
        is None
    )


def test_other_settings_are_not_taken_over() -> None:
    two = way("ddp", 2)
    known_passes, known_step = (
        {pass_settings_of(two): rehearsed()[two]},
        {step_of(two): rehearsed()[two]},
    )
    other = way("ddp", 4, precision="bf16", optimizer="fused")
    assert pass_footprint_like(pass_settings_of(other), known_passes) is None
    assert step_like(step_of(other), known_step) is None
    assert (
        pass_footprint_like(pass_settings_of(way("ddp", 4, accumulation=2)), known_passes) is None
    )
