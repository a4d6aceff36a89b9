"""Values that a script asks of the model's outputs: they do not exist, and are made up.

Floats are 1, so that nothing divides by zero or looks broken; a single whole number is 1, others
are 0; what is true is only what says that all is well. Every use is counted under the script's
own line, because what the script does then rests on it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from oomph.records.script import Invented
from oomph.tracing.script.users_line import users_line

_HOST = torch.device("cpu")
_full = torch._C._VariableFunctions.full
_LIBRARY = ("a library", 0)


class Inventions:
    """What was made up, and where."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int, str]] = Counter()

    def note(self, what: str) -> None:
        file, line = users_line() or _LIBRARY
        self._counts[(file, line, what)] += 1

    def has_read(self, place: tuple[str, int]) -> bool:
        """Has this line of the script read something that was made up?"""
        return any(each[:2] == place for each in self._counts)

    def value_of(self, tensor: Any) -> Any:
        """What `.item()` answers."""
        if getattr(tensor, "_oomph_is_true", False):
            self.note("True")
            return True
        value = _single(tensor.dtype, is_alone=tensor.dim() == 0)
        self.note(repr(value))
        return value

    def tensor_like(self, tensor: Any) -> Any:
        """A real tensor of that shape, all of one value."""
        value = self.value_of(tensor)
        return _full(tuple(tensor.shape), value, dtype=tensor.dtype, device=_HOST)

    def records(self) -> tuple[Invented, ...]:
        return tuple(
            Invented(file=file, line=line, what=what, count=count)
            for (file, line, what), count in sorted(self._counts.items())
        )


def _single(dtype: Any, *, is_alone: bool) -> Any:
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 1 + 0j
    if dtype.is_floating_point:
        return 1.0
    return 1 if is_alone else 0
