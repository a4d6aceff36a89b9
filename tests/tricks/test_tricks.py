"""Each trick is on where its setting is, says what it does, and is named once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from planning.plans import variant_of, variants, whatever_it_takes

from oomph.planning.ranking import STABILITIES, stability_of, tricks_of
from oomph.predicting.combinations import key_of, pass_settings_of, step_of
from oomph.records.workload import Variant
from oomph.tricks.trick import BATCH_SIZE, BY_NAME, NAMES, NEED_CONSENT, TRICKS, tricks_on

ON: dict[str, dict[str, Any]] = {
    "expandable-segments": {"expandable_segments": True},
    "sdpa": {"attention": "sdpa"},
    "fused-optimizer": {"optimizer": "fused"},
    "optimizer-in-backward": {"optimizer_in_backward": True},
    "accumulation": {"micro_batch": 4, "accumulation": 16},
    "chunked-loss": {"loss": "chunked"},
    "checkpointing": {"checkpointing": "blocks:0-3"},
    "for-loop-optimizer": {"optimizer": "for-loop"},
    "ddp": {"num_gpus": 2, "sharding": "ddp"},
    "fsdp": {"num_gpus": 2, "sharding": "fsdp"},
    "hybrid": {"num_gpus": 4, "sharding": "hybrid"},
    "tensor-parallel": {"num_gpus": 2, "tensor_parallel": 2},
    "offload-activations": {"offload_activations": True},
    "offload-optimizer": {"offload_optimizer": True},
    "zero-offload": {"zero_offload": True},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "channels-last": {"channels_last": True},
    "8-bit-optimizer": {"optimizer": "8-bit"},
    "pure-bf16": {"precision": "pure-bf16"},
    "adafactor": {"optimizer": "adafactor"},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon"},
    "lora": {"adapters": "lora"},
    "qlora": {"adapters": "qlora"},
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_lever_is_on_where_its_setting_is_and_no_other_is(name: str) -> None:
    variant = Variant(**{"micro_batch": 64, **ON[name]})
    assert [trick.name for trick in tricks_on(variant)] == [name]
    trick = tricks_of(variant)[0]
    assert trick.what
    assert trick.code
    assert trick.stability == BY_NAME[name].stability


@pytest.mark.parametrize("name", BY_NAME)
def test_no_variant_takes_the_rehearsal_of_another(name: str) -> None:
    plain, other = Variant(micro_batch=64), Variant(**{"micro_batch": 64, **ON[name]})
    if name == "tf32":  # other rates, and the same memory
        return
    assert key_of(other) != key_of(plain)


@pytest.mark.parametrize("adapters", ["lora", "qlora"])
@pytest.mark.parametrize("settings", [{"lora_rank": 8}, {"lora_targets": "attention"}])
def test_other_adapters_are_rehearsed_anew(adapters: Any, settings: dict[str, Any]) -> None:
    usual = Variant(micro_batch=64, adapters=adapters)
    other = Variant(micro_batch=64, adapters=adapters, **settings)
    assert pass_settings_of(usual) != pass_settings_of(other)
    assert step_of(usual) != step_of(other)


def test_a_workload_as_it_is_has_no_trick() -> None:
    assert tricks_on(Variant(micro_batch=64)) == ()
    assert stability_of(()) == "same"


def test_safety_comes_first_and_what_changes_training_last() -> None:
    places = [STABILITIES.index(trick.stability) for trick in TRICKS]
    assert places == sorted(places)
    assert len(set(NAMES)) == len(NAMES)
    assert BATCH_SIZE in NEED_CONSENT


@whatever_it_takes
@given(variants())
def test_a_plan_is_as_stable_as_its_weakest_trick(variant: Variant) -> None:
    tricks = tricks_of(variant)
    weakest = max((STABILITIES.index(trick.stability) for trick in tricks), default=0)
    assert stability_of(tricks_on(variant)) == STABILITIES[weakest]


def test_what_changes_this_model_only_is_told_so() -> None:
    variant = variant_of()  # which accumulates
    assert stability_of(tricks_on(variant), frozenset({"accumulation"})) == "changes"
    assert tricks_of(variant, frozenset({"accumulation"}))[0].stability == "changes"


@pytest.mark.parametrize(
    ("checkpointing", "said"),
    [
        ("blocks", "recompute every block in backward"),
        ("every-3", "recompute one block of 3 in backward"),
        ("blocks:0-3,6", "recompute in backward the blocks 0-3,6"),
        ("selective", "recompute in backward what is cheap"),
    ],
)
def test_checkpointing_says_what_is_recomputed(checkpointing: str, said: str) -> None:
    (trick,) = tricks_of(Variant(micro_batch=1, checkpointing=checkpointing))
    assert trick.what.startswith(said)
