"""A loss computed in pieces is the loss, to the last gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.errors import UsageError
from oomph.tricks import chunked_loss
from oomph.tricks.chunked_loss import chunk_loss, sum_of_losses, why_not
from tricks import language_models as lm


@pytest.fixture(params=["one part", "many parts"], autouse=True)
def _parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds for small vocabularies, of one part, and for large ones."""
    if request.param == "many parts":
        monkeypatch.setattr(chunked_loss, "_LEAST_CLASSES", 64)


@pytest.mark.parametrize("make", [lm.gpt2, lm.llama])
@pytest.mark.parametrize(
    "more", [{}, {"num_items_in_batch": torch.tensor(40)}, {"num_items_in_batch": 7}]
)
def test_loss_and_gradients_are_those_of_the_whole_logits(make: Any, more: dict[str, Any]) -> None:
    plain, chunked = make(), make()
    chunk_loss(chunked)
    losses = [model(**lm.text(), **more).loss for model in (plain, chunked)]
    for loss in losses:
        (loss * 3).backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0, check_dtype=False)
    lm.assert_same(
        lm.gradients(plain), lm.gradients(chunked), within=1e-6
    )  # transformers' loss is fp32


def test_labels_that_are_shifted_already_are_taken_as_they_are() -> None:
    plain, chunked = lm.llama(), lm.llama()
    chunk_loss(chunked)
    batch = lm.text()
    shifted = batch["labels"].roll(-1, -1)
    losses = [model(**batch, shift_labels=shifted).loss for model in (plain, chunked)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0, check_dtype=False)


def test_the_output_has_no_logits_in_training_and_has_them_elsewhere() -> None:
    model, plain = lm.llama(), lm.llama()
    chunk_loss(model)
    batch = lm.text()
    assert model(**batch).logits is None
    assert model(**batch, return_dict=False)[1] is None
    torch.testing.assert_close(model(input_ids=batch["input_ids"]).logits, plain(**batch).logits)
    with torch.no_grad():
        told = model(**batch)
    torch.testing.assert_close(told.loss, plain(**batch).loss, check_dtype=False)
    assert told.logits.shape == (3, 11, 96)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_low_precision_are_as_good_as_those_of_the_whole_logits(dtype: Any) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(4, 40, 32), torch.randn(300, 32) / 6, torch.randn(300)
    targets = torch.randint(0, 300, (4, 40))
    targets[0, :7] = -100

    def of(*, is_chunked: bool, low: Any) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        with torch.autocast("cpu", dtype=low, enabled=low is not None):
            if is_chunked:
                loss = sum_of_losses(leaves[0], leaves[1], leaves[2], targets)
            else:
                logits = torch.nn.functional.linear(*leaves).float().flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        # The scale that a GradScaler has is far beyond what fp16 can hold of a sum.
        (loss / 153 * 65536).backward()
        return [*(leaf.grad / 65536 for leaf in leaves if leaf.grad is not None)]

    exact = of(is_chunked=False, low=None)
    for true, whole, chunked in zip(
        exact, of(is_chunked=False, low=dtype), of(is_chunked=True, low=dtype), strict=True
    ):
        assert chunked.isfinite().all()
        assert (chunked - true).norm() <= 1.5 * (whole - true).norm() + 1e-7 * true.norm()


@pytest.mark.parametrize("shape", [(4, 40), (1, 7), (40,), (2, 1)])
@pytest.mark.parametrize("num_classes", [5, 300])
def test_pieces_of_any_shape_give_the_exact_sum(shape: Any, num_classes: int) -> None:
    torch.manual_seed(0)
    leaves = [
        torch.randn(size, dtype=torch.float64, requires_grad=True)
        for size in ((*shape, 8), (num_classes, 8), (num_classes,))
    ]
    targets = torch.randint(0, num_classes, shape)
    targets.view(-1)[0] = -100
    chunked = sum_of_losses(leaves[0], leaves[1], leaves[2], targets)
    logits = torch.nn.functional.linear(*leaves)
    whole = torch.nn.functional.cross_entropy(
        logits.view(-1, num_classes), targets.view(-1), reduction="sum"
    )
    torch.testing.assert_close(chunked, whole, rtol=1e-13, atol=1e-13)
    for one, other in zip(
        torch.autograd.grad(chunked, leaves), torch.autograd.grad(whole, leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_classes_that_can_never_be_chosen_give_the_loss_of_the_others() -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(5, 8), torch.randn(300, 8), torch.zeros(300)
    bias[192:] = float("-inf")  # a padded vocabulary: the last part has nothing to choose from
    targets = torch.tensor([0, 63, 64, 191, -100])
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    chunked = sum_of_losses(leaves[0], leaves[1], leaves[2], targets)
    whole = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(hidden, weight, bias), targets, reduction="sum"
    )
    torch.testing.assert_close(chunked, whole)
    chunked.backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


def test_parts_of_a_vocabulary_are_few_wide_and_all_of_it() -> None:
    for num_classes, width, most in [(32000, 4096, 4), (50257, 768, 13), (256000, 2048, 63)]:
        parts = chunked_loss._parts(num_classes, width)
        if chunked_loss._LEAST_CLASSES > 64:
            assert len(parts) <= most
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == (0, num_classes)


def test_a_model_with_a_loss_of_its_own_is_noticed() -> None:
    model = lm.llama()
    forward = type(model).forward

    def own(self: Any, input_ids: Any, labels: Any = None, **more: Any) -> Any:
        output = forward(self, input_ids, **more)
        output.loss = None if labels is None else output.logits.float().mean()
        return output

    model.forward = own.__get__(model)
    chunk_loss(model)
    with pytest.raises(UsageError) as raised:
        model(**lm.text())
    assert "without its loss_function" in str(raised.value)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight = torch.randn(2, 8, 4, requires_grad=True), torch.randn(9, 4)
    sum_of_losses(hidden, weight, None, torch.zeros(2, 8, dtype=torch.long)).backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_a_second_backward_is_refused() -> None:
    hidden = torch.randn(2, 8, 4, requires_grad=True)
    loss = sum_of_losses(hidden, torch.randn(9, 4), None, torch.zeros(2, 8, dtype=torch.long))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


def test_what_cannot_be_chunked_says_why() -> None:
    import transformers

    few = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertForSequenceClassification(
        transformers.BertConfig(**few, vocab_size=64, intermediate_size=32)
    )
    gemma = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **few, vocab_size=64, intermediate_size=32, num_key_value_heads=1, head_dim=8
        )
    )
    own_loss = lm.llama()
    own_loss.loss_function = lambda *_, **__: 0
    for model in (bert, gemma, own_loss, torch.nn.Linear(3, 3)):
        assert why_not(model) is not None
        with pytest.raises(UsageError, match="cannot be chunked"):
            chunk_loss(model)


def test_logits_that_are_changed_before_the_loss_are_noticed() -> None:
    import transformers

    cohere = transformers.CohereForCausalLM(
        transformers.CohereConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=96,
            intermediate_size=32,
        )
    ).train()
    chunk_loss(cohere)
    with pytest.raises(UsageError) as raised:
        cohere(**lm.text())
    assert "between its head and its loss" in str(raised.value)
