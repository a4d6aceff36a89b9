"""Plans -> one HTML file that needs no network: the page that draws them, with their timelines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oomph.records.plan import Plans, Timeline
from oomph.records.stored import SCHEMA, to_jsonable
from oomph.showing.html_page import write_page

_DIGITS = 6  # of a position: a step has fewer events than a million


def write_plan_page(
    plans: Plans, timelines: Sequence[Timeline | None], code: Sequence[str], path: Path | str
) -> None:
    """Write the page, whole or not at all. `timelines` and `code` are those of each plan."""
    write_page("plan", plan_data(plans, timelines, code), path)


def plan_data(
    plans: Plans, timelines: Sequence[Timeline | None], code: Sequence[str]
) -> dict[str, Any]:
    """What the page is given: the record, and with each plan its timeline and its code.

    Of a script whose batch size is not known, the numbers of a split mean nothing: it is marked.
    """
    from oomph import __version__

    is_own = plans.seen is not None and not plans.seen.is_batch_known

    drawn = [
        {**to_jsonable(plan), "timeline": _drawable(timeline), "code": text}
        for plan, timeline, text in zip(plans.plans, timelines, code, strict=True)
    ]
    for plan in drawn:
        plan["variant"] = {**plan["variant"], "is_own_batch": is_own}
    whole = {**to_jsonable(plans), "plans": drawn, "is_own_batch": is_own}
    return {"schema": SCHEMA, "version": __version__, **whole}


def _drawable(timeline: Timeline | None) -> dict[str, Any] | None:
    """The timeline with each op named once: there are far fewer names than positions."""
    if timeline is None:
        return None
    names = {op: number for number, op in enumerate(dict.fromkeys(timeline.ops))}
    return {
        **to_jsonable(timeline),
        "positions": [round(position, _DIGITS) for position in timeline.positions],
        "phases": [[round(position, _DIGITS), phase] for position, phase in timeline.phases],
        "ops": [names[op] for op in timeline.ops],
        "op_names": list(names),
    }
