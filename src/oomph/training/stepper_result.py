"""Result: what became of one batch."""

from __future__ import annotations

from typing import Any

import torch


class Result:
    """One batch that was trained on. `loss` is that of the whole batch, not waited for."""

    __slots__ = (
        "_factor",
        "_losses",
        "grad_norm",
        "has_stepped",
        "micro_batch",
        "num_ooms",
        "num_pieces",
    )

    def __init__(
        self,
        losses: list[tuple[Any, float]],
        *,
        factor: float,
        has_stepped: bool,
        micro_batch: int,
        num_ooms: int,
        grad_norm: Any = None,
    ) -> None:
        self._losses, self._factor = tuple(losses), factor
        self.has_stepped = has_stepped  # False while batches are accumulated
        self.micro_batch = micro_batch  # examples at a time
        self.num_pieces = len(losses)  # since the last step of the optimizer
        self.num_ooms = num_ooms  # that were recovered from in this step
        self.grad_norm = grad_norm  # before clipping, where gradients are clipped

    @property
    def loss(self) -> Any:
        """The loss since the last step, a tensor without a graph: float(...) waits for it."""
        losses = torch.stack([loss for loss, _ in self._losses]).flatten()
        shares = [share * self._factor for _, share in self._losses]
        return (losses * losses.new_tensor(shares)).sum()

    def __repr__(self) -> str:
        return (
            f"Result(loss={float(self.loss):.6g}, has_stepped={self.has_stepped},"
            f" micro_batch={self.micro_batch}, num_pieces={self.num_pieces},"
            f" num_ooms={self.num_ooms})"
        )
