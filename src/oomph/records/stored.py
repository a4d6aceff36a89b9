"""Any record -> JSON, the same that --json prints.

Field names are kept, tuples become lists, unknown stays null. `schema` counts
the changes that would break a reader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

SCHEMA = 1


def to_jsonable(value: Any) -> Any:
    """A record, or records inside tuples and mappings, as what `json` can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: to_jsonable(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_jsonable(item) for item in value]
    return value


def as_json(value: Any) -> str:
    """The text that --json prints for one record (or mapping of records)."""
    import json

    return json.dumps({"schema": SCHEMA, **to_jsonable(value)}, indent=2, ensure_ascii=False)
