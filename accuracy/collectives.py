"""Published times of single collectives beside predicted ones: collectives.csv, one machine each.

Where a source gives bus bandwidth, the time is what a GPU sends over that bandwidth, as nccl-tests
defines it. `nvls` reduces inside the NVLink switch, so that a GPU sends about half as much.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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
        found = estimate([sending, waiting], model, num_gpus=self.num_gpus)
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


def table() -> Iterator[str]:
    """A line per source, algorithm and GPU; small messages apart from large ones."""
    yield "| source | GPU | messages | rows | predicted / measured | median error |"
    yield "|---|---|---|--:|--:|--:|"
    groups: dict[tuple[str, ...], list[float]] = {}
    for each in read_collectives():
        size = "up to 32 MiB" if each.size_bytes <= _SMALL_BYTES else "larger"
        if each.predicted_s is not None:
            key = (each.source, each.gpu, " ".join([size, each.algorithm]).strip())
            groups.setdefault(key, []).append(each.predicted_s / each.measured_s)
    for title, ratios in groups.items():
        error = median(abs(ratio - 1) for ratio in ratios)
        figures = [f"{len(ratios)}", f"{median(ratios):.2f}", f"{100 * error:.0f} %"]
        yield f"| {' | '.join([*title, *figures])} |"
