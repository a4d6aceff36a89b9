"""A step under autocast beside the same step in fp64 -> the verdict, the op and what to do.

Found by exceptions, by values that are not finite, and by gradients that are too far apart.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oomph.records.check import CheckVerdict, Finding, PrecisionCheck
from oomph.records.check import LowPrecision as Dtype
from oomph.stability.observed import Broken, Observed, Reference
from oomph.stability.precision_gaps import Gaps, apart, gaps_between, tensors_apart
from oomph.stability.whereabouts import Call

Look = Callable[[], tuple[list[Call], list[Call]]]  # in fp64, and under autocast

_MOST_APART = 0.1  # of what a module gives
_SENSITIVE = 0.1  # of the whole gradient: worth to be said
_MOST_ZEROED = 0.05
_LARGEST_FP16 = 65504.0
_LEAST_HEADROOM = 8.0  # by which values may grow
_FIRST_SCALE_LOG2 = 16
_STEPS_A_DOUBLING = 2000  # torch.amp.GradScaler(growth_interval=)

_ISLAND = (
    'compute it in fp32: with torch.autocast("cuda", enabled=False) around it, and .float() on'
    " what goes in"
)
# What messages say -> what to do.
_CURES = (
    ("unsafe to autocast", "binary_cross_entropy_with_logits on what comes before the sigmoid"),
    ("without overflow", "torch.finfo(x.dtype).min instead of a number that fp16 does not have"),
    ("Index put requires", "cast what is written: out[index] = value.to(out.dtype)"),
    ("same dtype", "@torch.amp.custom_fwd and custom_bwd on an autograd.Function; else .to(dtype)"),
    ("expected scalar type", "@torch.amp.custom_fwd and custom_bwd on an autograd.Function"),
    ("Low precision dtypes", _ISLAND),
    ("Unsupported dtype", _ISLAND),
)


def of_error(broken: Broken, dtype: Dtype, limits: tuple[str, ...]) -> PrecisionCheck:
    """Autocast makes the user's code raise."""
    error = broken.error
    told = " ".join(str(error).split())[:200]
    cure = next((cure for part, cure in _CURES if part in told), _ISLAND)
    place = _users_line(error)
    is_fft = "Unsupported dtype Half" in told  # cuFFT has it where sizes are powers of 2
    finding = Finding(
        what=f"{type(error).__name__}: {told}" + (f" ({place})" if place else ""),
        module=broken.module,
        op=broken.op,
        do=cure,
    )
    return PrecisionCheck(
        verdict="uncertain" if is_fft else "fails",
        conclusion=f"{dtype} raises an error in {finding.where}",
        findings=(finding,),
        confidence="fair" if is_fft else "high",
        limits=(*limits, "CUDA has fp16 transforms of sizes that are powers of 2") * is_fft
        or limits,
        dtype=dtype,
    )


def judged(
    observed: Observed, reference: Reference, rounded: Any, dtype: Dtype, look: Look
) -> PrecisionCheck:
    """`rounded` is the gradient in fp64 with weights and inputs rounded to the dtype.

    `look` runs both steps once more, and tells what every module gave.
    """
    gaps = gaps_between(observed, reference, rounded)
    verdict, conclusion, findings = _verdict(observed, reference, dtype, gaps, look)
    limits = reference.limits
    if observed.emulated:
        ops = ", ".join(sorted(observed.emulated)[:4])
        limits = (*limits, f"the CPU lacks {ops} in {dtype}: computed in fp32 and rounded")
    fp32_error = apart(reference.gradient, reference.fp32_gradient)
    return PrecisionCheck(
        verdict=verdict,
        conclusion=conclusion,
        findings=findings,
        confidence="low" if any("made-up" in limit for limit in limits) else "fair",
        limits=limits,
        dtype=dtype,
        gradient_error_ratio=gaps.error,
        sensitivity_ratio=gaps.sensitivity,
        fp32_error_ratio=fp32_error if reference.trial.wide else None,
        zeroed_ratio=observed.zeroed_ratio,
        largest_value=observed.largest,
        loss_scale=observed.scale if dtype == "fp16" and observed.is_finite else None,
    )


_Judgement = tuple[CheckVerdict, str, tuple[Finding, ...]]


def _verdict(
    observed: Observed, reference: Reference, dtype: Dtype, gaps: Gaps, look: Look
) -> _Judgement:
    """The first of these that is so."""
    if gaps.error is None or not math.isfinite(observed.loss):
        return _not_finite(observed, dtype)
    if gaps.error > gaps.most_error:
        return _wrong(observed, dtype, gaps, look)
    if observed.zeroed_ratio > _MOST_ZEROED:
        return _lost(observed, reference, dtype)
    fine = f"{dtype} gives the gradient of fp64 within {gaps.error:.1g}"
    if gaps.error > _SENSITIVE:
        fine += f", of which rounding weights and inputs is {gaps.sensitivity:.1g}"
    doubts = _doubts(observed, dtype, gaps)
    if doubts:
        return "uncertain", f"{fine}, but {doubts[0].where}: {doubts[0].what}", tuple(doubts)
    return "passes", fine + _scale_in_words(observed, dtype), tuple(_notes(observed, dtype))


def _not_finite(observed: Observed, dtype: Dtype) -> _Judgement:
    finding = (
        _overflowed(observed, dtype)
        if observed.overflows
        else Finding(
            what=f"gradients overflow in {dtype} at every loss scale",
            module=None,
            op=None,
            do="make the loss smaller, or bf16",
        )
    )
    return "fails", f"{dtype} overflows: {finding.where}: {finding.what}", (finding,)


def _overflowed(observed: Observed, dtype: Dtype) -> Finding:
    first = next((o for o in observed.overflows if not o.is_low_end), observed.overflows[0])
    return Finding(
        what=f"{first.op} gives infinity or no number in {first.dtype}",
        module=first.module,
        op=first.op,
        do=_ISLAND + ("; or bf16, which has the range of fp32" if dtype == "fp16" else ""),
    )


def _wrong(observed: Observed, dtype: Dtype, gaps: Gaps, look: Look) -> _Judgement:
    """Everything is finite, and the gradient is another one: nobody would notice."""
    if any(not o.is_low_end for o in observed.overflows):
        finding = _overflowed(observed, dtype)
    else:
        finding = _first_apart(*look(), dtype, gaps)
    said = f"{dtype} silently gives another gradient (by {gaps.error:.2g} of its size)"
    return "fails", f"{said}: {finding.where}: {finding.what}", (finding,)


def _first_apart(
    calls: Sequence[Call], observed: Sequence[Call], dtype: Dtype, gaps: Gaps
) -> Finding:
    """The first module that gives something else; else the worst parameter."""
    if [call.module for call in calls] == [call.module for call in observed]:
        for exact, rounded in zip(calls, observed, strict=True):
            apart = tensors_apart(exact.gave, rounded.gave)
            if apart is not None and apart > _MOST_APART:
                is_given_it = (tensors_apart(exact.given, rounded.given) or 0.0) > _MOST_APART
                return Finding(
                    what=f"its {'input' if is_given_it else 'output'} is wrong by {apart:.2g} in"
                    f" {dtype}",
                    module=exact.parent if is_given_it else exact.module,
                    op=None,
                    do=_ISLAND,
                )
    name, cosine = min(gaps.cosines, key=lambda each: each[1], default=("", 1.0))
    return Finding(
        what=f"the gradient of {name or 'its parameters'} points elsewhere (cosine {cosine:.2g})",
        module=name.rpartition(".")[0],
        op=None,
        do=_ISLAND,
    )


def _lost(observed: Observed, reference: Reference, dtype: Dtype) -> _Judgement:
    """Gradients that are too small for fp16 are 0: Adam would have made as much of them."""
    trial = reference.trial
    shares = {
        name: float(((ours == 0) & is_there).double().mean())
        for (name, ours), (_, is_there) in zip(
            trial.by_parameter(observed.gradient),
            trial.by_parameter(reference.is_there),
            strict=True,
        )
    }
    worst = max(shares, key=lambda name: shares[name])
    finding = Finding(
        what=f"{shares[worst]:.0%} of the gradient of {worst} become 0 in {dtype}",
        module=worst.rpartition(".")[0],
        op=None,
        do=_ISLAND + (", or bf16" if dtype == "fp16" else ""),
    )
    said = f"{dtype} turns {observed.zeroed_ratio:.0%} of the gradient's values to 0"
    at = ", at any loss scale" if dtype == "fp16" else ""
    return "fails", f"{said}{at}, most in {finding.where}", (finding,)


def _doubts(observed: Observed, dtype: Dtype, gaps: Gaps) -> list[Finding]:
    """What is right now, and may not stay so."""
    doubts = []
    if any(not o.is_low_end for o in observed.overflows):
        doubts.append(_overflowed(observed, dtype))
    headroom = _LARGEST_FP16 / max(observed.largest, 1.0)
    if dtype == "fp16" and headroom < _LEAST_HEADROOM:
        doubts.append(
            Finding(
                what=f"values reach {observed.largest:.3g}, and fp16 ends at 65504",
                module=observed.largest_in,
                op=None,
                do="bf16; or compute it in fp32, or scale it down",
            )
        )
    doubts += [
        Finding(
            what=f"the gradient of {name} points elsewhere (cosine {cosine:.2g})",
            module=name.rpartition(".")[0],
            op=None,
            do=_ISLAND,
        )
        for name, cosine in gaps.cosines
    ]
    return doubts


def _notes(observed: Observed, dtype: Dtype) -> list[Finding]:
    """What is to be known though all is well."""
    masks = [o for o in observed.overflows if o.is_low_end][:1]
    return [
        Finding(
            what=f"{mask.op} gives -inf in {dtype}, harmless here: a mask",
            module=mask.module,
            op=mask.op,
            do="torch.finfo(x.dtype).min, lest a row is masked as a whole",
        )
        for mask in masks
    ]


def _scale_in_words(observed: Observed, dtype: Dtype) -> str:
    if dtype == "bf16":
        return ", without a loss scale"
    exponent = round(math.log2(observed.scale))
    said = f", at a loss scale of 2**{exponent}"
    if exponent > _FIRST_SCALE_LOG2:
        steps = (exponent - _FIRST_SCALE_LOG2) * _STEPS_A_DOUBLING
        said += (
            f": GradScaler(init_scale=2.0**{exponent}), which it would reach by itself after"
            f" {steps} steps; until then small gradients are lost"
        )
    if exponent < _FIRST_SCALE_LOG2:
        said += f": GradScaler skips about {_FIRST_SCALE_LOG2 - exponent} steps until it is there"
    return said


def _users_line(error: Exception) -> str | None:
    """The innermost line that is neither of a library nor of oomph."""
    ours = str(Path(__file__).parents[1])
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, sys.prefix, sys.base_prefix, "<frozen"))
        and "site-packages" not in frame.filename
    ]
    return lines[-1] if lines else None
