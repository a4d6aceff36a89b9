"""Memory of the host for what leaves the GPU: pinned where there is a GPU to copy from.

An op of torch's own kind, so that the rehearsal sees the memory that is not the GPU's.
"""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("oomph", "DEF")
_library.define("empty_on_host(Tensor like) -> Tensor")


def _empty(like: Any) -> Any:
    # Copies to and from memory that is not pinned cannot run beside the GPU's work.
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


for _key in ("CPU", "CUDA"):
    _library.impl("empty_on_host", _empty, _key)


def empty_on_host(like: Any) -> Any:
    """A tensor of the host, of that shape and dtype, contiguous."""
    return torch.ops.oomph.empty_on_host(like)
