"""What kind of op a call is, told once for each op from its schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from oomph.tracing import (
    host_memory,
    in_place,
    kernels,
    losses,
    ranks,
    recurrent,
    sparse,
    unknown_values,
)

# name of an op -> (recorder, behaviour, function, args, kwargs) -> its result, or NotImplemented
# where the call is an ordinary one after all
_RULES: dict[str, Callable[..., Any]] = {
    **unknown_values.RULES,
    **losses.RULES,
    **host_memory.RULES,
    **sparse.RULES,
    **recurrent.RULES,
    **ranks.RULES,
}

Kind = Literal["view", "in place", "own rule", "pure", "other"]


class Behaviour:
    """One overload of one op."""

    __slots__ = (
        "by_value",
        "flops",
        "in_place",
        "is_convolution",
        "is_gemm",
        "kind",
        "label",
        "lifts",
        "name",
        "returns",
        "rule",
        "temporaries",
        "updated",
    )

    def __init__(self, function: Any) -> None:
        self.name: str = function._schema.name.partition("::")[2]
        self.label = str(function)
        self.rule: Callable[..., Any] | None = _RULES.get(self.name)
        self.kind: Kind = _kind_of(function, self.name)
        self.in_place = in_place.IN_PLACE.get(self.name)
        self.returns = bool(function._schema.returns)
        self.is_gemm = self.name in kernels.GEMMS
        self.is_convolution = self.name in ("convolution", "convolution_backward")
        self.temporaries: Callable[[Any], list[int]] | None = kernels.TEMPORARIES.get(self.name)
        self.flops: Any = flop_registry.get(function._overloadpacket)
        self.updated = _updated(function, self.name)
        is_by_value = unknown_values.is_by_value(function)
        self.by_value = unknown_values.decided_by_values if is_by_value else None
        # torch.tensor([...]) makes its storage where nobody sees it, and only then shows it.
        self.lifts = self.name in ("lift_fresh", "lift")


# These write their first argument and do not read it.
_ONLY_WRITTEN = ("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_")


def _updated(function: Any, name: str) -> tuple[int, ...]:
    """The places of arguments that are read and written again."""
    if name in _ONLY_WRITTEN:
        return ()
    arguments = enumerate(function._schema.arguments)
    return tuple(i for i, a in arguments if a.alias_info and a.alias_info.is_write)


def _kind_of(function: Any, name: str) -> Kind:
    schema = function._schema
    if name in _RULES:
        return "own rule"
    if function.is_view:
        return "view"
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    if not written:
        return "pure" if schema.returns else "other"
    keeps_storage = name not in ("resize_", "resize_as_", "set_")
    keeps_shape = torch.Tag.inplace_view not in function.tags
    is_first_alone = written == [schema.arguments[0].name] and name.endswith("_")
    return "in place" if is_first_alone and keeps_storage and keeps_shape else "other"
