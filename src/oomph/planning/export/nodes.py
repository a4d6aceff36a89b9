"""A number of GPUs -> on how many machines they are."""

from __future__ import annotations

from dataclasses import dataclass

from oomph.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Machines of equally many GPUs."""

    num_nodes: int
    num_gpus_each: int


def spread(num_gpus: int, gpus_per_node: int | None) -> Nodes:
    """One machine if it has room for them all, else as many as they fill evenly."""
    if gpus_per_node is None or 0 < num_gpus <= gpus_per_node:
        return Nodes(num_nodes=1, num_gpus_each=num_gpus)
    if gpus_per_node < 1 or num_gpus % gpus_per_node:
        raise UsageError(
            f"{num_gpus} GPUs cannot be spread over machines of {gpus_per_node}",
            because="every machine must have equally many, or the batch would change",
            attempt="a plan whose number of GPUs is a multiple of a machine's",
        )
    return Nodes(num_nodes=num_gpus // gpus_per_node, num_gpus_each=gpus_per_node)
