"""Every way that is looked at keeps the batch, and does nothing that nobody agreed to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.errors import UsageError
from oomph.planning.choices import (
    check_names,
    choices_for,
    micro_batches,
    variants,
)
from oomph.records.workload import Possible
from oomph.tricks.definition import Request
from oomph.tricks.trick import BATCH_SIZE, NAMES, NEED_CONSENT, contradiction_in, tricks_on
from planning.plans import whatever_it_takes

BERT = Possible(
    block_names=("layer.0", "layer.1"),
    attention_is="eager",
    optimizer_class="torch.optim.adamw.AdamW",
    batch_norm_names=(),
    has_dropout=True,
    num_parameters=1000,
    num_trainable=1000,
    parameter_bytes=4000,
)
SPLITTING = ("accumulation", "ddp", "fsdp", "hybrid")

possibles = st.builds(
    replace,
    st.just(BERT),
    block_names=st.sampled_from([(), ("layer.0", "layer.1")]),
    attention_is=st.sampled_from(["eager", "sdpa", "none", "unknown"]),
    impossible=st.dictionaries(
        st.sampled_from(["chunked-loss", "lora", "qlora"]), st.just("it is no language model")
    ),
    optimizer_class=st.sampled_from(
        ["torch.optim.adamw.AdamW", "torch.optim.sgd.SGD", "bitsandbytes.optim.AdamW8bit"]
    ),
    batch_norm_names=st.sampled_from([(), ("stem.norm", "head.norm")]),
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    allow = draw(st.sets(st.sampled_from(NAMES), max_size=4))
    forbid = draw(st.sets(st.sampled_from(NAMES), max_size=6))
    return Request(
        batch_size=draw(st.integers(1, 96)),
        capability=draw(st.sampled_from([(7, 0), (7, 5), (8, 0), (9, 0)])),
        possible=draw(possibles),
        clips_gradients=draw(st.booleans()),
        max_gpus=draw(st.sampled_from([1, 2, 3, 4, 6, 9])),
        allow=frozenset(allow - forbid),
        forbid=frozenset(forbid),
    )


@whatever_it_takes
@given(requests())
def test_every_way_keeps_the_batch_and_what_was_agreed(request: Request) -> None:
    found = list(variants(choices_for(request, ("selective", "blocks"))))
    assert found
    assert len(set(found)) == len(found)
    may_change = {name for name in NEED_CONSENT if name in request.allow}
    if request.possible.batch_norm_names:
        may_split = {name for name in SPLITTING if name in request.allow}
    else:
        may_split = set(SPLITTING)
    for variant in found:
        names = {trick.name for trick in tricks_on(variant)}
        assert not names & request.forbid
        assert names & {*NEED_CONSENT} <= may_change
        assert names & {*SPLITTING} <= may_split
        assert variant.num_gpus <= request.max_gpus
        assert contradiction_in(variant, clips_gradients=request.clips_gradients) is None
        if variant.batch_size != request.batch_size:
            assert BATCH_SIZE in request.allow
            assert request.batch_size % variant.batch_size == 0
        if request.capability < (8, 0):
            assert variant.precision in ("fp32", "fp16")
        if not request.possible.block_names:
            assert variant.checkpointing == "none"


@whatever_it_takes
@given(requests())
def test_what_is_left_out_is_told_with_its_reason(request: Request) -> None:
    choices = choices_for(request, ("selective", "blocks"))
    told = {one.what: one.why for one in choices.rejected}
    used = {trick.name for variant in variants(choices) for trick in tricks_on(variant)}
    assert all(told.values())
    assert not used & told.keys()
    for name in request.forbid:
        assert name in told


def plain(**changes: Any) -> Request:
    given = {"batch_size": 64, "capability": (8, 0), "possible": BERT, "clips_gradients": False}
    return Request(**{**given, **changes})


def left_out(request: Request) -> dict[str, str]:
    return {one.what: one.why for one in choices_for(request, ("blocks",)).rejected}


def test_what_a_check_found_to_change_training_needs_consent() -> None:
    checked = {"accumulation": "changes", "bf16": "changes", "checkpointing": "same"}
    why = left_out(plain(checked=checked))
    for name in ("accumulation", "bf16"):
        assert why[name] == f"changes this training, as oomph check found: --allow {name}"
    assert "checkpointing" not in why
    agreed = plain(checked=checked, allow=frozenset({"accumulation"}))
    assert "accumulation" not in left_out(agreed)
    assert choices_for(agreed, ()).changing == {"accumulation", "bf16"}


def test_what_a_check_has_proven_counts_more_than_batch_norm_does() -> None:
    frozen = replace(BERT, batch_norm_names=("stem.norm",))
    assert "accumulation" in left_out(plain(possible=frozen))
    proven = plain(possible=frozen, checked={"accumulation": "same"})
    assert "accumulation" not in left_out(proven)
    assert "accumulation" not in choices_for(proven, ()).changing


def test_batch_norm_that_would_see_a_part_of_the_batch_needs_consent() -> None:
    model = replace(BERT, batch_norm_names=("stem.norm",))
    why = left_out(plain(possible=model, max_gpus=4))  # of which hybrid makes two groups
    for name in SPLITTING:
        assert "1 BatchNorm layers (stem.norm, ...)" in why[name]
        assert f"--allow {name}" in why[name]
    allowed = plain(possible=model, max_gpus=4, allow=frozenset({"accumulation"}))
    found = {v.accumulation for v in variants(choices_for(allowed, ()))}
    assert max(found) > 1


# ---- several GPUs ------------------------------------------------------------------------------


def numbers_of(kind: str, **changes: Any) -> set[int]:
    """The numbers of GPUs that a way to share the work is looked at with."""
    found = variants(choices_for(plain(**changes), ("blocks",)))
    return {variant.num_gpus for variant in found if variant.sharding == kind}


def test_hybrid_is_looked_at_where_gpus_make_several_equal_groups() -> None:
    assert numbers_of("hybrid", max_gpus=16) == {4, 8, 16}
    assert numbers_of("fsdp", max_gpus=16) == {2, 4, 8, 16}
    assert "hybrid" not in left_out(plain(max_gpus=4))
    assert numbers_of("hybrid", max_gpus=2) == set()
    assert left_out(plain(max_gpus=2))["hybrid"] == (
        "2 GPUs cannot form several equal groups: use fsdp"
    )
    assert left_out(plain())["hybrid"] == "only one GPU is allowed: --max-gpus"


def test_gpus_of_several_machines_fill_them() -> None:
    of_six = {"batch_size": 48, "max_gpus": 16, "gpus_per_node": 6}
    assert numbers_of("fsdp", **of_six) == {2, 4, 6, 12}
    assert numbers_of("hybrid", **of_six) == {4, 6, 12}
    assert "fill machines of 6" in left_out(plain(**of_six))["more than 12 GPUs"]
    assert numbers_of("ddp", batch_size=48, max_gpus=12) == {2, 4, 8}
    assert "--gpus-per-node" in left_out(plain(batch_size=48, max_gpus=12))["more than 8 GPUs"]
    assert numbers_of("ddp", batch_size=48, max_gpus=12, gpus_per_node=12) == {2, 4, 8, 12}
    assert numbers_of("hybrid", max_gpus=4, gpus_per_node=1) == set()


def test_only_variants_on_several_gpus_know_their_machines() -> None:
    found = list(variants(choices_for(plain(max_gpus=4, gpus_per_node=2), ())))
    assert {(one.num_gpus > 1, one.gpus_per_node) for one in found} == {(False, 8), (True, 2)}


def test_a_batch_that_the_gpus_cannot_share_is_shared_by_fewer_and_said() -> None:
    assert numbers_of("ddp", max_gpus=3) == {2}
    assert "batch of 64 cannot be divided" in left_out(plain(max_gpus=3))["more than 2 GPUs"]
    assert numbers_of("ddp", max_gpus=8, batch_size=15) == {5}
    assert numbers_of("ddp", max_gpus=8, batch_size=60) == {2, 4, 6}
    assert numbers_of("ddp", max_gpus=4, batch_size=7) == set()
    why = left_out(plain(max_gpus=4, batch_size=7))
    for name in ("ddp", "fsdp", "hybrid"):
        assert why[name] == "a batch of 7 cannot be divided equally among up to 4 GPUs"


def test_several_gpus_have_the_ways_of_one() -> None:
    def ways(num_gpus: int, kind: str) -> set[tuple[str, bool, bool]]:
        return {
            (one.checkpointing, one.offload_activations, one.offload_optimizer)
            for one in variants(choices)
            if one.num_gpus == num_gpus and one.sharding == kind
        }

    choices = choices_for(plain(max_gpus=4), ("selective", "blocks"))
    alone = ways(1, "none")
    assert {way for way, _, _ in alone} == {"none", "selective", "blocks"}
    for kind in ("ddp", "fsdp", "hybrid"):
        assert ways(4, kind) == alone


def test_one_example_a_gpu_is_looked_at_where_that_is_all_that_a_gpu_gets() -> None:
    choices = replace(choices_for(plain(max_gpus=4, batch_size=4), ()), least_micro_batch=2)
    splits = {(one.num_gpus, one.micro_batch) for one in variants(choices)}
    assert splits == {(1, 4), (1, 2), (2, 2), (4, 1)}


def test_bf16_makes_fp16_pointless_unless_it_is_asked_for() -> None:
    assert "bf16 is as fast" in left_out(plain())["fp16"]
    assert "fp16" not in left_out(plain(allow=frozenset({"fp16"})))
    assert "fp16" not in left_out(plain(forbid=frozenset({"bf16"})))
    assert "fp16" not in left_out(plain(capability=(7, 0)))


@pytest.mark.parametrize(
    ("batch_size", "num_gpus", "expected"),
    [
        (64, 1, [64, 32, 16, 8, 4, 2, 1]),
        (64, 4, [16, 8, 4, 2, 1]),
        (48, 1, [48, 24, 16, 8, 4, 2, 1]),  # 12, 6 and 3 divide it, too
        (7, 1, [7, 1]),
        (1, 1, [1]),
        (15, 1, [15, 5, 3, 1]),  # nothing in it that kernels like
        (7, 2, []),
    ],
)
def test_micro_batches_divide_the_batch_and_are_friendly(
    batch_size: int, num_gpus: int, expected: list[int]
) -> None:
    assert micro_batches(batch_size, num_gpus) == expected


def test_a_prime_batch_is_told_that_nothing_divides_it() -> None:
    why = left_out(plain(batch_size=61))
    assert why["micro-batches between 1 and 61"] == (
        "61 is a prime number: a batch of 64 can be divided"
    )
    for batch_size in (7, 60, 64):
        assert not any("prime" in why for why in left_out(plain(batch_size=batch_size)).values())
    forbidden = plain(batch_size=61, forbid=frozenset({"accumulation"}))
    assert left_out(forbidden)["accumulation"] == "forbidden"
    assert "micro-batches between 1 and 61" not in left_out(forbidden)


def test_a_name_that_is_no_trick_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="--allow 'magic': there is no such trick") as raised:
        check_names(["lora", "magic"], "--allow")
    assert "qlora" in str(raised.value)
    assert check_names(["lora", "sgd"], "--allow") == {"lora", "sgd"}


@pytest.mark.parametrize(
    ("optimizer_class", "trick"),
    [("torch.optim.sgd.SGD", "sgd"), ("torch.optim._adafactor.Adafactor", "adafactor")],
)
def test_an_optimizer_is_not_exchanged_for_itself(optimizer_class: str, trick: str) -> None:
    of = replace(BERT, optimizer_class=optimizer_class)
    request = plain(possible=of, allow=frozenset({"sgd", "adafactor"}))
    found = choices_for(request, ("blocks",))
    assert trick not in found.settings["optimizer"]
    assert {one.what: one.why for one in found.rejected}[trick] == "the optimizer already is one"


def test_adapters_have_the_rank_and_targets_that_were_asked_for_and_others_have_none() -> None:
    asked = plain(
        allow=frozenset({"lora"}), lora_rank=64, lora_targets="attention", possible=replace(BERT)
    )
    found = {
        (one.adapters, one.lora_rank, one.lora_targets)
        for one in variants(choices_for(asked, ("blocks",)))
    }
    assert found == {("none", 16, "all-linear"), ("lora", 64, "attention")}


# ---- layers that several GPUs share --------------------------------------------------------------


def grids_of_layers(**changes: Any) -> set[tuple[str, int]]:
    found = variants(choices_for(plain(**changes), ("blocks",)))
    return {(one.sharding, one.num_gpus) for one in found if one.tensor_parallel > 1}


def test_layers_are_shared_only_where_that_is_asked_for() -> None:
    assert grids_of_layers(max_gpus=16) == set()
    on_two_machines = {"max_gpus": 16, "tensor_parallel": 8}
    assert grids_of_layers(**on_two_machines) == {("none", 8), ("fsdp", 16)}
    assert grids_of_layers(max_gpus=8, tensor_parallel=2) == {
        *(("none", 2), ("fsdp", 4), ("fsdp", 8))
    }
    assert grids_of_layers(max_gpus=16, tensor_parallel=16) == set()  # on two machines of 8


def test_only_groups_of_gpus_that_share_layers_divide_the_batch() -> None:
    of_six = {"batch_size": 6, "max_gpus": 64, "tensor_parallel": 8}
    assert grids_of_layers(**of_six) == {("none", 8), ("fsdp", 16)}
    found = list(variants(choices_for(plain(**of_six), ())))
    assert {one.batch_size for one in found} == {6}


def test_a_model_whose_layers_cannot_be_divided_is_left_as_it_is() -> None:
    refusing = replace(BERT, impossible={"tensor-parallel": "its layers are not known"})
    request = plain(max_gpus=8, tensor_parallel=8, possible=refusing)
    assert not any(one.tensor_parallel > 1 for one in variants(choices_for(request, ())))
    assert left_out(request)["tensor-parallel"] == "its layers are not known"
    forbidding = plain(max_gpus=8, tensor_parallel=8, forbid=frozenset({"tensor-parallel"}))
    assert left_out(forbidding)["tensor-parallel"] == "forbidden"
