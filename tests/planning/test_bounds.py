"""What is left out without a rehearsal holds too much in every rehearsal."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from predicting.footprints import CAPABILITY, workload

from oomph.planning.bounds import (
    Held,
    held_by,
    least_bytes,
    least_bytes_sharded,
    sharing_limit,
    without_hopeless,
)
from oomph.planning.rehearsals import footprint_of_one
from oomph.predicting.footprint import Footprint
from oomph.records.workload import Variant
from oomph.rehearsing.child import in_a_child
from oomph.tricks.definition import Severity
from oomph.units import GIB

AS_GIVEN = Variant(micro_batch=2)
FSDP = Variant(micro_batch=2, sharding="fsdp", num_gpus=2)
VARIANTS = (
    AS_GIVEN,
    FSDP,
    replace(FSDP, num_gpus=3, precision="bf16"),
    replace(FSDP, num_gpus=8, precision="pure-bf16", checkpointing="blocks"),
    replace(FSDP, sharding="hybrid", num_gpus=4, precision="fp16", optimizer="fused"),
    replace(FSDP, sharding="ddp", optimizer="8-bit"),
    replace(AS_GIVEN, offload_optimizer=True),
    replace(AS_GIVEN, optimizer_in_backward=True),
    replace(AS_GIVEN, precision="bf16", zero_offload=True),
    replace(AS_GIVEN, precision="fp16", zero_offload=True),
)
ONE = Variant(micro_batch=1, accumulation=2, sharding="fsdp", num_gpus=2)
SHARED = tuple(replace(ONE, num_gpus=number) for number in (2, 4, 16))
MODEL = Held(parameter_bytes=100 * GIB, gradient_bytes=100 * GIB)


@functools.cache
def rehearsed() -> dict[Variant, Footprint]:
    def work() -> dict[Variant, Footprint]:
        from oomph.rehearsing.rehearse import prepare, rehearse

        prepare(CAPABILITY)
        trained = replace(workload(), clip_grad_norm=None)
        return {
            each: footprint_of_one(rehearse(trained, each, CAPABILITY))
            for each in (*VARIANTS, *SHARED)
        }

    return in_a_child(work)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rehearsal_holds_less(variant: Variant) -> None:
    held = held_by(rehearsed()[AS_GIVEN], 2)
    least = least_bytes(variant, held)
    assert 0 < least <= rehearsed()[variant].live_bytes(2)
    if variant == AS_GIVEN:
        assert held.parameter_bytes == held.gradient_bytes == least // 2


def test_what_may_hold_other_parameters_has_no_bound() -> None:
    assert least_bytes(replace(FSDP, adapters="qlora"), MODEL) == 0


def of(*variants: Variant) -> list[tuple[Variant, Variant]]:
    return [(one, replace(one, optimizer_in_backward=False)) for one in variants]


def test_too_few_shards_are_left_out_and_the_reason_says_what_each_gpu_needs() -> None:
    two, four = FSDP, replace(FSDP, num_gpus=4)
    kept, rejected = without_hopeless(of(AS_GIVEN, two, four), MODEL, 80 * GIB)
    assert kept == [AS_GIVEN, four]  # one GPU is always compared
    assert [one.what for one in rejected] == ["fsdp on 2 GPUs in fp32"]
    assert "100.0 GiB on each GPU" in rejected[0].why


def test_a_trick_that_may_make_it_fit_is_compared_with_the_variant_without_it() -> None:
    in_backward = replace(FSDP, optimizer_in_backward=True)
    four = replace(FSDP, num_gpus=4)
    kept, rejected = without_hopeless(of(FSDP, in_backward, four), MODEL, 80 * GIB)
    assert kept == [FSDP, in_backward, four]
    assert not rejected


def test_if_no_number_of_gpus_is_enough_all_are_compared() -> None:
    kept, rejected = without_hopeless(of(AS_GIVEN, FSDP), MODEL, 10 * GIB)
    assert kept == [AS_GIVEN, FSDP]
    assert not rejected


# ---- what no number of GPUs is enough for --------------------------------------------------------


def bytes_of(variant: Variant) -> int:
    """10 GiB of one example, and 80 GiB that the GPUs share."""
    return (10 * variant.micro_batch + 80 // variant.num_gpus) * GIB


TWO, FOUR = (replace(ONE, num_gpus=number) for number in (2, 4))


def test_what_the_gpus_do_not_share_is_left_on_any_number_of_them() -> None:
    assert least_bytes_sharded([TWO, FOUR], bytes_of) == 10 * GIB
    lighter = [replace(one, checkpointing="blocks") for one in (TWO, FOUR)]

    def lighter_bytes(variant: Variant) -> int:
        return bytes_of(variant) // (1 if variant.checkpointing == "none" else 2)

    assert least_bytes_sharded([TWO, FOUR, *lighter], lighter_bytes) == 5 * GIB


def test_no_rehearsal_on_more_gpus_holds_less_than_what_is_said_of_any_number() -> None:
    two, four, sixteen = (rehearsed()[each].live_bytes(1) for each in SHARED)
    least = least_bytes_sharded(SHARED[:2], lambda one: rehearsed()[one].live_bytes(1))
    assert least is not None
    assert 0 < least <= sixteen < four < two


@pytest.mark.parametrize(
    "known",
    [
        [],
        [FOUR],
        [FSDP, replace(FSDP, num_gpus=4)],  # two examples at a time
        [replace(one, sharding="ddp") for one in (TWO, FOUR)],
        [TWO, FOUR, replace(FOUR, checkpointing="blocks")],  # which may hold less
        [TWO, replace(FOUR, accumulation=1)],  # without the gradients of an earlier part
    ],
    ids=["nothing", "one number", "two examples", "ddp", "another trick", "accumulation"],
)
def test_what_nobody_knows_of_more_gpus_is_not_said(known: list[Variant]) -> None:
    assert least_bytes_sharded(known, bytes_of) is None
    assert sharing_limit(known, 64, bytes_of, 0) is None


def test_tensor_parallelism_is_named_only_where_sharding_cannot_help() -> None:
    too_large = sharing_limit([TWO, FOUR], 64, bytes_of, 9 * GIB)
    assert too_large is not None
    assert "at least 10.0 GiB" in too_large
    assert "tensor parallelism" in too_large
    assert sharing_limit([TWO, FOUR], 64, bytes_of, 11 * GIB) is None  # more GPUs would do
    too_few = sharing_limit([TWO, FOUR], 4, bytes_of, 11 * GIB)
    assert too_few is not None
    assert "No more than 4 GPUs can share a batch of 4 examples" in too_few
    assert sharing_limit([TWO], 4, bytes_of, 11 * GIB) is None  # 4 GPUs were not compared
    assert sharing_limit([], 1, bytes_of, 11 * GIB) is None


def test_offload_of_the_shards_comes_after_more_gpus_and_before_a_change_of_training() -> None:
    on_host = replace(FSDP, offload_optimizer=True)
    more = replace(FSDP, num_gpus=8)
    low = replace(FSDP, precision="pure-bf16", num_gpus=8)

    def kept(*pairs: tuple[Variant, Variant]) -> list[Variant]:
        found, _ = without_hopeless(
            pairs,
            MODEL,
            40 * GIB,
            lambda one: (Severity.NUMBERS,) if one.precision == "pure-bf16" else (),
        )
        return found

    of_host = ((FSDP, FSDP), (on_host, FSDP))
    assert kept(*of_host, (more, more)) == [more]
    assert kept(*of_host, (low, low)) == [FSDP, on_host, low]
