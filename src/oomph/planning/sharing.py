"""A batch, the most GPUs -> the numbers of GPUs that can share it, and in which ways they can."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.errors import UsageError
from oomph.records.sharding import check_sharding
from oomph.records.workload import Sharding


def numbers_of_gpus(batch_size: int, most: int) -> list[int]:
    """Powers of two that share the batch equally, and the largest number that does."""
    powers = [2**n for n in range(1, most.bit_length()) if batch_size % 2**n == 0]
    largest = next(number for number in range(most, 0, -1) if batch_size % number == 0)
    return sorted({*powers, largest} - {1})


def shared_by(numbers: Sequence[int]) -> dict[Sharding, list[int]]:
    """Which of the numbers of GPUs each way to share the work is for."""
    return {
        "ddp": list(numbers),
        "fsdp": list(numbers),
        "hybrid": [number for number in numbers if _can_be_grouped(number)],
    }


def why_not_shared(batch_size: int, most: int) -> str:
    """Why a way to share the work is for none of them."""
    if most == 1:
        return "one GPU: --max-gpus"
    numbers = numbers_of_gpus(batch_size, most)
    if not numbers:
        return f"a batch of {batch_size} cannot be shared equally among up to {most} GPUs"
    return f"{' or '.join(map(str, numbers))} GPUs make no equal groups of several: use fsdp"


def _can_be_grouped(num_gpus: int) -> bool:
    """Whether a model can be divided within groups of GPUs that are copies of each other."""
    try:
        check_sharding("hybrid", num_gpus)
    except UsageError:
        return False
    return True
