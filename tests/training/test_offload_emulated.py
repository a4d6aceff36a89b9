"""Optimizers on the host, trained by a Stepper on an emulated GPU: memory and weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from planning.plans import plan_of
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

import oomph
from oomph.predicting.timeline import find_peak
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.child import in_a_child
from oomph.units import KIB

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, NUM, CAPABILITY = 128, 64, (8, 0)
PLAIN = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}
# name -> the precision without the trick, and how to train
TRICKED: dict[str, tuple[str, dict[str, Any]]] = {
    "offload": ("fp32", {"precision": "fp32", "offload_optimizer": True}),
    "offload fp16": ("fp16", {"precision": "fp16", "offload_optimizer": True}),
    "zero bf16": ("bf16", {"precision": "bf16", "zero_offload": True}),
    "zero fp16": ("fp16", {"precision": "fp16", "zero_offload": True}),
}
HOWS = {**PLAIN, **{name: how for name, (_, how) in TRICKED.items()}}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Several wait for each other longer than such small models take."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)] * 3
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def batch(num: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(num, 32, WIDTH, generator=generator),
        "y": torch.randint(0, 10, (num, 32), generator=generator),
    }


def loss(model: Any, data: Any) -> Any:
    return F.cross_entropy(model(data["x"]).flatten(0, 1).float(), data["y"].flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def rehearsed_bytes() -> dict[str, int]:
    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    workload = Workload(model=make, batch=batch, loss=loss, optimizer=adamw, batch_size=NUM)
    return {
        name: find_peak(rehearse(workload, Variant(micro_batch=NUM, **how), CAPABILITY)).live_bytes
        for name, how in HOWS.items()
    }


@pytest.fixture(scope="module")
def told_bytes() -> dict[str, int]:
    return in_a_child(rehearsed_bytes)


def trained(name: str, budget: str = "1GiB") -> tuple[list[torch.Tensor], int, int, int]:
    """The optimizer's weights, the peaks of allocated and reserved bytes, and the failures."""
    plan = plan_of(micro_batch=NUM, accumulation=1, **HOWS[name])
    with oomph.emulated_gpu(budget) as gpu:
        model, optimizer = oomph.apply(plan, make(), adamw)
        model.cuda()
        # The optimizer was made from weights on the host: it sees them on the GPU, too.
        step = oomph.Stepper(
            model, optimizer, loss, plan, device="cuda", on_difference="ignore", say=lambda _: None
        )
        for _ in range(3):
            step(batch(NUM))
        weights = [p.detach().cpu() for group in optimizer.param_groups for p in group["params"]]
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return weights, *peaks, gpu.num_out_of_memory


@pytest.mark.parametrize("name", TRICKED)
def test_the_gpu_saves_what_the_rehearsal_says(name: str, told_bytes: dict[str, int]) -> None:
    plain, _ = TRICKED[name]
    saved = trained(plain)[1] - trained(name)[1]
    told = told_bytes[plain] - told_bytes[name]
    assert told > 0
    assert abs(saved - told) <= 64 * KIB


@pytest.mark.parametrize("name", TRICKED)
def test_a_batch_that_runs_out_of_memory_is_trained_in_pieces(name: str) -> None:
    whole, _, reserved_bytes, _ = trained(name)
    pieces, _, _, num_failed = trained(name, f"{int(reserved_bytes * 0.7)}B")
    assert num_failed > 0
    for one, other in zip(whole, pieces, strict=True):
        apart = (one - other).abs().mean()
        assert apart <= 1e-3 * 3  # AdamW's steps have this length, whatever the gradient
        assert other.isfinite().all()
