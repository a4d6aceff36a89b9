"""Plans -> the answer that `oomph plan --json` prints."""

from __future__ import annotations

from typing import Any

from oomph.records.plan import Plan, Plans
from oomph.records.prediction import Prediction
from oomph.records.stored import SCHEMA, to_jsonable


def as_answer(plans: Plans) -> dict[str, Any]:
    """The whole answer as what `json` can write. docs/plan-format.md has its fields."""
    return {
        "schema": SCHEMA,
        "workload": plans.workload,
        "gpu": plans.gpu,
        "batch_size": plans.batch_size,
        "capacity_bytes": plans.capacity_bytes,
        "fits_as_is": plans.fits_as_is,
        "as_is": _cost(plans.as_is),
        "plans": [_one(plan) for plan in plans],
        "rejected": to_jsonable(plans.rejected),
        "shortfall": to_jsonable(plans.shortfall),
        "caveats": list(plans.caveats),
        "num_candidates": plans.num_candidates,
        "largest_micro_batch": plans.largest_micro_batch,
        "seen": to_jsonable(plans.seen),
    }


def _one(plan: Plan) -> dict[str, Any]:
    return {
        "recommended": plan.recommended,
        "micro_batch": plan.micro_batch,
        "accumulate": plan.accumulate,
        "gpus": plan.gpus,
        "precision": plan.precision,
        "checkpointing": plan.checkpointing,
        "optimizer": plan.optimizer,
        "tricks": to_jsonable(plan.tricks),
        "stability": plan.stability,
        **_cost(plan.prediction),
        "relative_time": plan.relative_time,
        "why": plan.why,
        "variant": to_jsonable(plan.variant),
        "reach": to_jsonable(plan.reach),
    }


def _cost(prediction: Prediction) -> dict[str, Any]:
    return {
        "fits": prediction.fits,
        "device_bytes": prediction.device_bytes,
        "low_bytes": prediction.low_bytes,
        "high_bytes": prediction.high_bytes,
        "host_bytes": prediction.host_bytes,
        "step_s": prediction.step_s,
    }
