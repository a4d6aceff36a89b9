"""Models of all kinds on the emulated GPU: the CPU's numbers, the rehearsal's allocations."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from rehearsing import real_run
from rehearsing.zoo import TORCH_MODELS
from rehearsing.zoo.hugging_face import transformers_models
from rehearsing.zoo.kind import Kind
from torch.nn.attention import SDPBackend, sdpa_kernel

import oomph
from oomph.pretending import kernels
from oomph.pretending.emulated import EmulatedGpu
from oomph.rehearsing.self_test import Recording, first_difference, recording_of
from pretending.requests_of_card import Requests

# Of torch, about models that users write like this.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

MODELS = {**TORCH_MODELS, **dict(transformers_models())}
# The recording to compare with counts every device: a scalar of `x[0] = 3`, which a GPU's tensor
# leaves on the host (t5), and tensors from before the first step, when they are first returned.
COUNTED_OTHERWISE = ("t5", "sparse table", "reparametrised")
COMPARABLE = {
    name: kind
    for name, kind in MODELS.items()
    if kind.is_comparable and name not in COUNTED_OTHERWISE
}
# CUDA's fused kernels for float32 have no groups of heads, as the CPU's have.
WITH_MATRICES = ("llama",)
STEPS = 2


def trained(kind: Kind, device: str, optimizer: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    workload = kind.workload(optimizer)
    model = workload.model().train().to(device)
    made = workload.optimizer([p for p in model.parameters() if p.requires_grad])
    batch = {name: tensor.to(device) for name, tensor in workload.batch(3).items()}
    for _ in range(STEPS):
        made.zero_grad()
        workload.loss(model, batch).backward()
        made.step()
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_bit_for_bit_those_of_the_cpu(name: str) -> None:
    has_matrices = sdpa_kernel(SDPBackend.MATH) if name in WITH_MATRICES else nullcontext()
    with has_matrices:
        plain = trained(MODELS[name], "cpu", "adamw")
    with oomph.emulated_gpu("1GiB") as gpu:
        emulated = trained(MODELS[name], "cuda", "adamw")
    assert gpu.peak_allocated_bytes > 0
    assert [key for key in plain if not torch.equal(plain[key], emulated[key])] == []


@contextmanager
def gpu_without_hidden_memory() -> Iterator[EmulatedGpu]:
    """Nothing that only CUDA's kernels take: the recording to compare with has none of it."""
    nothing: dict[str, Any] = {"GEMMS": frozenset(), "TEMPORARIES": {}}
    with mock.patch.multiple(kernels, **nothing), oomph.emulated_gpu("1GiB") as gpu:
        yield gpu


def recorded_on_the_gpu(kind: Kind) -> Recording:
    """Two steps as real_run.run trains them, the model and the batch being on the GPU before."""
    torch.manual_seed(0)
    workload = kind.workload("sgd")
    with gpu_without_hidden_memory() as gpu, sdpa_kernel(SDPBackend.MATH):
        model = workload.model().train().to("cuda")
        made = workload.optimizer([p for p in model.parameters() if p.requires_grad])
        batch = {name: tensor.to("cuda") for name, tensor in workload.batch(3).items()}
        gpu._card.settled()
        asked = Requests(gpu)
        for _ in range(STEPS):
            made.zero_grad()
            loss = workload.loss(model, batch)
            (loss / 1).backward()
            made.step()
        gpu._card.settled()
        events = list(asked.events)
    return Recording(asked.sizes, ["?"] * len(asked.sizes), events)


def without_the_momentary(recording: Recording) -> Recording:
    """Without what is freed at once: a size that a meta kernel told wrongly, corrected."""
    pairs = zip(recording.events, recording.events[1:], strict=False)
    momentary = {taken - 1 for taken, freed in pairs if freed == -taken}
    return recording.only(lambda number: number not in momentary)


def fused_dropout(tensor: Any, p: float, train: bool) -> Any:
    """CUDA's branch: a mask of one byte for each element."""
    return torch.native_dropout(tensor, p, train)[0] if train and p else tensor


@pytest.mark.parametrize("name", COMPARABLE)
def test_every_allocation_and_free_is_that_of_the_rehearsal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.disable()
    try:
        on_gpu = recorded_on_the_gpu(COMPARABLE[name])
    finally:
        gc.enable()
    monkeypatch.setattr(torch._VF, "dropout", fused_dropout)
    rehearsed = recording_of(real_run.train(COMPARABLE[name], "meta"))
    assert len(on_gpu.events) > 20
    assert first_difference(*map(without_the_momentary, (on_gpu, rehearsed))) is None
