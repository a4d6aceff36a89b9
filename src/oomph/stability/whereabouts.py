"""Which module runs, and what each module was given and gave."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

_ACCUMULATE_GRAD = 1 << 62  # autograd's numbers from here on belong to no op of forward


@dataclass(frozen=True)
class Call:
    """One call of a module, with copies of the tensors that went in and came out."""

    module: str
    parent: str | None  # the module that called it; None: the loss
    given: list[Any]
    gave: list[Any]


class Whereabouts:
    """Follows the calls of a model's modules. `module` is None in the loss, outside of all."""

    def __init__(self, model: Any, *, keeps: bool = False) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._keeps = keeps
        self._stack: list[tuple[str | None, list[Any]]] = [(None, [])]
        self.failed: str | None = None  # the innermost module that raised
        self._has_failed = False
        self.calls: list[Call] = []  # in the order in which they ended: inner ones first
        # Where in autograd's numbers each module begins and ends: backward is told by them.
        self._numbers: list[int] = [0]
        self._modules: list[str | None] = [None]

    def __enter__(self) -> Whereabouts:
        self._error_outside = sys.exc_info()[1]
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def module(self) -> str | None:
        """The module that runs, or whose gradient is computed."""
        node = torch._C._current_autograd_node()
        if node is None or len(self._stack) > 1:
            return self._stack[-1][0]
        number = node._sequence_nr()
        if number >= _ACCUMULATE_GRAD:
            return None
        return self._modules[bisect.bisect_right(self._numbers, number) - 1]

    def _enter(self, module: Any, args: Any) -> None:
        name = self._names.get(id(module), self._stack[-1][0])
        self._stack.append((name, list(_tensors(args)) if self._keeps else []))
        self._note()

    def _leave(self, _: Any, __: Any, out: Any) -> None:
        if len(self._stack) == 1:
            return
        name, given = self._stack.pop()
        self._note()
        is_raising = sys.exc_info()[1] is not self._error_outside
        if is_raising and not self._has_failed:
            self.failed, self._has_failed = name, True
        if self._keeps and name is not None:
            self.calls.append(Call(name, self._stack[-1][0], given, list(_tensors(out))))

    def _note(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(self._stack[-1][0])


def _tensors(tree: Any) -> Iterator[Any]:
    """Copies: what is changed in place later was as it was."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf.detach().clone()
