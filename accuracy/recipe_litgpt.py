"""litgpt's fine-tuning of the decoders in recipe_shapes.py: `litgpt finetune lora`, and `full`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accuracy import litgpt
from accuracy.litgpt import Tuning
from accuracy.recipe_shapes import LITGPT

if TYPE_CHECKING:
    from accuracy.recipe_workloads import Built
    from oomph.records.workload import Workload


def tuning_of(words: str) -> Tuning:
    """Return what lora-32-qv-nf4-dq says: rank 32, on queries and values, on four bits.

    With "all" instead of "qv", on all layers.
    """
    if words == "full":
        return Tuning()
    _, rank, layers, *bits = words.split("-")
    is_on_all = layers == "all"
    return Tuning(rank=int(rank), on_keys=is_on_all, on_all=is_on_all, bits="-".join(bits))


def workload(built: Built) -> Workload:
    shape = LITGPT[built.model]
    return litgpt.workload(shape, tuning_of(built.tuning), built.size, built.batch_size)
