"""The user's own settings -> a copy as plain data, to lay the plan's upon."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from oomph.errors import UsageError


def as_settings(mine: object) -> dict[str, Any]:
    """A mapping, or a dataclass's object such as TrainingArguments, as a dict of one's own.

    Of an object only what differs from its class's defaults is taken: the rest would be the same
    without being said.
    """
    if mine is None:
        return {}
    if isinstance(mine, Mapping):
        return copy.deepcopy(dict(mine))
    if dataclasses.is_dataclass(mine) and not isinstance(mine, type):
        return {
            field.name: copy.deepcopy(getattr(mine, field.name))
            for field in dataclasses.fields(mine)
            if field.init and getattr(mine, field.name) != _default(field)
        }
    raise UsageError(
        f"settings cannot be read from {type(mine).__name__!r:.60}",
        because="they are a dict, or an object of a dataclass such as TrainingArguments",
        attempt="pass a dict",
    )


def laid_upon(mine: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, Any]:
    """Both together; where they contradict each other the plan's are taken, at any depth."""
    merged = dict(mine)
    for name, value in planned.items():
        own = merged.get(name)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            merged[name] = laid_upon(own, value)
        else:
            merged[name] = value
    return merged


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
