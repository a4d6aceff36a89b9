"""CUDA's branch, where the CPU takes another one with the same numbers: dropout.

On the CPU dropout keeps what it multiplied by, in the tensor's own type; on CUDA a mask of one byte
for each element. Both draw the same random numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.training.emulation.patches import Patches
from oomph.training.emulation.places import Places


def patch_branches(patches: Patches, places: Places) -> None:
    original = torch.dropout

    def dropout(input: Any, p: float, train: bool) -> Any:  # noqa: A002 - as torch names it
        # torch/native/Dropout.cpp, is_fused_kernel_acceptable
        is_fused = train and 0 < p < 1 and input.numel() > 0 and places.on_card(input)
        return torch.native_dropout(input, p, train)[0] if is_fused else original(input, p, train)

    patches.set(torch, "dropout", dropout)
    patches.set(torch._VF, "dropout", dropout)
