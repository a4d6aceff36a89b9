"""Losses that stay in a block of the size of what they were reduced from.

Their kernels, on the CPU as on CUDA, allocate the result at full size and shrink it to a scalar
in place; a block is not given back for that (ATen/native/Loss.cpp, TORCH_META_FUNC(mse_loss):
`maybe_get_output().resize_({})`; Loss.cu, binary_cross_entropy_out_cuda). While a script holds
its loss, it holds that block. The meta kernels return a scalar of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.tracing.pretend import is_pretended

_META = torch.device("meta")
_empty = torch._C._VariableFunctions.empty
_NOT_REDUCED = 0  # at::Reduction::None
_MEAN = 1

_PLACE_OF_REDUCTION = {
    "mse_loss": 2,
    "smooth_l1_loss": 2,
    "soft_margin_loss": 2,
    "binary_cross_entropy": 3,
}


def _loss(recorder: Any, behaviour: Any, _: Any, args: Any, kwargs: Any) -> Any:
    place = _PLACE_OF_REDUCTION[behaviour.name]
    reduction = args[place] if len(args) > place else kwargs.get("reduction", _MEAN)
    if reduction == _NOT_REDUCED or not is_pretended(args[0]):
        return NotImplemented
    dtype = torch.result_type(args[0], args[1])
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    out = _empty(shape, dtype=dtype, device=_META).resize_(())
    recorder.track(out, behaviour.label)
    recorder.take_temporaries(behaviour, args, (out,))
    recorder.note_work(behaviour, args, kwargs, (out,))
    return out


RULES = dict.fromkeys(_PLACE_OF_REDUCTION, _loss)
