"""Published times of single collectives beside predicted ones: collectives.csv, one machine each.

Where a source gives bus bandwidth, the time is what a GPU sends over that bandwidth, as nccl-tests
defines it. `nvls` reduces inside the NVLink switch, so that a GPU sends about half as much.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from oomph.predicting.links import links_among
from oomph.predicting.speed import estimate
from oomph.records.trace import Op
from oomph.units import MIB
from oomph.verbs.gpus import find_gpu

_SMALL_BYTES = 32 * MIB  # a bucket of DDP has 25 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    source: str
    kind: str  # "all_reduce", as an Op is named
    algorithm: str  # "ring" or "nvls"; empty if the source does not tell
    gpu: str  # in the catalogue
    num_gpus: int
    size_bytes: int
    measured_s: float

    @property
    def name(self) -> str:
        algorithm = self.algorithm or "nccl"
        return f"{self.kind} {algorithm} {self.num_gpus} x {self.gpu} {self.size_bytes}"

    @property
    def sent_bytes(self) -> int:
        passes = 2 if self.kind == "all_reduce" else 1
        return round(passes * (self.num_gpus - 1) / self.num_gpus * self.size_bytes)

    @property
    def predicted_s(self) -> float | None:
        sending = Op(
            name=self.kind, phase="backward", flops=0, moved_bytes=self.sent_bytes, dtype="float32"
        )
        waiting = Op(name="wait", phase="backward", flops=0, moved_bytes=0, dtype="float32")
        model = find_gpu(self.gpu).model
        found = estimate([sending, waiting], model, links=links_among(model, self.num_gpus))
        return found.step_s if found else None


def read_collectives() -> list[Collective]:
    with Path(__file__).with_name("collectives.csv").open(encoding="utf-8") as file:
        return [
            Collective(
                source=row["source"],
                kind=row["kind"],
                algorithm=row["algorithm"],
                gpu=row["gpu"],
                num_gpus=int(row["num_gpus"]),
                size_bytes=int(row["size_bytes"]),
                measured_s=float(row["seconds"]),
            )
            for row in csv.DictReader(file)
        ]


def table(before: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """A line per source, algorithm and GPU; small messages apart from large ones.

    `before` has the seconds of an earlier estimator, by name.
    """
    yield "| source | GPU | messages | rows | predicted / measured | median error |"
    yield "|---|---|---|--:|--:|--:|"
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for each in read_collectives():
        size = "up to 32 MiB" if each.size_bytes <= _SMALL_BYTES else "larger"
        key = (each.source, each.gpu, " ".join([size, each.algorithm]).strip())
        groups.setdefault(key, []).append(each)
    for title, group in groups.items():
        then = [(each, before[each.name][0]) for each in group if each.name in before]
        now = [(each, each.predicted_s) for each in group]
        figures = [f"{len(group)}"]
        figures += (f"{old} -> {new}" for old, new in zip(_errors(then), _errors(now), strict=True))
        yield f"| {' | '.join([*title, *figures])} |"


def _errors(said: Sequence[tuple[Collective, float | None]]) -> tuple[str, str]:
    """Return the median ratio and the median error, as shown."""
    ratios = [seconds / each.measured_s for each, seconds in said if seconds is not None]
    if not ratios:
        return "-", "-"
    error = median(abs(ratio - 1) for ratio in ratios)
    return f"{median(ratios):.2f}", f"{100 * error:.0f} %"
