"""A call of an op -> the work of its kernels: operations, bytes, and the shape of its product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from oomph.pretending.layouts import layout_of_convolution
from oomph.pretending.ops import Behaviour
from oomph.pretending.tensors import is_pretended, tensors_in
from oomph.records.trace import Op, Phase, Product

# Of these tensors, kernels read as much as they return: op -> index of the argument.
_READ_IN_PART = {"embedding": 0, "index": 0, "index_select": 0, "gather": 0, "nll_loss_forward": 0}
# These arguments only give a shape: op -> index. nll_loss_backward's is `self`.
_UNREAD = {"nll_loss_backward": 1, "nll_loss2d_backward": 1}


def work_of(
    behaviour: Behaviour,
    args: Any,
    kwargs: Any,
    outputs: Any,
    phase: Phase,
    module: str = "",
    num_views: int = 0,
) -> tuple[Op, ...]:
    """Return the work of a call: empty if none of it runs on the GPU."""
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if is_pretended(tensor)]
    tensors += [out for out in outputs if isinstance(out, torch.Tensor) and is_pretended(out)]
    if not tensors:
        return ()
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if behaviour.is_convolution:
        runs = _convolutions(behaviour.name, args, outputs, phase, dtype)
        return with_place(runs, module, num_views)
    written_again = tensors_in(tuple(args[i] for i in behaviour.updated if i < len(args)))
    moved = [*tensors, *(tensor for tensor in written_again if is_pretended(tensor))]
    op = Op(
        name=behaviour.name,
        phase=phase,
        flops=_flops(behaviour, args, kwargs, outputs),
        moved_bytes=_bytes_of(moved) - _unread_bytes(behaviour.name, args, outputs),
        dtype=dtype,
        module=module,
        product=_product_of(behaviour, args, kwargs),
        num_views=num_views,
        is_strided=_is_strided(behaviour, tensors),
    )
    return (op,)


def with_place(runs: tuple[Op, ...], module: str, num_views: int) -> tuple[Op, ...]:
    """Return the runs of a call in another module; views were made before the first."""
    return tuple(
        replace(op, module=module, num_views=0 if place else num_views)
        for place, op in enumerate(runs)
    )


def _is_strided(behaviour: Behaviour, tensors: Sequence[Any]) -> bool:
    """Return whether its tensors differ in layout, or one is spread over the others.

    Elementwise kernels then compute the place of each element, and load elements one by one.
    """
    if behaviour.name.startswith("_foreach") or behaviour.name.startswith("_fused"):
        return False
    return len({_layout(each) for each in tensors if each.layout is torch.strided}) > 1


def _layout(tensor: Any) -> tuple[tuple[int, int], ...]:
    """Return edges and strides, without edges of 1, whose strides mean nothing."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(pair for pair in pairs if pair[0] > 1)


# ---- bytes


def _bytes_of(tensors: Sequence[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _unread_bytes(name: str, args: Any, outputs: Any) -> int:
    """Return how much of its arguments a kernel that picks elements leaves unread."""
    if name in _UNREAD:
        return _bytes_of([args[_UNREAD[name]]])
    if name not in _READ_IN_PART:
        return 0
    source = args[_READ_IN_PART[name]]
    return max(_bytes_of([source]) - _bytes_of([outputs[0]]), 0) if len(outputs) else 0


# ---- operations


def _flops(behaviour: Behaviour, args: Any, kwargs: Any, outputs: Any) -> int:
    """Return the operations by torch's formulas, without what a causal attention skips."""
    if behaviour.flops is None or not len(outputs):
        return 0
    out = outputs[0] if len(outputs) == 1 else tuple(outputs)
    # torch's formulas do not know overloads that take the dtype of their result.
    given = [arg for arg in args if not isinstance(arg, torch.dtype)]
    flops = int(behaviour.flops(*given, **kwargs, out_val=out))
    if _argument(behaviour, args, kwargs, "is_causal"):
        return int(flops * _causal_ratio(behaviour, args, kwargs))
    return flops


def _argument(behaviour: Behaviour, args: Any, kwargs: Any, name: str) -> Any:
    """Return an argument by its name in the schema; None if it is not given."""
    if name in kwargs:
        return kwargs[name]
    names = behaviour.argument_names
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else None


# FlashAttention-2 skips the blocks above the diagonal (https://arxiv.org/abs/2307.08691, 3.1), and
# so does the memory-efficient kernel (kernel_forward.h, `kIsCausal`). Blocks of 128 rows: the
# diagonal's are computed whole.
_ATTENTION_BLOCK = 128


def _causal_ratio(behaviour: Behaviour, args: Any, kwargs: Any) -> float:
    query = _argument(behaviour, args, kwargs, "query")
    rows = query.shape[-2] if query is not None else _ATTENTION_BLOCK
    blocks = -(-rows // _ATTENTION_BLOCK)
    return (blocks + 1) / (2 * blocks)


# ---- products


_LEFT = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1}


def _product_of(behaviour: Behaviour, args: Any, kwargs: Any) -> Product | None:
    """Return the product of a matmul or of fused attention."""
    if "attention" in behaviour.name and behaviour.flops is not None:
        query, key = (_argument(behaviour, args, kwargs, name) for name in ("query", "key"))
        if query is None or key is None:
            return None
        return Product(prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1])
    place = _LEFT.get(behaviour.name)
    if place is None:
        return None
    left, right = args[place], args[place + 1]
    num = left.shape[0] if left.dim() == 3 else 1
    return Product(num, left.shape[-2], right.shape[-1], left.shape[-1])


# ---- convolutions: one kernel forward, one per gradient backward ---------------------------------
# torch's own formula for the filter gradient ignores groups: it counts 65 times the forward's
# operations for a depthwise convolution of 64 channels. Each run does the same multiplications.


def _convolutions(name: str, args: Any, outputs: Any, phase: Phase, dtype: str) -> tuple[Op, ...]:
    if name == "convolution":
        source, weight, result = args[0], args[1], outputs[0]
        stride, is_transposed, groups = args[3], args[6], args[8]
    else:
        result, source, weight = args[:3]
        stride, is_transposed, groups = args[4], args[7], args[9]
    like = _Convolved(source, weight, result, stride[0], groups, is_transposed=bool(is_transposed))
    if name == "convolution":
        runs = [(like.forward(), (source, weight, result))]
    else:
        gradients: list[Any] = [*outputs, None, None, None]
        to_source, to_weight, to_bias = gradients[:3]
        runs = []
        if isinstance(to_source, torch.Tensor):
            runs.append((like.to_source(), (result, weight, source)))
        if isinstance(to_weight, torch.Tensor):
            # the bias's gradient is a sum over what arrives
            again = (result,) if isinstance(to_bias, torch.Tensor) else ()
            runs.append((like.to_weight(), (result, source, weight, *again)))
    return tuple(
        Op(
            name=name,
            phase=phase,
            flops=like.flops,
            moved_bytes=_bytes_of(moved),
            dtype=dtype,
            product=product,
        )
        for product, moved in runs
    )


class _Convolved:
    """The products of a convolution and of its gradients."""

    def __init__(
        self,
        source: Any,
        weight: Any,
        result: Any,
        stride: int,
        groups: int,
        *,
        is_transposed: bool,
    ) -> None:
        # A transposed convolution is the data gradient of one from its result to its source.
        self._is_transposed = is_transposed
        wide, narrow = (result, source) if is_transposed else (source, result)
        self._examples = source.shape[0]
        self._window = prod(weight.shape[2:])
        self._wide_places, self._narrow_places = prod(wide.shape[2:]), prod(narrow.shape[2:])
        self._wide_channels = wide.shape[1] // groups
        self._narrow_channels = narrow.shape[1] // groups
        self._groups, self._stride = groups, stride
        layout = layout_of_convolution(source, weight)
        self._is_channels_last = layout is not torch.contiguous_format
        self.flops = (2 * groups * self._examples * self._narrow_places * self._narrow_channels) * (
            self._wide_channels * self._window
        )

    def forward(self) -> Product:
        return self._gathered() if self._is_transposed else self._convolved()

    def to_source(self) -> Product:
        return self._convolved() if self._is_transposed else self._gathered()

    def _convolved(self) -> Product:
        rows = self._examples * self._narrow_places
        return self._product(rows, self._narrow_channels, self._wide_channels * self._window)

    def _gathered(self) -> Product:
        depth = self._narrow_channels * self._window * self._narrow_places // self._wide_places
        rows = self._examples * self._wide_places
        return self._product(rows, self._wide_channels, max(depth, 1))

    def to_weight(self) -> Product:
        depth = self._examples * self._narrow_places
        return self._product(self._narrow_channels, self._wide_channels * self._window, depth)

    def _product(self, rows: int, columns: int, depth: int) -> Product:
        return Product(
            self._groups,
            rows,
            columns,
            depth,
            self._window,
            self._stride,
            self._is_channels_last,
            min(self._wide_channels, self._narrow_channels),
        )
