"""What is left out without a rehearsal holds too much in every rehearsal."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from predicting.footprints import CAPABILITY, workload

from oomph.planning.bounds import Held, held_by, least_bytes, without_hopeless
from oomph.planning.rehearsals import footprint_of_one
from oomph.predicting.footprint import Footprint
from oomph.records.workload import Variant
from oomph.rehearsing.child import in_a_child
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
)
MODEL = Held(parameter_bytes=100 * GIB, gradient_bytes=100 * GIB)


@functools.cache
def rehearsed() -> dict[Variant, Footprint]:
    def work() -> dict[Variant, Footprint]:
        from oomph.rehearsing.rehearse import prepare, rehearse

        prepare(CAPABILITY)
        trained = replace(workload(), clip_grad_norm=None)
        return {each: footprint_of_one(rehearse(trained, each, CAPABILITY)) for each in VARIANTS}

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
