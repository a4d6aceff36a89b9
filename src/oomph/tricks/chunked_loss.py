"""Compute a causal language model's loss without ever holding all logits.

The model's own forward runs. In training its head passes the hidden states on, and the loss applies
the head chunk by chunk, computing each chunk's gradient at once and dropping its logits. Loss and
gradients match up to rounding; the output has no logits. A second backward through the same graph,
or a derivative of the gradient, is refused.

Limits: Hugging Face causal language models with their own loss, whose logits go from the head to
the loss unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from oomph.errors import UsageError
from oomph.tricks.definition import Definition, Fragment, by_hand

if TYPE_CHECKING:
    import torch

Gradient: TypeAlias = "torch.Tensor | None"

_IGNORED = -100  # the label of ignored tokens in transformers and torch


def why_not(model: Any) -> str | None:
    """Return why a model's loss cannot be chunked, or None if it can."""
    import torch

    if not callable(getattr(model, "get_output_embeddings", None)):
        return f"{type(model).__name__} is not a language model of Hugging Face's transformers"
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        return f"{type(model).__name__} has no head that is a plain nn.Linear"
    if not _has_own_causal_loss(model):
        return f"the loss of {type(model).__name__} is not transformers' causal one"
    if "labels" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no labels"
    if getattr(model.config, "final_logit_softcapping", None) is not None:
        return "the model changes its logits before the loss (final_logit_softcapping)"
    return None


def _has_own_causal_loss(model: Any) -> bool:
    forward = inspect.unwrap(type(model).forward)
    if "loss_function" not in forward.__code__.co_names:  # its forward has another loss
        return False
    loss = model.loss_function
    module = getattr(loss, "__module__", "")
    return getattr(loss, "__name__", "") == "ForCausalLMLoss" and module.startswith("transformers.")


def chunk_loss(model: Any) -> None:
    """Compute the loss of a causal language model in chunks. Raises UsageError."""
    because = why_not(model)
    if because is not None:
        raise _refusal(because)
    head = model.get_output_embeddings()
    deferred = _Deferred(head, model.loss_function)
    head.forward = deferred.head
    model.loss_function = deferred.loss
    model.forward = _in_pieces(model.forward, deferred)


def _refusal(because: str) -> UsageError:
    return UsageError(
        "the loss cannot be chunked",
        because=because,
        attempt="computing the loss piece by piece:"
        " torch.nn.functional.linear_cross_entropy(options=...)",
    )


def _in_pieces(forward: Callable[..., Any], deferred: _Deferred) -> Callable[..., Any]:
    """Wrap the model's forward to defer its head if there is a loss to train on."""
    import torch

    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def in_pieces(*args: Any, **kwargs: Any) -> Any:
        labels = signature.bind_partial(*args, **kwargs).arguments.get("labels")
        if labels is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        deferred.begin()
        try:
            output = forward(*args, **kwargs)
            deferred.check()
            return _without_logits(output, deferred)
        finally:
            deferred.end()

    return in_pieces


def _without_logits(output: Any, deferred: _Deferred) -> Any:
    """Remove the hidden states from the output, where they would be taken for logits."""
    if isinstance(output, dict):
        return type(output)(**{k: v for k, v in output.items() if v is not deferred.hidden})
    return tuple(None if value is deferred.hidden else value for value in output)


class _Deferred:
    """A head that runs only when the loss needs it."""

    def __init__(self, head: Any, loss: Any) -> None:
        self._linear, self._forward = head, head.forward
        self._loss, self._signature = loss, inspect.signature(loss)
        self.is_on = self.was_asked = False
        self.hidden: Any = None

    def begin(self) -> None:
        self.hidden, self.is_on, self.was_asked = None, True, False

    def end(self) -> None:
        self.hidden, self.is_on = None, False

    def check(self) -> None:
        """Raise UsageError if another loss has used hidden states as if they were logits."""
        if not self.was_asked:
            raise _refusal("the model computes its loss without its loss_function")

    def head(self, hidden: Any) -> Any:
        if not self.is_on:
            return self._forward(hidden)
        self.hidden = hidden.view_as(hidden)  # a new object, to distinguish it from the model's
        return self.hidden

    def loss(self, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute transformers' ForCausalLMLoss from hidden states instead of logits."""
        if not self.is_on:
            return self._loss(logits, labels, *args, **kwargs)
        if logits is not self.hidden:
            raise _refusal("the model changes its logits between its head and its loss")
        self.was_asked = True
        given = self._signature.bind(logits, labels, *args, **kwargs)
        options = given.arguments.pop("kwargs", {})
        return self._in_pieces(**given.arguments, **options)

    def _in_pieces(
        self,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        import torch

        hidden: torch.Tensor = self.hidden
        linear = self._linear
        targets = shift_labels
        if targets is None:  # each token predicts the next one
            padded = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)
            targets = padded[..., 1:].contiguous()
        targets = targets.to(hidden.device).view(hidden.shape[:-1])
        total = sum_of_losses(
            hidden, linear.weight, linear.bias, targets, ignore_index=ignore_index
        )
        if num_items_in_batch is None:
            return total / (targets != ignore_index).sum()
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch


def sum_of_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    ignore_index: int = _IGNORED,
) -> torch.Tensor:
    """Return the summed cross-entropy of hidden @ weight.T + bias, without holding all logits.

    `hidden` is (examples, positions, width) or (positions, width).
    """
    import torch

    device = hidden.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    dtype = low or hidden.dtype
    total: torch.Tensor = _sum_of_losses().apply(hidden, weight, bias, targets, dtype, ignore_index)
    return total


@functools.cache
def _sum_of_losses() -> Any:
    """Return an op with the gradient of the sum, whose magnitude fp16 can hold, not of the mean.

    Backward scales it, when the loss scale is known.
    """
    import torch
    from torch.autograd.function import once_differentiable

    class SumOfLosses(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, hidden: torch.Tensor, *given: Any) -> torch.Tensor:
            with torch.autocast(hidden.device.type, enabled=False):
                total, context.gradients = _loss_and_gradients(
                    hidden, *given, needed=context.needs_input_grad
                )
            return total

        @staticmethod
        @once_differentiable
        def backward(context: Any, *scales: torch.Tensor) -> tuple[Gradient, ...]:
            if context.gradients is None:
                raise RuntimeError("a chunked loss has one backward: its gradients are used up")
            gradients, context.gradients = context.gradients, None
            scaled = (None if one is None else one.mul_(scales[0]) for one in gradients)
            return (*scaled, None, None, None)

    return SumOfLosses


def _loss_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    *,
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor, tuple[Gradient, Gradient, Gradient]]:
    import torch

    low = weight.to(dtype)
    # Chunks are summed in fp32 at least, as one large matmul would do internally.
    sums = torch.promote_types(weight.dtype, torch.float32)
    total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
    of_hidden = torch.empty_like(hidden) if needed[0] else None
    of_weight = torch.zeros_like(weight, dtype=sums) if needed[1] else None
    of_bias = torch.zeros_like(bias, dtype=sums) if bias is not None and needed[2] else None
    for start, end in _pieces(hidden.shape[-2], hidden.shape[-1], weight.shape[0]):
        piece = hidden[..., start:end, :].reshape(-1, hidden.shape[-1]).to(dtype)
        wanted = targets[..., start:end].reshape(-1)
        loss, of_logits = _of_piece(piece, low, bias, wanted, ignore_index)
        total += loss
        if of_bias is not None:
            of_bias += of_logits.sum(0)
        of_logits = of_logits.to(dtype)
        if of_hidden is not None:
            out = of_hidden[..., start:end, :]
            out.copy_((of_logits @ low).view(out.shape))
        if of_weight is not None and of_weight.dtype == dtype:
            of_weight.addmm_(of_logits.t(), piece)
        elif of_weight is not None:
            of_weight += of_logits.t() @ piece
    return total, (of_hidden, _as(of_weight, weight), _as(of_bias, bias))


def _of_piece(
    piece: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    wanted: torch.Tensor,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of some rows and its gradient with respect to their logits."""
    import torch

    logits = piece @ weight.t()
    if bias is not None:
        logits += bias
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_ratios = torch.log_softmax(logits, -1)
    del logits
    counts = (wanted != ignore_index).unsqueeze(-1)
    places = wanted.unsqueeze(-1).clamp(min=0)
    loss = -(log_ratios.gather(-1, places) * counts).sum()
    gradient = log_ratios.exp_()
    gradient.scatter_add_(-1, places, torch.full_like(places, -1, dtype=gradient.dtype))
    return loss, gradient.mul_(counts)


def _as(gradient: Gradient, like: Gradient) -> Gradient:
    return None if gradient is None or like is None else gradient.to(like.dtype)


def _pieces(num_positions: int, width: int, num_classes: int) -> list[tuple[int, int]]:
    """Cut positions so that a chunk of logits is about as large as the hidden states.

    liger-kernel's fused_linear_cross_entropy does the same. Cutting positions instead of rows makes
    the number of chunks independent of the batch.
    """
    num_pieces = -(-num_classes // width)
    length = 1 << (-(-num_positions // num_pieces) - 1).bit_length()
    return [
        (start, min(start + length, num_positions)) for start in range(0, num_positions, length)
    ]


# ---- the trick -----------------------------------------------------------------------------------

CHUNKED_LOSS = Definition(
    name="chunked-loss",
    stability="same",
    setting="loss",
    value="chunked",
    what="the loss from the last hidden states piece by piece: no whole logits",
    code="torch.nn.functional.linear_cross_entropy, with options that chunk",
    why_not_on=why_not,
    put_on_model=lambda model, _: chunk_loss(model),
    by_hand=by_hand("the loss in chunks: oomph.tricks.chunked_loss.chunk_loss(model)"),
    in_code=lambda _: Fragment(
        imports=["from oomph.tricks.chunked_loss import chunk_loss"],
        on_model=["chunk_loss(model)"],
        notes=["It needs oomph, for the loss in chunks, which has no short form."],
    ),
)
