"""Large figures of the host: how they are made -> made when somebody reads them, and not before.

A script that builds billions of weights on the host, and then moves them, reads none of them. Their
memory is asked for and never touched, so that the system gives none; what is to be written there is
kept as a list of steps, and the random numbers of them are passed over (`draws`). Whoever reads
gets what the script would have had. Small tensors, and whole numbers, are made at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomph.tracing.behaviour import Behaviour
from oomph.tracing.known_outputs import tensors_in
from oomph.tracing.pretend import is_pretended
from oomph.tracing.script.draws import Draws, generator_at, is_never_cut, words_of

_aten = torch.ops.aten
_empty = torch._C._VariableFunctions.empty
_HOST = torch.device("cpu")
_DRAWS = torch.Tag.nondeterministic_seeded

# Fewer are made at once: what shadows carry to the GPU is among them.
LEAST = 2**20 + 1
_MOST_DRAWN = 2**21  # so many are drawn for nothing where their words cannot be counted

# What a factory writes: the op in place, and which of its arguments tells the value.
_ZERO, _ONE = (_aten.zero_.default, ()), (_aten.fill_.Scalar, (1,))
_UNIFORM, _NORMAL = (_aten.uniform_.default, (0, 1)), (_aten.normal_.default, (0, 1))
_WRITES: dict[str, Any] = {
    "zeros": _ZERO,
    "zeros_like": _ZERO,
    "new_zeros": _ZERO,
    "ones": _ONE,
    "ones_like": _ONE,
    "new_ones": _ONE,
    "full": 1,
    "full_like": 1,
    "new_full": 2,
    "rand": _UNIFORM,
    "rand_like": _UNIFORM,
    "randn": _NORMAL,
    "randn_like": _NORMAL,
}  # fmt: skip - by what they write
_FILLS = frozenset({"zero_", "fill_", "uniform_", "normal_"})
_DERIVES = frozenset({"mul", "div", "add", "sub", "clamp", "_to_copy", "clone"})
CUT = "random numbers that a truncated distribution draws again are not counted: later ones differ"


@dataclass(frozen=True, slots=True)
class _Step:
    """An op on a tensor in place; `moment` is that of the generator if it draws."""

    function: Callable[..., Any]
    rest: tuple[Any, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    moment: tuple[Any, int] | None = None

    def run(self, storage: Any) -> None:
        tensor = _empty((0,), dtype=self.dtype, device=_HOST)
        tensor.set_(storage, 0, self.size, self.stride)
        drawing = {} if self.moment is None else {"generator": generator_at(self.moment)}
        self.function(tensor, *self.rest, **drawing)


class _Pending(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("address", "steps")
    address: int
    steps: tuple[_Step, ...]


class Deferred:
    """Storages of the host, and what is still to be written into them."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.approximate: Callable[[str], None] = lambda _: None
        self._of: dict[int, _Pending] = {}
        self._behaviours: dict[Any, Behaviour] = {}

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """An op on real tensors alone."""
        behaviour = self._behaviours.get(function)
        if behaviour is None:
            behaviour = self._behaviours[function] = Behaviour(function)
        if behaviour.kind == "view":
            return function(*args, **kwargs)
        name = behaviour.name
        answer: Any = NotImplemented
        if kwargs.get("generator") is None:
            if name in _WRITES:
                answer = self._made(name, args, kwargs)
            elif behaviour.kind == "in place" and isinstance(args[0], torch.Tensor):
                answer = self._changed(behaviour, function, args, kwargs)
            elif name in _DERIVES and self._of and not tensors_in(args[1:]):
                answer = self._derived(function, args, kwargs)
        if answer is not NotImplemented:
            return answer
        self.flush(args, kwargs)
        if _DRAWS in function.tags and kwargs.get("generator") is None:
            self.draws.catch_up()
        return function(*args, **kwargs)

    def flush(self, *values: Any) -> None:
        """Write what is to be written into these."""
        if not self._of:
            return
        for tensor in tensors_in(values):
            if not is_pretended(tensor) and tensor.layout is torch.strided:
                self.write(tensor.untyped_storage())

    def write(self, storage: Any) -> None:
        pending = self._of.pop(storage._cdata, None)
        if pending is None:
            return
        # Whoever reads without an op is seen by the recorder, and would have it put off again.
        with _disable_current_modes(), torch.no_grad():
            for step in pending.steps:
                step.run(storage)

    # ---- what is put off -----------------------------------------------------------------------

    def _made(self, name: str, args: Any, kwargs: Any) -> Any:
        value = _WRITES[name]
        function, rest = value if isinstance(value, tuple) else (_aten.fill_.Scalar, None)
        if rest is None:
            rest = (args[value] if value < len(args) else kwargs["fill_value"],)
        options = {k: v for k, v in kwargs.items() if k not in ("generator", "fill_value", "names")}
        out = _blank(name, args, options)
        if out is None or not _is_large(out):
            return NotImplemented
        return out if self._put_off(function, rest, out) else NotImplemented

    def _put_off(self, function: Any, rest: Any, tensor: Any, *, adds: bool = False) -> bool:
        """Keep a step; False if the words that it draws cannot be counted."""
        moment = None
        if _DRAWS in getattr(function, "tags", ()):
            name = function._schema.name.partition("::")[2]
            moment = self._passed_over(words_of(name, tensor))
            if moment is None:
                return False
        self._keep(_Step(function, rest, *_spec(tensor), moment), tensor, adds=adds)
        return True

    def _passed_over(self, num_words: int | None) -> Any:
        if num_words is None:
            return None
        moment = self.draws.moment()
        self.draws.pass_over(num_words)
        return moment

    def _keep(self, step: _Step, tensor: Any, *, adds: bool) -> None:
        storage = tensor.untyped_storage()
        before = self._of.get(storage._cdata)
        pending: Any = _Pending(storage, self._on_death)
        pending.address = storage._cdata
        pending.steps = (*before.steps, step) if adds and before is not None else (step,)
        self._of[pending.address] = pending

    def _on_death(self, pending: Any) -> None:
        address = pending.address
        if self._of.get(address) is pending:
            del self._of[address]

    def _pending(self, tensor: Any) -> Any:
        return self._of.get(tensor.untyped_storage()._cdata)

    def _changed(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if kwargs or not _is_large(tensor) or not _is_whole(tensor):
            return NotImplemented
        others = tensors_in(args[1:])
        if behaviour.name == "copy_" and self._is_source(others[0], tensor):
            steps = self._pending(others[0]).steps
            self._keep(
                _Step(_copied, (steps, *_spec(others[0])), *_spec(tensor)), tensor, adds=False
            )
            return tensor
        is_fill = behaviour.name in _FILLS
        if others or not (is_fill or self._pending(tensor)):
            return NotImplemented
        if not is_fill and _DRAWS in function.tags:
            return NotImplemented
        is_kept = self._put_off(function, tuple(args[1:]), tensor, adds=not is_fill)
        return tensor if is_kept else NotImplemented

    def _is_source(self, source: Any, target: Any) -> bool:
        is_alike = source.shape == target.shape and source.layout is torch.strided
        return bool(is_alike and self._pending(source) and _is_whole(source))

    def _derived(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Reckoned from one alone and numbers: made from how that one is made."""
        source = args[0]
        if not (self._pending(source) and _is_whole(source)):
            return NotImplemented
        options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
        out = _aten.empty_like.default(source, **options)
        if not out.is_floating_point() or any(isinstance(one, complex) for one in args):
            return NotImplemented

        def work(tensor: Any, steps: Any, *spec: Any) -> None:
            tensor.copy_(function(_again(steps, *spec), *args[1:], **kwargs))

        args = (None, *args[1:])  # the source is not held
        rest = (self._pending(source).steps, *_spec(source))
        self._keep(_Step(work, rest, *_spec(out)), out, adds=False)
        return out

    # ---- figures of the host without memory ----------------------------------------------------

    def passed_over(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An op on parameters that draws, and has nothing to write: the generator goes on."""
        if _DRAWS not in function.tags or kwargs.get("generator") is not None:
            return
        name = function._schema.name.partition("::")[2].replace("_like", "")
        num_words = words_of(name, out)
        if num_words is not None:
            self.draws.pass_over(num_words)
        elif function._schema.arguments[0].alias_info and out.numel() <= _MOST_DRAWN:
            self.draws.catch_up()
            drawn = torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device=_HOST)
            function(drawn.zero_(), *args[1:], **kwargs)

    def install(self, is_on_host: Callable[[Any], bool]) -> None:
        """Patch what reads values as it makes them: torch's truncated normal distribution."""
        module: Any = torch.nn.init
        original = module._no_grad_trunc_normal_

        def drawn(tensor: Any, mean: Any, std: Any, a: Any, b: Any, generator: Any = None) -> Any:
            is_blank = is_pretended(tensor)
            if generator is not None or (is_blank and not is_on_host(tensor)):
                return original(tensor, mean, std, a, b, generator=generator)
            is_kept = is_never_cut(mean, std, a, b)
            if is_blank:
                if not is_kept:
                    self.approximate(CUT)
                with torch.no_grad():
                    return tensor.normal_(mean, std)
            moment = None
            if is_kept and _is_large(tensor) and _is_whole(tensor):
                moment = self._passed_over(words_of("normal_", tensor))
            if moment is None:
                return original(tensor, mean, std, a, b)
            self._keep(
                _Step(original, (mean, std, a, b), *_spec(tensor), moment), tensor, adds=False
            )
            return tensor

        module._no_grad_trunc_normal_ = drawn


def _blank(name: str, args: Any, options: dict[str, Any]) -> Any:
    """The tensor that a factory returns, with nothing written; None for a kind of its own."""
    if options.get("layout") not in (None, torch.strided):
        return None
    if name.endswith("_like"):
        return _aten.empty_like.default(args[0], **options)
    if name.startswith("new_"):
        return _aten.new_empty.default(args[0], args[1], **options)
    dtype = options.get("dtype") or torch.get_default_dtype()
    if not dtype.is_floating_point or options.get("out") is not None:
        return None
    return _empty(args[0], **options)


def _is_large(tensor: Any) -> bool:
    is_strided = tensor.layout is torch.strided and type(tensor) is torch.Tensor
    return bool(is_strided and tensor.numel() >= LEAST and tensor.is_floating_point())


def _is_whole(tensor: Any) -> bool:
    """Is it all of its storage, each element once?"""
    size_bytes = tensor.numel() * tensor.element_size()
    is_dense = tensor.is_contiguous() or (tensor.dim() == 2 and tensor.t().is_contiguous())
    return bool(is_dense and tensor.untyped_storage().nbytes() == size_bytes)


def _spec(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    return tuple(tensor.size()), tensor.stride(), tensor.dtype


def _again(steps: tuple[_Step, ...], size: Any, stride: Any, dtype: Any) -> Any:
    """Another tensor, made as one is made."""
    tensor = torch.empty_strided(size, stride, dtype=dtype, device=_HOST)
    for step in steps:
        step.run(tensor.untyped_storage())
    return tensor


def _copied(tensor: Any, steps: tuple[_Step, ...], *spec: Any) -> None:
    tensor.copy_(_again(steps, *spec))
