"""How many GPUs, and what each of them holds, as stated <-> the grid of GPUs that this is.

"ddp": every GPU holds everything, and gradients are averaged. "fsdp": parameters, gradients and
the optimizer's state are divided among all GPUs. "hybrid": they are divided within groups, and
the groups are copies of each other.
"""

from __future__ import annotations

from typing import get_args

from oomph.errors import UsageError
from oomph.records.workload import How, Sharding

# The GPUs that a fast link joins: eight in every DGX and HGX. More are several machines.
GPUS_PER_NODE = 8


def check_sharding(sharding: str | None, num_gpus: int) -> Sharding:
    """The sharding that is meant: "ddp" where several GPUs are all that is said."""
    if num_gpus < 1:
        raise UsageError(f"{num_gpus} GPUs cannot train", attempt="a number of GPUs from 1 on")
    if sharding is None:
        return "ddp" if num_gpus > 1 else "none"
    if sharding not in get_args(Sharding):
        raise UsageError(
            f"{sharding!r:.40} is no way to share the work among GPUs",
            because="it is ddp, fsdp or hybrid",
            attempt="fsdp",
        )
    if (num_gpus == 1) != (sharding == "none"):
        raise UsageError(
            f"sharding {sharding!r} and {num_gpus} GPU{'s' * (num_gpus > 1)} do not go together",
            because="one GPU shares its work with nobody, and several need a way to",
            attempt="ddp, fsdp or hybrid, with two GPUs or more",
        )
    known: Sharding = sharding  # type: ignore[assignment] # checked above
    if known == "hybrid":
        _shards_of_hybrid(num_gpus)
    return known


def grid_of(how: How) -> tuple[int, int]:
    """How many copies there are of the model, and among how many GPUs each is divided."""
    if how.sharding == "fsdp":
        return 1, how.num_gpus
    if how.sharding == "hybrid":
        shards = _shards_of_hybrid(how.num_gpus)
        return how.num_gpus // shards, shards
    return how.num_gpus, 1


def divides_parameters(how: How) -> bool:
    return how.sharding in ("fsdp", "hybrid")


def casts_parameters(how: How) -> bool:
    """Does FSDP cast parameters when it gathers them? Then nothing is cast by autocast."""
    return divides_parameters(how) and how.precision == "bf16"


def num_groups(how: How) -> int:
    """How many process groups communicate: one for the shards, one for the copies."""
    return sum(size > 1 for size in grid_of(how))


def _shards_of_hybrid(num_gpus: int) -> int:
    """The largest number of shards that one machine has, and of which there are several."""
    numbers = range(min(GPUS_PER_NODE, num_gpus - 1), 1, -1)
    found = next((number for number in numbers if num_gpus % number == 0), None)
    if found is None:
        raise UsageError(
            f"{num_gpus} GPUs cannot be put into equal groups",
            because="hybrid divides the model within groups of 2 to 8 GPUs, of which there are"
            " several",
            attempt="4, 8 or 16 GPUs, or fsdp",
        )
    return found
