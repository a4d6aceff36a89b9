"""Workload -> will autocast to fp16 or bf16 train this model, and if not, which op breaks it?

A step is run in fp64, in fp32 and under autocast as CUDA does it, with the same random numbers,
and the gradients are compared. How far they may be apart is the model's own: a step in fp64 whose
weights and inputs alone are rounded says how sensitive its gradient is. Values are those at the
start of training, or of the weights that the model is given: activations grow later, and may then
overflow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from oomph.records.check import LowPrecision as Dtype
from oomph.records.check import PrecisionCheck
from oomph.records.workload import Workload
from oomph.stability import precision_findings
from oomph.stability.cuda_casts import CudaCasts, known_to_models
from oomph.stability.examples import Examples
from oomph.stability.low_precision import LowPrecision
from oomph.stability.observed import Broken, Observed, Reference
from oomph.stability.precision_gaps import resolved_values
from oomph.stability.randomness import Drawing, Draws, Redrawing
from oomph.stability.trial import Trial, rounded_batch, widest
from oomph.stability.whereabouts import Call, Whereabouts

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FIRST_SCALE = 2.0**16  # torch.amp.GradScaler(init_scale=)
_SMALLER = (2.0**12, 2.0**8, 2.0**4, 1.0, 2.0**-4, 2.0**-8)
_LARGER = (2.0**20, 2.0**24, 2.0**28, 2.0**32)
# Of the values of a gradient, that became 0: where there are more, a larger scale is tried.
_FEW_ZEROED = 0.002
_FIRST_STEP = "values are those of the first step: they may grow"


def check_precision(
    workload: Workload,
    examples: Examples,
    casts: CudaCasts,
    dtypes: tuple[Dtype, ...] = ("fp16", "bf16"),
) -> list[PrecisionCheck]:
    """One check for each dtype. Patches torch: for a process of its own."""
    with known_to_models(casts):
        trial = Trial(workload, wide=False)
        reference = _reference(workload, examples, trial, casts)
        return [_checked(trial, examples, reference, dtype) for dtype in dtypes]


def _reference(
    workload: Workload, examples: Examples, narrow: Trial, casts: CudaCasts
) -> Reference:
    trial, seen, limits = widest(workload, lambda trial: _exact(trial, examples))
    draws = seen.draws
    again = narrow.run(examples.whole, Redrawing(draws, 0, examples.num, examples.num))
    return Reference(
        trial=trial,
        cuda_autocast=casts.switched_on,
        gradient=seen.gradient,
        fp32_gradient=again.gradient,
        draws=draws,
        is_there=resolved_values(trial, seen.gradient, again.gradient),
        infinite=seen.infinite,
        limits=(_FIRST_STEP, *limits, *examples.notes, *_recurrent(trial.model)),
    )


class _Seen(NamedTuple):
    """Of the step in fp64."""

    gradient: Any
    draws: Draws
    infinite: set[tuple[str | None, str]]


def _exact(trial: Trial, examples: Examples) -> _Seen:
    draws, where = Draws(), Whereabouts(trial.model)
    watch = LowPrecision(where)
    ran = trial.run(examples.whole, where, watch, Drawing(draws))
    infinite = {(overflow.module, overflow.op) for overflow in watch.overflows}
    return _Seen(ran.gradient, draws, infinite)


def _rounded_gradient(examples: Examples, reference: Reference, dtype: Any) -> Any:
    """Of the same step in fp64, with weights and inputs rounded to `dtype` and nothing else."""
    trial = reference.trial
    redrawing = Redrawing(reference.draws, 0, examples.num, examples.num)
    with trial.rounded(dtype):
        return trial.run(rounded_batch(examples.whole, dtype), redrawing).gradient


def _recurrent(model: Any) -> list[str]:
    """AutocastRNN.cpp casts to fp16 whatever autocast's dtype is."""
    is_so = any(isinstance(module, torch.nn.RNNBase) for module in model.modules())
    return ["on a GPU cuDNN's recurrent layers run in fp16, with bf16 autocast, too"] * is_so


def _checked(
    trial: Trial, examples: Examples, reference: Reference, dtype: Dtype
) -> PrecisionCheck:
    if not bool(torch.isfinite(reference.gradient).all()) or not bool(reference.gradient.any()):
        return PrecisionCheck(
            verdict="uncertain",
            conclusion="the gradient is 0 or not finite in fp64 already",
            confidence="low",
            limits=reference.limits,
            dtype=dtype,
        )
    try:
        observed = _scaled(trial, examples, reference, dtype)
    except Broken as broken:
        return precision_findings.of_error(broken, dtype, reference.limits)
    rounded = _rounded_gradient(examples, reference, _DTYPES[dtype])
    return precision_findings.judged(
        observed, reference, rounded, dtype, lambda: _calls(trial, examples, reference, dtype)
    )


def _scaled(trial: Trial, examples: Examples, reference: Reference, dtype: Dtype) -> Observed:
    """The step with the loss scale that GradScaler would settle at; bf16 needs none."""
    if dtype == "bf16":
        return _observe(trial, examples, reference, dtype, 1.0)
    observed = _observe(trial, examples, reference, dtype, FIRST_SCALE)
    for scale in _SMALLER:
        if observed.is_finite:
            break
        observed = _observe(trial, examples, reference, dtype, scale)
    if observed.scale == FIRST_SCALE:
        for scale in _LARGER:
            if observed.zeroed_ratio <= _FEW_ZEROED:
                break
            larger = _observe(trial, examples, reference, dtype, scale)
            if not larger.is_finite or larger.zeroed_ratio >= observed.zeroed_ratio:
                break
            observed = larger
    return observed


@contextlib.contextmanager
def _op_by_op(model: Any) -> Iterator[None]:
    """Recurrent layers of the CPU would be one op, which computes in fp32 inside."""
    has_recurrent = any(isinstance(module, torch.nn.RNNBase) for module in model.modules())
    before = bool(torch.backends.mkldnn.enabled)
    torch._C._set_mkldnn_enabled(before and not has_recurrent)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _calls(
    trial: Trial, examples: Examples, reference: Reference, dtype: Dtype
) -> tuple[list[Call], list[Call]]:
    """What every module was given and gave, in fp64 and under autocast."""
    exact = Whereabouts(reference.trial.model, keeps=True)
    redrawing = Redrawing(reference.draws, 0, examples.num, examples.num)
    reference.trial.run(examples.whole, exact, redrawing)
    low = Whereabouts(trial.model, keeps=True)
    _observe(trial, examples, reference, dtype, 1.0, low)
    return exact.calls, low.calls


def _observe(
    trial: Trial,
    examples: Examples,
    reference: Reference,
    dtype: Dtype,
    scale: float,
    where: Whereabouts | None = None,
) -> Observed:
    where = where or Whereabouts(trial.model)
    watch = LowPrecision(where)
    redrawing = Redrawing(reference.draws, 0, examples.num, examples.num)
    casting = torch.autocast("cuda", dtype=_DTYPES[dtype])
    around = (where, watch, redrawing, reference.cuda_autocast(), _op_by_op(trial.model))
    try:
        ran = trial.run(examples.whole, *around, forward=(casting,), scale=scale)
    except Exception as error:
        module, op = watch.failed or (where.failed, None)
        raise Broken(error, module, op) from error
    there = reference.is_there
    lost = there & (ran.gradient == 0)
    return Observed(
        scale=scale,
        loss=ran.loss,
        gradient=ran.gradient,
        zeroed_ratio=float(lost.sum() / there.sum().clamp(min=1)),
        overflows=[o for o in watch.overflows if (o.module, o.op) not in reference.infinite],
        largest=watch.largest,
        largest_in=watch.largest_in,
        emulated=watch.emulated,
    )
