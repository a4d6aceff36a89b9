"""The line that a plan prints, run as it is printed, takes the memory that the plan says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from planning.plans import plan_of
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import oomph
from oomph.exporting.planned import Planned
from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.child import in_a_child
from oomph.tricks.trick import tricks_on

CAPABILITY, EXAMPLES, WIDTH, NUM_BLOCKS = (8, 0), 4, 128, 5
HOWS: dict[str, dict[str, Any]] = {
    "blocks": {"checkpointing": "blocks"},
    "every": {"checkpointing": "every-2"},
    "listed": {"checkpointing": "blocks:0,3-4"},
    "selective": {"checkpointing": "selective"},
    "selective bf16": {"checkpointing": "selective", "precision": "bf16"},
    "activations": {"offload_activations": True},
}
NAMES = [f"blocks.{number}" for number in range(NUM_BLOCKS)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        attended, _ = self.heads(x, x, x, need_weights=False)
        return x + self.down(nn.functional.gelu(self.up(self.norm(attended))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def batch(num: int) -> torch.Tensor:
    return torch.zeros(num, 64, WIDTH)


def loss_of(model: Any, x: Any) -> Any:
    return model(x).float().pow(2).mean()


def workload(model: Any = Model, loss: Any = loss_of) -> Workload:
    return Workload(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        batch_size=EXAMPLES,
    )


def plan_for(how: dict[str, Any]) -> Planned:
    return replace(plan_of(micro_batch=EXAMPLES, accumulation=1, **how), block_names=tuple(NAMES))


def lines_of(how: dict[str, Any]) -> dict[str, str]:
    on = tricks_on(Variant(micro_batch=EXAMPLES, **how))
    return {trick.name: trick.as_set(Variant(micro_batch=EXAMPLES, **how)).code for trick in on}


def with_line(how: dict[str, Any]) -> Workload:
    """The workload with the printed line in it."""
    lines, plan = lines_of(how), plan_for(how)
    if "offload-activations" in lines:
        assert "with oomph.offloaded_activations(): loss = ..." in lines["offload-activations"]

        def offloaded(model: Any, x: Any) -> Any:
            with oomph.offloaded_activations():
                return loss_of(model, x)

        return workload(loss=offloaded)
    _, _, line = lines["checkpointing"].partition("without BatchNorm: ")
    known = {"torch": torch, "partial": partial, "plan": plan}
    known["create_selective_checkpoint_contexts"] = create_selective_checkpoint_contexts

    def checkpointed() -> Any:
        model = Model()
        exec(line, {**known, "model": model})  # noqa: S102 # what is tested
        return model

    return workload(checkpointed)


def with_exported(how: dict[str, Any]) -> Workload:
    """The workload with what plan.to_code() puts on a model and around a forward."""
    from oomph.tricks.offload_activations import empty_on_host

    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(plan_for(how).to_code(), "exported.py", "exec"), names)  # noqa: S102
    if "offloaded_activations" in names:
        names["empty_on_host"] = empty_on_host  # a rehearsal has no pinned memory

        def offloaded(model: Any, x: Any) -> Any:
            with names["offloaded_activations"]():
                return loss_of(model, x)

        return workload(loss=offloaded)

    def checkpointed() -> Any:
        model = Model()
        text = how["checkpointing"]
        chosen = {"every-2": [0, 2, 4], "blocks:0,3-4": [0, 3, 4]}.get(text, range(NUM_BLOCKS))
        for number in chosen:
            names["recompute"](model.blocks[number])
        return model

    return workload(checkpointed)


def rehearsed_all() -> dict[str, list[Trace]]:
    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    found = {}
    for name, how in HOWS.items():
        precision = {"precision": how.get("precision", "fp32")}
        plain = Variant(micro_batch=EXAMPLES, **precision)
        tricked = Variant(micro_batch=EXAMPLES, **how)
        found[name] = [
            rehearse(workload(), tricked, CAPABILITY),
            rehearse(with_line(how), plain, CAPABILITY),
            rehearse(with_exported(how), plain, CAPABILITY),
            rehearse(workload(), plain, CAPABILITY),
        ]
    return found


@pytest.fixture(scope="module")
def rehearsed() -> dict[str, list[Trace]]:
    return in_a_child(rehearsed_all)


def requests(trace: Trace) -> list[int]:
    """Every allocation and release, as sizes."""
    return [
        (1 if event > 0 else -1) * trace.allocations[abs(event) - 1].size_bytes
        for event in trace.events
    ]


@pytest.mark.parametrize("name", HOWS)
def test_the_line_and_the_exported_code_allocate_what_was_rehearsed(
    name: str, rehearsed: dict[str, list[Trace]]
) -> None:
    planned, by_line, exported, plain = rehearsed[name]
    assert requests(by_line) == requests(planned)
    assert requests(exported) == requests(planned)
    assert by_line.host_peak_bytes == exported.host_peak_bytes == planned.host_peak_bytes
    assert requests(plain) != requests(planned)


def test_bus_traffic_is_that_of_the_plan(rehearsed: dict[str, list[Trace]]) -> None:
    planned, *others, _ = rehearsed["activations"]
    moved = [
        [(op.name, op.moved_bytes) for op in one.ops if "host" in op.name]
        for one in (planned, *others)
    ]
    assert moved[0]
    assert moved[0] == moved[1] == moved[2]


def test_exported_recomputation_counts_a_batch_once() -> None:
    """torch's own checkpoint would update BatchNorm's statistics twice."""
    names: dict[str, Any] = {"__name__": "exported"}
    text = plan_for({"checkpointing": "blocks"}).to_code()
    exec(compile(text, "exported.py", "exec"), names)  # noqa: S102
    found = []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        if is_recomputed:
            names["recompute"](block)
        x = torch.randn(8, 4, requires_grad=True)
        block(x).pow(2).sum().backward()
        norm: Any = block[1]
        found.append((norm.momentum, norm.running_mean.tolist(), int(norm.num_batches_tracked)))
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", ["bf16", "pure-bf16", "fp16"])
def test_exported_fsdp_casts_as_it_was_rehearsed(precision: str) -> None:
    text = plan_of(precision=precision, sharding="fsdp", num_gpus=2).to_code()
    assert ("MixedPrecisionPolicy(param_dtype=low, reduce_dtype=wide)" in text) == (
        precision != "fp16"
    )
    assert ("torch.autocast(" in text) == (precision == "fp16")
