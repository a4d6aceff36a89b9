"""Eager attention is exchanged for the fused one, and training stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.errors import UsageError
from oomph.tricks.sdpa import attention_is, use_sdpa
from tricks import language_models as lm


@pytest.mark.parametrize("make", [lm.gpt2, lm.llama])
def test_loss_and_gradients_stay_the_same(make: Any) -> None:
    eager, fused = make(attn_implementation="eager"), make(attn_implementation="eager")
    assert attention_is(eager) == "eager"
    use_sdpa(fused)
    assert attention_is(fused) == "sdpa"
    losses = [model(**lm.text()).loss for model in (eager, fused)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-7, atol=0)
    lm.assert_same(lm.gradients(eager), lm.gradients(fused), within=1e-6)  # llama's softmax is fp32


def test_a_model_that_has_it_already_is_left_alone() -> None:
    model = lm.llama()
    assert attention_is(model) == "sdpa"
    before = dict(vars(model.config))
    use_sdpa(model)
    assert vars(model.config) == before


def test_a_model_of_ones_own_is_told_what_to_call() -> None:
    assert attention_is(torch.nn.Linear(3, 3)) == "unknown"
    with pytest.raises(UsageError) as raised:
        use_sdpa(torch.nn.Linear(3, 3))
    assert "scaled_dot_product_attention" in str(raised.value)


def test_a_model_without_fused_attention_says_so() -> None:
    import transformers

    mpt = transformers.MptForCausalLM(
        transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=64, max_seq_len=32)
    )
    if attention_is(mpt) == "sdpa":
        pytest.skip("this transformers has a fused attention for it")
    with pytest.raises(UsageError):
        use_sdpa(mpt)
