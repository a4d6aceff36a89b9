"""Spans -> files of spans that get coarser with age, so that a run of weeks stays small.

Every span is written as it comes, and once more merged into longer ones, each length to files of
its own. Old files of short spans are deleted; nothing is ever rewritten, so whoever reads finds
whole lines, and at every moment of the run the shortest spans that are left.

    gpu-1s-0.jsonl gpu-1s-1.jsonl ...   an hour each, of which six are kept
    gpu-10s-0.jsonl ...                 two days
    gpu-60s-0.jsonl ...                 for good: about 1.6 MB a day for eight GPUs
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from oomph.records.run import GpuSpan, HostSpan
from oomph.running.appending import Appender
from oomph.running.run_lines import Table

Span = TypeVar("Span", GpuSpan, HostSpan)

HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Tier:
    """Spans of about one length."""

    length_s: int
    file_s: int  # how much of the run one file holds
    num_files: int | None  # how many are kept; None: all

    def file_of(self, began_s: float) -> int:
        return int(began_s // self.file_s)


TIERS = (
    Tier(1, HOUR_S, 7),  # six hours, and the one that is being written
    Tier(10, 6 * HOUR_S, 9),
    Tier(60, 48 * HOUR_S, None),
)


class TieredFiles(Generic[Span]):
    """Writes spans of one kind, of several GPUs perhaps."""

    def __init__(
        self,
        directory: Path,
        name: str,
        table: Table[Span],
        merge: Callable[[Sequence[Span]], Span],
        tiers: Sequence[Tier] = TIERS,
    ) -> None:
        self._table: Table[Span] = table
        self._merge: Callable[[Sequence[Span]], Span] = merge
        self._files = [_TierFiles(directory, name, table.header(), tier) for tier in tiers]
        self._open: dict[tuple[int, object], list[Span]] = {}  # by tier and GPU

    def add(self, span: Span) -> None:
        self._files[0].add(span.began_s, self._table.row(span))
        for place in range(1, len(self._files)):
            self._gather(place, span)

    def _gather(self, place: int, span: Span) -> None:
        tier = self._files[place].tier
        key = (place, getattr(span, "gpu", None))
        gathered = self._open.setdefault(key, [])
        if gathered and span.began_s // tier.length_s != gathered[0].began_s // tier.length_s:
            self._files[place].add(gathered[0].began_s, self._table.row(self._merge(gathered)))
            gathered.clear()
        gathered.append(span)

    def appenders(self) -> list[Appender]:
        return [files.appender for files in self._files if files.appender is not None]

    def close(self) -> None:
        """What is gathered and not full: the shorter spans have it, so only they are needed."""
        for files in self._files:
            files.close()


class _TierFiles:
    """The files of one tier, of which the newest is open."""

    def __init__(self, directory: Path, name: str, header: str, tier: Tier) -> None:
        self.tier = tier
        self.appender: Appender | None = None
        self._number = -1
        self._directory = directory
        self._name = f"{name}-{tier.length_s}s"
        self._header = header

    def add(self, began_s: float, row: str) -> None:
        number = self.tier.file_of(began_s)
        if number > self._number:
            self._turn_over(number)
        if self.appender is not None:
            self.appender.add(row)

    def _turn_over(self, number: int) -> None:
        self.close()
        self._number = number
        self.appender = Appender(self._path(number), self._header)
        if self.tier.num_files is not None:
            self._delete_up_to(number - self.tier.num_files)

    def _delete_up_to(self, last: int) -> None:
        # A directory that is gone, or a disk that fails: the next hour tries again.
        with contextlib.suppress(OSError):
            for path in self._directory.glob(f"{self._name}-*.jsonl"):
                number = path.stem.rpartition("-")[2]
                if number.isdecimal() and int(number) <= last:
                    path.unlink()

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._name}-{number}.jsonl"

    def close(self) -> None:
        if self.appender is not None:
            self.appender.close()
