"""Which module an allocation belongs to, in forward and in backward.

In forward it is the innermost module that runs. In backward, autograd's nodes carry the number
at which they were made; the numbers at which modules began and ended tell the module.
"""

from __future__ import annotations

import bisect
from typing import Any

import torch

_ACCUMULATE_GRAD = 1 << 62  # sequence numbers from here on belong to no forward op


class ModuleStack:
    """Follows the forward calls of a model. Recomputation in backward adds new numbers."""

    def __init__(self, model: Any) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack = [""]
        self._numbers = [0]
        self._modules = [""]
        self._handles: list[Any] = []

    def __enter__(self) -> ModuleStack:
        from torch.nn.modules import module

        self._handles = [
            module.register_module_forward_pre_hook(self._enter_module),
            module.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def current(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None or len(self._stack) > 1:
            return self._stack[-1]
        number = node._sequence_nr()
        if number >= _ACCUMULATE_GRAD:
            return ""
        return self._modules[bisect.bisect_right(self._numbers, number) - 1]

    def _enter_module(self, module: Any, _: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))
        self._note_boundary()

    def _leave_module(self, *_: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
        self._note_boundary()

    def _note_boundary(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(self._stack[-1])
