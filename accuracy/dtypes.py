"""Models that are made in a type, with what asks for another left as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def made_in(dtype: Any, make: Callable[[], Any]) -> Any:
    """What `make` makes with a type as torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)
