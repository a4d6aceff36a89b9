"""One model of the zoo, as a workload that can be trained on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from oomph.records.workload import Workload


@dataclass(frozen=True)
class Kind:
    """One model of the zoo."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    loss: Callable[[Any, Any], Any] = lambda model, batch: model(**batch).mean()
    has_blocks: bool = False  # something to checkpoint
    is_comparable: bool = True  # the CPU takes the same branches, and no shape depends on values
    has_sparse_gradients: bool = False  # AdamW refuses them; added up, they grow

    def workload(self, optimizer: str = "adamw", **changes: Any) -> Workload:
        chosen: dict[str, Callable[[Any], Any]] = {
            "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
            "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        }
        made = Workload(
            model=self.make,
            batch=self.batch,
            loss=self.loss,
            optimizer=chosen["plain sgd" if self.has_sparse_gradients else optimizer],
            batch_size=8,
        )
        return replace(made, **changes)


def images(*shape: int) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda n: {"x": torch.rand(n, *shape)}


def tokens(length: int, vocabulary: int = 50) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda n: {"x": torch.arange(n * length).reshape(n, length) % vocabulary}
