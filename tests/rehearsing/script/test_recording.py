"""A script that records its own memory: what it recorded is rehearsed, whole."""

from __future__ import annotations

from pathlib import Path

from oomph.predicting.alignment import blocks_of_trace
from oomph.predicting.demand import replay_trace
from oomph.records.trace import Trace
from rehearsing.script.rehearsed import rehearsed

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
def step(optimizer=None):
    loss = F.cross_entropy(model(torch.randn(8, 16).cuda()), torch.randint(4, (8,)).cuda())
    if optimizer:
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss
memory = torch.cuda.memory
"""
TRAINED = (
    HEAD
    + """
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    step(optimizer)
memory._record_memory_history(max_entries=100000)
extra = torch.empty(1000, device="cuda")
step(optimizer)
memory._dump_snapshot("snapshot.pickle")
memory._record_memory_history(enabled=None)
for _ in range(1000):
    step(optimizer)
"""
)


def workspaces(trace: Trace) -> list[str]:
    return [each.phase for each in trace.allocations if each.category == "workspace"]


def test_the_rehearsal_goes_on_to_the_snapshot_and_no_further(tmp_path: Path) -> None:
    trace, seen = rehearsed(tmp_path, TRAINED)
    assert seen.num_optimizer_steps == 4
    assert trace.recorded is not None
    begin, end = trace.recorded
    assert end == len(trace.events)
    first = trace.allocations[trace.events[begin] - 1]
    assert first.size_bytes == 4000  # what the script made when it had begun to record
    assert not (tmp_path / "snapshot.pickle").exists()


def test_a_script_that_could_record_and_does_not_ends_after_some_steps(tmp_path: Path) -> None:
    trace, seen = rehearsed(tmp_path, TRAINED.replace("memory._", "False and memory._"))
    assert seen.num_optimizer_steps == 12
    assert trace.recorded is None


def test_a_script_without_a_recording_ends_after_two_steps(tmp_path: Path) -> None:
    _, seen = rehearsed(tmp_path, TRAINED.replace("memory._dump_snapshot", "print"))
    assert seen.num_optimizer_steps == 2


def test_a_snapshot_of_the_first_step_does_not_hide_the_second(tmp_path: Path) -> None:
    early = TRAINED.replace("for _ in range(3):\n    step(optimizer)\n", "")
    trace, seen = rehearsed(tmp_path, early)
    assert seen.num_optimizer_steps == 2
    assert trace.recorded is not None
    assert trace.recorded[1] < len(trace.events)


def test_a_forward_alone_can_be_rehearsed_where_the_script_records_it(tmp_path: Path) -> None:
    forward = """
with torch.inference_mode():
    for _ in range(3):
        step()
    memory._record_memory_history()
    step()
    memory._dump_snapshot("snapshot.pickle")
"""
    trace, seen = rehearsed(tmp_path, HEAD + forward)
    assert not seen.num_optimizer_steps
    assert trace.recorded is not None
    # Evaluation is otherwise answered from its first forward.
    ops = [block.label for block in blocks_of_trace(trace, *trace.recorded)]
    assert ops.count("aten.addmm.default") == 2
    assert workspaces(trace) == ["forward"]


def test_forward_and_backward_have_a_workspace_each(tmp_path: Path) -> None:
    trace, _ = rehearsed(tmp_path, TRAINED)
    assert workspaces(trace) == ["forward", "backward"]


def test_a_cache_that_the_script_empties_is_given_back(tmp_path: Path) -> None:
    emptying = """
large = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda")
del large
torch.cuda.empty_cache()
larger = torch.empty(120 * 2**20, dtype=torch.uint8, device="cuda")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    step(optimizer)
"""
    emptied, _ = rehearsed(tmp_path, HEAD + emptying)
    kept, _ = rehearsed(tmp_path, HEAD + emptying.replace("torch.cuda.empty_cache()", ""))
    assert (len(emptied.emptied_at), len(kept.emptied_at)) == (1, 0)
    saved = replay_trace(kept).peak_reserved_bytes - replay_trace(emptied).peak_reserved_bytes
    # The kept 100 MiB also serve cuBLAS's workspaces, for which else 20 are reserved.
    assert saved == (100 - 20) * 2**20
    assert emptied.events == kept.events


def test_a_state_that_is_made_anew_in_each_step_is_the_optimizers(tmp_path: Path) -> None:
    by_hand = """
class Momentum(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["m"] = 0.9 * state.get("m", torch.zeros_like(parameter)) + parameter.grad
            parameter -= 0.1 * state["m"]
optimizer = Momentum(model.parameters())
for _ in range(3):
    step(optimizer)
"""
    trace, _ = rehearsed(tmp_path, HEAD + by_hand)
    states = [each.size_bytes for each in trace.allocations if each.category == "optimizer"]
    own = [64 * 16 * 4, 64 * 4, 4 * 64 * 4, 4 * 4]
    assert states == [*own, *own]  # those of the first step, and those of the second


def test_a_loop_without_an_optimizer_goes_on_to_its_snapshot(tmp_path: Path) -> None:
    backwards = "step().backward()\n"
    script = HEAD + 5 * backwards + "memory._record_memory_history(max_entries=100000)\n"
    script += backwards + 'memory._dump_snapshot("snapshot.pickle")\n'
    trace, seen = rehearsed(tmp_path, script)
    assert trace.recorded is not None
    assert seen.num_optimizer_steps == 0


SWEEP = """
import torch
from torch import nn
def run(trains):
    model = nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.zeros(4, 1024, device="cuda")).mean()
        if trains:
            loss.backward()
            optimizer.step()
for trains in (False, False, False, True):
    run(trains)
"""


def test_models_that_a_script_has_dropped_take_no_memory(tmp_path: Path) -> None:
    trace, seen = rehearsed(tmp_path, SWEEP)
    live = peak = 0
    for event in trace.events:
        size_bytes = trace.allocations[abs(event) - 1].size_bytes
        live += size_bytes if event > 0 else -size_bytes
        peak = max(peak, live)
    workspaces_bytes = sum(a.size_bytes for a in trace.allocations if a.category == "workspace")
    # one model, its gradient and the one that is added to it
    assert peak - workspaces_bytes < 4 * 4 * 1024 * 1024
    assert (seen.model, seen.num_parameters) == ("Linear", 1024 * 1024)


def test_a_model_that_was_dropped_before_the_end_is_still_described(tmp_path: Path) -> None:
    once = SWEEP.replace("range(2)", "range(1)").replace("(False, False, False, True)", "(True,)")
    _, seen = rehearsed(tmp_path, once)
    assert (seen.model, seen.num_parameters, seen.precision) == ("Linear", 1024 * 1024, "fp32")
