"""torch.accelerator and its like while a GPU is pretended: for workloads and for scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rehearsing.script.rehearsed import rehearsed, trained
from torch import nn

from oomph.records.workload import Variant, Workload

# What a model may ask of the accelerator, and the answer.
QUESTIONS = """
import torch
accelerator = torch.accelerator
here = accelerator.current_accelerator()
assert here.type == "cuda" and here == accelerator.current_accelerator(check_available=True)
assert accelerator.is_available() and accelerator.device_count() == 1
assert accelerator.current_device_index() == 0
assert accelerator.current_device_idx() == 0
accelerator.set_device_index(0), accelerator.set_device_idx("cuda:0")
with accelerator.device_index(0): pass
with torch.cuda.device(0) as _, torch.cuda.device_of(torch.zeros(2, device="cuda")): pass
stream = accelerator.current_stream()
accelerator.set_stream(stream), accelerator.synchronize(), accelerator.empty_cache()
accelerator.empty_host_cache()
assert torch.bfloat16 in accelerator.get_device_capability()["supported_dtypes"]
assert isinstance(accelerator.memory_stats().get("num_ooms", 0), int)
for ask in (accelerator.memory_allocated, accelerator.max_memory_allocated,
            accelerator.memory_reserved, accelerator.max_memory_reserved):
    assert ask() >= 0
accelerator.reset_peak_memory_stats(), accelerator.reset_accumulated_memory_stats()
free, total = accelerator.get_memory_info()
assert 0 < free <= total
assert isinstance(torch.cuda.stream(stream), torch.cuda.StreamContext)
numbers = torch.tensor([0, 1], device="cuda")
for kind, dtype in ((bool, torch.bool), (int, torch.int64), (float, torch.float64)):
    assert numbers.to(kind).dtype == numbers.to("cuda", kind, True).dtype == dtype
with torch.cuda.nvtx.range("forward"): torch.cuda.nvtx.mark("here")
"""


def test_every_name_of_the_accelerator_is_asked() -> None:
    names = {name for name in torch.accelerator.__all__ if name != "Graph"}
    assert {name for name in names if name not in QUESTIONS} == set()


class Asking(nn.Module):
    """As the UNets of diffusers, which ask in their constructors and in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        exec(QUESTIONS, {})  # noqa: S102 - the same questions as in a script
        here: Any = torch.accelerator.current_accelerator()
        return self.linear(x.to(here)).sum()


# What torch calls old warns, as it does on a GPU.
OLD = pytest.mark.filterwarnings("ignore:Use `.*_device_index` instead:FutureWarning")


@OLD
def test_a_model_of_a_workload_may_ask_for_the_accelerator() -> None:
    workload = Workload(
        model=Asking,
        batch=lambda n: {"x": torch.zeros(n, 8)},
        loss=lambda model, batch: model(**batch),
        optimizer=torch.optim.SGD,
        batch_size=4,
    )
    trace = trained(workload, Variant(micro_batch=4))
    assert len(trace.step_starts) == 2


@OLD
def test_a_script_may_ask_for_the_accelerator(tmp_path: Path) -> None:
    loop = """
model = torch.nn.Linear(8, 8).to(here)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad(); model(torch.zeros(4, 8, device=here)).sum().backward(); optimizer.step()
"""
    _, seen = rehearsed(tmp_path, QUESTIONS + loop)
    assert seen.has_stepped


def test_a_fraction_of_the_memory_that_a_script_sets_is_told(tmp_path: Path) -> None:
    text = """
import torch
torch.cuda.set_per_process_memory_fraction(0.5)
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad(); model(torch.zeros(4, 8).cuda()).sum().backward(); optimizer.step()
"""
    _, seen = rehearsed(tmp_path, text)
    assert any("set_per_process_memory_fraction" in one for one in seen.approximations)


def test_torchs_own_memory_functions_answer_and_the_rest_is_refused_by_name(tmp_path: Path) -> None:
    text = """
import torch
cuda = torch.cuda
held = torch.zeros(1024, device="cuda")
assert cuda.memory_allocated() == cuda.memory_stats()["allocated_bytes.all.current"] == 4096
assert cuda.memory_reserved() == 2 * 2**20 and "Allocated memory" in cuda.memory_summary()
assert cuda.memory_stats_as_nested_dict()["segment"] and cuda.memory_snapshot() == []
assert cuda.get_allocator_backend() == "native" and cuda.utilization() == 0
assert torch.Generator("cuda").device.type == "cuda" and cuda.is_tf32_supported()
for ask in (cuda.MemPool, cuda.host_memory_stats, lambda: cuda.caching_allocator_alloc(9)):
    try:
        ask()
    except RuntimeError as error:
        assert "the pretended GPU has no torch.cuda." in str(error), error
    else:
        raise AssertionError(ask)
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad(); model(torch.zeros(4, 8).cuda()).sum().backward(); optimizer.step()
"""
    _, seen = rehearsed(tmp_path, text)
    assert seen.has_stepped
