"""One rank of several is rehearsed as it really trains."""

from __future__ import annotations

from typing import Any

import pytest
from rehearsing import children

from pretending import fsdp_tracker, real_ranks

pytestmark = pytest.mark.slow

LENIENT = 1e-6  # sums of fp32 in another order
NUM_BLOCKS = 3
PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16")
STATES = ("parameters", "gradients", "optimizer")

Found = dict[Any, dict[str, Any]]


@pytest.fixture(scope="module")
def real() -> Found:
    """Two real processes, joined by gloo."""
    run = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    child = children.start_module(*run, "-m", "pretending.real_ranks")
    return {one["way"]: one for one in children.found_by(child)}


@pytest.fixture(scope="module")
def rehearsed() -> Found:
    return {one["way"]: one for one in children.found_by(children.start("on_ranks"))}


@pytest.fixture(scope="module")
def divided() -> Found:
    return {tuple(one["case"]): one for one in children.found_by(children.start("divided"))}


@pytest.fixture(scope="module")
def units() -> Found:
    return {tuple(one["case"]): one for one in children.found_by(children.start("units"))}


@pytest.mark.parametrize("way", real_ranks.WAYS)
def test_two_ranks_learn_what_one_process_learns(way: str, real: Found) -> None:
    assert real[way]["weights_differ_by"] < LENIENT
    assert real[way]["gradients_differ_by"] < LENIENT


@pytest.mark.parametrize("way", real_ranks.WAYS)
def test_a_rehearsed_rank_asks_for_the_blocks_that_a_real_one_asks_for(
    way: str, real: Found, rehearsed: Found
) -> None:
    asked = [size_bytes for size_bytes, _ in real[way]["taken"]]
    assert [size_bytes for size_bytes, _ in rehearsed[way]["taken"]] == asked


@pytest.mark.parametrize("way", real_ranks.WAYS)
def test_a_rehearsed_rank_holds_what_a_real_one_holds(
    way: str, real: Found, rehearsed: Found
) -> None:
    # Gloo's thread may hold the buffer of a collective a moment longer than the rank itself.
    buffer = max(size_bytes for size_bytes, _ in real[way]["taken"])
    for (_, truly), (_, here) in zip(real[way]["taken"], rehearsed[way]["taken"], strict=True):
        assert 0 <= truly - here <= (buffer if way.startswith("fsdp") else 0)


@pytest.mark.parametrize("num_gpus", range(2, 9))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_between_steps_a_rank_holds_its_shards_and_nothing_more(
    precision: str, num_gpus: int, divided: Found
) -> None:
    each = 2 if precision == "pure-bf16" else 4
    shard = sum(
        each * -(-parameter.shape[0] // num_gpus) * parameter[0].numel()
        for parameter in real_ranks.Stack().parameters()
    )
    at_the_end = divided["fsdp", num_gpus, precision]["at_the_end"]
    assert [at_the_end[state] for state in STATES] == [shard, shard, 2 * shard]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_peak_falls_with_every_gpu_that_takes_a_share(precision: str, divided: Found) -> None:
    alone = divided["none", 1, precision]["peak_bytes"]
    peaks = [divided["fsdp", num_gpus, precision]["peak_bytes"] for num_gpus in range(2, 9)]
    assert peaks == sorted(peaks, reverse=True)
    assert alone > peaks[0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_hybrid_holds_what_its_group_holds_and_reduces_once_more(
    precision: str, divided: Found
) -> None:
    group, hybrid = divided["fsdp", 4, precision], divided["hybrid", 8, precision]
    for state in STATES:
        assert hybrid["at_the_end"][state] == group["at_the_end"][state]
    more = hybrid["communication"]["all_reduce"] - group["communication"].get("all_reduce", 0)
    assert more >= NUM_BLOCKS + 1


def test_every_unit_is_gathered_twice_and_reduced_once(divided: Found) -> None:
    told = divided["fsdp", 4, "bf16"]["communication"]
    assert told["reduce_scatter"] == NUM_BLOCKS + 1
    assert told["all_gather"] == 2 * NUM_BLOCKS + 1  # what is not in a block is not given back
    assert told["wait"] >= told["all_gather"]


def test_what_is_gathered_and_reduced_comes_from_pools_of_its_own(divided: Found) -> None:
    assert divided["none", 1, "bf16"]["streams"] == [0]
    assert len(divided["fsdp", 4, "bf16"]["streams"]) == 3


def test_the_peak_of_forward_and_backward_is_that_of_torchs_own_tracker(units: Found) -> None:
    torchs = children.found_by(children.start_module("pretending.fsdp_tracker"))
    assert {tuple(one["case"]): one for one in torchs} == units


@pytest.mark.parametrize(("precision", "units_beside"), [("fp32", 4), ("bf16", 2.5)])
def test_beside_its_shards_backward_takes_four_units_or_in_bf16_two_and_a_half(
    precision: str, units_beside: float, units: Found
) -> None:
    # Parameters, the prefetched ones, gradients, and the gradients to be reduced, these in fp32.
    num_reduced = fsdp_tracker.NUM_UNITS - 2  # gradients that are shards already
    shards = (fsdp_tracker.NUM_UNITS + num_reduced) / 8
    taken = units[8, precision]["peak_bytes"] / fsdp_tracker.UNIT_BYTES
    assert taken - shards == pytest.approx(units_beside, abs=0.01)
