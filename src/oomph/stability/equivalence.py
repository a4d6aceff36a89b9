"""Workload -> whether the gradient of the split batch equals that of the whole.

Runs a few examples in fp64, in uneven pieces, with the same random numbers per example. The weights
that recombine the pieces show what the loss divides by. Branches that these few examples do not
take are not covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from oomph.records.check import AccumulationCheck, Confidence, Finding
from oomph.records.workload import Workload
from oomph.stability.coupling import (
    CONSTANT_TERM,
    apart,
    cuts,
    find_meeting,
    fitted,
    is_constant_term,
    watch,
)
from oomph.stability.examples import Examples
from oomph.stability.normalisers import Divisors, Piece, name_normaliser
from oomph.stability.randomness import Drawing, Draws, Redrawing
from oomph.stability.trial import NOT_REPEATABLE, Ran, Trial, one_line, widest

# Errors of losses that reject a piece of some size.
_REFUSED = (RuntimeError, ValueError, IndexError, AssertionError)


def check_accumulation(workload: Workload, examples: Examples) -> AccumulationCheck:
    """Run the whole batch and its pieces, and compare. Raises what the user's code raises."""
    if examples.cannot_split is not None:
        return _uncertain(f"the batch cannot be split: {examples.cannot_split}", ())
    _, (runs, whole), notes = widest(workload, lambda trial: _first(trial, examples))
    limits = [*examples.notes, *notes]
    if not _is_there(whole.gradient):
        return _uncertain(
            "the gradient of the whole batch is 0 or not finite: nothing can be compared", limits
        )
    again = runs.piece(0, examples.num, Divisors())
    if apart(whole.gradient, again.gradient) > runs.trial.tolerance:
        conclusion = "two runs of the same batch from the same seed give different gradients"
        return _uncertain(conclusion, limits, NOT_REPEATABLE)
    tried = _split(runs)
    if isinstance(tried, str):
        return _uncertain(tried, limits)
    return _judge(runs, whole, tried, limits)


def _first(trial: Trial, examples: Examples) -> tuple[_Runs, Ran]:
    runs = _Runs(trial, examples)
    return runs, trial.run(examples.whole, Drawing(runs.draws))


class _Runs:
    """Runs of the whole batch and of its pieces, with the same random numbers."""

    def __init__(self, trial: Trial, examples: Examples) -> None:
        self.trial, self.examples = trial, examples
        self.draws = Draws()
        self.is_aligned = True

    def piece(self, start: int, stop: int, *modes: AbstractContextManager[Any]) -> Ran:
        redrawing = Redrawing(self.draws, start, stop, self.examples.num)
        ran = self.trial.run(self.examples.piece(start, stop), *modes, redrawing)
        self.is_aligned &= redrawing.is_aligned
        return ran


@dataclass(frozen=True)
class _Split:
    """A batch in two pieces."""

    bounds: tuple[tuple[int, int], tuple[int, int]]
    gradients: list[torch.Tensor]
    divisors: list[Divisors]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.bounds)


def _split_at(runs: _Runs, at: int) -> _Split:
    bounds, divisors = ((0, at), (at, runs.examples.num)), [Divisors(), Divisors()]
    ran = [runs.piece(*bound, each) for bound, each in zip(bounds, divisors, strict=True)]
    return _Split(bounds, [each.gradient for each in ran], divisors)


def _split(runs: _Runs) -> _Split | str:
    """Return the batch in two pieces, or the reason if the loss rejects all these sizes."""
    num = runs.examples.num
    reason = f"{num} examples cannot be split"
    for at in cuts(num):
        try:
            split = _split_at(runs, at)
        except _REFUSED as error:
            message = f"{type(error).__name__}: {one_line(error, 160)}"
            reason = f"pieces of {at} and {num - at} examples fail: {message}"
            continue
        return split
    return reason


def _judge(runs: _Runs, whole: Ran, split: _Split, limits: list[str]) -> AccumulationCheck:
    if not all(map(_is_there, split.gradients)):
        return _uncertain(
            "the gradient of a piece is 0 or not finite, as if nothing in it counted (all targets"
            " ignored): a mean over nothing is NaN, also in training",
            limits,
        )
    weights, residual = fitted(whole.gradient, split.gradients)
    if not runs.is_aligned:
        limits.append("random numbers are drawn in another order for pieces than for the whole")
    figures: dict[str, Any] = {
        "confidence": _confidence(limits),
        "limits": tuple(limits),
        "piece_sizes": split.sizes,
        "residual_ratio": residual,
        "divided_ratio": apart(whole.gradient, torch.stack(split.gradients).sum(0) / 2),
    }
    if residual > runs.trial.tolerance:
        finding = _where(runs, whole, split)
        return AccumulationCheck(
            verdict="fails" if runs.is_aligned else "uncertain",
            conclusion=f"the gradient of the split batch differs by {residual:.2g} of its size,"
            f" however the pieces are weighted: {finding.where}: {finding.what}",
            findings=(finding,),
            **figures,
        )
    if weights is None:
        return _uncertain("the pieces' gradients are parallel: any weights give the same", limits)
    batches = [runs.examples.piece(*bound) for bound in split.bounds]
    pieces = [
        Piece(batch, size, weight, divisors.found)
        for batch, size, weight, divisors in zip(
            batches, split.sizes, weights, split.divisors, strict=True
        )
    ]
    normaliser, conclusion = name_normaliser(pieces)
    return AccumulationCheck(
        verdict="passes",
        conclusion=conclusion,
        findings=_moved_buffers(runs, whole),
        normaliser=normaliser,
        weights=tuple(weights),
        **figures,
    )


def _where(runs: _Runs, whole: Ran, split: _Split) -> Finding:
    """Return where examples interact, by running everything again: cut elsewhere, then observed."""
    num = runs.examples.num
    other = next((at for at in cuts(num) if at != split.sizes[0]), None)
    try:
        others = [] if other is None else _split_at(runs, other).gradients
    except _REFUSED:  # the loss rejects pieces of this size
        others = []
    if others and is_constant_term(whole.gradient, split.gradients, others, runs.trial.tolerance):
        return CONSTANT_TERM
    watches = []
    for start, stop in ((0, num), *split.bounds):
        watches.append(watch(runs.trial.model, stop - start))
        runs.piece(start, stop, *watches[-1])
    return find_meeting(runs.trial.model, watches, runs.draws)


def _moved_buffers(runs: _Runs, whole: Ran) -> tuple[Finding, ...]:
    """Return findings on state that forward changes, since it changes once per piece."""
    before = runs.trial.buffers_at_first()
    moved = [
        name.rpartition(".")
        for name, value in whole.buffers.items()
        if name in before and not torch.equal(before[name], value)
    ]
    return tuple(
        Finding(
            what=f"its buffer {buffer} changes in every forward: once for each piece, instead of"
            " once a step",
            module=module,
            do="nothing, if it converges anyway (spectral norm); else update it once a step",
        )
        for module, _, buffer in moved[:3]
    )


def _uncertain(conclusion: str, limits: Sequence[str], *findings: Finding) -> AccumulationCheck:
    return AccumulationCheck(
        verdict="uncertain",
        conclusion=conclusion,
        findings=findings,
        confidence="low",
        limits=tuple(limits),
    )


def _confidence(limits: Sequence[str]) -> Confidence:
    if any("made-up" in limit for limit in limits):
        return "low"
    return "fair" if limits else "high"


def _is_there(gradient: torch.Tensor) -> bool:
    return bool(torch.isfinite(gradient).all()) and bool(gradient.any())
