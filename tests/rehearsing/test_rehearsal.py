"""Training is rehearsed to its end, in every way, and every byte has its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomph
from rehearsing import children, rehearsals

pytestmark = pytest.mark.slow

MODELS = rehearsals.models()
REHEARSALS = [(name, way) for name, kind in MODELS.items() for way in rehearsals.ways(kind)]
CUBLAS_WORKSPACE_BYTES = 2 * 8_519_680  # one of the forward, one of the backward

# The live MiB of another tracer (FakeTensors on a patched device), without workspaces.
REFERENCES = {
    "bert-large": 7075,
    "bert-large bf16": 6478,
    "bert-large checkpointed": 6392,
    "gpt2": 7914,
    "llama-1b": 13506,
    "vit-b": 1740,
}


@pytest.fixture(scope="module")
def rehearsed() -> dict[tuple[str, str], dict[str, Any]]:
    both = [children.start("small", str(part), "2") for part in range(2)]
    found = [one for child in both for one in children.found_by(child)]
    return {(one["model"], one["way"]): one for one in found}


@pytest.fixture(scope="module")
def large() -> dict[str, dict[str, Any]]:
    return {one["model"]: one for one in children.found_by(children.start("large"))}


@pytest.mark.parametrize(("name", "way"), REHEARSALS)
def test_training_is_rehearsed(
    name: str, way: str, rehearsed: dict[tuple[str, str], dict[str, Any]]
) -> None:
    found = rehearsed[name, way]
    assert "error" not in found
    assert found["mistakes"] == []
    assert found["num_ops"] > 0


@pytest.mark.parametrize(("name", "way"), REHEARSALS)
def test_parameters_gradients_and_states_have_exactly_their_bytes(
    name: str, way: str, rehearsed: dict[tuple[str, str], dict[str, Any]]
) -> None:
    real, at_the_end = rehearsed[name, way]["real"], rehearsed[name, way]["at_the_end"]
    each = 2 if way == "pure-bf16" else 4
    buffers = each * real["floating_buffers"] + real["bytes_of_other_buffers"]
    assert at_the_end["parameters"] == each * real["parameters"] + buffers
    if not MODELS[name].has_sparse_gradients:
        assert at_the_end["gradients"] == each * real["with_gradients"]
        assert at_the_end["optimizer"] == 2 * each * real["with_gradients"]


@pytest.mark.parametrize(("name", "way"), REHEARSALS)
def test_what_is_live_between_steps_does_not_change(
    name: str, way: str, rehearsed: dict[tuple[str, str], dict[str, Any]]
) -> None:
    assert len(set(rehearsed[name, way]["live_between_steps"])) == 1


@pytest.mark.parametrize("name", REFERENCES)
def test_live_bytes_are_those_of_another_tracer(
    name: str, large: dict[str, dict[str, Any]]
) -> None:
    live_mib = (large[name]["peak_bytes"] - CUBLAS_WORKSPACE_BYTES) / 2**20
    assert live_mib == pytest.approx(REFERENCES[name], rel=0.002)


def test_values_that_were_assumed_are_noted(
    rehearsed: dict[tuple[str, str], dict[str, Any]],
) -> None:
    assert any("nonzero" in note for note in rehearsed["routed by where", "fp32"]["notes"])
    assert any(".item()" in note for note in rehearsed["masked", "fp32"]["notes"])
    assert any("assumed" in note for note in rehearsed["lstm", "fp32"]["notes"])
    assert rehearsed["vit", "fp32"]["notes"] == []


def test_a_recurrent_network_is_one_call_of_cudnn(
    rehearsed: dict[tuple[str, str], dict[str, Any]],
) -> None:
    for name in ("lstm", "gru", "rnn", "packed lstm"):
        assert rehearsed[name, "fp32"]["num_ops"] < 40


def test_recomputation_computes_more_and_changes_no_state(
    rehearsed: dict[tuple[str, str], dict[str, Any]],
) -> None:
    for name in ("bert sdpa", "gpt2", "llama", "vit"):
        plain, recomputed = rehearsed[name, "fp32"], rehearsed[name, "checkpointed"]
        assert recomputed["flops"] > plain["flops"]
        assert recomputed["live_between_steps"] == plain["live_between_steps"]


def test_backward_is_told_by_module(rehearsed: dict[tuple[str, str], dict[str, Any]]) -> None:
    modules = rehearsed["vit", "fp32"]["modules"]
    assert {"patches", "head", "blocks.0.attention.into", "blocks.1.mlp.2"} <= set(modules)


def test_kernels_are_those_of_cuda(rehearsed: dict[tuple[str, str], dict[str, Any]]) -> None:
    low, full = "aten._scaled_dot_product_flash", "aten._scaled_dot_product_efficient"
    expected = {
        ("vit", "fp32"): f"{full}_attention.default in blocks.0.attention",
        ("vit", "bf16"): f"{low}_attention.default in blocks.0.attention",
        ("cnn", "fp32"): "aten.cudnn_batch_norm.default in layers.1",
        ("cells", "fp32"): "aten._thnn_fused_lstm_cell.default in first",
        ("lstm", "fp32"): "aten._cudnn_rnn.default in rnn",
        ("encoder", "fp32"): "aten.native_dropout.default in stack.layers.0.dropout1",
    }
    for rehearsal, kernel in expected.items():
        assert kernel in rehearsed[rehearsal]["forward"]


def test_a_bias_is_added_in_place(rehearsed: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Where the input of a linear layer is not contiguous, and no addmm can be made of it."""
    forward = rehearsed["scan", "fp32"]["forward"]
    assert "aten.mm.default in of_b" in forward
    assert "aten.add.Tensor in of_b" not in forward


def test_a_squared_error_stays_in_a_block_of_full_size(
    rehearsed: dict[tuple[str, str], dict[str, Any]],
) -> None:
    kept = rehearsed["autoencoder", "fp32"]["at_the_end"]["temporaries"]
    assert kept == rehearsals.EXAMPLES * 3 * 16 * 16 * 4


def test_what_a_loop_takes_that_keeps_its_outputs_is_told_from_one_that_does_not() -> None:
    for found in children.found_by(children.start("outputs")):
        assert found["told"] == found["kept"] > found["dropped"]


def test_a_gpu_without_bf16_units_trains_in_bf16_as_torch_lets_it() -> None:
    workload = oomph.Workload(
        model=lambda: torch.nn.Linear(64, 64),
        batch=lambda n: torch.zeros(n, 64),
        loss=_in_bf16,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
    assert oomph.predict(workload, gpu="t4").fits == "yes"
    with oomph.emulated_gpu("64MiB", capability=(7, 5)):
        assert torch.cuda.is_bf16_supported()
        assert not torch.cuda.is_bf16_supported(including_emulation=False)


def _in_bf16(model: Any, batch: Any) -> Any:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(batch).float().pow(2).mean()
