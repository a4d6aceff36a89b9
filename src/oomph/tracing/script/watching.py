"""Patches of torch through which the loop of a script is seen."""

from __future__ import annotations

import functools
from typing import Any

import torch

from oomph.tracing.script.batch_size import BatchSize
from oomph.tracing.script.loaders import Loaders
from oomph.tracing.script.loop import Loop
from oomph.tracing.script.memo import Memo
from oomph.tracing.script.switches import Switched


def install(
    loop: Loop, memo: Memo, loaders: Loaders, batch_size: BatchSize, switched: Switched
) -> None:
    """Watch models, backward, optimizers and loaders."""
    _watch_modules(loop, memo, loaders, batch_size, switched)
    _watch_backward(loop, memo, switched)
    _watch_optimizers(loop)
    _watch_scaler(loop)
    _watch_clipping(loop, switched)


def _wrapped(owner: Any, name: str, around: Any) -> None:
    """Let `around(original, ...)` stand in for a function of a module or a class."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, replacement)


def _watch_modules(
    loop: Loop, memo: Memo, loaders: Loaders, batch_size: BatchSize, switched: Switched
) -> None:
    def around(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if loop.depth or loop.in_backward:
            if args and not loop.in_backward:
                loop.given.passed_on(self, args[0])
            return original(self, *args, **kwargs)
        args, kwargs = batch_size.given_to_model(args, kwargs)
        is_trained = loop.forward(self, args, kwargs)
        if is_trained:
            loaders.note_training(loop.given.rows_of_call)
            args, kwargs = switched.before_forward(args, kwargs)
        loop.depth += 1
        try:
            returned = memo.called(self, original, args, kwargs, is_trained=is_trained)
            if is_trained:
                loop.note_returned(self, returned)
        finally:
            loop.depth -= 1
        return returned

    _wrapped(torch.nn.Module, "__call__", around)
    _watch_own_calls(around)


def _watch_own_calls(around: Any) -> None:
    """Classes that have a `__call__` of their own, seen when the first of them is made."""
    known: set[type] = {torch.nn.Module}

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        owner = next(kind for kind in type(self).__mro__ if "__call__" in vars(kind))
        if owner not in known and not owner.__module__.startswith("torch."):
            _wrapped(owner, "__call__", around)
        known.add(owner)

    _wrapped(torch.nn.Module, "__init__", init)


def _watch_backward(loop: Loop, memo: Memo, switched: Switched) -> None:
    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        args = switched.before_backward(args)
        returned = loop.backward(lambda: original(*args, **kwargs))
        if memo.answers_next():
            loop.recorder.computes = False
        return returned

    def around_grad(original: Any, *args: Any, **kwargs: Any) -> Any:
        return loop.gradient(lambda: original(*args, **kwargs))

    _wrapped(torch.autograd, "backward", around)
    _wrapped(torch.autograd, "grad", around_grad)


def _watch_optimizers(loop: Loop) -> None:
    from torch.optim import Optimizer
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        loop.add_optimizer(self)

    def zero(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return loop.zero_grad(lambda: original(self, *args, **kwargs))

    _wrapped(Optimizer, "__init__", init)
    _wrapped(Optimizer, "zero_grad", zero)
    _wrapped(torch.nn.Module, "zero_grad", zero)
    register_optimizer_step_pre_hook(lambda *_: loop.before_step())
    register_optimizer_step_post_hook(lambda optimizer, *_: loop.after_step(optimizer))


def _watch_scaler(loop: Loop) -> None:
    kind: Any = torch.amp.GradScaler

    def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        loop.before_step()
        loop.in_step += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            loop.in_step -= 1

    def scale(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if loop.recorder.phase == "forward":  # a loss is scaled in order to go back from it
            loop.enter("backward")
        return original(self, *args, **kwargs)

    def update(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        loop.enter("input")

    def unscale(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return loop.clip(lambda: original(self, *args, **kwargs))

    _wrapped(kind, "step", step)
    _wrapped(kind, "scale", scale)
    _wrapped(kind, "update", update)
    _wrapped(kind, "unscale_", unscale)


def _watch_clipping(loop: Loop, switched: Switched) -> None:
    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        loop.clips = True

        def work() -> Any:
            switched.before_clip()
            return original(*args, **kwargs)

        return loop.clip(work)

    utils: Any = torch.nn.utils
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        _wrapped(utils, name, around)
        setattr(utils.clip_grad, name, getattr(utils, name))
