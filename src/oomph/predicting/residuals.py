"""Kind of model -> how far the truth may lie outside a prediction's named unknowns.

residuals.json has the published runs that `python -m accuracy --bars` predicted: for each, how far
its measurement lies outside the interval of the named unknowns and `AROUND_ANY_BYTES`, as a share
of what torch reserves. The widths follow from them by split conformal prediction (Vovk, Gammerman,
Shafer, Algorithmic Learning in a Random World, 2005).
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal, get_args

from oomph.records.trace import Op
from oomph.units import MIB

Kind = Literal["transformer", "convolutional model", "other model", "model on several GPUs"]
KINDS: tuple[Kind, ...] = get_args(Kind)

COVERAGE_RATIO = 0.95
# A small model's figure moves by whole segments of the allocator, of 20 MiB each; two of them are
# granted to every prediction. Judgement.
AROUND_ANY_BYTES = 40 * MIB
# From so many runs on, 95 % of them and the next one leave out one run (the n + 1 rule). Sources
# differ more than runs of one source, and from two alone nothing says by how much: judgement.
_LEAST_RUNS = 19
_LEAST_SOURCES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One published run: how far its measurement lies outside what was predicted by name."""

    kind: Kind
    source: str
    what: str
    outside_ratio: float  # of what torch reserves; below 0 if the measurement lies below


@dataclass(frozen=True, slots=True)
class Width:
    """How far the bar reaches to both sides, as a share of what torch reserves, and why."""

    ratio: float
    because: str


def kind_of(ops: Iterable[Op], num_gpus: int = 1) -> Kind:
    """Return what kind of model runs these kernels, by where its arithmetic is.

    Some transformers have convolutions (their images, LoRA in litgpt), and some U-Nets attention.
    """
    if num_gpus > 1:
        return "model on several GPUs"
    flops_by_name: Counter[str] = Counter()
    for op in ops:
        flops_by_name[op.name] += op.flops
    convolved = sum(flops for name, flops in flops_by_name.items() if "convolution" in name)
    if 2 * convolved > flops_by_name.total():
        return "convolutional model"
    attends = any(_is_attention(name) for name in flops_by_name)
    return "transformer" if attends else "other model"


def _is_attention(name: str) -> bool:
    """Attention written by hand has a softmax; that of a loss is `_log_softmax`."""
    return "attention" in name or name in ("_softmax", "_safe_softmax")


@functools.cache
def width_of(kind: Kind) -> Width:
    """Return the width for a kind of model."""
    return width_from(published_residuals(), kind)


def width_from(residuals: Sequence[Residual], kind: Kind) -> Width:
    """Return the width for a kind from these residuals.

    Each source is covered for itself, also the one that fits worst. A kind with too few runs or
    sources is as wide as the widest of all kinds, and wider than its own sources need: the largest
    of k draws lies at k / (k + 1) of a uniform distribution's end, on average.
    """
    own = [each for each in residuals if each.kind == kind]
    num_sources = len({each.source for each in own})
    counted = f"{len(own)} runs from {num_sources} source{'s' * (num_sources != 1)}"
    if len(own) >= _LEAST_RUNS and num_sources >= _LEAST_SOURCES:
        return Width(
            _widest_source(own), f"covers {COVERAGE_RATIO:.0%} of each source in {counted}"
        )
    because = f"few runs were published ({counted}): as wide as any source of any kind needs"
    own_end = _widest_source(own) * (num_sources + 1) / max(num_sources, 1)
    return Width(max(_widest_source(residuals), own_end), because)


def _widest_source(residuals: Sequence[Residual]) -> float:
    by_source: dict[tuple[str, str], list[float]] = {}
    for each in residuals:
        by_source.setdefault((each.kind, each.source), []).append(abs(each.outside_ratio))
    return max((conformal_quantile(ratios) for ratios in by_source.values()), default=0.0)


def conformal_quantile(ratios: Sequence[float], coverage_ratio: float = COVERAGE_RATIO) -> float:
    """Return the ratio that the next run stays below with this probability.

    It is the ceil((n + 1) x coverage)-th smallest; the largest if there are too few.

    >>> conformal_quantile([0.01 * number for number in range(1, 40)])
    0.38
    """
    rank = ceil((len(ratios) + 1) * coverage_ratio)
    return sorted(ratios)[min(rank, len(ratios)) - 1]


@functools.cache
def published_residuals() -> tuple[Residual, ...]:
    """Return the residuals of residuals.json."""
    written = json.loads(Path(__file__).with_name("residuals.json").read_text("utf-8"))
    return tuple(
        Residual(kind=group["kind"], source=group["source"], what=what, outside_ratio=ratio)
        for group in written["sources"]
        for what, ratio in group["runs"].items()
    )
