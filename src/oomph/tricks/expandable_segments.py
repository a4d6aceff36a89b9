"""Expandable segments: allocator segments that grow, leaving fewer gaps between tensors."""

from __future__ import annotations

import os
import sys

from oomph.errors import UsageError
from oomph.tricks.definition import Definition, Fragment, by_hand

# The name since torch 2.9, and the older one, which newer releases read if the new one is unset.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SEGMENTS = "expandable_segments:True"


def set_allocator() -> None:
    """Set what CUDA's allocator reads when it starts. Raises UsageError if it has started."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        if SEGMENTS in next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), ""):
            return
        raise UsageError(
            "expandable segments cannot be switched on any more",
            because="CUDA has started, and its allocator with it",
            attempt=f"PYTORCH_ALLOC_CONF={SEGMENTS} in the environment",
        )
    for name in ALLOCATOR_VARIABLES:
        os.environ.setdefault(name, SEGMENTS)


EXPANDABLE_SEGMENTS = Definition(
    name="expandable-segments",
    stability="same",
    setting="expandable_segments",
    what="let the allocator's segments grow, so that fewer gaps are left in them",
    code=f"PYTORCH_ALLOC_CONF={SEGMENTS}  # before CUDA starts",
    before_cuda=set_allocator,
    by_hand=by_hand(
        f"the allocator: PYTORCH_ALLOC_CONF={SEGMENTS} in the environment, before CUDA starts"
    ),
    in_code=lambda _: Fragment(
        environment=[
            "# Read once, when CUDA starts. The second name is that of torch before 2.9.",
            'for _name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):',
            f'    os.environ.setdefault(_name, "{SEGMENTS}")',
            "",
        ]
    ),
    has_edit=True,
)
