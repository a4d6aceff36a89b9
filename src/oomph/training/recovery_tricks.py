"""A model that does not fit one example at a time -> the same with another trick, in mid-training.

Only tricks that change neither the update nor the parameters: recomputation of the blocks that are
not recomputed yet, then activations that wait on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oomph.errors import UsageError
from oomph.records.checkpointing import as_text, recomputed_blocks
from oomph.records.workload import How
from oomph.training.blocks import find_blocks
from oomph.training.checkpointing import checkpoint_blocks
from oomph.training.out_of_memory import Memory

NAMES = ("checkpointing", "offload")


class LastResorts:
    """The tricks that are left, in order. `how` is how the model is trained now."""

    def __init__(self, model: Any, how: How, names: Sequence[str] = NAMES) -> None:
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            raise UsageError(
                f"{unknown[0]!r:.40} cannot be switched on in the middle of training",
                attempt=f"last_resorts={NAMES}, or some of them",
            )
        self._model, self.how = model, how
        self._left = [name for name in NAMES if name in names]
        self.tried: list[str] = []
        self.switched_on: list[str] = []  # their names, in order

    def switch_on(self, memory: Memory | None) -> str | None:
        """Put the next trick on. What it is, in words; None if none is left."""
        while self._left:
            name = self._left.pop(0)
            done = self._checkpoint() if name == "checkpointing" else self._offload(memory)
            if done:
                self.tried.append(done)
                self.switched_on.append(name)
                return done
        return None

    def switch_on_again(self, names: Sequence[str]) -> None:
        """Those of a checkpoint, without one that is on already."""
        for name in [each for each in names if each in self._left]:
            self._left.remove(name)
            if self._checkpoint() if name == "checkpointing" else self._offload(None):
                self.switched_on.append(name)

    def _checkpoint(self) -> str | None:
        if self.how.checkpointing == "selective":
            return None
        try:
            num_blocks = len(find_blocks(self._model))
            done = set(recomputed_blocks(self.how.checkpointing, num_blocks))
            rest = [number for number in range(num_blocks) if number not in done]
            if not rest:
                return None
            checkpoint_blocks(self._model, as_text(rest, num_blocks))
        except UsageError:  # it is recomputed already, by itself or by somebody else
            return None
        self.how = replace(self.how, checkpointing="blocks")
        return f"recomputing {len(rest)} blocks in backward"

    def _offload(self, memory: Memory | None) -> str | None:
        if self.how.offload_activations or memory == "host":
            return None
        self.how = replace(self.how, offload_activations=True)
        return "offloading activations to the host"
