"""Compute a causal language model's loss without ever holding all logits.

The model's own forward runs. In training its head passes the hidden states on, and the loss applies
the head to a part of the vocabulary at a time: once to sum the exponentials, and once more for the
gradients, each time dropping the part's logits. Loss and gradients match up to rounding; the output
has no logits. A second backward through the same graph,
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

    rows, wanted = hidden.reshape(-1, hidden.shape[-1]).to(dtype), targets.reshape(-1)
    counts = wanted != ignore_index
    head = _Head(rows, weight, bias, wanted.where(counts, -1))
    log_sums, chosen = head.log_sums_and_chosen()
    total = (log_sums - chosen).where(counts, 0).sum()
    log_sums = log_sums.where(counts, float("inf"))  # what is ignored has a probability of 0
    # Products are summed in fp32 at least, as one large product would do internally.
    of_rows = torch.zeros_like(rows, dtype=head.sums) if needed[0] else None
    of_weight = torch.empty_like(weight) if needed[1] else None
    of_bias = torch.empty_like(bias) if bias is not None and needed[2] else None
    for part in head.parts:
        of_logits = head.gradient(part, log_sums)
        if of_bias is not None:
            of_bias[part] = of_logits.sum(0)
        of_logits = of_logits.to(dtype)
        if of_rows is not None:
            of_rows += of_logits @ weight[part].to(dtype)
        if of_weight is not None:
            of_weight[part] = of_logits.t() @ rows
    of_hidden = None if of_rows is None else of_rows.to(hidden.dtype).view(hidden.shape)
    return total, (of_hidden, of_weight, of_bias)


class _Head:
    """A head that computes the logits of some classes at a time."""

    def __init__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: torch.Tensor,
    ) -> None:
        import torch

        self._rows, self._weight, self._bias = rows, weight, bias
        self._wanted = wanted  # the class of each row, or -1
        self.sums = torch.promote_types(rows.dtype, torch.float32)
        self.parts = _parts(weight.shape[0], weight.shape[1])

    def _logits(self, part: slice) -> torch.Tensor:
        import torch

        dtype = self._rows.dtype
        bias = None if self._bias is None else self._bias[part].to(dtype)
        return torch.nn.functional.linear(self._rows, self._weight[part].to(dtype), bias)

    def _less(self, logits: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
        """Subtract a number from each row, in the precision of sums, in place where possible."""
        is_wide = logits.dtype == self.sums
        return logits.sub_(what) if is_wide else logits - what

    def _places(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each row's class is among these, and whether it is one of them."""
        wanted = (self._wanted - part.start).unsqueeze(-1)
        places = wanted.clamp(0, part.stop - part.start - 1)
        return places, places == wanted

    def log_sums_and_chosen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log of the sum of exponentials of each row, and the logit of its class."""
        import torch

        most_negative = torch.finfo(self.sums).min
        size = (len(self._rows), 1)
        log_sums = self._rows.new_full(size, float("-inf"), dtype=self.sums)
        chosen = self._rows.new_zeros(size, dtype=self.sums)
        for part in self.parts:
            logits = self._logits(part)
            places, is_here = self._places(part)
            chosen += logits.gather(-1, places).where(is_here, 0)
            # A row of minus infinities alone has a sum of 0.
            most = logits.amax(-1, keepdim=True).to(self.sums).clamp_(min=most_negative)
            own = self._less(logits, most).exp_().sum(-1, keepdim=True).log_().add_(most)
            log_sums = torch.logaddexp(log_sums, own)
            del logits
        return log_sums.squeeze(-1), chosen.squeeze(-1)

    def gradient(self, part: slice, log_sums: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the summed loss with respect to the logits of these classes."""
        gradient = self._less(self._logits(part), log_sums.unsqueeze(-1)).exp_()
        places, is_here = self._places(part)
        return gradient.scatter_add_(-1, places, -is_here.to(gradient.dtype))


_LEAST_CLASSES = 4096  # judgement: a dozen parts of GPT-2's vocabulary; more wait for launches
_ALIGNED = 64  # classes; tensor cores and cache lines prefer such multiples


def _parts(num_classes: int, width: int) -> list[slice]:
    """Cut the classes so that some logits are about as large as two copies of the hidden states.

    The number of parts does not depend on the batch. Logits are computed twice: once for their
    sums, once for the gradients. Cutting rows instead would compute them once, but a small part of
    the rows reads the whole weight and adds to the whole gradient of the weight: with a few
    hundred rows that takes longer than all products (docs/tried.md).
    """
    num_parts = -(-num_classes // max(_LEAST_CLASSES, 2 * width))
    size = -(-num_classes // num_parts)
    size = -(-size // _ALIGNED) * _ALIGNED
    return [slice(start, min(start + size, num_classes)) for start in range(0, num_classes, size)]


# ---- the trick -----------------------------------------------------------------------------------

CHUNKED_LOSS = Definition(
    name="chunked-loss",
    stability="same",
    setting="loss",
    value="chunked",
    what="the loss from the last hidden states piece by piece: no whole logits",
    code="oomph.apply: oomph.tricks.chunked_loss.chunk_loss(model)",
    why_not_on=why_not,
    put_on_model=lambda model, _: chunk_loss(model),
    by_hand=by_hand("the loss in chunks: oomph.tricks.chunked_loss.chunk_loss(model)"),
    in_code=lambda _: Fragment(
        imports=["from oomph.tricks.chunked_loss import chunk_loss"],
        on_model=["chunk_loss(model)"],
        notes=["It needs oomph, for the loss in chunks, which has no short form."],
    ),
    in_script=lambda _, __: Fragment(
        imports=["import oomph.tricks.chunked_loss"],
        on_model=["oomph.tricks.chunked_loss.chunk_loss(model)"],
        binds_model=True,
    ),
)
