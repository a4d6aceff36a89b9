"""Tables with sparse gradients, and the optimizers that take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from oomph.errors import UserCodeError
from oomph.predicting.timeline import find_peak
from oomph.pretending.sparse import GROWS, ROWS
from oomph.records.workload import Variant, Workload
from rehearsing import real_run
from rehearsing.rehearsals import mistakes
from rehearsing.script.rehearsed import rehearsed, second_step, trained
from rehearsing.zoo import TORCH_MODELS

_HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
NUM_TOKENS, WIDTH = 64, 32
class Words(nn.Module):
    def __init__(self, num_rows):
        super().__init__()
        self.words = nn.Embedding(num_rows, WIDTH, sparse=True)

    def forward(self, tokens):
        return self.words(tokens).square().mean()
"""
_LOOP = """
for _ in range(3):
    loss = model(torch.randint(40, (NUM_TOKENS,)).cuda())
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


def _steps(directory: Path, optimizer: str, num_rows: int = 1000) -> tuple[Any, Any]:
    made = f"model = Words({num_rows}).cuda()\noptimizer = torch.optim.{optimizer}\n"
    return rehearsed(directory, _HEAD + made + _LOOP)


@pytest.mark.parametrize("name", ["SparseAdam", "Adagrad"])
def test_its_optimizers_are_rehearsed(tmp_path: Path, name: str) -> None:
    trace, seen = _steps(tmp_path, f"{name}(model.parameters(), lr=0.1)")
    assert (seen.has_stepped, seen.num_optimizer_steps) == (True, 2)
    assert mistakes(trace) == []
    assert ROWS in trace.notes
    states = [one.size_bytes for one in trace.allocations if one.category == "optimizer"]
    table = 1000 * 32 * 4
    assert states.count(table) == {"SparseAdam": 2, "Adagrad": 1}[name]


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 32, sparse=True)

    def forward(self, tokens: Any) -> Any:
        return self.words(tokens).square().mean()


def test_a_workload_takes_the_same(tmp_path: Path) -> None:
    workload = Workload(
        model=_Words,
        batch=lambda n: {"tokens": torch.zeros(n, dtype=torch.long)},
        loss=lambda model, batch: model(**batch),
        optimizer=lambda parameters: torch.optim.SparseAdam(list(parameters)),
        batch_size=64,
    )
    as_workload = trained(workload, Variant(micro_batch=64))
    as_script, _ = _steps(tmp_path, "SparseAdam(model.parameters())")
    assert find_peak(as_script).live_bytes == find_peak(as_workload).live_bytes
    assert second_step(as_script) == second_step(as_workload)


def test_a_gradient_has_a_row_for_each_token_and_no_more_than_the_table(tmp_path: Path) -> None:
    long, _ = _steps(tmp_path, "SparseAdam(model.parameters())")
    short, _ = _steps(tmp_path, "SparseAdam(model.parameters())", num_rows=40)
    put_together = "aten._coalesce.default"
    for trace, num_rows in ((long, 64), (short, 40)):
        taken = {one.size_bytes for one in trace.allocations if one.op == put_together}
        assert taken == {64 * 8, num_rows * 32 * 4}


def test_a_gradient_is_taken_over_and_not_copied(tmp_path: Path) -> None:
    """On a GPU, as on the host where nobody looks: what comes back is the gradient itself."""
    table, came_back = nn.Embedding(50, 8, sparse=True), []
    rows = table(torch.arange(6))
    rows.register_hook(lambda gradient: came_back.append(gradient.data_ptr()))
    rows.square().mean().backward()
    assert table.weight.grad is not None
    assert [table.weight.grad._values().data_ptr()] == came_back
    trace, _ = _steps(tmp_path, "SGD(model.parameters(), lr=0.1)")
    assert "aten.clone.default" not in {one.op for one in trace.allocations}


def test_rows_of_a_table_are_taken_as_torch_takes_them(tmp_path: Path) -> None:
    """The host does it by the same code (SparseTensor.cpp): its memory, event by event."""
    taken = """
class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000, WIDTH))

row = Row().cuda()
places = torch.arange(NUM_TOKENS)[None].cuda()
mask = torch.sparse_coo_tensor(places, torch.zeros(NUM_TOKENS, WIDTH).cuda(), (1000, WIDTH))
mask = mask.coalesce()
optimizer = torch.optim.SGD(row.parameters())
for _ in range(3):
    row.weight.sum().backward()
    optimizer.step()
    rows = row.weight.detach().sparse_mask(mask)
    del rows
"""
    trace, _ = rehearsed(tmp_path, _HEAD + taken)
    numbers = [i + 1 for i, one in enumerate(trace.allocations) if "sparse_mask" in one.op]
    events = [event for event in trace.events if abs(event) in numbers[:4]]
    sizes = [(1 if e > 0 else -1) * trace.allocations[abs(e) - 1].size_bytes for e in events]
    assert sizes == _sizes_on_the_host(tmp_path / "trace.json")


def _sizes_on_the_host(file: Path) -> list[int]:
    table, places = torch.zeros(1000, 32), torch.arange(64)[None]
    mask = torch.sparse_coo_tensor(
        places, torch.zeros(64, 32), (1000, 32), check_invariants=True
    ).coalesce()
    with torch.profiler.profile(profile_memory=True) as profile:
        rows = table.sparse_mask(mask)
        del rows
    profile.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    found = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return [size_bytes for _, size_bytes in found]


def test_of_a_table_on_the_host_the_way_out_is_told(tmp_path: Path) -> None:
    on_host = """
model, head = Words(1000), nn.Linear(1, 1).cuda()
optimizer = torch.optim.SparseAdam(model.parameters())
head(model(torch.arange(8)).cuda()[None]).mean().backward()
"""
    with pytest.raises(UserCodeError) as caught:
        rehearsed(tmp_path, _HEAD + on_host)
    assert "train.py:14" in str(caught.value)
    assert "sparse=False" in str(caught.value)


_ADDED_UP = """
model = Words(NUM_ROWS).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sizes = []
for _ in range(3):
    optimizer.zero_grad(set_to_none=False)
    for _ in range(2):
        model(torch.randint(3, (NUM_TOKENS,)).cuda()).backward()
        sizes.append(model.words.weight.grad._nnz())
    assert sizes[-2:] == ROWS, sizes
    optimizer.step()
"""


@pytest.mark.parametrize(("num_rows", "rows"), [(1000, [64, 128]), (3, [64, 3])])
def test_gradients_that_are_added_up_grow_until_they_are_more_than_the_table(
    tmp_path: Path, num_rows: int, rows: list[int]
) -> None:
    text = _HEAD + _ADDED_UP.replace("NUM_ROWS", str(num_rows)).replace("ROWS", str(rows))
    trace, seen = rehearsed(tmp_path, text)
    assert (seen.num_optimizer_steps, seen.accumulation) == (2, 2)
    assert mistakes(trace) == []
    assert GROWS in trace.notes


def test_they_grow_as_on_the_host() -> None:
    """There equal places may be put together, but not in the first addition."""
    kind = TORCH_MODELS["sparse table"]
    real, without_memory = (
        real_run.train(kind, device, accumulation=2) for device in ("cpu", "meta")
    )
    assert sorted(real.sizes) == sorted(without_memory.sizes)
