"""Records of a run <-> lines of text, one record a line.

Spans are short JSON arrays, whose columns the first line of their file names; everything else is
a JSON object with one key, which says what it is. What is read was perhaps written by somebody
else: a line that is not wholly understood raises ValueError, and nothing of it is used.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from oomph.records.run import (
    LOOKS_APART_S,
    Ending,
    Event,
    GpuSpan,
    HostSpan,
    Peak,
    StepSpan,
    WatchedGpu,
)
from oomph.records.stored import SCHEMA, from_jsonable

Span = TypeVar("Span", GpuSpan, HostSpan, StepSpan)

# Longer lines are no lines of ours: a command line is in meta.json, and texts are cut.
LONGEST_LINE_BYTES = 1 << 16
_LONGEST_TEXT = 4000
_MOST = 2**63  # bytes, seconds, counts: no figure of a run is larger
_LEAST = -200  # degrees

# How many digits are kept behind the point: a millisecond, a hundredth of a percent.
_DIGITS = {"s": 3, "ratio": 4, "w": 1, "cores": 3}
# Made once: `json.dumps` makes one for each line.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _in_range(figure: float) -> float:
    if _LEAST <= figure < _MOST:  # which neither infinity nor NaN is
        return figure
    raise ValueError(f"{figure!r:.40} is no figure of a run")


def _check_for(hint: Any) -> Callable[[Any], Any]:
    """What a value of that type must be."""
    if typing.get_origin(hint) is tuple:
        return _texts
    optional = isinstance(hint, types.UnionType)
    kinds = [
        kind
        for kind in (typing.get_args(hint) if optional else (hint,))
        if kind is not types.NoneType
    ]
    is_int = kinds == [int]

    def check(value: Any) -> Any:
        kind = type(value)
        if kind is int or (kind is float and not is_int):
            return _in_range(value)
        if value is None and optional:
            return None
        raise ValueError(f"{value!r:.40} is no number")

    return check


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{value!r:.40} is no list of words")
    return tuple(text[:40] for text in value[:10])


class Table(Generic[Span]):
    """Spans of one kind as rows."""

    def __init__(self, kind: type[Span]) -> None:
        self._kind: type[Span] = kind
        self._fields = dataclasses.fields(kind)
        hints = typing.get_type_hints(kind)
        self._checks = {field.name: _check_for(hints[field.name]) for field in self._fields}
        self._digits = [_DIGITS.get(field.name.rpartition("_")[2], 0) for field in self._fields]
        self._values = operator.attrgetter(*(field.name for field in self._fields))

    def header(self) -> str:
        columns = [field.name for field in self._fields]
        return json.dumps({"schema": SCHEMA, "columns": columns}) + "\n"

    def row(self, span: Span) -> str:
        values = [
            round(value, digits) if isinstance(value, float) else value
            for value, digits in zip(self._values(span), self._digits, strict=True)
        ]
        return _ENCODER.encode(values) + "\n"

    def columns(self, line: bytes) -> list[str]:
        """The columns that the first line of a file names. Raises ValueError."""
        header = load(line)
        if not isinstance(header, dict) or header.get("schema") != SCHEMA:
            raise ValueError(f"it is not of schema {SCHEMA}")
        columns = header.get("columns")
        if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
            raise ValueError("it does not name its columns")
        missing = [
            field.name
            for field in self._fields
            if field.name not in columns and field.default is dataclasses.MISSING
        ]  # an older run has not all that this one keeps
        if missing:
            raise ValueError(f"the column {missing[0]} is missing")
        return columns

    def span(self, columns: list[str], line: bytes) -> Span:
        """The span of a row. Raises ValueError."""
        row = load(line)
        if not isinstance(row, list) or len(row) != len(columns):
            raise ValueError("a row has not as many figures as its file has columns")
        checks = self._checks
        values = {
            name: checks[name](value)
            for name, value in zip(columns, row, strict=True)
            if name in checks  # a column of a later version is nothing to us
        }
        if not 0 <= values["began_s"] <= values["ended_s"]:
            raise ValueError("a span ends before it begins")
        span: Span = self._kind(**values)
        return span


GPU_SPANS = Table(GpuSpan)
HOST_SPANS = Table(HostSpan)

_OBJECTS: Mapping[str, Any] = {
    "gpu": WatchedGpu,
    "peak": Peak,
    "event": Event,
    "ending": Ending,
    "steps": StepSpan,
}
# None of them holds another record. Found out once: lines are written beside a training.
_WRITTEN = {
    kind: (name, tuple(field.name for field in dataclasses.fields(kind)))
    for name, kind in _OBJECTS.items()
}


def object_line(record: WatchedGpu | Peak | Event | Ending | StepSpan) -> str:
    """A record that is no span of a table, as a line."""
    name, fields = _WRITTEN[type(record)]
    content = {field: getattr(record, field) for field in fields}
    if "text" in content:
        content["text"] = content["text"][:_LONGEST_TEXT]
    return _ENCODER.encode({name: content}) + "\n"


# Of a GPU, what runs have not always said.
_SINCE = {"looks_apart_s": LOOKS_APART_S, "link_bytes_per_s": None}


def read_object(line: bytes) -> Any:
    """The record of such a line. Raises ValueError."""
    content = load(line)
    if not isinstance(content, dict) or len(content) != 1:
        raise ValueError("a line has not one key")
    (name, value) = next(iter(content.items()))
    if name not in _OBJECTS:
        raise ValueError(f"nothing is known of {name!r:.40}")
    if name == "gpu" and isinstance(value, dict):
        value = {**_SINCE, **value}  # which older runs do not say
    record = from_jsonable(_OBJECTS[name], value)
    for field in dataclasses.fields(record):
        figure = getattr(record, field.name)
        if isinstance(figure, int | float):
            _in_range(figure)
    return record


def load(line: bytes) -> Any:
    """JSON without what JSON has not: NaN, and depth that no reader survives."""
    try:
        return _DECODER.decode(line.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
