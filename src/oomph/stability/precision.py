"""Workload -> whether autocast to fp16 or bf16 trains this model, and if not, which op breaks it.

A step runs in fp64, in fp32 and under CUDA-like autocast, with the same random numbers, and the
gradients are compared. The tolerance depends on the model: a step in fp64 with only weights and
inputs rounded shows how sensitive its gradient is. Values are those at the start of training, or of
the weights given; activations grow later and may then overflow.
"""

from __future__ import annotations

import contextlib
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from oomph.pretending.autocast import LOW, guard, known_to_models
from oomph.records.check import CheckVerdict, Finding, PrecisionCheck
from oomph.records.check import LowPrecision as Dtype
from oomph.records.workload import Workload
from oomph.stability.calls import Call, ModuleTracker
from oomph.stability.coupling import apart
from oomph.stability.examples import Examples
from oomph.stability.randomness import Drawing, Draws, EveryOp, Redrawing, name_of
from oomph.stability.trial import Trial, one_line, rounded_batch, widest

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_FIRST_SCALE_EXPONENT = 16
_FIRST_SCALE = 2.0**_FIRST_SCALE_EXPONENT  # torch.amp.GradScaler(init_scale=)
# Judgement: steps of 2**4, as far as fp16's range of 2**40 allows a gradient to be scaled.
_SMALLER = (2.0**12, 2.0**8, 2.0**4, 1.0, 2.0**-4, 2.0**-8)
_LARGER = (2.0**20, 2.0**24, 2.0**28, 2.0**32)
# Judgement: share of a gradient's values that became 0; above it, a larger scale is tried.
_FEW_ZEROED = 0.002
_FIRST_STEP = "values are those of the first step: they may grow"
# AutocastRNN.cpp casts to fp16, whatever autocast's dtype.
_RECURRENT = "on a GPU cuDNN's recurrent layers run in fp16, with bf16 autocast, too"


def check_precision(
    workload: Workload, examples: Examples, dtypes: Sequence[Dtype] = ("fp16", "bf16")
) -> list[PrecisionCheck]:
    """Run one check per dtype. Patches torch, so use a separate process."""
    with known_to_models():
        steps = _Steps(workload, examples)
        return [steps.check(dtype) for dtype in dtypes]


class _Steps:
    """The step in fp64, and the same step in other precisions."""

    def __init__(self, workload: Workload, examples: Examples) -> None:
        self._examples, self._trial = examples, Trial(workload, wide=False)
        self._draws = Draws()
        trial, (gradient, infinite), limits = widest(workload, self._exact)
        in_fp32 = self._trial.run(examples.whole, self._redrawing()).gradient
        recurrent = (_RECURRENT,) * _has_recurrent(trial.model)
        self._reference = _Reference(
            trial=trial,
            gradient=gradient,
            fp32_gradient=in_fp32,
            is_there=resolved_values(trial, gradient, in_fp32),
            infinite=infinite,
            limits=(_FIRST_STEP, *limits, *examples.notes, *recurrent),
        )

    def _exact(self, trial: Trial) -> tuple[Tensor, set[tuple[str | None, str]]]:
        """Return the gradient in fp64, and the modules and ops that give infinity even there."""
        self._draws, where = Draws(), ModuleTracker(trial.model)
        ops = LowPrecision(where)
        ran = trial.run(self._examples.whole, where, ops, Drawing(self._draws))
        return ran.gradient, {(overflow.module, overflow.op) for overflow in ops.overflows}

    def _redrawing(self) -> Redrawing:
        return Redrawing(self._draws, 0, self._examples.num, self._examples.num)

    def check(self, dtype: Dtype) -> PrecisionCheck:
        reference = self._reference
        is_finite = bool(torch.isfinite(reference.gradient).all())
        if not is_finite or not bool(reference.gradient.any()):
            return PrecisionCheck(
                verdict="uncertain",
                conclusion="the gradient is 0 or not finite in fp64 already",
                confidence="low",
                limits=reference.limits,
                dtype=dtype,
            )
        try:
            observed = self._scaled(dtype)
        except _Broken as broken:
            return _of_error(broken, dtype, reference.limits)
        rounded = self._rounded_gradient(_DTYPES[dtype])
        return _judged(observed, reference, rounded, dtype, lambda: self._calls(dtype))

    def _scaled(self, dtype: Dtype) -> _Observed:
        """Run the step at the loss scale where GradScaler would settle; bf16 needs none."""
        if dtype == "bf16":
            return self._observe(dtype, 1.0)
        observed = self._observe(dtype, _FIRST_SCALE)
        for scale in _SMALLER:
            if observed.is_finite:
                break
            observed = self._observe(dtype, scale)
        for scale in _LARGER if observed.scale == _FIRST_SCALE else ():
            if observed.zeroed_ratio <= _FEW_ZEROED:
                break
            larger = self._observe(dtype, scale)
            if not larger.is_finite or larger.zeroed_ratio >= observed.zeroed_ratio:
                break
            observed = larger
        return observed

    def _rounded_gradient(self, dtype: torch.dtype) -> Tensor:
        """Return the gradient in fp64 with only weights and inputs rounded to `dtype`."""
        trial = self._reference.trial
        with trial.rounded(dtype):
            batch = rounded_batch(self._examples.whole, dtype)
            return trial.run(batch, self._redrawing()).gradient

    def _calls(self, dtype: Dtype) -> tuple[list[Call], list[Call]]:
        """Return the inputs and outputs of every module call, in fp64 and under autocast."""
        trial = self._reference.trial
        exact, low = (ModuleTracker(each.model, records=True) for each in (trial, self._trial))
        trial.run(self._examples.whole, exact, self._redrawing())
        self._observe(dtype, 1.0, low)
        return exact.calls, low.calls

    def _observe(self, dtype: Dtype, scale: float, where: ModuleTracker | None = None) -> _Observed:
        trial, there = self._trial, self._reference.is_there
        where = where or ModuleTracker(trial.model)
        ops = LowPrecision(where)
        casting = torch.autocast("cuda", dtype=_DTYPES[dtype])
        around = (where, ops, self._redrawing(), guard(), _op_by_op(trial.model))
        try:
            ran = trial.run(self._examples.whole, *around, forward=(casting,), scale=scale)
        except Exception as error:
            module, op = ops.failed or (where.failed, None)
            raise _Broken(error, module, op) from error
        lost = there & (ran.gradient == 0)
        infinite = self._reference.infinite
        return _Observed(
            scale=scale,
            loss=ran.loss,
            gradient=ran.gradient,
            zeroed_ratio=float(lost.sum() / there.sum().clamp(min=1)),
            overflows=[o for o in ops.overflows if (o.module, o.op) not in infinite],
            largest=ops.largest,
            largest_in=ops.largest_in,
            emulated=ops.emulated,
        )


def _has_recurrent(model: nn.Module) -> bool:
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


@contextlib.contextmanager
def _op_by_op(model: nn.Module) -> Iterator[None]:
    """Run recurrent layers op by op: on the CPU they would be one op that computes in fp32."""
    before = bool(torch.backends.mkldnn.enabled)
    torch._C._set_mkldnn_enabled(before and not _has_recurrent(model))
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


# ---- fp16 and bf16 on the CPU, computed as on a GPU ----------------------------------------------
# Tensor cores multiply in low precision and accumulate in fp32; products here do the same. An op
# that CUDA has in low precision and the CPU lacks is computed in fp32 and rounded.

_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_convolution")
)
# Ops that the CPU and CUDA both lack in low precision and that autocast does not cast:
# AT_DISPATCH_FLOATING_TYPES without Half in aten/src/ATen/native/cuda.
_LACKED_BY_CUDA = frozenset(
    ("_ctc_loss", "histc", "_cdist_forward", "_pdist_forward", "igamma", "igammac", "special_zeta")
)
# Judgement: relative to the largest value of a dtype. Larger values are deliberate, as in masks.
_MASK_FROM = 0.99


@dataclass(frozen=True)
class _Overflow:
    """A forward op that returned infinity or NaN for finite inputs."""

    module: str | None
    op: str
    is_low_end: bool  # all are -inf: a mask meant to be very low
    dtype: str


class LowPrecision(EveryOp):
    """Computes as a GPU does, and inspects every result of forward."""

    def __init__(self, where: ModuleTracker) -> None:
        super().__init__()
        self._where = where
        self.overflows: list[_Overflow] = []
        self.largest = 0.0  # largest value of forward in low precision
        self.largest_in: str | None = None
        self.failed: tuple[str | None, str] | None = None  # module and op
        self.emulated: set[str] = set()

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_forward = torch._C._current_autograd_node() is None
        # Inputs that the op overwrites must be checked before it runs.
        was_finite = is_forward and op._schema.is_mutable and _are_finite((args, kwargs))
        try:
            out = self._computed(op, args, kwargs)
        except Exception:
            self.failed = self.failed or (self._where.module, name_of(op))
            raise
        if is_forward and "empty" not in name_of(op):  # that memory is not written yet
            self._look(op, out, lambda: was_finite or _are_finite((args, kwargs)))
        return out

    def _computed(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtypes = [t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        # Mixing low precision with other dtypes is an error on a GPU, and stays one here.
        is_all_low = len(set(dtypes)) == 1 and dtypes[0] in LOW
        if name_of(op) in _PRODUCTS and is_all_low:
            return _in_fp32(op, args, kwargs)
        try:
            return op(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            has_low = any(dtype in LOW for dtype in dtypes)
            is_lack = "not implemented for" in str(error) and has_low
            if not is_lack or name_of(op) in _LACKED_BY_CUDA:
                raise
            self.emulated.add(name_of(op))
            return _in_fp32(op, args, kwargs)

    def _look(self, op: OpOverload, out: Any, were_finite: Callable[[], bool]) -> None:
        for tensor in _floats(out):
            largest = float(tensor.detach().abs().max())
            is_finite = largest < float("inf")  # False for NaN too
            is_mask = largest > _MASK_FROM * torch.finfo(tensor.dtype).max
            if tensor.dtype in LOW and not is_mask and largest > self.largest:
                self.largest, self.largest_in = largest, self._where.module
            if not is_finite and were_finite():
                bad = tensor.detach()[~torch.isfinite(tensor)]
                is_low_end = bool((bad == float("-inf")).all())
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.overflows.append(_Overflow(self._where.module, name_of(op), is_low_end, dtype))


def _in_fp32(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op in fp32 and round its results to the precision of its arguments."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    low = next(t.dtype for t in tensors if t.dtype in LOW)
    wide_args, wide_kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
    out = op(*wide_args, **wide_kwargs)
    if op._schema.is_mutable:
        return args[0].copy_(wide_args[0])
    return tree_map_only(Tensor, lambda t: t.to(low) if t.dtype == torch.float32 else t, out)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor


def _floats(tree: Any) -> list[Tensor]:
    return [
        t
        for t in tree_leaves(tree)
        if isinstance(t, Tensor)
        and t.is_floating_point()
        and t.numel()
        and t.layout is torch.strided
    ]


def _are_finite(tree: Any) -> bool:
    return all(float(t.detach().abs().max()) < float("inf") for t in _floats(tree))


@dataclass(frozen=True)
class _Reference:
    """The step in fp64, and what is not finite there either (masks of -inf)."""

    trial: Trial
    gradient: Tensor
    fp32_gradient: Tensor
    is_there: Tensor  # per value of the gradient: is it real, rather than 0 or rounding?
    infinite: set[tuple[str | None, str]]  # (module, op)
    limits: tuple[str, ...]


@dataclass(frozen=True)
class _Observed:
    """One step under autocast."""

    scale: float
    loss: float
    gradient: Tensor
    zeroed_ratio: float
    overflows: list[_Overflow]
    largest: float
    largest_in: str | None
    emulated: set[str]

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.gradient).all())


class _Broken(Exception):
    """An error that autocast causes in the user's code, and where."""

    def __init__(self, error: Exception, module: str | None, op: str | None) -> None:
        super().__init__(str(error))
        self.error, self.module, self.op = error, module, op


# ---- how far gradients differ, and how far they may ----------------------------------------------

# Measured: rounding only the weights and inputs, and computing in fp64, changes the gradient of a
# GPT-2 by 0.2 % in bf16, and that of an untrained DenseNet by half. Under autocast, in either
# dtype, thirteen models that train well (perceptrons, transformers, six CNNs from timm) differed by
# 1.0 to 3.6 times as much; three that it silently breaks, by 590 to 4900 times. 10 lies between.
# The difference of the loss alone shows nothing, nor does the size of gradients, which follows the
# loss scale.
_MOST_TIMES = 10  # times the error from rounding weights and inputs
# The rest is judgement. Relative to the whole gradient: far less than two batches differ by.
_HARMLESS_ERROR = 0.02
_LEAST_COSINE = 0.95  # for the gradient of one parameter
# Relative to the typical value of the whole gradient; below it, a gradient is 0 except for an
# epsilon, such as that of a scale before a norm.
_LEAST_TYPICAL = 0.01
_RESOLVED_COSINE = 0.999  # in fp32; below it, a gradient is mere rounding


class _Gaps(NamedTuple):
    """How far gradients are from those in fp64."""

    error: float | None  # under autocast; None if not finite
    sensitivity: float  # with weights and inputs rounded, computed in fp64
    cosines: list[tuple[str, float]]  # of parameters whose gradient has the wrong direction

    @property
    def most_error(self) -> float:
        return max(_HARMLESS_ERROR, _MOST_TIMES * self.sensitivity)


def _apart(exact: Tensor, other: Tensor) -> float | None:
    """Return the relative difference; None if it is not finite."""
    found = apart(exact, other)
    return found if found < float("inf") else None


def resolved_values(trial: Trial, exact: Tensor, narrow: Tensor) -> Tensor:
    """Return which values of a gradient are real: not 0, in parameters where fp64 and fp32 agree.

    Values that should be 0 (queries when only one is used, a bias before a norm) are rounding.
    """
    parts = zip(trial.by_parameter(exact), trial.by_parameter(narrow), strict=True)
    return torch.cat(
        [
            (there != 0) & (_cosine(there, other) > _RESOLVED_COSINE)
            for (_, there), (_, other) in parts
        ]
    )


def _cosines(
    observed: _Observed, reference: _Reference, rounded: Tensor
) -> list[tuple[str, float]]:
    """Return parameters whose direction is wrong, though fp32 and rounding alone do not turn it."""
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
        # An angle grows with the square root of 1 - cosine.
        most_turned = _MOST_TIMES**2 * (1 - _cosine(exact, near))
        if is_resolved and cosine < _LEAST_COSINE and 1 - cosine > most_turned:
            found.append((name, cosine))
    return found


def _typical(values: Tensor) -> float:
    """Return the root mean square."""
    return float(values.norm()) / math.sqrt(max(values.numel(), 1))


def _cosine(one: Tensor, other: Tensor) -> float:
    length = float(one.norm() * other.norm())
    return float(torch.dot(one, other)) / length if length else 0.0


def _tensors_apart(exact: Sequence[Tensor], rounded: Sequence[Tensor]) -> float | None:
    """Return the largest relative difference of any tensor; None if there is nothing to compare."""
    found = [
        float((a.double() - b.double()).norm() / a.double().norm())
        for a, b in zip(exact, rounded, strict=False)
        if a.shape == b.shape and a.is_floating_point() and bool(a.any())
    ]
    return max((each for each in found if each == each), default=None)


# ---- the verdict, and what to do -----------------------------------------------------------------

Look = Callable[[], tuple[list[Call], list[Call]]]  # calls in fp64, and under autocast

_MOST_APART = 0.1  # judgement: relative to a module's output
_SENSITIVE = 0.1  # judgement: relative to the whole gradient; larger differences are mentioned
_MOST_ZEROED = 0.05  # judgement: share of the gradient's values
_LARGEST_FP16 = torch.finfo(torch.float16).max
_LEAST_HEADROOM = 8.0  # judgement: factor by which values may grow during training
_STEPS_A_DOUBLING = 2000  # torch.amp.GradScaler(growth_interval=)

_ISLAND = (
    'compute it in fp32: with torch.autocast("cuda", enabled=False) around it, and .float() on'
    " what goes in"
)
# Part of an error message -> what to do.
_CURES = (
    ("unsafe to autocast", "binary_cross_entropy_with_logits on what comes before the sigmoid"),
    ("without overflow", "torch.finfo(x.dtype).min instead of a number that fp16 does not have"),
    ("Index put requires", "cast what is written: out[index] = value.to(out.dtype)"),
    ("same dtype", "@torch.amp.custom_fwd and custom_bwd on an autograd.Function; else .to(dtype)"),
    ("expected scalar type", "@torch.amp.custom_fwd and custom_bwd on an autograd.Function"),
    ("Low precision dtypes", _ISLAND),
    ("Unsupported dtype", _ISLAND),
)


def _of_error(broken: _Broken, dtype: Dtype, limits: tuple[str, ...]) -> PrecisionCheck:
    """Return the check for user code that raises under autocast."""
    error = broken.error
    message, place = one_line(error, 200), _users_line(error)
    # cuFFT supports fp16 for sizes that are powers of 2.
    is_fft = "Unsupported dtype Half" in message
    if is_fft:
        limits = (*limits, "CUDA has fp16 transforms of sizes that are powers of 2")
    finding = Finding(
        what=f"{type(error).__name__}: {message}" + (f" ({place})" if place else ""),
        module=broken.module,
        op=broken.op,
        do=next((cure for part, cure in _CURES if part in message), _ISLAND),
    )
    return PrecisionCheck(
        verdict="uncertain" if is_fft else "fails",
        conclusion=f"{dtype} raises an error in {finding.where}",
        findings=(finding,),
        confidence="fair" if is_fft else "high",
        limits=limits,
        dtype=dtype,
    )


def _judged(
    observed: _Observed, reference: _Reference, rounded: Tensor, dtype: Dtype, look: Look
) -> PrecisionCheck:
    """Return the check for a step that ran.

    `rounded` is the gradient in fp64 with weights and inputs rounded to the dtype. `look` runs both
    steps once more and returns the calls of every module.
    """
    gaps = _Gaps(
        error=_apart(reference.gradient, observed.gradient),
        sensitivity=_apart(reference.gradient, rounded) or 0.0,
        cosines=_cosines(observed, reference, rounded),
    )
    verdict, conclusion, findings = _verdict(observed, reference, dtype, gaps, look)
    limits = reference.limits
    if observed.emulated:
        ops = ", ".join(sorted(observed.emulated)[:4])
        limits = (*limits, f"the CPU has no {dtype} {ops}: computed in fp32 and rounded")
    fp32_error = _apart(reference.gradient, reference.fp32_gradient)
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
    observed: _Observed, reference: _Reference, dtype: Dtype, gaps: _Gaps, look: Look
) -> _Judgement:
    """Return the first judgement that applies."""
    if gaps.error is None or not math.isfinite(observed.loss):
        return _not_finite(observed, dtype)
    if gaps.error > gaps.most_error:
        return _wrong(observed, dtype, gaps, look)
    if observed.zeroed_ratio > _MOST_ZEROED:
        return _lost(observed, reference, dtype)
    fine = f"{dtype} gives the gradient of fp64 within {gaps.error:.1g}"
    if gaps.error > _SENSITIVE:
        fine += f" ({gaps.sensitivity:.1g} comes from rounding weights and inputs)"
    doubts = _doubts(observed, dtype, gaps)
    if doubts:
        return "uncertain", f"{fine}, but {doubts[0].where}: {doubts[0].what}", tuple(doubts)
    return "passes", fine + _scale_in_words(observed, dtype), tuple(_notes(observed, dtype))


def _not_finite(observed: _Observed, dtype: Dtype) -> _Judgement:
    finding = (
        _overflowed(observed, dtype)
        if observed.overflows
        else Finding(
            what=f"gradients overflow in {dtype} at every loss scale",
            module=None,
            do="make the loss smaller, or bf16",
        )
    )
    return "fails", f"{dtype} overflows: {finding.where}: {finding.what}", (finding,)


def _overflowed(observed: _Observed, dtype: Dtype) -> Finding:
    first = next((o for o in observed.overflows if not o.is_low_end), observed.overflows[0])
    return Finding(
        what=f"{first.op} gives inf or NaN in {first.dtype}",
        module=first.module,
        op=first.op,
        do=_ISLAND + ("; or bf16, which has the range of fp32" if dtype == "fp16" else ""),
    )


def _wrong(observed: _Observed, dtype: Dtype, gaps: _Gaps, look: Look) -> _Judgement:
    """Return the judgement for a finite but wrong gradient, which would go unnoticed."""
    if any(not o.is_low_end for o in observed.overflows):
        finding = _overflowed(observed, dtype)
    else:
        finding = _first_apart(*look(), dtype, gaps)
    conclusion = (
        f"{dtype} silently gives a different gradient (off by {gaps.error:.2g} of its size)"
    )
    return "fails", f"{conclusion}: {finding.where}: {finding.what}", (finding,)


def _first_apart(
    calls: Sequence[Call], observed: Sequence[Call], dtype: Dtype, gaps: _Gaps
) -> Finding:
    """Return the first module whose output differs, or else the worst parameter."""
    if [call.module for call in calls] == [call.module for call in observed]:
        for exact, rounded in zip(calls, observed, strict=True):
            apart = _tensors_apart(exact.outputs, rounded.outputs)
            if apart is not None and apart > _MOST_APART:
                is_given_it = (_tensors_apart(exact.inputs, rounded.inputs) or 0.0) > _MOST_APART
                return Finding(
                    what=f"its {'input' if is_given_it else 'output'} is wrong by {apart:.2g} in"
                    f" {dtype}",
                    module=exact.parent if is_given_it else exact.module,
                    do=_ISLAND,
                )
    name, cosine = min(gaps.cosines, key=lambda each: each[1], default=("", 1.0))
    return _turned(name, cosine)


def _turned(name: str, cosine: float) -> Finding:
    direction = f"points in another direction (cosine {cosine:.2g})"
    return Finding(
        what=f"the gradient of {name or 'its parameters'} {direction}",
        module=name.rpartition(".")[0],
        do=_ISLAND,
    )


def _lost(observed: _Observed, reference: _Reference, dtype: Dtype) -> _Judgement:
    """Return the judgement for gradients too small for fp16, which Adam would have scaled up."""
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
        do=_ISLAND + (", or bf16" if dtype == "fp16" else ""),
    )
    conclusion = f"{dtype} turns {observed.zeroed_ratio:.0%} of the gradient's values to 0"
    at = ", at any loss scale" if dtype == "fp16" else ""
    return "fails", f"{conclusion}{at}, most in {finding.where}", (finding,)


def _doubts(observed: _Observed, dtype: Dtype, gaps: _Gaps) -> list[Finding]:
    """Return what is correct now but may not stay so."""
    doubts = []
    if any(not o.is_low_end for o in observed.overflows):
        doubts.append(_overflowed(observed, dtype))
    headroom = _LARGEST_FP16 / max(observed.largest, 1.0)
    if dtype == "fp16" and headroom < _LEAST_HEADROOM:
        doubts.append(
            Finding(
                what=f"values reach {observed.largest:.3g}, and fp16 ends at 65504",
                module=observed.largest_in,
                do="bf16; or compute it in fp32, or scale it down",
            )
        )
    return [*doubts, *(_turned(name, cosine) for name, cosine in gaps.cosines)]


def _notes(observed: _Observed, dtype: Dtype) -> list[Finding]:
    """Return what is good to know even if the check passes."""
    do = "torch.finfo(x.dtype).min, so that no row is masked entirely"
    return [
        Finding(
            what=f"{mask.op} gives -inf in {dtype}, harmless here: a mask",
            module=mask.module,
            op=mask.op,
            do=do,
        )
        for mask in [o for o in observed.overflows if o.is_low_end][:1]
    ]


def _scale_in_words(observed: _Observed, dtype: Dtype) -> str:
    if dtype == "bf16":
        return ", without a loss scale"
    exponent = round(math.log2(observed.scale))
    text = f", at a loss scale of 2**{exponent}"
    if exponent > _FIRST_SCALE_EXPONENT:
        steps = (exponent - _FIRST_SCALE_EXPONENT) * _STEPS_A_DOUBLING
        text += (
            f": GradScaler(init_scale=2.0**{exponent}), which it would reach by itself after"
            f" {steps} steps; until then small gradients are lost"
        )
    if exponent < _FIRST_SCALE_EXPONENT:
        text += (
            f": GradScaler skips about {_FIRST_SCALE_EXPONENT - exponent} steps until it is there"
        )
    return text


def _users_line(error: Exception) -> str | None:
    """Return the innermost line of the traceback outside libraries and oomph."""
    ours = str(Path(__file__).parents[1])
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, sys.prefix, sys.base_prefix, "<frozen"))
        and "site-packages" not in frame.filename
    ]
    return lines[-1] if lines else None
