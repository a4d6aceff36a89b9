"""Plans for tests: any that the records allow, and a plain one to change."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from oomph.exporting.planned import Planned
from oomph.records.prediction import Moment, Prediction
from oomph.records.workload import OPTIMIZERS, Adapters, Precision, Sharding, Variant
from oomph.tricks.trick import contradiction_in

# A busy machine is no failure: neither an example nor its making has a time limit.
whatever_it_takes = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 1 << 50),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: st.text(max_size=12),
}

checkpointings = st.one_of(
    st.sampled_from(["none", "blocks", "selective"]),
    st.integers(2, 99).map(lambda every: f"every-{every}"),
    st.sets(st.integers(0, 99), min_size=1, max_size=9).map(
        lambda blocks: "blocks:" + ",".join(map(str, sorted(blocks)))
    ),
)


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that the records use, records themselves included."""
    if kind is Variant:
        return variants()
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        return st.builds(kind, **{name: any_of(hints[name]) for name in names})
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(any_of, inner))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(any_of(inner[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(any_of, inner))
    if origin is Mapping:
        return st.dictionaries(any_of(inner[0]), any_of(inner[1]), max_size=3)
    return st.none() if kind is types.NoneType else _PLAIN[kind]


@st.composite
def _variants(draw: st.DrawFn) -> Variant:
    num_gpus = draw(st.sampled_from([1, 2, 4, 8]))
    kinds = ["ddp", "fsdp", "hybrid"] if num_gpus > 2 else ["ddp", "fsdp"]  # hybrid needs groups
    sharding = draw(st.sampled_from(kinds)) if num_gpus > 1 else "none"
    adapters = draw(st.sampled_from(["none", "lora", "qlora"]))
    is_quantised = adapters == "qlora"
    precisions = ["bf16", "pure-bf16"] if is_quantised else typing.get_args(Precision)
    return Variant(
        precision=draw(st.sampled_from(precisions)),
        checkpointing=draw(checkpointings),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        attention=draw(st.sampled_from(["as-is", "sdpa"])),
        loss=draw(st.sampled_from(["as-is", "chunked"])),
        offload_activations=draw(st.booleans()),
        offload_optimizer=draw(st.booleans()),
        zero_offload=draw(st.booleans()),
        adapters=typing.cast(Adapters, adapters),
        sharding=typing.cast(Sharding, sharding),
        num_gpus=num_gpus,
        micro_batch=draw(st.integers(1, 256)),
        accumulation=draw(st.integers(1, 256)),
        expandable_segments=draw(st.booleans()),
    )


def variants() -> st.SearchStrategy[Variant]:
    """Combinations that can be trained in."""
    return _variants().filter(lambda v: contradiction_in(v, clips_gradients=False) is None)


any_plans: st.SearchStrategy[Planned] = any_of(Planned)


def variant_of(**settings: Any) -> Variant:
    """64 examples a step, four at a time, in fp32, with these settings instead."""
    chosen: dict[str, Any] = {"micro_batch": 4, "accumulation": 16, **settings}
    if chosen.get("num_gpus", 1) > 1:
        chosen.setdefault("sharding", "ddp")
    return Variant(**chosen)


def plan_of(**settings: Any) -> Planned:
    """A plan of variant_of, with a prediction that nothing here looks at."""
    variant = variant_of(**settings)
    return Planned(
        gpu="v100-16gb",
        workload="train.py:workload",
        variant=variant,
        prediction=prediction_of(variant),
        tricks=(),
        stability="same",
        relative_time=1.25,
        recommended=True,
        why="it is the fastest that fits",
    )


def prediction_of(variant: Variant) -> Prediction:
    """Twelve of sixteen GiB."""
    given: dict[str, Any] = {
        "gpu": "v100-16gb",
        "variant": variant,
        "fits": "yes",
        "by_category": {"activations": 7 << 30, "parameters": 2 << 30},
        "by_module": {"encoder": 9 << 30},
        "peak_at": Moment(step=2, phase="backward", op="aten::addmm", module="encoder"),
        "step_s": 0.5,
        "samples_per_s": 128.0,
        "unknowns": (),
        "notes": (),
        "capacity_bytes": 16 << 30,
        "num_retries": 0,
    }
    hints = typing.get_type_hints(Prediction)
    for field in dataclasses.fields(Prediction):
        # What is not given is a size, or unknown.
        given.setdefault(field.name, 12 << 30 if hints[field.name] is int else None)
    return Prediction(**given)
