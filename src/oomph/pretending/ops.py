"""Classify each op once, from its schema."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from oomph.pretending import kernels, layouts, ranks, recurrent, reductions, sparse, tensors, values
from oomph.pretending.reductions import REDUCTIONS, Taken
from oomph.pretending.tensors import META, Recorder, empty, is_pretended

# ---- losses that keep a block as large as their unreduced values ---------------------------------
# Their kernels, on the CPU as on CUDA, allocate the result at full size and then shrink it to a
# scalar in place, which frees no memory (ATen/native/Loss.cpp, TORCH_META_FUNC(mse_loss):
# `maybe_get_output().resize_({})`; Loss.cu, binary_cross_entropy_out_cuda). While a script holds
# its loss, it holds that block. The meta kernels return a separate scalar.

_MEAN = 1

_PLACE_OF_REDUCTION = {
    "mse_loss": 2,
    "smooth_l1_loss": 2,
    "soft_margin_loss": 2,
    "binary_cross_entropy": 3,
}


def _loss(recorder: Recorder, behaviour: Any, _: Any, args: Any, kwargs: Any) -> Any:
    place = _PLACE_OF_REDUCTION[behaviour.name]
    reduction = args[place] if len(args) > place else kwargs.get("reduction", _MEAN)
    if reduction == kernels.NOT_REDUCED or not is_pretended(args[0]):
        return NotImplemented
    dtype = torch.result_type(args[0], args[1])
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    out = empty(shape, dtype=dtype, device=META).resize_(())
    recorder.track(out, behaviour.label)
    recorder.take_temporaries(behaviour, args, kwargs, (out,))
    recorder.note_work(behaviour, args, kwargs, (out,))
    return out


RULES = dict.fromkeys(_PLACE_OF_REDUCTION, _loss)


# ---- where backward works in place on a GPU, but not under a dispatch mode -----------------------
# If a tensor is used twice, autograd's engine adds the second gradient to the first, in place if
# nothing else holds the first (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace).
# Backward formulas scatter into fresh zeros in place (FunctionsManual.cpp,
# areAnyTensorSubclassLike). Both make copies while any dispatch mode is active. The reference
# counts that the engine checks show what it would have done without one.

# name -> its in-place form in torch.ops.aten, where some accept what Tensor methods refuse
IN_PLACE = {
    "add": "add_",
    "scatter": "scatter_",
    "scatter_add": "scatter_add_",
    "index_put": "index_put_",
    "sub": "sub_",
    "mul": "mul_",
}
# The backward formulas that call each of these on a tensor they created.
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
    """Return whether backward itself makes this call, on a tensor that only backward holds."""
    node = torch._C._current_autograd_node()
    if node is None or torch.is_grad_enabled():
        return False
    if name not in _FORMULAS:
        return _is_accumulation(args)
    if node.name() not in _FORMULAS[name]:
        return False
    # With `pos_weight`, the formula of that loss starts from a saved tensor that is the user's.
    return name != "mul" or _is_of_nobody_else(args)


def _is_of_nobody_else(args: Any) -> bool:
    """Return whether only the formula holds the tensor; a saved tensor is also held by the graph.

    In `t.sub_(a).mul_(b)` the result of `sub_` counts twice until the end of the line. So does a
    tensor that a saved-tensor hook recreates; in that case the shape must at least be the result's.
    """
    held, other = args[0], args[1]  # as in _is_accumulation: the counts include these variables
    of_storage, in_cpp, in_python = _holders_of_an_engines_own()
    if _holders(held) not in ((of_storage, in_cpp, in_python), (of_storage, in_cpp + 1, in_python)):
        return False
    return bool(torch.broadcast_shapes(held.shape, other.shape) == held.shape)


def _is_accumulation(args: Any) -> bool:
    """Return whether the engine is adding to a gradient that only the engine holds.

    An addition in a custom autograd.Function has other counts, because Python holds its operands.
    An addition in a C++ backward formula looks the same as the engine's.
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
    """Return the reference counts of the storage, of the C++ tensor and of the Python tensor."""
    of_storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return of_storage, tensor._use_count(), sys.getrefcount(tensor)


@functools.cache
def _holders_of_an_engines_own() -> tuple[int, int, int]:
    """Return the counts that a dispatch mode sees if only the engine holds a gradient."""
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
        return False  # as in the recorder: no frame in between that holds the arguments

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_engine = torch._C._current_autograd_node() is not None
        if is_engine and function is torch.ops.aten.add.Tensor:
            self.holders = _seen(args)
        return function(*args, **(kwargs or {}))


def _seen(args: Any) -> tuple[int, int, int]:
    held = args[0]  # one more reference, as in _is_accumulation
    return _holders(held)


def calibrate() -> None:
    """Measure the counts, before entering a mode that needs them."""
    _holders_of_an_engines_own()


# op name -> (recorder, behaviour, function, args, kwargs) -> its result, or NotImplemented if the
# call turns out to be an ordinary one
_RULES: dict[str, Callable[..., Any]] = {
    **values.RULES,
    **RULES,
    **tensors.RULES,
    **sparse.RULES,
    **recurrent.RULES,
    **ranks.RULES,
}

# These write their first argument and do not read it.
_ONLY_WRITTEN = ("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_")

Kind = Literal["view", "in place", "own rule", "pure", "other"]


class Behaviour:
    """One overload of one op, as its schema and torch's dispatcher describe it."""

    def __init__(self, function: OpOverload) -> None:
        schema = function._schema
        self.function = function
        self.name: str = schema.name.partition("::")[2]
        self.label = str(function)
        self.rule: Callable[..., Any] | None = _RULES.get(self.name)
        written = [i for i, one in enumerate(schema.arguments) if _is_written(one)]
        self.moves_storage = self.name in ("resize_", "resize_as_", "set_")
        self.changes_first = written == [0] and self.name.endswith("_") and not self.moves_storage
        self.kind: Kind = self._kind(function, written)
        self.in_place = IN_PLACE.get(self.name)
        self.returns = bool(schema.returns)
        self.argument_names = tuple(one.name for one in schema.arguments)
        self.is_gemm = self.name in kernels.GEMMS
        self.is_convolution = self.name in ("convolution", "convolution_backward")
        self.temporaries = _temporaries(self.name)
        self.copies = layouts.COPIES.get(self.name)
        self.flops: Any = flop_registry.get(function._overloadpacket)
        # The arguments that are read and written back.
        self.updated = () if self.name in _ONLY_WRITTEN else tuple(written)
        is_by_value = values.is_by_value(function)
        self.by_value = values.decided_by_values if is_by_value else None
        # torch.tensor([...]) creates its storage where no op is dispatched, then lifts it.
        self.lifts = self.name in ("lift_fresh", "lift")
        # Dispatched only in inference mode; otherwise only the ops it consists of are.
        self.is_composite = _has_kernel(function, "CompositeImplicitAutograd") and not (
            _has_kernel(function, "CPU")
        )

    def _kind(self, function: OpOverload, written: list[int]) -> Kind:
        if self.rule is not None:
            return "own rule"
        if function.is_view:
            return "view"
        if not written:
            return "pure" if function._schema.returns else "other"
        keeps_shape = torch.Tag.inplace_view not in function.tags
        return "in place" if self.changes_first and keeps_shape else "other"


def _temporaries(name: str) -> Callable[[Any, Any], list[Taken]] | None:
    """Return what tells from arguments and keywords which blocks the kernel takes, if any."""
    if name in REDUCTIONS:
        return lambda args, kwargs: reductions.taken(name, args, kwargs)
    known = kernels.TEMPORARIES.get(name)
    return None if known is None else lambda args, _: list[Taken](known(args))


def _is_written(argument: Any) -> bool:
    return bool(argument.alias_info and argument.alias_info.is_write)


def _has_kernel(function: OpOverload, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key))
