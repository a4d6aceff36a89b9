"""Random numbers that are not drawn -> the generator as if they had been.

Torch's generator of the host is a Mersenne Twister (ATen/core/MT19937RNGEngine.h): its words obey
a linear recurrence, so that the state after any number of them is a sum of some 20,000 words of
now, which ones being told by a power of x modulo the characteristic polynomial. A model's billions
of initial weights are passed over in a fraction of a second, and what a script draws next is what
it would have drawn.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

_NUM_WORDS = 624
_DEGREE = 19937
# phi(x) of MT19937 by the formula of Matsumoto and Nishimura (1998), section 3.2: 135 terms.
_MIDDLE, _TWIST = 397, 0x9908B0DF
# CPUGeneratorImpl's state: a seed, how many words are left, whether it is seeded, the next word,
# the words (in 8 bytes each), and what normal distributions keep.
_HEAD = struct.Struct("<QiiQ")
_BODY = struct.Struct(f"<{_NUM_WORDS}Q")
_NEAR = 2**21  # so many words are drawn sooner than passed over
_FILLED = 16  # normal_ fills so many at a time, the last of them from the end
_NEVER = 6.0  # in float32 no normal figure lies so many deviations away: sqrt(-2 log 2^-24) = 5.8


def words_of(name: str, tensor: Any) -> int | None:
    """How many words a fill in place takes; None where that is not known beforehand."""
    num: int = tensor.numel()
    dtype = tensor.dtype
    size = 2 if dtype == torch.float64 else 1
    if name in ("uniform_", "rand"):
        return num * size
    is_dense = num >= _FILLED and tensor.is_contiguous()
    if name in ("normal_", "randn", "normal") and is_dense:
        if num % _FILLED == 0:
            return num * size
        if dtype in (torch.float32, torch.float64):
            return (num + _FILLED) * size
    return None


def is_never_cut(mean: float, std: float, low: float, high: float) -> bool:
    """Does a truncated normal distribution keep whatever is drawn?"""
    return min(mean - low, high - mean) >= _NEVER * std


class Draws:
    """The host's generator, and how far behind it is."""

    def __init__(self) -> None:
        self._num_behind = 0
        self._state: Any = None  # of when it was not

    def moment(self) -> tuple[Any, int]:
        """From where the next words come, to draw them later."""
        if not self._num_behind:
            self._state = torch.default_generator.get_state()
        return self._state, self._num_behind

    def pass_over(self, num_words: int) -> None:
        self.moment()
        self._num_behind += num_words

    def catch_up(self) -> None:
        """Somebody is about to draw, or to look at the state."""
        if self._num_behind:
            state, num_words = self._state, self._num_behind
            self._num_behind = 0
            torch.default_generator.set_state(_after(state, num_words))

    def begin_anew(self) -> None:
        """Somebody has set the state."""
        self._num_behind = 0


def generator_at(moment: tuple[Any, int]) -> Any:
    """A generator of its own that draws what is next at a moment."""
    made = torch.Generator()
    made.set_state(_after(*moment))
    return made


def install(draws: Draws) -> None:
    """Let whoever sets or reads the state find it where it ought to be."""
    module: Any = torch
    for name in ("manual_seed", "seed", "set_rng_state"):
        setting = _first(draws.begin_anew, getattr(torch, name))
        setattr(module, name, setting)
        setattr(module.random, name, setting)
    reading = _first(draws.catch_up, torch.get_rng_state)
    module.get_rng_state = module.random.get_rng_state = reading


def _first(work: Any, function: Any) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        work()
        return function(*args, **kwargs)

    called.__name__, called.__doc__ = function.__name__, function.__doc__
    return called


# ---- far ahead -------------------------------------------------------------------------------


def _after(state: Any, num_words: int) -> Any:
    """A state so many words later."""
    made = torch.Generator()
    made.set_state(state)
    near = min(num_words, _NUM_WORDS) if num_words > _NEAR else num_words
    _draw(made, near)  # a block that was seeded and not drawn obeys no recurrence yet
    if near == num_words:
        return made.get_state()
    seed, left, seeded, _, words, tail = _taken_apart(made.get_state())
    num_taken = _NUM_WORDS + 1 - left + num_words - near  # of the block that it is in
    num_blocks, in_block = divmod(num_taken - 1, _NUM_WORDS)
    later = _later(made, words, num_blocks * _NUM_WORDS)
    head = _HEAD.pack(seed, _NUM_WORDS - in_block, seeded, in_block + 1)
    return torch.frombuffer(bytearray(head + _BODY.pack(*later) + tail), dtype=torch.uint8)


def _draw(generator: Any, num_words: int) -> None:
    torch.empty(num_words, dtype=torch.float32, device="cpu").uniform_(generator=generator)


def _taken_apart(state: Any) -> tuple[int, int, int, int, tuple[int, ...], bytes]:
    data = bytes(state.tolist())
    words = _BODY.unpack_from(data, _HEAD.size)
    return *_HEAD.unpack_from(data), words, data[_HEAD.size + _BODY.size :]


def _later(generator: Any, words: tuple[int, ...], num_words: int) -> list[int]:
    """The block that begins so many words after this one."""
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
    """x to that power modulo phi, a bit for each coefficient."""
    terms = sorted(_phi(), reverse=True)[1:]
    mask = (1 << _DEGREE) - 1
    power = 1
    for digit in f"{exponent:b}":
        power = int(f"{power:b}", 4)  # squared: a zero between all coefficients
        if digit == "1":
            power <<= 1
        while high := power >> _DEGREE:
            power &= mask
            for term in terms:
                power ^= high << term
    return power


def _phi() -> set[int]:
    """The exponents of the characteristic polynomial."""
    upper, lower = {_NUM_WORDS, _MIDDLE}, {_NUM_WORDS - 1, _MIDDLE - 1}
    found = _times(upper, _to_the(lower, 31))
    for place in range(32):
        if _TWIST >> place & 1:
            found ^= _times(upper, _to_the(lower, 30 - place)) if place < 31 else {0}
    return found


def _times(one: set[int], other: set[int]) -> set[int]:
    found: set[int] = set()
    for first in one:
        found ^= {first + second for second in other}
    return found


def _to_the(polynomial: set[int], power: int) -> set[int]:
    found = {0}
    while power:
        if power & 1:
            found = _times(found, polynomial)
        polynomial = {2 * term for term in polynomial}
        power >>= 1
    return found
