"""Gradients of a whole batch -> one step of the optimizers, whole or not at all.

Unscaled and clipped once, after the last piece; schedulers go on with each step, and not where a
loss scaler skipped one. An optimizer that runs out of memory is set back, if a copy of the weights
was kept, and tried once more parameter by parameter, which needs the least memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from oomph.errors import OomphError, UsageError
from oomph.training.out_of_memory import is_out_of_memory
from oomph.training.recovery import half_updated, release, said_by, tried_twice
from oomph.training.rollback_update import UpdateCopy, parameters_of

Copies = Literal["first", "always", "never"]


class Update:
    """The optimizers' side of a Stepper."""

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        *,
        scaler: Any = None,
        clip_grad_norm: float | None = None,
        copies: Copies = "first",
        average: Callable[[], None] | None = None,
        parameters: Callable[[], list[Any]] | None = None,
    ) -> None:
        """average: gradients over ranks, before they are clipped.

        parameters: whose gradients these are; unless said, the model's and the optimizers'.
        """
        _check(schedulers, copies)
        self._average, self._own_parameters = average, parameters
        self.optimizers, self._model, self._scaler = tuple(optimizers), model, scaler
        self._schedulers, self._clip, self._copies = tuple(schedulers), clip_grad_norm, copies
        self._num_updated = 0  # parameters that have been updated: they have their states

    def __call__(self, factor: float) -> Any:
        """Step with the gradients that are there, times a factor; the norm, where it is clipped."""
        try:
            norm = self._prepare(factor)
            self._step()
        except BaseException:
            self._forget_unscaled()
            raise
        self._finish()
        return norm

    def _prepare(self, factor: float) -> Any:
        """Only gradients change: what fails here can be done again."""
        if factor == 1 and self._clip is None and self._average is None:
            return None
        parameters = self._parameters()
        if factor != 1:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
        if self._average is not None:
            self._average()
        if self._clip is None:
            return None
        if self._scaler:
            for optimizer in self.optimizers:
                self._scaler.unscale_(optimizer)
        return tried_twice(lambda: torch.nn.utils.clip_grad_norm_(parameters, self._clip or 0))

    def _parameters(self) -> list[Any]:
        if self._own_parameters is not None:
            return self._own_parameters()
        both = [*self._model.parameters(), *(p for o in self.optimizers for p in parameters_of(o))]
        return list({id(parameter): parameter for parameter in both}.values())

    def _step(self) -> None:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        num_parameters = sum(len(group["params"]) for group in groups)
        is_first = num_parameters != self._num_updated
        is_copied = self._copies == "always" or (self._copies == "first" and is_first)
        copied = self._copied() if is_copied else None
        if copied:
            self._unscale()
        try:
            self._step_each()
        except BaseException as error:
            if copied:
                copied.restore()
            if not is_out_of_memory(error):
                raise
            self._step_again(error, copied)
        self._num_updated = num_parameters

    def _unscale(self) -> None:
        """Before the step: a fused one would do it on its way, and could not do it twice."""
        for optimizer in self.optimizers if self._scaler else ():
            state = self._scaler._per_optimizer_states[id(optimizer)]
            if state["stage"] is torch.amp.grad_scaler.OptState.READY:
                self._scaler.unscale_(optimizer)

    def _copied(self) -> UpdateCopy | None:
        """None if the host has no memory for it: then the step goes on without."""
        try:
            return UpdateCopy(self.optimizers)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            return None

    def _step_each(self) -> None:
        for optimizer in self.optimizers:
            if self._scaler:
                self._scaler.step(optimizer)
            else:
                optimizer.step()

    def _step_again(self, error: BaseException, copied: UpdateCopy | None) -> None:
        """One parameter after the other, without temporaries for all of them."""
        text = said_by(error)
        release(error)
        if copied is None:
            raise half_updated(text) from None
        for optimizer in self.optimizers:
            _one_by_one(optimizer)
        self._forget_stepped()
        try:
            self._step_each()
        except BaseException as again:
            copied.restore()
            if not is_out_of_memory(again):
                raise
            release(again)
            raise OomphError(
                "the optimizer's step does not fit into memory",
                because=text,
                attempt="oomph plan, for an optimizer in 8 bits or on the host. Weights and"
                " optimizer are those of the last whole step",
            ) from None

    def _finish(self) -> None:
        is_skipped = False
        if self._scaler:
            before = self._scaler.get_scale() if self._schedulers else 0
            self._scaler.update()
            is_skipped = bool(self._schedulers) and self._scaler.get_scale() < before
        for scheduler in () if is_skipped else self._schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _forget_unscaled(self) -> None:
        """The scaler would refuse to unscale the next gradients of these optimizers."""
        if self._scaler:
            for optimizer in self.optimizers:
                self._scaler._per_optimizer_states.pop(id(optimizer), None)

    def _forget_stepped(self) -> None:
        """An optimizer before the one that failed has been set back: it is to step again."""
        if self._scaler:
            for optimizer in self.optimizers:
                state = self._scaler._per_optimizer_states[id(optimizer)]
                if state["stage"] is torch.amp.grad_scaler.OptState.STEPPED:
                    state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED


def _one_by_one(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group.update({name: False for name in ("foreach", "fused") if name in group})
    # A fused step asks what the scaler has left on the optimizer; others refuse to see it.
    optimizer._step_supports_amp_scaling = False
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


def _check(schedulers: Sequence[Any], copies: str) -> None:
    if copies not in ("first", "always", "never"):
        raise UsageError(f"{copies!r:.40} is no time to copy weights", attempt='copies="first"')
    if any(isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau) for s in schedulers):
        raise UsageError(
            "ReduceLROnPlateau cannot go on with each step",
            because="it wants a measure of the validation",
            attempt="calling its step(measure) in your loop",
        )
