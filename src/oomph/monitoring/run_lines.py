"""Records of a run <-> lines of text, one record per line.

Spans are short JSON arrays; the first line of the file names their columns. Everything else is a
JSON object with one key, its type. Files may come from an untrusted writer: a line that is not
fully understood raises ValueError, and none of it is used.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import stat
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, NoReturn, TypeVar

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

# oomph writes no longer lines: command lines are in meta.json, and texts are cut.
LONGEST_LINE_BYTES = 1 << 16
_LONGEST_TEXT = 4000
_MOST = 2**63  # bytes, seconds, counts: no figure of a run is larger
_LEAST = -200  # degrees

# Digits after the decimal point: a millisecond, a hundredth of a percent.
_DIGITS = {"s": 3, "ratio": 4, "w": 1, "cores": 3}
# Created once: `json.dumps` would create one per line.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _in_range(figure: float) -> float:
    if _LEAST <= figure < _MOST:  # excludes infinity and NaN
        return figure
    raise ValueError(f"{figure!r:.40} is not a figure of a run")


def _check_for(hint: Any) -> Callable[[Any], Any]:
    """Return the check for values of that type."""
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
        raise ValueError(f"{value!r:.40} is not a number")

    return check


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{value!r:.40} is not a list of words")
    return tuple(text[:40] for text in value[:10])


class Table(Generic[Span]):
    """Rows <-> spans of one kind."""

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
        """Return the columns named in the first line of a file. Raises ValueError."""
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
        ]  # older runs lack some columns
        if missing:
            raise ValueError(f"the column {missing[0]} is missing")
        return columns

    def span(self, columns: list[str], line: bytes) -> Span:
        """Return the span in a row. Raises ValueError."""
        row = load(line)
        if not isinstance(row, list) or len(row) != len(columns):
            raise ValueError("a row has another number of figures than its file has columns")
        checks = self._checks
        values = {
            name: checks[name](value)
            for name, value in zip(columns, row, strict=True)
            if name in checks  # ignore columns of later versions
        }
        if not 0 <= values["began_s"] <= values["ended_s"]:
            raise ValueError("a span ends before it begins")
        span: Span = self._kind(**values)
        return span


GPU_SPANS = Table(GpuSpan)
HOST_SPANS = Table(HostSpan)

Record = WatchedGpu | Peak | Event | Ending | StepSpan

_OBJECTS: Mapping[str, type[Record]] = {
    "gpu": WatchedGpu,
    "peak": Peak,
    "event": Event,
    "ending": Ending,
    "steps": StepSpan,
}
# None of them holds another record. Computed once: lines are written during training.
_WRITTEN = {
    kind: (name, tuple(field.name for field in dataclasses.fields(kind)))
    for name, kind in _OBJECTS.items()
}


def object_line(record: Record) -> str:
    """Return a record that is not a span of a table, as a line."""
    name, fields = _WRITTEN[type(record)]
    content = {field: getattr(record, field) for field in fields}
    if "text" in content:
        content["text"] = content["text"][:_LONGEST_TEXT]
    return _ENCODER.encode({name: content}) + "\n"


# Fields of a GPU that older runs lack.
_SINCE = {"looks_apart_s": LOOKS_APART_S, "link_bytes_per_s": None}


def read_object(line: bytes) -> Record:
    """Return the record in such a line. Raises ValueError."""
    content = load(line)
    if not isinstance(content, dict) or len(content) != 1:
        raise ValueError("a line does not have exactly one key")
    (name, value) = next(iter(content.items()))
    if name not in _OBJECTS:
        raise ValueError(f"unknown key {name!r:.40}")
    if name == "gpu" and isinstance(value, dict):
        value = {**_SINCE, **value}  # older runs lack these
    record: Record = from_jsonable(_OBJECTS[name], value)
    for entry in dataclasses.fields(record):
        figure = getattr(record, entry.name)
        if isinstance(figure, int | float):
            _in_range(figure)
    return record


def load(line: bytes) -> Any:
    """Parse strict JSON: no NaN, and no nesting too deep for a reader."""
    try:
        return _DECODER.decode(line.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


# ---- a file that may still be growing, or be hostile -> its whole lines ----
# Only a regular file is opened. A line that is too long is skipped in pieces and never held in
# memory. All files of one run together have a size limit.

# Judgement: eight GPUs produce about 60 MB, however long they are watched.
MOST_BYTES = 1 << 29


@dataclass(slots=True)
class Complaints:
    """What could not be read, once per file."""

    left_bytes: int = MOST_BYTES
    _counts: dict[str, int] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)

    def add(self, file: str, reason: str) -> None:
        self._counts[file] = self._counts.get(file, 0) + 1
        self._reasons.setdefault(file, reason)

    def texts(self) -> list[str]:
        """Return one sentence per file."""
        return [
            f"{count} {'line' if count == 1 else 'lines'} of {file[:80]} left out:"
            f" {self._reasons[file][:200]}"
            for file, count in self._counts.items()
        ]


def whole_lines(path: Path, complaints: Complaints, unwritten: bytes = b"") -> Iterator[bytes]:
    """Yield whole lines of a file and its unwritten rest; an incomplete last line is dropped."""
    torn = b""
    try:
        file = _open(path)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            complaints.add(path.name, error.strerror or str(error))
    else:
        with file:
            for line in _read(file, path.name, complaints):
                if line.endswith(b"\n"):
                    yield line
                else:
                    torn = line
    yield from (torn + unwritten).splitlines(keepends=True) if unwritten else ()


def _open(path: Path) -> BinaryIO:
    # Without O_NONBLOCK, opening a pipe would block before we can see that it is one.
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(number, "rb")
    if not stat.S_ISREG(os.fstat(number).st_mode):
        file.close()
        raise OSError(0, "it is not a regular file")
    return file


def _read(file: BinaryIO, name: str, complaints: Complaints) -> Iterator[bytes]:
    while line := file.readline(LONGEST_LINE_BYTES):
        complaints.left_bytes -= len(line)
        if complaints.left_bytes < 0:
            complaints.add(name, f"the run has more than {MOST_BYTES} bytes")
            return
        if line.endswith(b"\n") or len(line) < LONGEST_LINE_BYTES:
            yield line
            continue
        complaints.add(name, f"it is longer than {LONGEST_LINE_BYTES} bytes")
        while line and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE_BYTES)
            complaints.left_bytes -= len(line)


def last_lines(path: Path, max_bytes: int) -> list[bytes]:
    """Return the whole lines in the last `max_bytes` of a file; none if it cannot be read."""
    try:
        with _open(path) as file:
            skipped = max(os.fstat(file.fileno()).st_size - max_bytes, 0)
            file.seek(skipped)
            lines = file.read(max_bytes).splitlines(keepends=True)
    except OSError:  # it is not there yet, or was just deleted for its age
        return []
    return [line for line in lines[bool(skipped) :] if line.endswith(b"\n")]


def names_in(directory: Path) -> set[str]:
    """Return the names of the files in a directory; none if it does not exist."""
    try:
        with os.scandir(directory) as entries:
            return {entry.name for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return set()
