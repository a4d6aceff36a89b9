"""LoRA: the same output at first, and only adapters are trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.errors import UsageError
from oomph.records.workload import LORA_RANK, Variant
from oomph.tricks.apply import put_on_built
from oomph.tricks.lora import ALPHA_PER_RANK, adaptable, put_adapters
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
    merged = layer.weight + ALPHA_PER_RANK * layer.lora_B @ layer.lora_A
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


# ---- rank and targets ----------------------------------------------------------------------------


def test_rank_and_targets_are_those_that_were_asked_for() -> None:
    variant = Variant(micro_batch=1, adapters="lora", lora_rank=4, lora_targets="attention")
    model = put_on_built(lm.llama(), variant)
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[4] for name in shapes} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {shape[0] for name, shape in shapes.items() if name.endswith("lora_A")} == {4}


@pytest.mark.parametrize("make", [lm.gpt2, lm.llama])
def test_a_rank_leaves_the_size_of_an_update_as_it_is(make: Any) -> None:
    config = make()
    put_adapters(config, is_quantised=False)
    first = next(p for name, p in config.named_parameters() if name.endswith("lora_A"))
    assert first.shape[0] == LORA_RANK


def test_attention_that_has_no_such_name_is_refused_by_what_is_missing() -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 4)) for _ in range(2))
    with pytest.raises(UsageError, match="no layers that adapters") as raised:
        put_adapters(model, is_quantised=False, targets="attention")
    assert "attn" in str(raised.value)


def test_a_model_with_adapters_gets_no_others() -> None:
    model = lm.llama()
    put_adapters(model, is_quantised=False)
    with pytest.raises(UsageError, match="has adapters already"):
        put_adapters(model, is_quantised=False)


# ---- frozen weights in 16 bits -------------------------------------------------------------------


def tied() -> Any:
    model: Any = lm.gpt2().float()
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def trained(model: Any, low: torch.dtype, num_steps: int = 3) -> list[torch.Tensor]:
    """Train adapters under autocast: losses, gradients and what has been learnt."""
    model.train()
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    found: list[torch.Tensor] = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=low):
            loss = model(**lm.text()).loss
        loss.backward()
        found += [loss.detach(), *(p.grad for p in adapters)]
        optimizer.step()
    return [*found, *(p.detach() for p in adapters)]


@pytest.mark.parametrize("make", [tied, lambda: lm.llama().float()])
@pytest.mark.parametrize("targets", ["all-linear", "attention"])
@pytest.mark.parametrize(("precision", "low"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_frozen_weights_in_16_bits_give_the_numbers_of_autocast(
    make: Any, targets: Any, precision: Any, low: str
) -> None:
    dtype = getattr(torch, low)
    whole, stored = make(), make()
    torch.manual_seed(0)
    put_adapters(whole, is_quantised=False, targets=targets)
    torch.manual_seed(0)
    variant = Variant(micro_batch=1, adapters="lora", precision=precision, lora_targets=targets)
    put_on_built(stored, variant)
    small = [p for p in stored.parameters() if p.dtype == dtype]
    assert len(small) >= 2 * 4
    for one, other in zip(trained(whole, dtype), trained(stored, dtype), strict=True):
        assert torch.equal(one, other)


def test_what_autocast_does_not_cast_stays_in_fp32() -> None:
    model: Any = tied()
    put_on_built(model, Variant(micro_batch=1, adapters="lora", precision="bf16"))
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    for name, dtype in dtypes.items():
        is_product = "c_" in name and "lora_" not in name  # c_attn, c_proj, c_fc
        assert dtype == (torch.bfloat16 if is_product else torch.float32), name
    assert model.lm_head.weight is model.transformer.wte.weight


def test_two_heads_with_one_weight_keep_it_in_common() -> None:
    model = lm.llama().float()
    model.other_head = torch.nn.Linear(16, 96, bias=False)
    model.other_head.weight = model.lm_head.weight
    put_on_built(model, Variant(micro_batch=1, adapters="lora", precision="bf16"))
    assert model.other_head.weight is model.lm_head.weight
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.other_head(torch.ones(1, 16)).dtype == torch.float32


@pytest.mark.parametrize("make", [tied, lambda: lm.llama().float()])
def test_a_model_with_stored_weights_also_runs_outside_of_autocast(make: Any) -> None:
    model = make()
    plain = model(**lm.text()).logits
    put_on_built(model, Variant(micro_batch=1, adapters="lora", precision="bf16"))
    torch.testing.assert_close(model(**lm.text()).logits, plain, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_of_a_model_in_16_bits_are_in_fp32_and_learn(dtype: Any) -> None:
    model = lm.llama().to(dtype)
    put_adapters(model, is_quantised=False)
    trained_ones = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained_ones} == {torch.float32}
    output = model(**lm.text())
    assert output.logits.dtype == dtype
    output.loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained_ones)


@pytest.mark.parametrize("adapters", ["lora", "qlora"])
def test_pure_bf16_has_adapters_in_bf16(adapters: Any) -> None:
    from oomph.tricks.lora import LORA

    code = "\n".join(
        LORA.in_code(Variant(micro_batch=1, adapters=adapters, precision="pure-bf16")).on_model
    )
    assert "autocast_adapter_dtype=False" in code
