"""A causal language model -> the same, whose loss is computed without the whole logits.

The model's own forward runs. In training its head hands on the hidden states as they are, and the
loss takes them through the head piece by piece; each piece's gradient is computed at once and its
logits are dropped. Loss and gradients are the same up to rounding. The model's output then has no
logits. Once: a second backward through the same graph, or a derivative of the gradient, is refused.

Limits: causal language models of Hugging Face, with their own loss, whose logits go from the head
to the loss unchanged.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from oomph.errors import UsageError

_IGNORED = -100  # transformers' and torch's label for what does not count
_ATTEMPT = (
    "computing the loss piece by piece: torch.nn.functional.linear_cross_entropy(options=...)"
)


def why_not(model: Any) -> str | None:
    """Why a model's loss cannot be chunked; None if it can."""
    if not callable(getattr(model, "get_output_embeddings", None)):
        return f"{type(model).__name__} is no language model of Hugging Face's transformers"
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
    if "loss_function" not in forward.__code__.co_names:  # it has another loss, in its forward
        return False
    loss = model.loss_function
    module = getattr(loss, "__module__", "")
    return getattr(loss, "__name__", "") == "ForCausalLMLoss" and module.startswith("transformers.")


def chunk_loss(model: Any) -> None:
    """Compute the loss of a causal language model in pieces. Raises UsageError."""
    because = why_not(model)
    if because is not None:
        raise UsageError("the loss cannot be chunked", because=because, attempt=_ATTEMPT)
    head = model.get_output_embeddings()
    deferred = _Deferred(head, model.loss_function)
    head.forward = deferred.head
    model.loss_function = deferred.loss
    model.forward = _in_pieces(model.forward, deferred)


def _in_pieces(forward: Any, deferred: _Deferred) -> Any:
    """The model's forward, which defers its head where a loss is to be trained on."""
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
    """Where the logits were, there are hidden states: nobody is to take them for logits."""
    if isinstance(output, dict):
        return type(output)(**{k: v for k, v in output.items() if v is not deferred.hidden})
    return tuple(None if value is deferred.hidden else value for value in output)


class _Deferred:
    """A head that does its work only when the loss asks for it."""

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
        """A loss of the model's own would have taken hidden states for logits."""
        if not self.was_asked:
            raise UsageError(
                "the loss cannot be chunked",
                because="the model computes its loss without its loss_function",
                attempt=_ATTEMPT,
            )

    def head(self, hidden: Any) -> Any:
        if not self.is_on:
            return self._forward(hidden)
        self.hidden = hidden.view_as(hidden)  # its own object, told apart from the model's
        return self.hidden

    def loss(self, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' ForCausalLMLoss, of hidden states instead of logits."""
        if not self.is_on:
            return self._loss(logits, labels, *args, **kwargs)
        if logits is not self.hidden:
            raise UsageError(
                "the loss cannot be chunked",
                because="the model changes its logits between its head and its loss",
                attempt=_ATTEMPT,
            )
        self.was_asked = True
        given = self._signature.bind(logits, labels, *args, **kwargs)
        options = given.arguments.pop("kwargs", {})
        return self._in_pieces(**given.arguments, **options)

    def _in_pieces(
        self,
        labels: Any,
        num_items_in_batch: Any = None,
        ignore_index: int = _IGNORED,
        shift_labels: Any = None,
        **_: Any,
    ) -> Any:
        hidden, linear = self.hidden, self._linear
        targets = _shifted(labels, ignore_index) if shift_labels is None else shift_labels
        targets = targets.to(hidden.device).view(hidden.shape[:-1])
        total = sum_of_losses(
            hidden, linear.weight, linear.bias, targets, ignore_index=ignore_index
        )
        if num_items_in_batch is None:
            return total / (targets != ignore_index).sum()
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch


def _shifted(labels: Any, ignore_index: int) -> Any:
    """Each token is to predict the next one."""
    return torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def sum_of_losses(
    hidden: Any, weight: Any, bias: Any, targets: Any, *, ignore_index: int = _IGNORED
) -> Any:
    """The sum of the cross-entropies of hidden @ weight.T + bias, without all logits at once.

    `hidden` is (examples, positions, width) or (positions, width).
    """
    device = hidden.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return _SumOfLosses.apply(hidden, weight, bias, targets, low or hidden.dtype, ignore_index)


class _SumOfLosses(torch.autograd.Function):
    """The gradient of the sum, not of the mean: it is of a size that fp16 can hold.

    It is scaled in backward, when the loss scale is known.
    """

    @staticmethod
    def forward(
        context: Any,
        hidden: Any,
        weight: Any,
        bias: Any,
        targets: Any,
        dtype: Any,
        ignore_index: int,
    ) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            total, context.gradients = _loss_and_gradients(
                hidden, weight, bias, targets, dtype, ignore_index, context.needs_input_grad
            )
        return total

    @staticmethod
    @once_differentiable
    def backward(context: Any, *scales: Any) -> Any:
        if context.gradients is None:
            raise RuntimeError("a chunked loss has one backward: its gradients are used up")
        gradients, context.gradients = context.gradients, None
        scaled = (None if one is None else one.mul_(scales[0]) for one in gradients)
        return (*scaled, None, None, None)


def _loss_and_gradients(
    hidden: Any,
    weight: Any,
    bias: Any,
    targets: Any,
    dtype: Any,
    ignore_index: int,
    needed: Any,
) -> tuple[Any, tuple[Any, Any, Any]]:
    low = weight.to(dtype)
    # Pieces are added up in fp32 at least, as one large matmul would do inside.
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
        if of_weight is not None:
            _add_product(of_weight, of_logits.t(), piece)
    return total, (of_hidden, _as(of_weight, weight), _as(of_bias, bias))


def _of_piece(
    piece: Any, weight: Any, bias: Any, wanted: Any, ignore_index: int
) -> tuple[Any, Any]:
    """The sum of the losses of some rows, and its gradient by their logits."""
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


def _add_product(sums: Any, left: Any, right: Any) -> None:
    if sums.dtype == left.dtype:
        sums.addmm_(left, right)
    else:
        sums += left @ right


def _as(gradient: Any, like: Any) -> Any:
    return None if gradient is None else gradient.to(like.dtype)


def _pieces(num_positions: int, width: int, num_classes: int) -> list[tuple[int, int]]:
    """Positions, cut so that a piece of the logits is about as large as the hidden states.

    As liger-kernel's fused_linear_cross_entropy does. By positions and not by rows, so that the
    number of pieces does not depend on the batch.
    """
    num_pieces = -(-num_classes // width)
    length = 1 << (-(-num_positions // num_pieces) - 1).bit_length()
    return [
        (start, min(start + length, num_positions)) for start in range(0, num_positions, length)
    ]
