"""Steps of a script -> micro-steps of a larger one: its gradients are added up before it steps.

The script goes on as it is. Until enough has been added up, its optimizers do not step, nothing is
clipped, no gradient is set to zero and no loss scale is updated; losses are divided by the number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from oomph.errors import UsageError
from oomph.tracing.script.loop import Loop


class Accumulating:
    """How many steps of the script become one."""

    def __init__(self, num: int | None, loop: Loop) -> None:
        self._num, self._loop = num or 1, loop

    def before_backward(self, args: Any) -> Any:
        """The loss, as a share of the mean over all micro-steps."""
        if self._num == 1 or not args or not isinstance(args[0], torch.Tensor):
            return args
        return (args[0] / self._num, *args[1:])

    def _is_within(self) -> bool:
        """Has something been added up, and not yet enough?"""
        num_done = self._loop.backwards_of_step[-1]
        return not self._loop.is_between_steps and 0 < num_done < self._num

    def _unless_within(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return None if self._is_within() else original(*args, **kwargs)

        return call

    def install(self) -> None:
        """Outside of what watches the loop: what is held back is not seen."""
        if self._num == 1:
            return
        scaler: Any = torch.amp.GradScaler
        for name in ("step", "update", "unscale_"):
            setattr(scaler, name, self._unless_within(getattr(scaler, name)))
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            setattr(owner, "zero_grad", self._unless_within(owner.zero_grad))  # noqa: B010
        utils: Any = torch.nn.utils
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            clip = self._without_clipping(getattr(utils, name))
            setattr(utils, name, clip)
            setattr(utils.clip_grad, name, clip)
        self._hold_steps()

    def _without_clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A script may print the norm."""

        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            if self._is_within():
                return torch.zeros((), device="cuda")
            return original(*args, **kwargs)

        return clip

    def _hold_steps(self) -> None:
        """Each class of optimizers has a step of its own, which is held back when one is made."""
        kind: Any = torch.optim.Optimizer
        made = kind.__init__

        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            own = type(optimizer)
            if not getattr(own.step, "is_held", False):
                own.step = self._held(own.step)

        kind.__init__ = init

    def _held(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_within():
                return original(optimizer, *args, **kwargs)
            if (args and args[0] is not None) or kwargs.get("closure") is not None:
                raise UsageError(
                    "an optimizer that computes losses itself cannot have them added up",
                    because=f"{type(optimizer).__name__}.step was given a closure",
                    attempt="the batch as it is: --forbid accumulation",
                )
            return None

        step.is_held = True  # type: ignore[attr-defined]
        return step
