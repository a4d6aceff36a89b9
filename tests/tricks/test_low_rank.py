"""LoRA: the same output at first, and only adapters are trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.errors import UsageError
from oomph.tricks.lora import ALPHA, RANK, adaptable, put_adapters
from tricks import language_models as lm


@pytest.mark.parametrize("make", [lm.gpt2, lm.llama])
def test_at_first_the_output_is_that_of_the_model(make: Any) -> None:
    plain, adapted = make(), make()
    put_adapters(adapted, is_quantised=False)
    assert torch.equal(plain(**lm.text()).logits, adapted(**lm.text()).logits)


@pytest.mark.parametrize("make", [lm.gpt2, lm.llama])
def test_only_adapters_are_trained_and_they_do_learn(make: Any) -> None:
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    put_adapters(model, is_quantised=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(**lm.text()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert {name.rpartition(".")[2] for name in lm.gradients(model)} == {"lora_A", "lora_B"}
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_an_adapter_is_what_the_paper_says() -> None:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 4)) for _ in range(2))
    put_adapters(model, is_quantised=False)
    layer: Any = model.layers[0][0]  # type: ignore[index]
    torch.nn.init.normal_(layer.lora_B)
    x = torch.randn(5, 6)
    merged = layer.weight + ALPHA / RANK * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(layer(x), x @ merged.t() + layer.bias)


def test_every_linear_layer_of_the_blocks_has_one_and_the_head_has_none() -> None:
    names = adaptable(lm.gpt2())
    assert len(names) == 2 * 4
    assert "lm_head" not in names


def test_a_new_classifier_is_trained_too() -> None:
    import transformers

    bert = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=64,
            intermediate_size=32,
        )
    )
    put_adapters(bert, is_quantised=False)
    trained = {name for name, p in bert.named_parameters() if p.requires_grad}
    assert {"classifier.weight", "classifier.bias"} <= trained
    assert all("lora_" in name for name in trained if not name.startswith("classifier"))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="no layers that adapters"):
        put_adapters(torch.nn.Linear(3, 3), is_quantised=False)


def test_real_weights_are_not_quantised_without_the_library_or_a_gpu() -> None:
    with pytest.raises(UsageError, match="cannot be applied here"):
        put_adapters(lm.llama(), is_quantised=True)


def test_layers_that_are_not_linear_cannot_be_quantised() -> None:
    with pytest.raises(UsageError, match="4 bits"):
        put_adapters(lm.gpt2(), is_quantised=True)
