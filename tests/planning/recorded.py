"""Five small models, rehearsed once in one child in every family and step that a test combines."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product

from oomph.planning.rehearsals import footprint_of_one
from oomph.predicting.combinations import Combinations, pass_settings_of, step_of
from oomph.records.workload import Precision, Variant
from oomph.rehearsing.child import in_a_child
from oomph.sensing.catalog import find

CAPABILITY = (8, 0)
MODELS = ("mlp", "vit", "encoder", "seq2seq", "tied")
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
CHECKPOINTINGS = ("none", "blocks")
OPTIMIZERS = ("as-is", "fused", "for-loop")


@functools.cache
def all_ways() -> dict[str, Combinations]:
    """What is known of each model."""
    return in_a_child(lambda: {name: _rehearsed(name) for name in MODELS})


def checkpointings(model: str) -> tuple[str, ...]:
    from rehearsing.zoo import TORCH_MODELS

    return CHECKPOINTINGS if TORCH_MODELS[model].has_blocks else ("none",)


def _rehearsed(model: str) -> Combinations:
    from rehearsing.zoo import TORCH_MODELS

    from oomph.predicting.footprint import footprint_of
    from oomph.predicting.scaling import affine
    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    workload = TORCH_MODELS[model].workload()
    pass_footprints, steps = {}, {}
    for precision, checkpointing in product(PRECISIONS, checkpointings(model)):
        how = Variant(
            micro_batch=2, accumulation=2, precision=precision, checkpointing=checkpointing
        )
        traces = [rehearse(workload, replace(how, micro_batch=n), CAPABILITY) for n in (2, 3)]
        pass_footprints[pass_settings_of(how)] = footprint_of(affine(*traces))
    for optimizer in OPTIMIZERS:
        how = Variant(micro_batch=2, optimizer=optimizer)
        traced = rehearse(workload, how, CAPABILITY, is_step_alone=True)
        steps[step_of(how)] = footprint_of_one(traced)
    return Combinations(pass_footprints=pass_footprints, steps=steps, model=find("a100-80gb").model)
