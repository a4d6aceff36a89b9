"""Fill large tensors on the host only when something reads them.

A script that builds billions of weights on the host and then moves them reads none of them. Their
memory is requested but never touched, so the system allocates none. What should be written there is
kept as a list of steps, and the generator skips their random numbers (`Draws`). A reader gets
exactly the values the script would have had. Small tensors and integers are filled at once.
"""

from __future__ import annotations

import functools
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomph.pretending.ops import Behaviour
from oomph.pretending.patches import wrap
from oomph.pretending.tensors import HOST, empty, is_pretended, tensors_in
from oomph.rehearsing.recorder import Behaviours

# ---- skip random numbers: the generator's state as if they had been drawn ------------------------
# Torch's generator on the host is a Mersenne Twister (ATen/core/MT19937RNGEngine.h). Its words obey
# a linear recurrence, so the state after any number of words is a sum of some 20,000 of its next
# words; a power of x modulo the characteristic polynomial tells which ones. So oomph skips a
# model's billions of initial weights in a fraction of a second, and the script's next random
# numbers are the ones it would have drawn.

_NUM_WORDS = 624
_DEGREE = 19937
# phi(x) of MT19937 by the formula of Matsumoto and Nishimura (1998), section 3.2: 135 terms.
_MIDDLE, _TWIST = 397, 0x9908B0DF
# CPUGeneratorImpl's state: the seed, how many words are left, whether it is seeded, the next word,
# the words (8 bytes each), and a cache for normal distributions.
_HEAD = struct.Struct("<QiiQ")
_BODY = struct.Struct(f"<{_NUM_WORDS}Q")
_NEAR = 2**21  # up to this many words, drawing is faster than skipping
_FILLED = 16  # normal_ fills blocks of this size; the last block is aligned to the end
_NEVER = 6.0  # standard deviations that no float32 normal reaches: sqrt(-2 log 2^-24) = 5.8

Moment = tuple[torch.Tensor, int]  # a generator's state, and how many words later


def words_of(name: str, tensor: torch.Tensor) -> int | None:
    """Return how many random words an in-place fill draws; None if not known beforehand."""
    num: int = tensor.numel()
    dtype = tensor.dtype
    size = 2 if dtype == torch.float64 else 1
    if name == "uniform_":
        return num * size
    is_dense = num >= _FILLED and tensor.is_contiguous()
    if name == "normal_" and is_dense:
        if num % _FILLED == 0:
            return num * size
        if dtype in (torch.float32, torch.float64):
            return (num + _FILLED) * size
    return None


def is_never_cut(mean: float, std: float, low: float, high: float) -> bool:
    """Return whether a truncated normal distribution never rejects a drawn value."""
    return min(mean - low, high - mean) >= _NEVER * std


class Draws:
    """The host's generator, and how many words it lags behind."""

    def __init__(self) -> None:
        self._num_behind = 0
        self._state = torch.default_generator.get_state()  # the last state before it lagged

    def moment(self) -> Moment:
        """Return the generator's current position, to draw from it later."""
        if not self._num_behind:
            self._state = torch.default_generator.get_state()
        return self._state, self._num_behind

    def pass_over(self, num_words: int) -> Moment:
        """Lag behind by so many words more. Return the position before them."""
        moment = self.moment()
        self._num_behind += num_words
        return moment

    def catch_up(self) -> None:
        """Advance the generator: its state is about to be used or read."""
        if self._num_behind:
            state, num_words = self._state, self._num_behind
            self._num_behind = 0
            torch.default_generator.set_state(_after(state, num_words))

    def begin_anew(self) -> None:
        """Reset the lag: the state was just set."""
        self._num_behind = 0


def generator_at(moment: Moment) -> torch.Generator:
    """Return a new generator that draws what comes next at `moment`."""
    made = torch.Generator()
    made.set_state(_after(*moment))
    return made


def _after(state: torch.Tensor, num_words: int) -> torch.Tensor:
    """Return the state `num_words` later."""
    made = torch.Generator()
    made.set_state(state)
    near = min(num_words, _NUM_WORDS) if num_words > _NEAR else num_words
    _draw(made, near)  # a freshly seeded block does not obey the recurrence yet
    if near == num_words:
        return made.get_state()
    seed, left, seeded, _, words, tail = _taken_apart(made.get_state())
    num_taken = _NUM_WORDS + 1 - left + num_words - near  # counted within the current block
    num_blocks, in_block = divmod(num_taken - 1, _NUM_WORDS)
    later = _later(made, words, num_blocks * _NUM_WORDS)
    head = _HEAD.pack(seed, _NUM_WORDS - in_block, seeded, in_block + 1)
    return torch.frombuffer(bytearray(head + _BODY.pack(*later) + tail), dtype=torch.uint8)


def _draw(generator: torch.Generator, num_words: int) -> None:
    torch.empty(num_words, dtype=torch.float32, device="cpu").uniform_(generator=generator)


def _taken_apart(state: torch.Tensor) -> tuple[int, int, int, int, tuple[int, ...], bytes]:
    data = bytes(state.tolist())
    words = _BODY.unpack_from(data, _HEAD.size)
    return *_HEAD.unpack_from(data), words, data[_HEAD.size + _BODY.size :]


def _later(generator: torch.Generator, words: tuple[int, ...], num_words: int) -> list[int]:
    """Return the block that begins `num_words` after this one."""
    chosen = _power_of_x(num_words)
    data = bytearray(struct.pack(f"<{_NUM_WORDS}I", *words))
    while len(data) < 4 * (_DEGREE + _NUM_WORDS):
        _draw(generator, _NUM_WORDS)
        block = _taken_apart(generator.get_state())[4]
        data += struct.pack(f"<{_NUM_WORDS}I", *block)
    size_bytes, total = 4 * _NUM_WORDS, 0
    for place, is_chosen in enumerate(reversed(f"{chosen:b}")):
        if is_chosen == "1":
            total ^= int.from_bytes(data[4 * place : 4 * place + size_bytes], "little")
    return list(struct.unpack(f"<{_NUM_WORDS}I", total.to_bytes(size_bytes, "little")))


def _power_of_x(exponent: int) -> int:
    """Return x**exponent modulo phi, one bit per coefficient."""
    mask = (1 << _DEGREE) - 1
    power = 1
    for digit in f"{exponent:b}":
        power = int(f"{power:b}", 4)  # squared: a zero between all coefficients
        if digit == "1":
            power <<= 1
        while high := power >> _DEGREE:
            power &= mask
            for term in _phi():
                power ^= high << term
    return power


@functools.cache
def _phi() -> tuple[int, ...]:
    """Return the exponents of the characteristic polynomial, without its degree."""
    powers = [1]  # of x**623 + x**396, one bit per coefficient
    for _ in range(31):
        powers.append(powers[-1] << _NUM_WORDS - 1 ^ powers[-1] << _MIDDLE - 1)
    found = _TWIST >> 31
    for power in (31, *(30 - place for place in range(31) if _TWIST >> place & 1)):
        found ^= powers[power] << _NUM_WORDS ^ powers[power] << _MIDDLE
    return tuple(term for term in range(_DEGREE) if found >> term & 1)


# ---- tensors that are filled when read -----------------------------------------------------------

_aten = torch.ops.aten
_DRAWS = torch.Tag.nondeterministic_seeded

# Smaller tensors are filled at once; they include all whose values shadows carry to the GPU.
LEAST = 2**20 + 1
_MOST_TRUNCATED = 2**25  # judgement: values cut from a normal distribution, some 2 s of drawing
_MOST_DRAWN = 2**21  # judgement: at most so many are drawn and discarded if not countable

# What a factory writes: the in-place op, and the position of the argument that is the value.
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
}  # fmt: skip - grouped by what they write
_FILLS = frozenset({"zero_", "fill_", "uniform_", "normal_"})
_DERIVES = frozenset({"mul", "div", "add", "sub", "clamp", "_to_copy", "clone"})
CUT = "random numbers that a truncated distribution draws again are not counted: later ones differ"


@dataclass(frozen=True, slots=True)
class _Step:
    """An in-place op on a tensor; `moment` is the generator's position if it draws."""

    function: Callable[..., Any]
    rest: tuple[Any, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    moment: Moment | None = None

    def run(self, storage: torch.UntypedStorage) -> None:
        tensor = empty((0,), dtype=self.dtype, device=HOST)
        tensor.set_(storage, 0, self.size, self.stride)
        drawing = {} if self.moment is None else {"generator": generator_at(self.moment)}
        self.function(tensor, *self.rest, **drawing)


class _Pending(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("address", "steps")
    address: int
    steps: tuple[_Step, ...]


class Deferred:
    """Storages on the host, and the steps still to be written into them."""

    def __init__(self) -> None:
        self.draws = Draws()
        self._num_truncated = 0
        self._of: dict[int, _Pending] = {}
        self._behaviours = Behaviours()

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on real tensors only, or defer it."""
        behaviour = self._behaviours[function]
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
        """Write the pending steps of these tensors."""
        if not self._of:
            return
        for tensor in tensors_in(values):
            if not is_pretended(tensor) and tensor.layout is torch.strided:
                self.write(tensor.untyped_storage())

    def write(self, storage: torch.UntypedStorage) -> None:
        pending = self._of.pop(storage._cdata, None)
        if pending is None:
            return
        # The recorder also sees reads without an op, and would defer these steps again.
        with _disable_current_modes(), torch.no_grad():
            for step in pending.steps:
                step.run(storage)

    # ---- what is deferred ----------------------------------------------------------------------

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

    def _put_off(
        self, function: Any, rest: Any, tensor: torch.Tensor, *, adds: bool = False
    ) -> bool:
        """Defer a step; return False if the words it draws cannot be counted."""
        moment = None
        if _DRAWS in getattr(function, "tags", ()):
            name = function._schema.name.partition("::")[2]
            num_words = words_of(name, tensor)
            if num_words is None:
                return False
            moment = self.draws.pass_over(num_words)
        self._keep(_Step(function, rest, *_spec(tensor), moment), tensor, adds=adds)
        return True

    def _keep(self, step: _Step, tensor: torch.Tensor, *, adds: bool) -> None:
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

    def _pending(self, tensor: torch.Tensor) -> Any:
        return self._of.get(tensor.untyped_storage()._cdata)

    def _changed(self, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if kwargs or not _is_large(tensor) or not _is_whole(tensor):
            return NotImplemented
        others = tensors_in(args[1:])
        if behaviour.name == "copy_" and self._is_source(others[0], tensor):
            return self._derive(tensor, others[0], lambda source: source)
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
        """Defer an op on one deferred tensor and numbers: the result reuses its steps."""
        source = args[0]
        if not (self._pending(source) and _is_whole(source)):
            return NotImplemented
        options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
        out = _aten.empty_like.default(source, **options)
        if not out.is_floating_point() or any(isinstance(one, complex) for one in args):
            return NotImplemented
        rest = args[1:]  # without the source, which must not be kept alive
        return self._derive(out, source, lambda again: function(again, *rest, **kwargs))

    def _derive(self, out: Any, source: Any, compute: Callable[[Any], Any]) -> Any:
        steps, spec = self._pending(source).steps, _spec(source)

        def work(tensor: torch.Tensor) -> None:
            again = torch.empty_strided(*spec[:2], dtype=spec[2], device=HOST)
            for step in steps:
                step.run(again.untyped_storage())
            tensor.copy_(compute(again))

        self._keep(_Step(work, (), *_spec(out)), out, adds=False)
        return out

    def _is_drawn_again(self, tensor: torch.Tensor) -> bool:
        """Return whether so few values were truncated so far that the exact draws are affordable.

        How often torch draws again depends on the values, so skipping them loses the generator's
        position.
        """
        self._num_truncated += tensor.numel()
        return self._num_truncated <= _MOST_TRUNCATED

    # ---- host tensors without memory -----------------------------------------------------------

    def passed_over(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Advance the generator for a random fill of parameters, which have no memory."""
        if _DRAWS not in function.tags or kwargs.get("generator") is not None:
            return
        num_words = words_of(function._schema.name.partition("::")[2], out)
        if num_words is not None:
            self.draws.pass_over(num_words)
        elif out.numel() <= _MOST_DRAWN:
            self.draws.catch_up()
            drawn = torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device=HOST)
            function(drawn.zero_(), *args[1:], **kwargs)

    def install(
        self, is_on_host: Callable[[Any], bool], approximate: Callable[[str], None]
    ) -> None:
        """Patch what reads or sets the generator's state, and the truncated normal distribution.

        That distribution reads values while it makes them.
        """

        def setting(original: Any, *args: Any, **kwargs: Any) -> Any:
            self.draws.begin_anew()
            return original(*args, **kwargs)

        for name in ("manual_seed", "seed", "set_rng_state"):
            wrap(name, torch, torch.random)(setting)

        @wrap("get_rng_state", torch, torch.random)
        def reading(original: Any) -> Any:
            self.draws.catch_up()
            return original()

        @wrap("_no_grad_trunc_normal_", torch.nn.init)
        def drawn(
            original: Any, tensor: Any, mean: Any, std: Any, a: Any, b: Any, generator: Any = None
        ) -> Any:
            is_blank = is_pretended(tensor)
            if generator is not None or (is_blank and not is_on_host(tensor)):
                return original(tensor, mean, std, a, b, generator=generator)
            num_words = words_of("normal_", tensor)
            is_deferred = _is_large(tensor) and _is_whole(tensor) and num_words is not None
            is_cut = not is_never_cut(mean, std, a, b)
            if not is_blank and (not is_deferred or (is_cut and self._is_drawn_again(tensor))):
                return original(tensor, mean, std, a, b)
            if is_cut:
                approximate(CUT)
            if is_blank or num_words is None:
                with torch.no_grad():
                    return tensor.normal_(mean, std)
            moment = self.draws.pass_over(num_words)
            step = _Step(original, (mean, std, a, b), *_spec(tensor), moment)
            self._keep(step, tensor, adds=False)
            return tensor


def _blank(name: str, args: Any, options: dict[str, Any]) -> Any:
    """Return a factory's tensor with nothing written; None for special layouts or dtypes."""
    if options.get("layout") not in (None, torch.strided):
        return None
    if name.endswith("_like"):
        return _aten.empty_like.default(args[0], **options)
    if name.startswith("new_"):
        return _aten.new_empty.default(args[0], args[1], **options)
    dtype = options.get("dtype") or torch.get_default_dtype()
    if not dtype.is_floating_point or options.get("out") is not None:
        return None
    return empty(args[0], **options)


def _is_large(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and type(tensor) is torch.Tensor
    return bool(is_strided and tensor.numel() >= LEAST and tensor.is_floating_point())


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether the tensor covers its whole storage, each element once."""
    size_bytes = tensor.numel() * tensor.element_size()
    is_dense = tensor.is_contiguous() or (tensor.dim() == 2 and tensor.t().is_contiguous())
    return bool(is_dense and tensor.untyped_storage().nbytes() == size_bytes)


def _spec(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    return tuple(tensor.size()), tensor.stride(), tensor.dtype
