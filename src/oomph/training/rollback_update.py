"""Weights and the optimizers' states before an update -> the same again, if it fails in the middle.

The first update makes the optimizer's state: that is where it runs out of memory, if it does. For
it a copy of the weights is kept on the host; later ones need no more than the first, and keep no
copy unless asked to. An update that fails without a copy is an error that says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class UpdateCopy:
    """What an update changes, copied to the host."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._of = [_OptimizerCopy(optimizer) for optimizer in optimizers]

    def restore(self) -> None:
        for each in self._of:
            each.restore()


class _OptimizerCopy:
    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._weights = [(p, _on_host(p)) for p in parameters_of(optimizer)]
        self._states = {p: _copied_state(state) for p, state in optimizer.state.items()}
        self._groups = [_without_parameters(group) for group in optimizer.param_groups]

    @torch.no_grad()
    def restore(self) -> None:
        state = self._optimizer.state
        for parameter in [p for p in state if p not in self._states]:
            del state[parameter]
        for parameter, kept in self._states.items():
            _restore_state(state[parameter], kept)
        for parameter, weight in self._weights:
            parameter.copy_(weight)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(before)


def parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _copied_state(state: Any) -> Any:
    """Each entry: the tensor itself and what was in it, or a plain value."""
    if not isinstance(state, dict):
        return state
    return {
        name: (value, _on_host(value)) if isinstance(value, torch.Tensor) else (value, None)
        for name, value in state.items()
    }


def _restore_state(state: Any, kept: Any) -> None:
    if not isinstance(kept, dict):
        return
    state.clear()
    for name, (value, content) in kept.items():
        if content is not None:
            value.copy_(content)
        state[name] = value


def _on_host(tensor: Any) -> Any:
    return tensor.detach().to("cpu", copy=True)
