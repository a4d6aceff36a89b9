"""What the card must know of an op, told once for each overload."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["view", "in place", "storage", "fresh"]
# What an op leaves on the host though its arguments are on the GPU: places among its outputs.
_ON_HOST = {"_pack_padded_sequence": frozenset({1})}  # batch_sizes
_OF_HOST = ("empty_on_host",)  # oomph's own: all that it makes is the host's
_MOVES_STORAGE = ("resize_", "resize_as_", "set_", "resize_output_")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """What tracing knows of CUDA's kernels and of autograd."""

    in_place_names: Mapping[str, str]  # op -> what backward does instead, where it may
    is_in_place: Callable[[str, Any], bool]  # ... and whether it may, of a call
    gemms: Container[str]
    workspace_bytes: int  # cuBLAS takes it at the first matrix product, for good
    temporaries: Mapping[str, Callable[[Any], list[int]]]  # beside the outputs, given back


class Op:
    """One overload of one op."""

    __slots__ = (
        "function",
        "in_place",
        "is_composite",
        "is_gemm",
        "is_of_host",
        "kind",
        "lifts",
        "name",
        "on_host",
        "temporaries",
    )

    def __init__(self, function: Any, facts: KernelFacts) -> None:
        self.function = function  # alive, so that its id is no one else's
        self.name: str = function._schema.name.partition("::")[2]
        self.kind = _kind_of(function, self.name)
        self.in_place = facts.in_place_names.get(self.name)
        self.on_host = _ON_HOST.get(self.name)
        self.is_of_host = self.name in _OF_HOST
        self.is_gemm = self.name in facts.gemms
        self.temporaries = facts.temporaries.get(self.name)
        # torch.tensor([...]) makes its storage where nobody sees it, and only then shows it.
        self.lifts = self.name in ("lift_fresh", "lift")
        self.is_composite = _has_kernel(function, "CompositeImplicitAutograd") and not (
            _has_kernel(function, "CPU")
        )


def _kind_of(function: Any, name: str) -> Kind:
    if function.is_view:
        return "view"
    if name in _MOVES_STORAGE:
        return "storage"
    arguments = function._schema.arguments
    written = [argument.name for argument in arguments if _is_written(argument)]
    if written and written == [arguments[0].name] and name.endswith("_"):
        return "in place"
    return "fresh"


def _has_kernel(function: Any, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key))


def _is_written(argument: Any) -> bool:
    return bool(argument.alias_info and argument.alias_info.is_write)
