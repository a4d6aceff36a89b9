"""Which models can be divided layer by layer, and what their ranks learn."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from oomph.errors import UsageError
from oomph.records.workload import Variant, check_sharding, grid_of, num_groups
from oomph.tricks.tensor_parallel import Layers, layers_of, split_layers
from oomph.tricks.trick import contradiction_in

LENIENT = 1e-5  # of the largest gradient
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}


def language_models() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of transformers, small: those that can be divided."""
    import transformers as t

    configs = {
        "llama": t.LlamaConfig(**GROUPED),
        "llama with tied embeddings": t.LlamaConfig(**GROUPED, tie_word_embeddings=True),
        "mistral": t.MistralConfig(**GROUPED),
        "qwen2": t.Qwen2Config(**GROUPED),
        "qwen3": t.Qwen3Config(**GROUPED, head_dim=16),  # with norms of heads
        "gemma": t.GemmaConfig(**GROUPED, head_dim=16),  # with an embedding of its own
    }
    for name, config in configs.items():
        config.use_cache = False
        yield name, partial(t.AutoModelForCausalLM.from_config, config)


def refused(model: nn.Module) -> str:
    why = layers_of(model)
    assert isinstance(why, str)
    return why


# ---- what is divided -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, _ in language_models()])
def test_language_models_are_divided_from_the_embedding_to_the_head(name: str) -> None:
    found = layers_of(dict(language_models())[name]())
    assert isinstance(found, Layers)
    assert (found.embedding, found.norm, found.head) == (
        "model.embed_tokens",
        "model.norm",
        "lm_head",
    )
    assert found.whole == ()
    block = found.blocks["model.layers.0"]
    assert len(block.columns) == 5
    assert len(block.rows) == 2
    assert set(block.gathering) == {"model.layers.0.self_attn", "model.layers.0.mlp"}


def test_norms_of_heads_are_told_from_norms_of_the_width() -> None:
    found = layers_of(dict(language_models())["qwen3"]())
    assert isinstance(found, Layers)
    block = found.blocks["model.layers.1"]
    attention = "model.layers.1.self_attn"
    assert set(block.norms_of_heads) == {f"{attention}.q_norm", f"{attention}.k_norm"}
    assert len(block.norms) == 2


def test_fused_queries_keys_and_values_are_refused() -> None:
    import transformers as t

    config = t.Phi3Config(**GROUPED, pad_token_id=0)
    assert "self_attn.o_proj (Linear)" in refused(t.AutoModelForCausalLM.from_config(config))


def test_torchs_own_attention_is_refused_by_name() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    assert "self_attn (MultiheadAttention)" in refused(nn.TransformerEncoder(layer, 2))


def test_a_model_without_blocks_is_refused() -> None:
    assert refused(nn.Linear(4, 4)) == "it has no repeated blocks"


def test_experts_are_refused_by_name() -> None:
    import transformers as t

    config = t.MixtralConfig(**GROUPED, num_local_experts=2)
    assert "model.layers.0.mlp" in refused(t.AutoModelForCausalLM.from_config(config))


# ---- which grids there are -----------------------------------------------------------------------


def test_gpus_that_share_layers_are_divided_among_groups_of_them() -> None:
    how = Variant(micro_batch=2, accumulation=3, num_gpus=64, tensor_parallel=8, sharding="fsdp")
    assert grid_of(how) == (1, 8)
    assert how.num_data_gpus == 8
    assert how.batch_size == 2 * 3 * 8
    assert num_groups(how) == 2


def test_hybrid_keeps_shards_and_layers_on_one_machine() -> None:
    how = Variant(micro_batch=1, num_gpus=32, tensor_parallel=2, sharding="hybrid")
    assert grid_of(how) == (4, 4)
    assert num_groups(how) == 3


@pytest.mark.parametrize(
    ("given", "found"),
    [((None, 8, 8, 8), "none"), ((None, 16, 8, 8), "fsdp"), (("hybrid", 16, 8, 2), "hybrid")],
)
def test_the_sharding_is_among_groups_that_share_layers(given: Any, found: str) -> None:
    assert check_sharding(*given) == found


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("fsdp", 12, 8, 8), "12"),  # no equal groups
        (("fsdp", 32, 8, 16), "one machine"),
        (("fsdp", 24, 12, 8), "one machine"),  # a group would lie on two
        (("fsdp", 8, 8, 8), "nothing to divide"),
        (("ddp", 16, 8, 8), "ddp"),
        (("fsdp", 8, 8, 0), "0"),
    ],
)
def test_an_impossible_grid_is_refused(given: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_sharding(*given)


@pytest.mark.parametrize(
    "changes",
    [
        {"adapters": "lora"},
        {"loss": "chunked"},
        {"optimizer": "8-bit"},
        {"offload_optimizer": True},
        {"optimizer_in_backward": True},
        {"precision": "fp16"},
    ],
)
def test_what_was_not_tried_on_parts_of_layers_is_refused(changes: Any) -> None:
    how = Variant(micro_batch=1, num_gpus=8, tensor_parallel=8, **changes)
    assert contradiction_in(how, clips_gradients=False) is not None
    alone = Variant(micro_batch=1, **changes)
    assert contradiction_in(alone, clips_gradients=False) is None


# ---- what ranks learn ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt() -> dict[str, Any]:
    """Two real processes, joined by gloo."""
    from rehearsing import children

    run = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    child = children.start_module(*run, "-m", "tricks.test_tensor_parallel")
    return {one["model"]: one for one in children.found_by(child)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in language_models()])
def test_two_ranks_have_the_loss_and_the_gradients_of_one(
    name: str, learnt: dict[str, Any]
) -> None:
    assert learnt[name]["loss_differs_by"] < LENIENT
    assert learnt[name]["gradients_differ_by"] < LENIENT


@pytest.mark.slow
def test_tied_embeddings_stay_tied(learnt: dict[str, Any]) -> None:
    assert learnt["llama with tied embeddings"]["is_tied"]
    assert not learnt["llama"]["is_tied"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("odd heads", "heads"),
        ("an odd sequence", "share the second dimension"),
        ("tokens without their sequences", "not examples, sequence and width"),
    ],
)
def test_what_cannot_be_shared_equally_is_refused(
    name: str, why: str, learnt: dict[str, Any]
) -> None:
    assert why in learnt[name]["refused"]


def compared(make: Callable[[], Any], mesh: Any, length: int = 32) -> dict[str, Any]:
    import copy

    torch.manual_seed(0)
    alone = make()
    shared: Any = split_layers(copy.deepcopy(alone), mesh)
    tokens = torch.randint(0, 512, (3, length))
    losses = []
    for model in (alone, shared):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(float(loss.detach()))
    pairs = zip(alone.parameters(), shared.parameters(), strict=True)
    return {
        "loss_differs_by": abs(losses[0] - losses[1]),
        "gradients_differ_by": max(_off(one.grad, other.grad) for one, other in pairs),
        "is_tied": shared.lm_head.weight is shared.model.embed_tokens.weight,
    }


def _off(one: Any, other: Any) -> float:
    return float((one - other.full_tensor()).abs().max() / one.abs().max().clamp(min=1e-9))


def impossible() -> Iterator[tuple[str, Callable[[], Any], int]]:
    import transformers as t

    odd = {**SMALL, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    yield "odd heads", lambda: t.LlamaForCausalLM(t.LlamaConfig(**odd)), 32
    yield "an odd sequence", dict(language_models())["llama"], 31
    opt = t.OPTConfig(
        hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512,
        word_embed_proj_dim=64, max_position_embeddings=64,
    )  # fmt: skip
    yield "tokens without their sequences", lambda: t.OPTForCausalLM(opt), 32


def main() -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    found = [{"model": name, **compared(make, mesh)} for name, make in language_models()]
    for name, make, length in impossible():
        try:
            compared(make, mesh, length)
        except UsageError as error:  # noqa: PERF203 - each is an answer
            found.append({"model": name, "refused": error.in_one_line()})
    if distributed.get_rank() == 0:
        sys.stdout.writelines(json.dumps(one) + "\n" for one in found)
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in pretending/real_ranks.py


if __name__ == "__main__":
    main()
