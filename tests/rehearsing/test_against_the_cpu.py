"""What the recorder says of tensors without memory is what torch does with memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from oomph.rehearsing.self_test import Counting
from rehearsing import real_run
from rehearsing.zoo import TORCH_MODELS
from rehearsing.zoo.hugging_face import transformers_models
from rehearsing.zoo.kind import Kind

# Of torch, about models that users write like this.
pytestmark = pytest.mark.filterwarnings("ignore")

MODELS = {**TORCH_MODELS, **dict(transformers_models())}
COMPARABLE = {name: kind for name, kind in MODELS.items() if kind.is_comparable}
WITH_BLOCKS = {name: kind for name, kind in COMPARABLE.items() if kind.has_blocks}
DENSE = {name: kind for name, kind in COMPARABLE.items() if not kind.has_sparse_gradients}


def assert_equal_to_a_real_run(kind: Kind, **how: Any) -> None:
    real, without_memory = real_run.train(kind, "cpu", **how), real_run.train(kind, "meta", **how)
    assert len(real.events) > 20
    assert real_run.first_difference(real, without_memory) is None


def test_there_are_models_of_all_kinds() -> None:
    assert len(COMPARABLE) >= 20


@pytest.mark.parametrize("name", COMPARABLE)
def test_every_allocation_and_free_is_that_of_a_real_run(name: str) -> None:
    assert_equal_to_a_real_run(COMPARABLE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_so_it_is_with_adamw_and_accumulation(name: str) -> None:
    assert_equal_to_a_real_run(DENSE[name], optimizer="adamw", accumulation=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_so_it_is_with_recomputation(name: str) -> None:
    assert_equal_to_a_real_run(WITH_BLOCKS[name], is_checkpointed=True)


IN_PLACE_OR_NOT = ("add", "scatter", "scatter_add", "index_put")


def copies_of_a_run_without_a_recorder(kind: Kind) -> Counter[str]:
    """What backward computes out of place in truth, as torch's own profiler counts."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        real_run.run(kind, "cpu")
    events = profiled.events() or ()
    return Counter(
        event.name.removeprefix("aten::")
        for event in events
        if event.name.removeprefix("aten::") in IN_PLACE_OR_NOT and is_of_backward(event)
    )


def is_of_backward(event: Any) -> bool:
    """Called by autograd, and not by another op."""
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith(("aten::", "autograd::engine")):
        parent = parent.cpu_parent
    return parent is not None and parent.name.startswith("autograd::engine")


class Listening(Counting):
    """Counts what backward computes out of place."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[str] = Counter()

    def fresh(self, behaviour: Any, function: Any, args: Any, kwargs: Any) -> Any:
        if torch._C._current_autograd_node() is not None and behaviour.name in IN_PLACE_OR_NOT:
            self.copies[behaviour.name] += 1
        return super().fresh(behaviour, function, args, kwargs)


@pytest.mark.parametrize("name", COMPARABLE)
def test_backward_works_in_place_where_it_does_so_without_a_recorder(name: str) -> None:
    """A dispatch mode makes autograd copy: the profiler, which is none, tells the truth."""
    recorder = Listening()
    real_run.run(COMPARABLE[name], "meta", recorder)
    assert recorder.copies == copies_of_a_run_without_a_recorder(COMPARABLE[name])


def test_a_tensor_made_of_a_list_is_an_allocation() -> None:
    with Counting() as recorder:
        made = torch.tensor([1.0, 2.0, 3.0])
    assert recorder.sizes == [made.untyped_storage().nbytes()]


def test_an_empty_tensor_is_no_allocation() -> None:
    with Counting() as recorder:
        torch.empty(0, 5, device="meta")
    assert recorder.sizes == []


def test_a_tensor_that_is_resized_moves_to_a_new_block() -> None:
    with Counting() as recorder:
        out = torch.empty(2, device="meta")
        out.resize_(9)
    assert recorder.sizes == [8, 36]
    assert recorder.events == [1, 2, -1]
    assert recorder.number_of(out) == 1
