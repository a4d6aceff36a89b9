"""Files of plans -> what the page of plans is given: for a server, which has a directory of them.

A page that `oomph plan --html` wrote holds its plans as JSON, with their timelines; a plan that
`oomph plan -o` wrote is one plan. Only data is taken from either, and only what is understood.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oomph.errors import Unreadable
from oomph.records.plan import Plan, Plans
from oomph.records.stored import LARGEST_FILE_BYTES, SCHEMA, from_jsonable, no_record

_DATA = re.compile(
    r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL
)  # see html_page.py
_OF_THE_PAGE = ("timeline", "code")  # what a page has beside each plan
_OWN_BATCH = "is_own_batch"  # of all plans, and of each way to train
_WHAT = "plan"


def plan_files(directory: Path, most: int) -> list[Path]:
    """Those that may hold plans, the newest first."""
    found = [
        path
        for path in directory.iterdir()
        if path.suffix in (".html", ".json") and path.is_file() and not path.name.startswith(".")
    ]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:most]


def read_plan_file(path: Path) -> dict[str, Any]:
    """What the page of plans shows. Raises Unreadable where it holds none."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise ValueError(f"it is larger than {LARGEST_FILE_BYTES} bytes")
        text = content.decode("utf-8")
        return _of_page(text) if path.suffix == ".html" else _of_plan(text)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read", because=error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise no_record(_WHAT, path, str(error)) from None


def summary_of(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    """One line of a list."""
    best = data["plans"][0] if data["plans"] else None
    return {
        "name": path.name,
        "written_at": path.stat().st_mtime,
        "workload": data["workload"],
        "gpu": data["gpu"],
        "batch_size": data["batch_size"],
        "num_plans": len(data["plans"]),
        "device_bytes": best and best["prediction"]["device_bytes"],
        "capacity_bytes": data["capacity_bytes"],
        "why": best and best["why"],
    }


def _of_page(text: str) -> dict[str, Any]:
    found = _DATA.search(text)
    if found is None:
        raise ValueError("it is no page of plans")
    data = _object(json.loads(found[1], parse_constant=_refuse))
    _check(data)
    return data


def _check(data: dict[str, Any]) -> None:
    """Is it a record of this version, as far as it is one?"""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}, which this oomph reads")
    rest = _without(data, ("schema", "version", _OWN_BATCH))
    plans = data.get("plans")
    if isinstance(plans, list):
        rest["plans"] = [_plan_in(_object(plan)) for plan in plans]
    from_jsonable(Plans, rest)


def _plan_in(plan: dict[str, Any]) -> dict[str, Any]:
    """Without what only the page has of it."""
    variant = _without(_object(plan.get("variant")), (_OWN_BATCH,))
    return {**_without(plan, _OF_THE_PAGE), "variant": variant}


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} is no JSON object")
    return value


def _without(plan: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name not in names}


def _of_plan(text: str) -> dict[str, Any]:
    from oomph import __version__

    data = _object(json.loads(text, parse_constant=_refuse))
    if data.pop("schema", None) != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}, which this oomph reads")
    plan = from_jsonable(Plan, data)
    return {
        "schema": SCHEMA,
        "version": __version__,
        "workload": plan.workload,
        "gpu": plan.gpu,
        "batch_size": plan.batch_size,
        "capacity_bytes": plan.prediction.capacity_bytes,
        "fits_as_is": None,  # a single plan does not know the others
        "as_is": None,
        "plans": [{**data, "timeline": None, "code": ""}],
        "rejected": [],
        "shortfall": None,
        "caveats": [],
        "num_candidates": None,
    }
