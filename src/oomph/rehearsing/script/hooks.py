"""Patches of torch through which oomph sees a script's loop.

A forward like an earlier one is not run again; it gets fresh outputs. Evaluation goes through a
whole data set and long accumulation repeats its micro-steps, but only the first few can raise the
peak. Side effects of a skipped forward do not happen again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from oomph.pretending.patches import wrap
from oomph.pretending.tensors import is_pretended
from oomph.rehearsing.script.loaders import BatchSize, Loaders
from oomph.rehearsing.script.loop import Loop
from oomph.rehearsing.script.switches import Switched

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
_NUM_REAL = 2  # micro-steps run per step: the first makes gradients, the second adds to them
EVALUATION = "evaluation: forwards of one shape were rehearsed once"
ACCUMULATION = "accumulation: of the micro-steps of a step, two were rehearsed"


class Memo:
    """The forwards seen so far, and how to answer similar ones."""

    def __init__(self, loop: Loop, approximate: Callable[[str], None]) -> None:
        self._loop, self._approximate = loop, approximate
        self._answers: dict[Any, Callable[[], Any]] = {}
        self._of_step: tuple[int, list[Any]] = (0, [])  # keys of this step's forwards

    def called(
        self, module: torch.nn.Module, call: Any, args: Any, kwargs: Any, *, is_trained: bool
    ) -> Any:
        """Return the output of a module called from outside, by running it or from the memo."""
        is_plain = is_trained or not torch.is_grad_enabled()
        is_plain = is_plain and not torch._C._functorch.maybe_current_level()
        key = _key(module, args, kwargs) if is_plain else None
        answer = self._answers.get(key) if key is not None else None
        if is_trained and not self._is_repeated(key):
            answer = None
        if self._loop.recording_since is not None:  # what the script records is rehearsed whole
            answer = None
        if answer is not None:
            self._approximate(ACCUMULATION if is_trained else EVALUATION)
            return answer()
        returned = call(module, *args, **kwargs)
        if key is not None:
            made = _answer(returned, args, kwargs)
            if made is not None:
                self._answers[key] = made
        return returned

    def _is_repeated(self, key: Any) -> bool:
        """Return whether two earlier micro-steps of this step had only this same forward."""
        number = len(self._loop.backwards_of_step)
        if self._of_step[0] != number:
            self._of_step = (number, [])
        keys = self._of_step[1]
        num_done = self._loop.backwards_of_step[-1]
        is_one_each = len(keys) == num_done and len(self._loop.alive()) == 1
        is_repeated = num_done >= _NUM_REAL and is_one_each and set(keys) == {key}
        keys.append(key)
        return is_repeated and key is not None

    def answers_next(self) -> bool:
        """Return whether the memo will answer the next micro-step if it is like the others."""
        number, keys = self._of_step
        is_now = number == len(self._loop.backwards_of_step)
        return is_now and len(keys) >= _NUM_REAL and keys[0] in self._answers


def _key(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    parts: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
        elif isinstance(leaf, _PLAIN):
            parts.append((type(leaf), leaf))
        else:
            return None
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    state = (id(module), module.training, torch.is_grad_enabled(), low)
    return (*state, str(spec), *parts)


class _Again(torch.autograd.Function):
    """Outputs whose backward ends at once."""

    @staticmethod
    def forward(_: Any, __: Any, recipes: Any) -> Any:
        return tuple(recipe() for recipe in recipes)

    @staticmethod
    def backward(*_: Any) -> Any:
        return None, None


def _answer(returned: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Return how to make the output again; None for unknown objects, views and host tensors."""
    leaves, spec = tree_flatten(returned)
    given, _ = tree_flatten((args, kwargs))
    taken = {_address(one) for one in given if isinstance(one, torch.Tensor)}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, _PLAIN):
                return None
            continue
        is_fit = leaf.is_cuda and is_pretended(leaf) and leaf.layout is torch.strided
        if not is_fit or _address(leaf) in taken or leaf.storage_offset():
            return None
        taken.add(_address(leaf))
    recipes = [_recipe(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    in_graph = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]

    def again() -> Any:
        wanted = list(itertools.compress(recipes, in_graph))
        anchor = torch.zeros((), device="cpu", requires_grad=True)
        made = iter(_Again.apply(anchor, wanted) if wanted else ())
        outputs = [
            next(made) if needs_grad else (recipe() if callable(recipe) else recipe)
            for recipe, needs_grad in zip(recipes, in_graph, strict=True)
        ]
        return tree_unflatten(outputs, spec)

    return again


def _recipe(tensor: torch.Tensor) -> Callable[[], Any]:
    size, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
    return lambda: torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _address(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def install(
    loop: Loop, memo: Memo, loaders: Loaders, batch_size: BatchSize, switched: Switched
) -> None:
    """Watch models, backward, optimizers and loaders."""
    _watch_modules(loop, memo, loaders, batch_size, switched)
    _watch_backward(loop, memo, switched)
    _watch_optimizers(loop)
    _watch_scaler(loop)
    _watch_clipping(loop, switched)


def _watch_modules(
    loop: Loop, memo: Memo, loaders: Loaders, batch_size: BatchSize, switched: Switched
) -> None:
    def called(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if loop.depth or loop.in_backward:
            if args and not loop.in_backward:
                loop.given.passed_on(self, args[0])
            return original(self, *args, **kwargs)
        args, kwargs = batch_size.given_to_model(args, kwargs)
        is_trained = loop.forward(self, args, kwargs)
        if is_trained:
            loaders.note_training(loop.given.rows_of_call)
            switched.before_forward()
        loop.depth += 1
        try:
            returned = memo.called(self, original, args, kwargs, is_trained=is_trained)
            if is_trained:
                loop.note_returned(self, returned)
        finally:
            loop.depth -= 1
        return returned

    wrap("__call__", torch.nn.Module)(called)
    known: set[type] = {torch.nn.Module}

    @wrap("__init__", torch.nn.Module)
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        """Watch a class that defines its own `__call__`, from its first instance on."""
        original(self, *args, **kwargs)
        owner = next(kind for kind in type(self).__mro__ if "__call__" in vars(kind))
        if owner not in known and not owner.__module__.startswith("torch."):
            wrap("__call__", owner)(called)
        known.add(owner)


def _watch_backward(loop: Loop, memo: Memo, switched: Switched) -> None:
    @wrap("backward", torch.autograd)
    def backward(original: Any, *args: Any, **kwargs: Any) -> Any:
        args = switched.before_backward(args)
        losses = args[0] if args else kwargs.get("tensors")
        returned = loop.backward(lambda: original(*args, **kwargs), losses)
        if memo.answers_next():
            loop.recorder.computes = False
        return returned

    wrap("grad", torch.autograd)(_as_work_of(loop.gradient))


def _as_work_of(watch: Callable[[Callable[[], Any]], Any]) -> Callable[..., Any]:
    """Return a wrapper that lets the loop run the original, in its phase."""
    return lambda original, *args, **kwargs: watch(lambda: original(*args, **kwargs))


def _watch_optimizers(loop: Loop) -> None:
    from torch.optim import Optimizer
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    @wrap("__init__", Optimizer)
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        loop.add_optimizer(self)

    for owner in (Optimizer, torch.nn.Module):
        wrap("zero_grad", owner)(_as_work_of(loop.zero_grad))
    register_optimizer_step_pre_hook(lambda *_: loop.before_step())
    register_optimizer_step_post_hook(lambda optimizer, *_: loop.after_step(optimizer))


def _watch_scaler(loop: Loop) -> None:
    @wrap("step", torch.amp.GradScaler)
    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        loop.before_step()
        loop.in_step += 1
        try:
            return original(*args, **kwargs)
        finally:
            loop.in_step -= 1

    @wrap("scale", torch.amp.GradScaler)
    def scale(original: Any, *args: Any, **kwargs: Any) -> Any:
        if loop.recorder.phase == "forward":  # a scaled loss is about to go into backward
            loop.enter("backward")
        return original(*args, **kwargs)

    @wrap("update", torch.amp.GradScaler)
    def update(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        loop.enter("input")

    wrap("unscale_", torch.amp.GradScaler)(_as_work_of(loop.clip))


def _watch_clipping(loop: Loop, switched: Switched) -> None:
    def clipped(original: Any, *args: Any, **kwargs: Any) -> Any:
        loop.clips = True

        def work() -> Any:
            switched.before_clip()
            return original(*args, **kwargs)

        return loop.clip(work)

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrap(name, torch.nn.utils, torch.nn.utils.clip_grad)(clipped)
