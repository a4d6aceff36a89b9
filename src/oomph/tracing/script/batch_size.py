"""Another batch for a script: through its loader, or where its batches go to the GPU.

A script without a DataLoader makes its batches itself. Their tensors are known by their leading
dimension, which the rehearsal of the script as it is has told, and are cut or repeated when they
are moved, or when they reach the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from oomph.errors import UsageError, UserCodeError
from oomph.tracing.script.loaders import Loaders
from oomph.tracing.script.loop import Loop
from oomph.tracing.script.users_line import in_words, users_line

RESIZED = "the batch was changed by cutting or repeating tensors of the script, not by its loader"


class BatchSize:
    """The batch that is asked for, and that which the script has."""

    def __init__(self, wanted: int | None, given: int | None) -> None:
        self.wanted = wanted if wanted != given else None
        self.given = given
        self.is_by_loader = False
        self.has_resized = False

    def moved(self, tensor: Any, loop: Loop) -> Any:
        """A real tensor on its way to the GPU."""
        if self.wanted is None or self.is_by_loader or loop.depth or not _has(tensor, self.given):
            return tensor
        return self._resized(tensor)

    def given_to_model(self, args: Any, kwargs: Any) -> Any:
        if self.wanted is None or self.is_by_loader:
            return args, kwargs
        return tree_map_only(
            torch.Tensor,
            lambda one: self._resized(one) if _has(one, self.given) else one,
            (args, kwargs),
        )

    def _resized(self, tensor: Any) -> Any:
        assert self.wanted is not None  # noqa: S101 - the callers have looked
        self.has_resized = True
        return tensor[:1].expand(self.wanted, *tensor.shape[1:]).contiguous()

    def blamed(self, error: UserCodeError) -> UsageError | None:
        """An error of a script whose batch is not its own; None if it is its own."""
        if self.wanted is None:
            return None
        return UsageError(
            f"the batch of the script could not be varied to {self.wanted}",
            because=f"{error.what}: {error.because}",
            attempt="the script's own option for its batch size, after --",
        )

    def check(self, loop: Loop, loaders: Loaders) -> None:
        """Raises UsageError where the batch did not become what was asked for."""
        if self.wanted is None or loop.micro_batch == self.wanted:
            return
        loader = loaders.feeding
        raise UsageError(
            f"the batch of the script could not be varied to {self.wanted}",
            because=f"the model was given {loop.micro_batch} examples at"
            f" {loader.place if loader else in_words(users_line())}",
            attempt="the script's own option for its batch size, after --",
        )


def _has(tensor: Any, num_examples: int | None) -> bool:
    return bool(tensor.dim()) and num_examples is not None and tensor.shape[0] == num_examples
