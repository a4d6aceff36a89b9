"""Explanation, Plans for the same training -> the explanation with what the planner would do."""

from __future__ import annotations

from dataclasses import replace

from oomph.records.explanation import Explanation, Remedy
from oomph.records.plan import Plan, Plans
from oomph.units import format_bytes

_HELPS = {"yes": True, "no": False}


def with_plans(found: Explanation, plans: Plans, next_command: str) -> Explanation:
    """Return an explanation whose remedies begin with the plans, the recommended one first."""
    ratios = plans.time_ratios
    remedies = [_remedy(plan, ratio) for plan, ratio in zip(plans, ratios, strict=True)]
    return replace(
        found,
        remedies=(*remedies, *found.remedies),
        caveats=(*_caveats(plans), *found.caveats),
        next_command=next_command,
    )


def _remedy(plan: Plan, time_ratio: float | None) -> Remedy:
    split = f"{plan.micro_batch} x {plan.accumulate}"
    time = [] if time_ratio is None else [f"{time_ratio:.2f} x the time"]
    tricks = [trick.name for trick in plan.tricks] or ["as it is"]
    return Remedy(
        name=", ".join([split, *tricks]),
        needed_bytes=plan.prediction.reserved_bytes,
        helps=_HELPS.get(plan.fits),
        cost=", ".join([*time, f"update: {plan.stability}"]),
        source="planner",
    )


def _caveats(plans: Plans) -> list[str]:
    """Return what the prediction of the training as it is says about the explanation."""
    needed, size = plans.as_is.device_bytes, plans.capacity_bytes
    as_is = f"{format_bytes(needed)} of {format_bytes(size)}"
    caveats = []
    if plans.fits_as_is == "yes":
        caveats.append(
            f"{plans.workload} as it is should fit ({as_is}):"
            " what died had other settings, or held more"
        )
    else:
        caveats.append(f"{plans.workload} as it is needs {as_is}, by prediction")
    if plans.best is None:
        caveats.append("no plan that leaves the training as it is fits: oomph plan says what would")
    return caveats
