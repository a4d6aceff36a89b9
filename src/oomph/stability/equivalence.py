"""Workload -> is the gradient of the split batch the gradient of the whole?

In fp64, with a few examples in uneven pieces, and the same random numbers for the same example.
The weights that put the pieces together are found by least squares: what is left over tells
whether examples come apart at all, and the weights tell what the loss divides by. Branches that
these few examples do not take are not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oomph.records.check import SAME_IN_FP32, SAME_IN_FP64, AccumulationCheck, Finding
from oomph.records.workload import Workload
from oomph.stability import coupling
from oomph.stability.examples import Examples
from oomph.stability.normalisers import Divisors, Piece, name_normaliser
from oomph.stability.randomness import Drawing, Draws, Redrawing
from oomph.stability.trial import Ran, Trial, widest
from oomph.stability.whereabouts import Call, Whereabouts

# Gradients of two pieces that are as parallel as this give no weights.
_PARALLEL = 1e-9
# What losses raise that do not take a piece of some size.
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
    again = runs.again()
    if _apart(whole.gradient, again.gradient) > runs.tolerance:
        return _not_repeatable(limits)
    tried = _pieces(runs)
    if isinstance(tried, str):
        return _uncertain(tried, limits)
    return _judged(runs, whole, tried, limits)


def _first(trial: Trial, examples: Examples) -> tuple[_Runs, Ran]:
    runs = _Runs(trial, examples)
    return runs, runs.whole()


class _Runs:
    """Runs of the whole batch and of its pieces, with the same random numbers."""

    def __init__(self, trial: Trial, examples: Examples) -> None:
        self.trial, self.examples = trial, examples
        self.draws = Draws()
        self.is_aligned = True
        self.tolerance = SAME_IN_FP64 if trial.wide else SAME_IN_FP32

    def whole(self) -> Ran:
        return self.trial.run(self.examples.whole, Drawing(self.draws))

    def again(self) -> Ran:
        return self._piece(0, self.examples.num, Divisors())

    def piece(self, start: int, stop: int) -> tuple[Ran, Divisors]:
        divisors = Divisors()
        return self._piece(start, stop, divisors), divisors

    def _piece(self, start: int, stop: int, *modes: Any) -> Ran:
        redrawing = Redrawing(self.draws, start, stop, self.examples.num)
        ran = self.trial.run(self.examples.piece(start, stop), *modes, redrawing)
        self.is_aligned &= redrawing.is_aligned
        return ran


@dataclass(frozen=True)
class _Split:
    """A batch in two, and the weights that bring it together again."""

    at: int
    ran: tuple[Ran, Ran]
    divisors: tuple[Divisors, Divisors]


def _pieces(runs: _Runs) -> _Split | str:
    """The batch in two pieces; if the loss takes none of these sizes, why."""
    num = runs.examples.num
    told = f"{num} examples cannot be split"
    for at in _cuts(num):
        try:
            first, second = runs.piece(0, at), runs.piece(at, num)
        except _REFUSED as error:
            reason = " ".join(str(error).split())[:160]
            told = f"pieces of {at} and {num - at} examples fail: {type(error).__name__}: {reason}"
            continue
        return _Split(at, (first[0], second[0]), (first[1], second[1]))
    return told


def _cuts(num: int) -> list[int]:
    """Uneven, and if that does not work of even sizes: 3 + 5, 2 + 6, 4 + 4."""
    wanted = (3 * num // 8, num // 4, num // 2)
    return list(dict.fromkeys(max(at, 1) for at in wanted if 0 < max(at, 1) < num))


def _judged(runs: _Runs, whole: Ran, split: _Split, limits: list[str]) -> AccumulationCheck:
    gradients = [ran.gradient for ran in split.ran]
    if not all(map(_is_there, gradients)):
        return _uncertain(
            "the gradient of a piece is 0 or not finite, as if nothing in it counted (all targets"
            " ignored): a mean over nothing is no number, in training, too",
            limits,
        )
    weights, residual = fitted(whole.gradient, gradients)
    sizes = (split.at, runs.examples.num - split.at)
    figures: dict[str, Any] = {
        "piece_sizes": sizes,
        "residual_ratio": residual,
        "divided_ratio": _apart(whole.gradient, sum(gradients) / len(gradients)),
    }
    if not runs.is_aligned:
        limits = [
            *limits,
            "random numbers are drawn in another order for pieces than for the whole",
        ]
    if residual > runs.tolerance:
        return _coupled(runs, whole, split, figures, limits)
    if weights is None:
        return _uncertain("the pieces' gradients are parallel: any weights would do", limits)
    pieces = [
        Piece(batch, size, weight, divisors.found)
        for batch, size, weight, divisors in zip(
            (runs.examples.piece(0, split.at), runs.examples.piece(split.at, runs.examples.num)),
            sizes,
            weights,
            split.divisors,
            strict=True,
        )
    ]
    normaliser, conclusion = name_normaliser(pieces)
    return AccumulationCheck(
        verdict="passes",
        conclusion=conclusion,
        findings=_moved_buffers(runs, whole),
        confidence=_confidence(limits),
        limits=tuple(limits),
        normaliser=normaliser,
        weights=tuple(weights),
        **figures,
    )


def fitted(whole: Any, pieces: Sequence[Any]) -> tuple[list[float] | None, float]:
    """The weights that come closest, None if there is no telling, and what they leave over."""
    matrix = torch.stack(list(pieces), 1)
    scale = matrix.norm(dim=0)
    scale[scale == 0] = 1.0
    found = torch.linalg.lstsq(matrix / scale, whole[:, None], driver="gelsd")
    weights = found.solution[:, 0] / scale
    residual = float((matrix @ weights - whole).norm() / whole.norm())
    singular = found.singular_values
    is_known = bool(singular[-1] > _PARALLEL * singular[0]) if len(singular) else True
    return ([float(w) for w in weights] if is_known else None), residual


def _coupled(
    runs: _Runs, whole: Ran, split: _Split, figures: dict[str, Any], limits: list[str]
) -> AccumulationCheck:
    finding = (
        coupling.constant_term() if _is_constant_term(runs, whole, split) else _where(runs, split)
    )
    return AccumulationCheck(
        verdict="fails" if runs.is_aligned else "uncertain",
        conclusion=(
            f"the gradient of the split batch differs by {figures['residual_ratio']:.2g} of its"
            f" size, however the pieces are weighted: {finding.where}: {finding.what}"
        ),
        findings=(finding,),
        confidence=_confidence(limits),
        limits=tuple(limits),
        **figures,
    )


def _is_constant_term(runs: _Runs, whole: Ran, split: _Split) -> bool:
    """Is what is counted too often the same wherever the batch is cut?"""
    num = runs.examples.num
    other = next((at for at in _cuts(num) if at != split.at), None)
    if other is None:
        return False
    try:
        pieces = (runs.piece(0, other)[0], runs.piece(other, num)[0])
    except _REFUSED:  # the loss does not take pieces of this size
        return False
    extra, again = (
        sum(ran.gradient for ran in ran_pieces) - whole.gradient
        for ran_pieces in (split.ran, pieces)
    )
    return float((extra - again).norm() / whole.gradient.norm()) < runs.tolerance


def _where(runs: _Runs, split: _Split) -> Finding:
    """Run all three once more, and look at every module."""
    trial, examples = runs.trial, runs.examples
    bounds = ((0, examples.num), (0, split.at), (split.at, examples.num))
    calls: list[list[Call]] = []
    pairs: list[coupling.Pairs] = []
    for start, stop in bounds:
        where = Whereabouts(trial.model, keeps=True)
        pairs.append(coupling.Pairs(where, stop - start))
        redrawing = Redrawing(runs.draws, start, stop, examples.num)
        trial.run(examples.piece(start, stop), where, pairs[-1], redrawing)
        calls.append(where.calls)
    met = coupling.first_meeting(calls[0], calls[1:])
    return coupling.finding_of(
        trial.model,
        met,
        mixing=runs.draws.mixing,
        pairs=pairs[0].op if all(each.op for each in pairs) else None,
        scalars=coupling.single_values(trial.model, calls[0]),
    )


def _moved_buffers(runs: _Runs, whole: Ran) -> tuple[Finding, ...]:
    """State that forward changes: it will be changed once for each piece."""
    before = _buffers_before(runs.trial)
    moved = [
        name
        for name, value in whole.buffers.items()
        if name in before and not torch.equal(before[name], value)
    ]
    return tuple(
        Finding(
            what=f"its buffer {name.rpartition('.')[2]} changes in every forward: once for each"
            " piece, instead of once a step",
            module=name.rpartition(".")[0],
            op=None,
            do="nothing, if it converges anyway (spectral norm); else update it once a step",
        )
        for name in moved[:3]
    )


def _buffers_before(trial: Trial) -> dict[str, Any]:
    trial.put_back()
    return {name: value.detach().clone() for name, value in trial.model.named_buffers()}


def _not_repeatable(limits: list[str]) -> AccumulationCheck:
    return AccumulationCheck(
        verdict="uncertain",
        conclusion="two runs of the same batch from the same seed give different gradients",
        findings=(
            Finding(
                what="something draws random numbers from a generator that no seed reaches, or"
                " keeps state between calls",
                module="",
                op=None,
                do="seed it from torch, or make it a buffer",
            ),
        ),
        confidence="low",
        limits=tuple(limits),
    )


def _uncertain(conclusion: str, limits: Sequence[str]) -> AccumulationCheck:
    return AccumulationCheck(
        verdict="uncertain", conclusion=conclusion, confidence="low", limits=tuple(limits)
    )


def _confidence(limits: Sequence[str]) -> Any:
    if any("made-up" in limit for limit in limits):
        return "low"
    return "fair" if limits else "high"


def _is_there(gradient: Any) -> bool:
    return bool(torch.isfinite(gradient).all()) and bool(gradient.any())


def _apart(gradient: Any, other: Any) -> float:
    return float((gradient - other).norm() / gradient.norm())
