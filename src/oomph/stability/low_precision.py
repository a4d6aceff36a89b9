"""Ops in fp16 and bf16 on the CPU, as a GPU computes them; and what goes wrong in them.

Tensor cores multiply low precision and add up in fp32: so do products here. An op that the CPU
lacks in low precision and CUDA has is computed in fp32 and rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from oomph.stability.cuda_casts import LOW
from oomph.stability.modes import EveryOp, name_of
from oomph.stability.whereabouts import Whereabouts

_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_convolution")
)
# Ops that CUDA lacks in low precision, too, among those that the CPU lacks and that autocast does
# not cast: AT_DISPATCH_FLOATING_TYPES without Half in aten/src/ATen/native/cuda.
_LACKED_BY_CUDA = frozenset(
    ("_ctc_loss", "histc", "_cdist_forward", "_pdist_forward", "igamma", "igammac", "special_zeta")
)
# Of the largest value of a dtype: what is as large as that was set to it, as masks are.
_MASK_FROM = 0.99


@dataclass(frozen=True)
class Overflow:
    """An op of forward that gave infinity or no number, though it was given numbers."""

    module: str | None
    op: str
    is_low_end: bool  # all of it is -inf: a mask that was meant to be very low
    dtype: str


class LowPrecision(EveryOp):
    """Computes as a GPU does, and looks at every result of forward."""

    def __init__(self, where: Whereabouts) -> None:
        super().__init__()
        self._where = where
        self.overflows: list[Overflow] = []
        self.largest = 0.0  # value of forward in low precision
        self.largest_in: str | None = None
        self.failed: tuple[str | None, str] | None = None  # module and op
        self.emulated: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_forward = torch._C._current_autograd_node() is None
        # What is written in place is to be looked at before.
        was_finite = is_forward and op._schema.is_mutable and _are_finite((args, kwargs))
        try:
            out = self._computed(op, args, kwargs)
        except Exception:
            self.failed = self.failed or (self._where.module, name_of(op))
            raise
        if is_forward and "empty" not in name_of(op):  # nobody has written to that yet
            self._look(op, out, lambda: was_finite or _are_finite((args, kwargs)))
        return out

    def _computed(self, op: Any, args: Any, kwargs: Any) -> Any:
        if name_of(op) in _PRODUCTS and _are_all_low((args, kwargs)):
            return _in_fp32(op, args, kwargs)
        try:
            return op(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            is_lack = "not implemented for" in str(error) and _has_low((args, kwargs))
            if not is_lack or name_of(op) in _LACKED_BY_CUDA:
                raise
            self.emulated.add(name_of(op))
            return _in_fp32(op, args, kwargs)

    def _look(self, op: Any, out: Any, were_finite: Callable[[], bool]) -> None:
        for tensor in _floats(out):
            largest = float(tensor.detach().abs().max())
            is_finite = largest < float("inf")  # what is no number is not less
            is_mask = largest > _MASK_FROM * torch.finfo(tensor.dtype).max
            if tensor.dtype in LOW and not is_mask and largest > self.largest:
                self.largest, self.largest_in = largest, self._where.module
            if not is_finite and were_finite():
                bad = tensor.detach()[~torch.isfinite(tensor)]
                is_low_end = bool((bad == float("-inf")).all())
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.overflows.append(Overflow(self._where.module, name_of(op), is_low_end, dtype))


def _in_fp32(op: Any, args: Any, kwargs: Any) -> Any:
    """The op in fp32, and its results rounded to the precision of its arguments."""
    low = next(t.dtype for t in tree_leaves((args, kwargs)) if _is_low(t))
    wide_args, wide_kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
    out = op(*wide_args, **wide_kwargs)
    if op._schema.is_mutable:
        return args[0].copy_(wide_args[0])
    return tree_map_only(torch.Tensor, lambda t: _rounded(t, low), out)


def _widened(tensor: Any) -> Any:
    return tensor.float() if tensor.dtype in LOW else tensor


def _rounded(tensor: Any, dtype: Any) -> Any:
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in LOW


def _are_all_low(tree: Any) -> bool:
    """Of one low precision; a mixture is an error on a GPU, and stays one."""
    found = {t.dtype for t in tree_leaves(tree) if isinstance(t, torch.Tensor)}
    return len(found) == 1 and found <= set(LOW)


def _has_low(tree: Any) -> bool:
    return any(map(_is_low, tree_leaves(tree)))


def _floats(tree: Any) -> list[Any]:
    return [
        t
        for t in tree_leaves(tree)
        if isinstance(t, torch.Tensor)
        and t.is_floating_point()
        and t.numel()
        and t.layout is torch.strided
    ]


def _are_finite(tree: Any) -> bool:
    return all(float(t.detach().abs().max()) < float("inf") for t in _floats(tree))
