"""Ops on tensors without memory that are not on the GPU: on the host, or on `meta` by request.

They are followed so that the script goes on, and are not counted. A copy between the host and the
GPU goes over the bus, and is noted as that.
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.tracing.behaviour import Behaviour
from oomph.tracing.host_memory import note_on_host
from oomph.tracing.known_outputs import leaves_of, tensors_in
from oomph.tracing.pretend import is_pretended, suspended
from oomph.tracing.script.by_value import note_truth
from oomph.tracing.script.places import Name
from oomph.tracing.script.refusals import refused
from oomph.tracing.unknown_values import is_by_value

_META = torch.device("meta")
_empty_strided = torch._C._VariableFunctions.empty_strided
_empty_like = torch.ops.aten.empty_like.default
# A GPU takes tensors of the host among its own only here.
_CROSSING = frozenset(
    {"copy_", "_foreach_copy_", "_to_copy", "index", "index_put_", "_index_put_impl_", "index_put"}
)
_RANDOM = frozenset({"rand_like", "randn_like", "randint_like"})


def run(recorder: Any, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
    """An op that has such tensors among its arguments."""
    if behaviour.kind == "view":
        return function(*args, **kwargs)
    tensors = tensors_in((args, kwargs))
    is_on_gpu = _is_of_gpu(recorder, tensors)
    if is_on_gpu and behaviour.name not in _CROSSING and _is_mixed(recorder, tensors):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices,"
            " cuda:0 and cpu!"
        )
    if behaviour.kind == "in place":
        _note_copy(recorder, behaviour, args)
        recorder.shadows.follow(function, args, kwargs, args[0])
        if isinstance(args[0], torch.Tensor) and recorder.host.of(args[0]) == "cpu":
            recorder.deferred.passed_over(function, args, kwargs, args[0])
        return args[0] if behaviour.returns else None
    if is_on_gpu:  # its result is there, as its first tensor is
        return recorder.fresh(behaviour, function, args, kwargs)
    return _computed(recorder, behaviour, function, args, kwargs, tensors)


def _is_of_gpu(recorder: Any, tensors: Any) -> bool:
    """Is one on the GPU? A single figure among tensors of the host is of autograd's making."""
    there = [t for t in tensors if is_pretended(t) and not recorder.host.has(t)]
    return any(t.dim() for t in there) or (bool(there) and not any(t.dim() for t in tensors))


def _is_mixed(recorder: Any, tensors: Any) -> bool:
    """Are tensors of the GPU and of the host together that are more than single figures?"""
    return len({recorder.host.named(tensor) for tensor in tensors if tensor.dim()}) > 1


def _note_copy(recorder: Any, behaviour: Behaviour, args: Any) -> None:
    if behaviour.name not in ("copy_", "_foreach_copy_"):
        return
    to, source = (one[0] if isinstance(one, list | tuple) else one for one in args[:2])
    places = (recorder.host.named(to), recorder.host.named(source))
    if places in (("cpu", "cuda"), ("cuda", "cpu")):
        name = "copy_to_host" if places[0] == "cpu" else "copy_from_host"
        note_on_host(recorder, name, tensors_in(args[:1]))


def _computed(
    recorder: Any, behaviour: Behaviour, function: Any, args: Any, kwargs: Any, tensors: Any
) -> Any:
    place = next(recorder.host.of(one) for one in tensors if is_pretended(one))
    if place == "cpu" and is_by_value(function):
        return function(*_real(recorder, args), **kwargs)
    shadows = recorder.shadows
    value: Any = NotImplemented
    if shadows.knows(args, kwargs):
        value = shadows.computed(function, args, kwargs)
    out = _without_values(behaviour, function, args, kwargs)
    for made in leaves_of(out):
        if isinstance(made, torch.Tensor) and not recorder.host.has(made):
            recorder.host.stand(made, place)
    if value is not NotImplemented:
        shadows.give_all(out, value)
    note_truth(behaviour.name, args, out)
    return out


def _without_values(behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
    args = _blank(args)
    kwargs = {name: _blank(value) for name, value in kwargs.items()}
    with suspended():
        if behaviour.name in _RANDOM:
            return _empty_like(args[0], dtype=kwargs.get("dtype"))
        return function(*args, **kwargs)


def _blank(value: Any) -> Any:
    """Real tensors among pretended ones of the host lose their memory, single figures excepted."""
    if isinstance(value, torch.Tensor):
        if is_pretended(value) or not value.dim():
            return value
        return _empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
    if isinstance(value, list | tuple):
        return type(value)(_blank(item) for item in value)
    return value


def _real(recorder: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return recorder.real(value) if is_pretended(value) else value
    if isinstance(value, list | tuple):
        return type(value)(_real(recorder, item) for item in value)
    return value


def refuse_sparse(args: Any, kwargs: Any) -> None:
    """The gradient of a table on the host: torch has no such tensor."""
    is_sparse = kwargs.get("layout") is torch.sparse_coo
    if is_sparse and not all(is_pretended(tensor) for tensor in tensors_in(args)):
        raise refused(
            "a sparse gradient of a table on the host",
            because="its rows are real, and its values are those of a model without memory",
            attempt="nn.Embedding(sparse=False) there, or the table on the GPU",
        )


# ---- moves -----------------------------------------------------------------------------------


def made_there(
    recorder: Any, behaviour: Behaviour, function: Any, args: Any, kwargs: Any, place: Name
) -> Any:
    """A factory's tensor, or a copy, that is to be elsewhere than on the GPU."""
    source = next(iter(tensors_in(args)), None)
    is_copy = behaviour.name == "_to_copy" and place == "cpu" and is_pretended(source)
    known = recorder.shadows.of(source) if is_copy else None
    if known is not None:
        dtype = kwargs.get("dtype") or known.dtype
        return known.to(dtype, copy=True)
    with suspended():
        out = function(*args, **{**kwargs, "device": _META})
    recorder.host.stand(out, place)
    if is_copy and not recorder.host.has(source):
        note_on_host(recorder, "copy_to_host", [out])
    return out
