"""GpuModel, a number of GPUs -> the link that joins them, and how fast it can be.

Within one machine, of eight GPUs at most: NVLink where the GPU has it, else PCIe. What joins
several machines is nobody's datasheet, so nothing is said of more GPUs. Not modelled is what
communication takes of the GPU's own bandwidth while it runs beside kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from oomph.records.catalog import GpuModel
from oomph.records.sharding import GPUS_PER_NODE, casts_parameters, grid_of
from oomph.records.workload import How

COMMUNICATION = frozenset({"all_gather", "reduce_scatter", "all_reduce"})

# Bytes per second of one lane in one direction, by generation, after the line coding: PCI-SIG.
_PCIE_LANE = {"1": 250e6, "2": 500e6, "3": 985e6, "4": 1969e6, "5": 3938e6, "6": 7563e6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins the GPUs of one machine."""

    kind: Literal["nvlink", "pcie"]
    bytes_per_s: float  # of one GPU, in one direction, as the sheet has it


def link_between(model: GpuModel, num_gpus: int) -> Link | None:
    """The link that so many of these GPUs use; None if nobody knows."""
    if num_gpus > GPUS_PER_NODE:
        return None
    if model.nvlink_bytes_per_s is not None:  # the sheet adds up both directions
        return Link(kind="nvlink", bytes_per_s=model.nvlink_bytes_per_s / 2)
    found = re.fullmatch(r"(\d)\.0 x(\d+)", model.pcie or "")
    if found is None or found[1] not in _PCIE_LANE:
        return None
    return Link(kind="pcie", bytes_per_s=_PCIE_LANE[found[1]] * int(found[2]))


def assumptions(how: How, model: GpuModel) -> list[str]:
    """What is put on a model and what joins its GPUs, where a user may have it otherwise."""
    if how.num_gpus == 1:
        return []
    return [_put_on(how), *_cast(how), _joined_by(model, how.num_gpus)]


def _put_on(how: How) -> str:
    if how.sharding == "ddp":
        return (
            "DDP with gradient_as_bucket_view=True: as delivered it is False, which keeps the bytes"
            " of the gradients twice (accumulation does so for a while in any case)"
        )
    copies, shards = grid_of(how)
    grid = f"; {copies} copies of the model, each divided among {shards} GPUs" if copies > 1 else ""
    return (
        "FSDP2: fully_shard on each block and on the model, every micro-batch's gradients are"
        f" reduced at once, the model is built on the host or on meta{grid}"
    )


def _cast(how: How) -> list[str]:
    policy = "bf16 is FSDP's own MixedPrecisionPolicy (reduced in float32), without autocast"
    return [policy] if casts_parameters(how) else []


def _joined_by(model: GpuModel, num_gpus: int) -> str:
    link = link_between(model, num_gpus)
    if num_gpus > GPUS_PER_NODE:
        return (
            f"{num_gpus} GPUs are several machines, of {GPUS_PER_NODE} GPUs each:"
            " what joins them is not known, so no time is told"
        )
    if link is None:
        return "what joins these GPUs is not known, so no time is told"
    name = "NVLink" if link.kind == "nvlink" else f"PCIe {model.pcie}"
    return (
        f"the GPUs are in one machine, joined by {name}"
        f" ({link.bytes_per_s / 1e9:.0f} GB/s in each direction)"
    )


class LinkClock:
    """What joins the GPUs does one collective after the other, as NCCL's stream does.

    Moments are seconds since the step began.
    """

    def __init__(self) -> None:
        self.busy_s = self.waited_s = 0.0
        self._ends: list[float] = []  # of each collective that was begun
        self._taken = 0.0  # when the GPU had waited last: what is gathered is one ahead of it

    def copy(self) -> LinkClock:
        copied = LinkClock()
        copied.busy_s, copied.waited_s = self.busy_s, self.waited_s
        copied._ends, copied._taken = [*self._ends], self._taken
        return copied

    def begin(self, seconds: float, host: float, gpu: float | None) -> None:
        """A collective that the host issues now. `gpu`: when its input is there, if not before."""
        last = self._ends[-1] if self._ends else 0.0
        self._ends.append(max(last, host, self._taken if gpu is None else gpu) + seconds)
        self.busy_s += seconds

    def wait(self, num_pending: int, gpu: float) -> float:
        """The GPU waits for all but the last so many. Its clock afterwards."""
        done = self._ends[-1 - num_pending] if len(self._ends) > num_pending else gpu
        self.waited_s += max(done - gpu, 0.0)
        self._taken = max(gpu, done)
        return self._taken
