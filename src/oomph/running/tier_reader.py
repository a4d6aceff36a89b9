"""Files of spans that get coarser with age -> the shortest spans that are left of each moment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from oomph.records.run import GpuSpan, HostSpan
from oomph.running.line_files import Complaints, whole_lines
from oomph.running.run_lines import Table

Span = TypeVar("Span", GpuSpan, HostSpan)

_MOST_FILES = 10_000
# Eight GPUs leave 200 000 of a second, 140 000 of ten, and 12 000 a day of a minute.
_MOST_SPANS = 600_000
_TOUCH_S = 0.01  # times are written to the millisecond: so far apart is still one after the other


def read_tiers(
    directory: Path,
    name: str,
    table: Table[Span],
    unwritten: Mapping[str, bytes],
    complaints: Complaints,
) -> tuple[Span, ...]:
    """All spans of that name, by time."""
    found: list[Span] = []
    begun: dict[object, float] = {}  # by GPU: from when on there are shorter ones
    for length_s in sorted({length for length, _, _ in _files(directory, name, unwritten)}):
        covered = dict(begun)
        for of_length, _, file in _files(directory, name, unwritten):
            if of_length != length_s:
                continue
            extra = unwritten.get(file, b"")
            for span in _read_file(directory / file, table, extra, complaints):
                gpu = getattr(span, "gpu", None)
                if span.ended_s > covered.get(gpu, float("inf")) + _TOUCH_S:
                    continue
                if len(found) >= _MOST_SPANS:
                    complaints.add(file, f"a run has no more than {_MOST_SPANS} spans")
                    break
                begun[gpu] = min(begun.get(gpu, float("inf")), span.began_s)
                found.append(span)
    return tuple(sorted(found, key=lambda span: span.began_s))


def _files(
    directory: Path, name: str, unwritten: Mapping[str, bytes]
) -> list[tuple[int, int, str]]:
    """Length, number and name of each file, sorted; also of those that could not be made."""
    pattern = re.compile(rf"{name}-(\d{{1,6}})s-(\d{{1,9}})\.jsonl")
    matches = (pattern.fullmatch(each) for each in names_in(directory) | unwritten.keys())
    return sorted((int(m[1]), int(m[2]), m[0]) for m in matches if m)[:_MOST_FILES]


def names_in(directory: Path) -> set[str]:
    """The names of the files in a directory; none in one that could never be made."""
    try:
        with os.scandir(directory) as entries:
            return {entry.name for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _read_file(
    path: Path, table: Table[Span], unwritten: bytes, complaints: Complaints
) -> list[Span]:
    lines = whole_lines(path, complaints, unwritten)
    try:
        columns = table.columns(next(lines, b""))
    except ValueError as error:
        complaints.add(path.name, str(error))
        return []
    read = (_read_row(table, columns, line, path.name, complaints) for line in lines)
    return [span for span in read if span is not None]


def _read_row(
    table: Table[Span], columns: list[str], line: bytes, file: str, complaints: Complaints
) -> Span | None:
    try:
        return table.span(columns, line)
    except ValueError as error:
        complaints.add(file, str(error))
        return None
