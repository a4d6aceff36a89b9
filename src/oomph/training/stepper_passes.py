"""A piece of a batch -> its gradients: forward and backward, with what a plan puts around them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from oomph.training import apply, splitting
from oomph.training.recovery_tricks import LastResorts
from oomph.training.stepper_options import device_kind, no_loss, no_scalar

_LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Passes:
    """Runs pieces; keeps their losses since the last step of the optimizer."""

    def __init__(
        self,
        model: Any,
        loss: Callable[[Any, Any], Any] | None,
        resorts: LastResorts,
        *,
        device: Any,
        scaler: Any,
    ) -> None:
        """device: where pieces are moved to."""
        self._model, self._loss = model, loss or no_loss
        self._resorts, self._device = resorts, device
        kind, precision = device_kind(model), resorts.how.precision
        low = _LOW.get(precision)
        self._autocast = None if low is None else torch.autocast(kind, dtype=low)
        if scaler is None and precision == "fp16":
            scaler = torch.amp.GradScaler(kind)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._steps_in_backward = resorts.how.optimizer_in_backward
        self.losses: list[tuple[Any, float]] = []  # and how much each counts
        self.carried: list[tuple[Any, float]] = []  # those from before a checkpoint
        self.is_half_updated = False  # only where the optimizer steps in backward

    def begin_again(self) -> None:
        self.losses, self.is_half_updated = [*self.carried], False

    def evaluate(self, data: Any, function: Callable[[Any, Any], Any] | None) -> Any:
        """Forward of a piece, by the loss or another function."""
        function = function or self._loss
        if self._device is not None:
            data = splitting.moved(data, self._device)
        with self._autocast or nullcontext():
            return function(self._model, data)

    def is_rounded(self) -> bool:
        """Is anything computed in half precision?"""
        dtypes = {parameter.dtype for parameter in self._model.parameters()}
        return self._autocast is not None or bool(dtypes & {torch.float16, torch.bfloat16})

    def run(self, data: Any, share: float) -> None:
        """Forward and backward of a piece. It is a function so that its frame can be cleared."""
        context = self.forward_context()
        if context is None:
            loss = self.loss_of(data)
        else:
            with context:
                loss = self.loss_of(data)
        self.backward(loss, share)

    def loss_of(self, data: Any) -> Any:
        """Forward of a piece, wherever it is."""
        if self._device is not None:
            data = splitting.moved(data, self._device)
        return self._loss(self._model, data)

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """What each forward runs in: autocast, offloaded activations; None for nothing."""
        if self._autocast is None and not self._resorts.how.offload_activations:
            return None
        stack = ExitStack()
        if self._autocast is not None:
            stack.enter_context(self._autocast)
        stack.enter_context(apply.around_forward(self._resorts.how))
        return stack

    def backward(self, loss: Any, share: float) -> None:
        """Backward of a piece that counts `share`."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise no_scalar(loss)
        self.losses.append((loss.detach(), share))
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self.is_half_updated = self._steps_in_backward
        if share == 1:
            loss.backward()
        else:  # what backward of `loss * share` begins with, without that op and its own backward
            loss.backward(torch.full_like(loss, share))
