"""Gradients of one step, computed in several ways -> how far they are apart, and may be.

How far two gradients may be apart depends on the model. Rounding its weights and inputs alone, and
computing in fp64, changes the gradient of a GPT-2 by 0.2 % in bf16, that of a DenseNet before
training by half. Thirteen models that train well (perceptrons, transformers, six CNNs of timm) were
1.0 to 3.6 times as far off under autocast, in either dtype; three that it breaks silently, 590 to
4900 times: 10 is between. A difference of the loss alone tells nothing, and neither does the size
of gradients, which goes with the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from oomph.stability.observed import Observed, Reference
from oomph.stability.trial import Trial

_MOST_TIMES = 10  # as far off as rounding weights and inputs makes it
_HARMLESS_ERROR = 0.02  # of the whole gradient: far below what one batch differs from the next by
_LEAST_COSINE = 0.95  # of the gradient of one parameter
# Of the whole gradient's typical value; below it, a gradient is 0 but for an epsilon, as that of a
# scale in front of a norm is.
_LEAST_TYPICAL = 0.01
_RESOLVED_COSINE = 0.999  # in fp32; below it, a gradient is rounding itself


class Gaps(NamedTuple):
    """How far gradients are from that of fp64."""

    error: float | None  # under autocast; None: it is not finite
    sensitivity: float  # with weights and inputs rounded, computed in fp64
    cosines: list[tuple[str, float]]  # of parameters that point elsewhere than they should

    @property
    def most_error(self) -> float:
        return max(_HARMLESS_ERROR, _MOST_TIMES * self.sensitivity)


def gaps_between(observed: Observed, reference: Reference, rounded: Any) -> Gaps:
    """`rounded` is the gradient in fp64 with weights and inputs rounded to the dtype."""
    return Gaps(
        error=apart(reference.gradient, observed.gradient),
        sensitivity=apart(reference.gradient, rounded) or 0.0,
        cosines=_cosines(observed, reference, rounded),
    )


def apart(exact: Any, other: Any) -> float | None:
    found = float((exact - other).norm() / exact.norm())
    return found if found < float("inf") else None


def resolved_values(trial: Trial, exact: Any, narrow: Any) -> Any:
    """Which values of a gradient are there: of parameters that fp64 and fp32 agree on, and not 0.

    What should be 0 (queries of which only one is used, a bias in front of a norm) is rounding.
    """
    parts = zip(trial.by_parameter(exact), trial.by_parameter(narrow), strict=True)
    return torch.cat(
        [
            (there != 0) & (_cosine(there, other) > _RESOLVED_COSINE)
            for (_, there), (_, other) in parts
        ]
    )


def _cosines(observed: Observed, reference: Reference, rounded: Any) -> list[tuple[str, float]]:
    """Of parameters that point elsewhere, though fp32 and rounding alone do not turn them."""
    found = []
    for (name, exact), (_, narrow), (_, near), (_, ours) in zip(
        *map(
            reference.trial.by_parameter,
            (reference.gradient, reference.fp32_gradient, rounded, observed.gradient),
        ),
        strict=True,
    ):
        counts = _typical(exact) > _LEAST_TYPICAL * _typical(reference.gradient)
        is_resolved = counts and _cosine(exact, narrow) > _RESOLVED_COSINE
        cosine = _cosine(exact, ours)
        # An angle is the root of what a cosine lacks.
        most_turned = _MOST_TIMES**2 * (1 - _cosine(exact, near))
        if is_resolved and cosine < _LEAST_COSINE and 1 - cosine > most_turned:
            found.append((name, cosine))
    return found


def _typical(values: Any) -> float:
    """The root of the mean square."""
    size = float(values.norm())
    return size / math.sqrt(max(values.numel(), 1))


def _cosine(one: Any, other: Any) -> float:
    length = float(one.norm() * other.norm())
    return float(torch.dot(one, other)) / length if length else 0.0


def tensors_apart(exact: Sequence[Any], rounded: Sequence[Any]) -> float | None:
    """How far the worst of them is, relative to its size; None: there is nothing to compare."""
    found = [
        float((a.double() - b.double()).norm() / a.double().norm())
        for a, b in zip(exact, rounded, strict=False)
        if a.shape == b.shape and a.is_floating_point() and bool(a.any())
    ]
    return max((each for each in found if each == each), default=None)
