"""What can be put on a model is told by looking at it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from rehearsing.zoo import TORCH_MODELS
from rehearsing.zoo.hugging_face import more_transformers_models, transformers_models

from oomph.records.workload import Possible
from oomph.tricks.apply import possible

MODELS = {**TORCH_MODELS, **dict(transformers_models()), **dict(more_transformers_models())}


def looked_at(name: str) -> Possible:
    model = MODELS[name].make()
    trained = [p for p in model.parameters() if p.requires_grad]
    return possible(model, torch.optim.AdamW(trained))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_looked_at(name: str) -> None:
    found = looked_at(name)
    model = MODELS[name].make()
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    assert found.parameter_bytes == 4 * found.num_parameters
    assert 0 < found.num_trainable <= found.num_parameters
    assert (found.num_blocks > 0) >= MODELS[name].has_blocks
    assert found.optimizer_class == "torch.optim.adamw.AdamW"


def test_attention_is_told() -> None:
    assert looked_at("bert eager").attention_is == "eager"
    assert looked_at("bert sdpa").attention_is == "sdpa"
    assert looked_at("vit").attention_is == "unknown"


def test_heads_are_told() -> None:
    with_heads = {name for name in MODELS if "chunked-loss" not in looked_at(name).impossible}
    assert {"gpt2", "llama", "mistral", "qwen2", "mixtral"} <= with_heads
    assert not {"bert sdpa", "roberta", "t5", "gemma2", "vit", "tied"} & with_heads


def test_batch_norms_and_dropout_are_named() -> None:
    resnet = looked_at("resnet")
    assert resnet.batch_norm_names
    assert not resnet.has_dropout
    assert looked_at("vit").batch_norm_names == ()
    assert looked_at("encoder").has_dropout
    assert looked_at("gru").has_dropout


class WithSettings(torch.nn.Linear):
    """As diffusers' models: a missing attribute is looked up in the settings, with a warning."""

    def __getattr__(self, name: str) -> Any:
        if name == "dropout":
            warnings.warn("read it from the settings", FutureWarning, stacklevel=2)
            return 0.1
        return super().__getattr__(name)


def test_a_rate_in_the_settings_is_no_dropout_and_is_not_read() -> None:
    model = torch.nn.Sequential(WithSettings(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = possible(model, torch.optim.AdamW(model.parameters()))
    assert not found.has_dropout


def test_a_frozen_model_has_little_that_is_trained() -> None:
    assert looked_at("lora").num_trainable < looked_at("vit").num_parameters


def test_blocks_are_named_as_the_model_names_them() -> None:
    assert looked_at("llama").block_names == ("model.layers.0", "model.layers.1")
