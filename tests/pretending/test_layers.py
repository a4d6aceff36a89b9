"""One rank of those that share each layer is rehearsed as it really trains."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from rehearsing import children

from pretending import real_layers

pytestmark = pytest.mark.slow

LENIENT = 1e-6  # sums of fp32 in another order
ON_TWO = [way for way, variant in real_layers.WAYS.items() if variant.num_gpus == 2]
ON_FOUR = [way for way, variant in real_layers.WAYS.items() if variant.num_gpus == 4]

Found = dict[str, dict[str, Any]]


def started(num_ranks: int, ways: list[str]) -> subprocess.Popen[str]:
    """Real processes, joined by gloo."""
    run = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    return children.start_module(*run, "-m", "pretending.real_layers", *ways)


@pytest.fixture(scope="module")
def real() -> Found:
    found: Found = {}
    for num_ranks, ways in ((2, ON_TWO), (4, ON_FOUR)):
        found |= {one["way"]: one for one in children.found_by(started(num_ranks, ways))}
    return found


@pytest.fixture(scope="module")
def rehearsed() -> Found:
    return {one["way"]: one for one in children.found_by(children.start("on_layers"))}


@pytest.mark.parametrize("way", real_layers.WAYS)
def test_ranks_that_share_layers_learn_what_one_process_learns(way: str, real: Found) -> None:
    assert real[way]["weights_differ_by"] < LENIENT
    assert real[way]["gradients_differ_by"] < LENIENT


@pytest.mark.parametrize("way", real_layers.WAYS)
def test_a_rehearsed_rank_asks_for_the_blocks_that_a_real_one_asks_for(
    way: str, real: Found, rehearsed: Found
) -> None:
    asked = [size_bytes for size_bytes, _ in real[way]["taken"]]
    assert [size_bytes for size_bytes, _ in rehearsed[way]["taken"]] == asked


@pytest.mark.parametrize("way", real_layers.WAYS)
def test_a_rehearsed_rank_holds_what_a_real_one_holds(
    way: str, real: Found, rehearsed: Found
) -> None:
    # Gloo's thread may hold the buffers of collectives a moment longer than the rank itself.
    buffers = 2 * max(size_bytes for size_bytes, _ in real[way]["taken"])
    for (_, truly), (_, here) in zip(real[way]["taken"], rehearsed[way]["taken"], strict=True):
        assert 0 <= truly - here <= buffers


@pytest.mark.parametrize("way", real_layers.WAYS)
def test_a_rank_holds_its_part_of_every_matrix_and_all_of_every_norm(
    way: str, real: Found, rehearsed: Found
) -> None:
    assert rehearsed[way]["at_the_end"]["parameters"] == real[way]["held"]
    if way != "layers":
        return
    model = real_layers.Transformer()
    places = model.places.weight.nbytes
    # A row's bias is added once, to what the ranks have summed, so each has all of it.
    whole = ("before", "between", "norm", "wo.bias", "places")
    held = sum(
        one.nbytes if any(word in name for word in whole) else one.nbytes // 2
        for name, one in model.named_parameters()
    )
    assert places < real[way]["held"] == held


def test_each_layer_gathers_its_sequence_and_scatters_what_it_reduced(rehearsed: Found) -> None:
    sent = rehearsed["layers"]["communication"]
    num_blocks, pairs = 2, 2  # attention and MLP
    # Forward gathers before each and before the head; backward where forward scattered, and where
    # the embedding was divided for the first block.
    assert sent["all_gather_in_layers"] == 2 * num_blocks * pairs + 2
    assert sent["reduce_scatter_in_layers"] == 2 * num_blocks * pairs + 1


def test_recomputing_gathers_again(rehearsed: Found) -> None:
    once, again = (rehearsed[way]["sent_bytes"] for way in ("layers", "layers, recomputed"))
    assert again > once
