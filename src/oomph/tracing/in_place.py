"""Where backward works in place on a GPU, and does not under a dispatch mode.

Where a tensor is used twice, autograd's engine adds the second gradient to the first: in place,
if nobody else holds the first one (torch/csrc/autograd/input_buffer.cpp,
can_accumulate_inplace). Backward formulas scatter into fresh zeros in place
(FunctionsManual.cpp, areAnyTensorSubclassLike). Both make copies where any dispatch mode is
active. What they would have done is told from the reference counts that the engine looks at.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# name -> what does the same in place, of torch.ops.aten: some take what methods of tensors refuse
IN_PLACE = {
    "add": "add_",
    "scatter": "scatter_",
    "scatter_add": "scatter_add_",
    "index_put": "index_put_",
    "sub": "sub_",
    "mul": "mul_",
}
# The backward formulas that call each of these on a tensor of their own.
_FORMULAS = {
    "scatter": frozenset(
        f"{name}Backward{number}"
        for name in ("Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Topk", "Sort")
        for number in (0, 1)
    ),
    "scatter_add": frozenset({"GatherBackward0", "CummaxBackward0", "CumminBackward0"}),
    "index_put": frozenset({"IndexBackward0"}),
    "sub": frozenset({"BinaryCrossEntropyWithLogitsBackward0"}),
    "mul": frozenset({"BinaryCrossEntropyWithLogitsBackward0"}),
}
_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


def is_in_place(name: str, args: Any) -> bool:
    """Is this a call of backward's own, on a tensor that only backward holds?"""
    node = torch._C._current_autograd_node()
    if node is None or torch.is_grad_enabled():
        return False
    if name not in _FORMULAS:
        return _is_accumulation(args)
    if node.name() not in _FORMULAS[name]:
        return False
    # With `pos_weight`, the formula of that loss begins with what it saved, and that is the user's.
    return name != "mul" or _is_of_nobody_else(args)


def _is_of_nobody_else(args: Any) -> bool:
    """Does only the formula hold it? What was saved has more holders: the graph, at least.

    In `t.sub_(a).mul_(b)` the result of `sub_` counts twice, until the end of the line. So does
    what a hook for saved tensors makes anew; there, at least the shape has to be the result's.
    """
    held, other = args[0], args[1]  # as in _is_accumulation: the counts include these
    of_storage, in_cpp, in_python = _holders_of_an_engines_own()
    if _holders(held) not in ((of_storage, in_cpp, in_python), (of_storage, in_cpp + 1, in_python)):
        return False
    return bool(torch.broadcast_shapes(held.shape, other.shape) == held.shape)


def _is_accumulation(args: Any) -> bool:
    """An addition of the engine's, to a gradient that only the engine holds.

    One that a custom autograd.Function makes has other counts: Python holds its operands. One
    that a backward formula makes in C++ cannot be told from the engine's.
    """
    held, other = args[0], args[1]
    return (
        len(args) == 2
        and isinstance(other, torch.Tensor)
        and held.layout is torch.strided
        and held.shape == other.shape
        and held.dtype == other.dtype
        and _holders(held) == _holders_of_an_engines_own()
        and bool(_is_dense(held))
    )


def _holders(tensor: Any) -> tuple[int, int, int]:
    """How many hold the storage, and how many the tensor in C++ and in Python."""
    of_storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return of_storage, tensor._use_count(), sys.getrefcount(tensor)


@functools.cache
def _holders_of_an_engines_own() -> tuple[int, int, int]:
    """The counts where only the engine holds a gradient, as a dispatch mode sees them."""
    probe = _Probe()
    with probe, torch.enable_grad():
        leaf = torch.ones(2, requires_grad=True)
        used_twice = leaf * 1
        (used_twice.relu() + used_twice.sigmoid()).backward(torch.ones(2))
    return probe.holders


class _Probe(TorchDispatchMode):
    holders = (0, 0, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in the recorder: nobody in between who holds the arguments

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_engine = torch._C._current_autograd_node() is not None
        if is_engine and function is torch.ops.aten.add.Tensor:
            self.holders = _seen(args)
        return function(*args, **(kwargs or {}))


def _seen(args: Any) -> tuple[int, int, int]:
    held = args[0]  # one reference more, as in _is_accumulation
    return _holders(held)


def calibrate() -> None:
    """Learn the counts. Before a mode is entered that asks."""
    _holders_of_an_engines_own()
