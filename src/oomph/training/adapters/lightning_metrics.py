"""Metrics inside a module -> set back with it: an example that is run again is counted once.

torchmetrics keeps what it counts in attributes that are no buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from oomph.training.rollback import Rollback

_COUNTERS = ("_update_count", "_computed", "_forward_cache")


class RollbackWithMetrics(Rollback):
    """A Rollback that knows torchmetrics' states."""

    def __init__(self, model: Any, optimizers: Iterable[Any], **options: Any) -> None:
        super().__init__(model, optimizers, **options)
        self._metrics = metrics_of(model)
        self._counted: list[dict[str, Any]] = []

    def take(self, *, keeps_gradients: bool = True) -> None:
        super().take(keeps_gradients=keeps_gradients)
        self._counted = [state_of(metric) for metric in self._metrics]

    def undo(self) -> None:
        super().undo()
        for metric, state in zip(self._metrics, self._counted, strict=True):
            put_back(metric, state)


def metrics_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "metric_state")]


def put_back(metric: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(metric, name, _copied(value))


def state_of(metric: Any) -> dict[str, Any]:
    counters = {name: getattr(metric, name) for name in _COUNTERS if hasattr(metric, name)}
    return {name: _copied(value) for name, value in {**metric.metric_state, **counters}.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
