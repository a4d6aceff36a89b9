"""Multi-layer perceptrons of GPUMemNet: small, so mostly the CUDA context of one machine.

Its generator draws inputs, outputs, depth and shape (NeuroNetGen_scripts/MLP/mlp.py); the first row
is where that machine's context is read from (rows.py), and so no test of it.
"""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

from torch import nn

from accuracy.rows import GPUMEMNET, Row

# Its loss for one output (BCEWithLogitsLoss, on integer labels of another shape) raises an error:
# what was measured is a run that ended before its first backward pass.
_LEAST_OUTPUTS = 2


def make(widths: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def widths_of(inputs: int, outputs: int, depth: int, shape: str) -> tuple[int, ...]:
    """The widths of all layers.

    >>> widths_of(100, 10, 3, "pyramid"), widths_of(100, 10, 3, "gradual")
    ((100, 50, 25, 12, 10), (100, 70, 40, 10, 10))
    """
    widths = [inputs]
    for _ in range(depth + (shape == "bottleneck")):
        width = widths[-1]
        if shape in ("pyramid", "bottleneck"):
            width = max(width // 2, outputs)
        elif shape == "gradual":
            width = max(width - (inputs - outputs) // depth, outputs)
        widths.append(width)
    return (*widths, outputs)


def rows() -> tuple[Row, ...]:
    with Path(__file__).with_name("gpumemnet_mlp.csv").open(encoding="utf-8") as file:
        published = list(csv.DictReader(file))
    return tuple(
        Row(
            source=GPUMEMNET,
            model="perceptron",
            widths=widths_of(
                int(row["inputs"]), int(row["outputs"]), int(row["depth"]), row["shape"]
            ),
            micro_batch=int(row["batch"]),
            size=0,
            optimizer="Adam",
            measured_mib=int(row["mib"]),
            remark="" if number else "the context is read from this run",
        )
        for number, row in enumerate(published)
        if int(row["outputs"]) >= _LEAST_OUTPUTS
    )
