"""What a model returns -> the tensors in it, whether alone, in containers or in any object.

Objects are looked into because a cache of keys and values is one: it lives as long as the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_of(returned: Any) -> Iterator[torch.Tensor]:
    """Each tensor once, whatever it is in."""
    seen: set[int] = set()
    waiting = [returned]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif hasattr(one, "__dict__") and not isinstance(one, torch.nn.Module | type):
            waiting += vars(one).values()
