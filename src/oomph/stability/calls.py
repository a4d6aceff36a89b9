"""A running model -> which of its modules is running, and the inputs and outputs of each call."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

# Sequence numbers of autograd from here on belong to no op of forward: AccumulateGrad has
# UINT64_MAX (torch/csrc/autograd/functions/accumulate_grad.cpp).
_ACCUMULATE_GRAD = 1 << 62


@dataclass(frozen=True)
class Call:
    """One call of a module, with copies of its input and output tensors."""

    module: str
    parent: str | None  # the module that called it; None for the loss
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class ModuleTracker:
    """Knows which module is running; `records` keeps every call with copies of its tensors."""

    def __init__(self, model: nn.Module, *, records: bool = False) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._records = records
        self._stack: list[tuple[str | None, list[torch.Tensor]]] = [(None, [])]
        self.failed: str | None = None  # the innermost module that raised
        self._has_failed = False
        self.calls: list[Call] = []  # in the order they ended: inner calls first
        # Autograd sequence numbers at each module's start and end; they locate ops of backward.
        self._numbers: list[int] = [0]
        self._modules: list[str | None] = [None]

    def __enter__(self) -> ModuleTracker:
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
        """Return the module in forward or backward; None for the loss, outside all modules."""
        node = torch._C._current_autograd_node()
        if node is None or len(self._stack) > 1:
            return self._stack[-1][0]
        number = node._sequence_nr()
        if number >= _ACCUMULATE_GRAD:
            return None
        return self._modules[bisect.bisect_right(self._numbers, number) - 1]

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module), self._stack[-1][0])
        self._stack.append((name, list(_copies(args)) if self._records else []))
        self._note()

    def _leave(self, _: nn.Module, __: Any, out: Any) -> None:
        if len(self._stack) == 1:
            return
        name, inputs = self._stack.pop()
        self._note()
        is_raising = sys.exc_info()[1] is not self._error_outside
        if is_raising and not self._has_failed:
            self.failed, self._has_failed = name, True
        if self._records and name is not None:
            self.calls.append(Call(name, self._stack[-1][0], inputs, list(_copies(out))))

    def _note(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(self._stack[-1][0])


def _copies(tree: Any) -> Iterator[torch.Tensor]:
    """Yield a copy of every tensor, before other code changes it in place."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf.detach().clone()
