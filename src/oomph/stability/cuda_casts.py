"""torch.autocast("cuda") for tensors of the CPU, as models ask for it.

The CPU has an autocast of its own with other lists of ops (there softmax and norms are not in
fp32). CUDA's casts are given; here torch is made to answer as if they were the CPU's. Patches torch
for good: for a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.amp import autocast_mode

LOW = (torch.float16, torch.bfloat16)


class CudaCasts(NamedTuple):
    """The casts of CUDA's autocast."""

    installed: Callable[[Callable[[Any], bool]], AbstractContextManager[None]]  # for which tensors
    switched_on: Callable[[], AbstractContextManager[Any]]


@contextlib.contextmanager
def known_to_models(casts: CudaCasts) -> Iterator[None]:
    """Within this, and where they are switched on, tensors of the CPU obey torch.autocast("cuda").

    Where they are not, a model's own autocast does nothing: so is the step that is compared with.
    """
    _answer_for_cuda()
    with casts.installed(lambda _: True):
        yield


@functools.cache
def _answer_for_cuda() -> None:
    """Autocast for "cpu" is autocast for "cuda": models ask with the device of their tensors."""
    any_torch: Any = torch
    mode: Any = autocast_mode
    any_torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    any_torch.cuda.is_bf16_supported = lambda *_, **__: True
    started, cast = mode.autocast.__init__, mode._cast

    def start(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        started(self, "cuda" if device_type == "cpu" else device_type, *args, **kwargs)

    mode.autocast.__init__ = start
    mode._cast = lambda value, _, dtype: cast(value, "cpu", dtype)  # of custom_fwd
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        setattr(torch, name, _asked_for_cuda(getattr(torch, name)))


def _asked_for_cuda(ask: Any) -> Any:
    def asked(device_type: str = "cuda") -> Any:
        return ask("cuda" if device_type == "cpu" else device_type)

    return asked
