"""The table of generations agrees with the catalogue and leaves nothing out."""

from __future__ import annotations

from itertools import pairwise

import pytest

from oomph.records.generation import (
    DEFAULT_BYTES_PER_S,
    DEFAULT_CAPABILITY,
    DEFAULT_GPU,
    DEFAULT_MATMUL_FLOPS,
    DEFAULT_NUM_SMS,
    GENERATIONS,
    MOST_RESIDENT_THREADS,
    generation_of,
    trace_capability,
)
from oomph.records.gpu_model import GpuModel
from oomph.sensing.catalog import all_models, find


def test_rows_are_in_order_and_cover_every_capability() -> None:
    assert all(before.since < after.since for before, after in pairwise(GENERATIONS))
    assert generation_of((0, 0)) is GENERATIONS[0]
    assert generation_of((99, 0)) is GENERATIONS[-1]


@pytest.mark.parametrize("model", all_models(), ids=lambda model: model.name)
def test_every_gpu_of_the_catalogue_is_of_a_generation_with_its_name(model: GpuModel) -> None:
    assert model.compute_capability is not None
    row = generation_of(model.compute_capability)
    assert model.architecture in row.name
    assert row.has_bf16 or not (model.bf16_flops or model.tf32_flops)
    assert (model.num_sms or 0) * row.threads_per_sm <= MOST_RESIDENT_THREADS


def test_the_default_gpu_has_the_figures_of_its_datasheet() -> None:
    model = find(DEFAULT_GPU).model
    assert (model.compute_capability, model.num_sms) == (DEFAULT_CAPABILITY, DEFAULT_NUM_SMS)
    assert pytest.approx(0.8 * (model.bf16_flops or 0), rel=0.01) == DEFAULT_MATMUL_FLOPS
    bandwidth = model.memory_bandwidth_bytes_per_s
    assert pytest.approx(bandwidth, rel=0.05) == DEFAULT_BYTES_PER_S


def test_traces_are_shared_before_ampere_from_ampere_to_ada_on_hopper_and_after() -> None:
    kinds = {row.since: trace_capability(row.since) for row in GENERATIONS}
    assert set(kinds.values()) == {(0, 0), (8, 0), (9, 0), (10, 0)}
    assert all(kind <= since for since, kind in kinds.items())
    assert [kinds[since] for since in ((7, 5), (8, 0), (8, 9), (9, 0), (12, 0))] == [
        (0, 0),
        (8, 0),
        (8, 0),
        (9, 0),
        (10, 0),
    ]


def test_what_depends_on_the_generation_has_its_published_value() -> None:
    """CUDA programming guide."""
    fewer = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
    for row in GENERATIONS:
        assert row.threads_per_sm == fewer.get(row.since, 2048)
    assert generation_of((8, 0)).fp64_of_fp32 == 0.5  # A100: 9.7 of 19.5 TFLOPS
    assert generation_of((8, 9)).fp64_of_fp32 == 1 / 64  # RTX 4090: 1.29 of 82.6 TFLOPS


def test_cublas_takes_more_on_hopper_and_since_torch_2_12_on_blackwell_too() -> None:
    """CublasHandlePool.cpp: ":4096:2:16:8" KiB, or 32 MiB."""
    small, large = (2 * 4096 + 8 * 16) * 1024, 32 * 1024**2

    def taken(version: str) -> list[int]:
        of = [(8, 0), (9, 0), (10, 0), (12, 0)]
        return [generation_of(each).cublas_workspace_bytes(version) for each in of]

    assert taken("2.11.0+cu128") == taken("2.1.1") == [small, large, small, small]
    assert taken("2.12.0") == taken("2.13.0+cpu") == [small, large, large, large]
