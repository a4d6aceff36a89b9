"""Optimizers and recomputation, rehearsed as they are applied; splices equal direct traces."""

from __future__ import annotations

from typing import Any

import pytest

from rehearsing import children, tricks

pytestmark = pytest.mark.slow  # the fixture rehearses six models with every optimizer

# The elements of the parameters of tricks.Wide, its table apart.
TABLE = 50 * 100
MATRICES = (100 * 96, 96 * 96, 96 * 96, 96 * 96, 96 * 96, 96 * 51)
BIASES = 5 * 96 + 51
KIB = 1024


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str, str], dict[str, Any]]:
    both = [children.start("tricks", str(part), "2") for part in range(2)]
    rows = [one for child in both for one in children.found_by(child)]
    return {(one["model"], one["way"], one["optimizer"]): one for one in rows}


@pytest.mark.parametrize("optimizer", tricks.OPTIMIZERS)
@pytest.mark.parametrize("name", ["wide", *tricks.MODELS])
def test_every_optimizer_is_rehearsed(
    found: dict[tuple[str, str, str], dict[str, Any]], name: str, optimizer: str
) -> None:
    one = found[name, "fp32", optimizer]
    assert one["mistakes"] == []
    assert len(set(one["live_between_steps"])) == 1


def test_foreach_takes_a_copy_of_the_parameters_and_fused_nothing(
    found: dict[tuple[str, str, str], dict[str, Any]],
) -> None:
    peaks = {name: found["wide", "fp32", name]["peak_bytes"] for name in tricks.OPTIMIZERS}
    assert peaks["foreach"] > peaks["for-loop"] > peaks["fused"]
    assert peaks["8-bit"] < peaks["fused"]
    weights_bytes = 4 * (TABLE + sum(MATRICES) + BIASES)
    assert peaks["foreach"] - peaks["fused"] >= 0.95 * weights_bytes


def test_the_state_of_8_bits_has_the_bytes_of_bitsandbytes(
    found: dict[tuple[str, str, str], dict[str, Any]],
) -> None:
    scales = sum(-(-n // 256) for n in MATRICES)
    low = 2 * sum(MATRICES) + 2 * 4 * scales + 2 * KIB
    state = found["wide", "fp32", "8-bit"]["at_the_end"]["optimizer"]
    assert state == low + 2 * 4 * (TABLE + BIASES)


def test_where_weight_decay_is_in_the_gradient_it_has_those_of_torchao(
    found: dict[tuple[str, str, str], dict[str, Any]],
) -> None:
    low = [n for n in (TABLE, *MATRICES) if n % 256 == 0]
    full = TABLE + sum(MATRICES) - sum(low) + BIASES
    state = found["wide", "torchao", "8-bit"]["at_the_end"]["optimizer"]
    assert state == sum(2 * n + 2 * 4 * n // 256 + 2 * KIB for n in low) + 2 * 4 * full


def test_other_optimizers_have_less_state(
    found: dict[tuple[str, str, str], dict[str, Any]],
) -> None:
    for name in ("wide", *tricks.MODELS):
        states = {
            optimizer: found[name, "fp32", optimizer]["at_the_end"]["optimizer"]
            for optimizer in tricks.OPTIMIZERS
        }
        assert states["foreach"] == states["for-loop"] == 2 * states["sgd"]
        assert states["adafactor"] < states["sgd"]
        # Its counters of steps are on the GPU.
        assert states["for-loop"] < states["fused"] < 1.01 * states["for-loop"]


@pytest.mark.parametrize("name", tricks.CHECKPOINTED)
def test_selective_lies_between_nothing_and_everything(
    found: dict[tuple[str, str, str], dict[str, Any]], name: str
) -> None:
    none, selective, blocks = (
        found[name, how, "plain sgd"] for how in ("none", "selective", "blocks")
    )
    assert blocks["peak_bytes"] < selective["peak_bytes"] < none["peak_bytes"]
    # What is kept is not computed again: no matmul, no convolution, no attention.
    assert selective["flops"] == none["flops"] < blocks["flops"]
    assert selective["mistakes"] == []


def test_a_splice_is_the_direct_trace(
    found: dict[tuple[str, str, str], dict[str, Any]],
) -> None:
    spliced = {key: one["differences"] for key, one in found.items() if "differences" in one}
    assert len({model for model, _, _ in spliced}) >= 5
    assert {way for _, way, _ in spliced} >= set(tricks.WAYS)
    assert {optimizer for _, _, optimizer in spliced} == set(tricks.SPLICED)
    assert {key: wrong for key, wrong in spliced.items() if wrong} == {}
