"""The recorder over a real training run on the CPU, and over the same run without memory.

Neither pretends to be a GPU: here is proven that what the recorder says of tensors without memory
is what torch does with memory. The branches that CUDA takes instead are another matter.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from oomph.rehearsing import self_test
from oomph.rehearsing.building import build
from oomph.rehearsing.recorder import Recorder
from oomph.rehearsing.self_test import Counting, Difference, recording_of
from oomph.tricks.checkpointing import checkpoint_blocks
from rehearsing.zoo.kind import Kind


def train(kind: Kind, device: str, **how: Any) -> Counting:
    """Two recorded steps on a device."""
    recorder = Counting()
    gc.disable()
    try:
        run(kind, device, recorder, **how)
    finally:
        gc.enable()
    return recorder


def run(
    kind: Kind,
    device: str,
    recorder: Counting | None = None,
    *,
    optimizer: str = "sgd",
    is_checkpointed: bool = False,
    accumulation: int = 1,
    examples: int = 3,
) -> None:
    """Two steps on a device, recorded or not."""
    torch.manual_seed(0)
    workload = kind.workload(optimizer)
    model = (build(workload.model) if device == "meta" else workload.model()).train()
    if is_checkpointed:
        checkpoint_blocks(model, "blocks")
    made = workload.optimizer([p for p in model.parameters() if p.requires_grad])
    batch = {name: tensor.to(device) for name, tensor in workload.batch(examples).items()}
    # The CPU has a flash attention of its own; the branch that both devices have is this one.
    with recorder or contextlib.nullcontext(), sdpa_kernel(SDPBackend.MATH):
        for _ in range(2):
            made.zero_grad()
            for _ in range(accumulation):
                loss = workload.loss(model, batch)
                (loss / accumulation).backward()
            made.step()
        if recorder is not None:
            recorder.events = list(recorder.events)  # what follows is the end of this function


def first_difference(one: Recorder, other: Recorder) -> Difference | None:
    """Where two recordings differ."""
    return self_test.first_difference(recording_of(one), recording_of(other))
