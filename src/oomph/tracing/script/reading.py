"""Values in bulk: `tolist`, `numpy`, `print`."""

from __future__ import annotations

from typing import Any

import torch

from oomph.tracing.pretend import is_pretended
from oomph.tracing.script.places import is_suspended


def install(recorder: Any) -> None:
    """Patch them."""
    base: Any = torch._C.TensorBase
    methods: Any = torch.Tensor
    true_repr = methods.__repr__
    true_numpy, true_tolist = base.numpy, base.tolist

    def numpy(tensor: Any, *, force: bool = False) -> Any:
        if not is_pretended(tensor) or is_suspended():
            recorder.deferred.flush(tensor)
            return true_numpy(tensor, force=force)
        if tensor.is_cuda and not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the"
                " tensor to host memory first."
            )
        if tensor.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy()"
                " instead."
            )
        return true_numpy(recorder.real(tensor))

    def tolist(tensor: Any) -> Any:
        recorder.deferred.flush(tensor)
        return true_tolist(recorder.real(tensor) if is_pretended(tensor) else tensor)

    def represented(tensor: Any, *, tensor_contents: Any = None) -> str:
        if is_suspended() or not is_pretended(tensor):
            return str(true_repr(tensor, tensor_contents=tensor_contents))
        values = _shown(recorder, tensor)
        device = ", device='cuda:0')" if tensor.is_cuda else ")"
        return str(true_repr(values))[:-1] + device

    _patch_one_hot()
    methods.numpy, methods.tolist, methods.__repr__ = numpy, tolist, represented


def _shown(recorder: Any, tensor: Any) -> Any:
    known = recorder.shadows.of(tensor)
    if known is not None:
        return known
    value = recorder.inventions.value_of(tensor)
    one = torch.full((), value, dtype=tensor.dtype, device="cpu")
    return one.expand(tensor.shape)  # a long one is printed in part: it needs no memory


def _patch_one_hot() -> None:
    """How many classes there are is read from the labels, where it is not given."""
    functional: Any = torch.nn.functional
    original = functional.one_hot

    def one_hot(tensor: Any, num_classes: int = -1) -> Any:
        if num_classes < 0 and is_pretended(tensor):
            num_classes = int(tensor.max()) + 1
        return original(tensor, num_classes)

    functional.one_hot = one_hot
