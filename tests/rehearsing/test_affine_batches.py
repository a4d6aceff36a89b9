"""The sizes of a trace are affine in the batch: two traces tell all others but that of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.predicting.scaling import affine
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.traces import Rehearser, with_rehearser
from rehearsing import children, rehearsals


@pytest.fixture(scope="module")
def compared() -> dict[str, dict[str, Any]]:
    return {one["model"]: one for one in children.found_by(children.start("batches"))}


@pytest.mark.parametrize("name", rehearsals.AFFINE)
def test_every_batch_has_the_same_events(name: str, compared: dict[str, dict[str, Any]]) -> None:
    assert compared[name]["has_one_structure"]


@pytest.mark.parametrize("name", rehearsals.AFFINE)
def test_batches_of_two_and_three_tell_those_of_five_and_eight(
    name: str, compared: dict[str, dict[str, Any]]
) -> None:
    assert compared[name]["wrong"] == []


class Keeping:
    """A loop that keeps the model's outputs until it has the next ones."""

    outputs: Any = None

    def loss(self, model: Any, batch: Any) -> Any:
        self.outputs = model(batch)
        return self.outputs.square().mean()


def test_a_trace_is_over_when_a_later_rehearsal_frees_what_the_loop_kept() -> None:
    def ask(rehearser: Rehearser) -> tuple[list[int], list[int], int]:
        smaller = rehearser.trace(Variant(micro_batch=2))
        before = list(smaller.events)
        larger = rehearser.trace(Variant(micro_batch=3))
        after = list(smaller.events)
        return before, after, len(affine(smaller, larger).slopes)

    workload = Workload(
        model=lambda: torch.nn.Linear(64, 64),
        batch=lambda n: torch.zeros(n, 64),
        loss=Keeping().loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=6,
    )
    before, after, num_slopes = with_rehearser(workload, (8, 0), ask)
    assert after == before
    assert num_slopes > 0
