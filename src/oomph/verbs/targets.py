"""The GPU that a question is about -> its figures, and what CUDA leaves of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomph.predicting.assembly import Card
    from oomph.predicting.overhead import Interval
    from oomph.records.catalog import GpuModel

# Of a GPU of which only the memory is known, ways to train are compared at the rates of this one.
_REFERENCE = "a100-40gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU by name, by its memory, or both."""

    name: str
    model: GpuModel
    memory_bytes: int | None  # where it is given apart
    assumed: str | None  # what its name left open

    @property
    def capability(self) -> tuple[int, int]:
        return self.model.compute_capability or (8, 0)

    @property
    def rated(self) -> GpuModel:
        """The model, with rates to compare by where its own are not known."""
        from oomph.verbs.readings import find_gpu

        if self.model.memory_bandwidth_bytes_per_s and self.model.fp32_flops:
            return self.model
        return find_gpu(_REFERENCE).model

    def card(self, torch_version: str, target_ratio: float = 1.0) -> Card:
        """What CUDA can have of it, and what CUDA takes first."""
        from oomph.verbs.predictions import card_of

        card = card_of(self.model, self.name, self.memory_bytes, torch_version)
        return replace(card, usable=_share(card.usable, target_ratio))


def _share(usable: Interval, ratio: float) -> Interval:
    if ratio >= 1:
        return usable
    low, likely, high = (
        int(size * ratio) for size in (usable.low_bytes, usable.likely_bytes, usable.high_bytes)
    )
    return replace(
        usable,
        low_bytes=low,
        likely_bytes=likely,
        high_bytes=high,
        because=f"{usable.because}, of which {ratio:.0%} may be used",
    )


def find_target(gpu: str | None, gpu_memory: int | str | None) -> Target:
    """The GPU that was asked for. Raises UsageError."""
    from oomph.verbs.predictions import find_model

    model, memory_bytes, assumed = find_model(gpu, gpu_memory)
    return Target(
        name=gpu or f"a GPU of {gpu_memory}",
        model=model,
        memory_bytes=memory_bytes,
        assumed=assumed,
    )
