"""Forwards of a script that are like one before -> its outputs again, without the forward.

Evaluation goes through a data set, and long accumulation repeats its micro-steps: only the first
of them can bring a new peak. Outputs are fresh each time, so that what the script keeps of them is
kept; what a forward changes beside its outputs is not changed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from oomph.tracing.pretend import is_pretended
from oomph.tracing.script.loop import Loop

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
_NUM_REAL = 2  # micro-steps of a step: the first makes gradients, the second adds to them
EVALUATION = "evaluation: forwards of one shape were rehearsed once"
ACCUMULATION = "accumulation: of the micro-steps of a step, two were rehearsed"


class Memo:
    """The forwards that were seen."""

    def __init__(self, loop: Loop, approximate: Callable[[str], None]) -> None:
        self._loop, self._approximate = loop, approximate
        self._answers: dict[Any, _Answer] = {}
        self._of_step: tuple[int, list[Any]] = (0, [])  # keys of this step's forwards

    def called(self, module: Any, call: Any, args: Any, kwargs: Any, *, is_trained: bool) -> Any:
        """What a module that is called from outside returns."""
        is_plain = is_trained or not torch.is_grad_enabled()
        is_plain = is_plain and not torch._C._functorch.maybe_current_level()
        key = _key(module, args, kwargs) if is_plain else None
        answer = self._answers.get(key) if key is not None else None
        if is_trained and not self._is_repeated(key):
            answer = None
        if answer is not None:
            self._approximate(ACCUMULATION if is_trained else EVALUATION)
            return answer.again()
        returned = call(module, *args, **kwargs)
        if key is not None:
            made = _answer(returned, args, kwargs)
            if made is not None:
                self._answers[key] = made
        return returned

    def _is_repeated(self, key: Any) -> bool:
        """Are two micro-steps of this step done that had one forward each, and this one?"""
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
        """Will a micro-step like those of this step be answered?"""
        number, keys = self._of_step
        is_now = number == len(self._loop.backwards_of_step)
        return is_now and len(keys) >= _NUM_REAL and keys[0] in self._answers


def _key(module: Any, args: Any, kwargs: Any) -> Any:
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


class _Answer:
    """How to make once more what a forward returned."""

    def __init__(self, leaves: list[Any], spec: Any) -> None:
        self._spec = spec
        self._leaves = [
            _recipe(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        self._needs_grad = [
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves
        ]

    def again(self) -> Any:
        in_graph = [r for r, needs in zip(self._leaves, self._needs_grad, strict=True) if needs]
        anchor = torch.zeros((), device="cpu", requires_grad=True)
        made = iter(_Again.apply(anchor, in_graph) if in_graph else ())
        leaves = [
            next(made) if needs else (leaf() if callable(leaf) else leaf)
            for leaf, needs in zip(self._leaves, self._needs_grad, strict=True)
        ]
        return tree_unflatten(leaves, self._spec)


class _Again(torch.autograd.Function):
    """Outputs whose backward ends at once."""

    @staticmethod
    def forward(_: Any, __: Any, recipes: Any) -> Any:
        return tuple(recipe() for recipe in recipes)

    @staticmethod
    def backward(*_: Any) -> Any:
        return None, None


def _recipe(tensor: Any) -> Callable[[], Any]:
    size, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
    return lambda: torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _answer(returned: Any, args: Any, kwargs: Any) -> _Answer | None:
    """None where it cannot be made again: an unknown object, a view, a tensor of the host."""
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
    return _Answer(leaves, spec)


def _address(tensor: Any) -> Any:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
