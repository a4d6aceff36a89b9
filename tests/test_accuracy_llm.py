"""The large language models that predictions are held against are those that were published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accuracy import (
    hugging_face,
    litgpt,
    llm,
    mpt,
    nanotron,
    segmentation,
    shapes,
    torchtitan,
    torchtune,
)
from accuracy.litgpt import Tuning
from accuracy.llm_rows import LLM_ROWS
from accuracy.llm_sources import UNBUILT, LlmRow, LlmSource
from oomph.records.prediction import Moment, Prediction
from oomph.records.workload import Variant
from oomph.units import MIB

# What litgpt does not tie is there twice.
_OF_HEAD = shapes.LLAMA_32_1B.vocabulary * shapes.LLAMA_32_1B.width


def _parameters(make: Callable[[], Any], *, trained: bool = False) -> int:
    with torch.device("meta"):
        model = make()
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torchtune.Decoder(shapes.LLAMA_32_3B), shapes.LLAMA_32_3B.parameters),
        (
            lambda: torchtitan.Transformer(shapes.LLAMA_31_8B, 8192),
            shapes.LLAMA_31_8B.parameters,
        ),
        (lambda: nanotron.Llama(shapes.NANOTRON_1B), shapes.NANOTRON_1B.parameters),
        (lambda: litgpt.Gpt(shapes.PHI_15, Tuning()), shapes.PHI_15.parameters),
        (lambda: litgpt.Gpt(shapes.TINY_LLAMA, Tuning()), shapes.TINY_LLAMA.parameters),
        (
            lambda: litgpt.Gpt(shapes.LLAMA_32_1B, Tuning()),
            shapes.LLAMA_32_1B.parameters + _OF_HEAD,
        ),
        (lambda: hugging_face.llama(shapes.LLAMA_32_3B, ""), shapes.LLAMA_32_3B.parameters),
        (lambda: hugging_face.phi3(shapes.PHI_3_MINI, ""), shapes.PHI_3_MINI.parameters),
        (lambda: mpt.Mpt(shapes.MPT_7B, 2048), shapes.MPT_7B.parameters),
        (lambda: mpt.Mpt(shapes.MPT_1B, 2048), shapes.MPT_1B.parameters),
        (lambda: mpt.Mpt(shapes.MPT_1B, 65536), 1_445_974_016),
    ],
)
def test_models_have_the_published_number_of_parameters(
    make: Callable[[], Any], expected: int
) -> None:
    assert _parameters(make) == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: litgpt.Gpt(shapes.PHI_15, Tuning(rank=8)), 1_572_864),
        (lambda: hugging_face.llama(shapes.LLAMA_32_3B, "LoRA"), 9_175_040),
        (lambda: hugging_face.llama(shapes.LLAMA_32_3B, "AdaLoRA"), 18_353_664),
        (lambda: hugging_face.llama(shapes.LLAMA_32_3B, "DeLoRA"), 9_175_096),
        (lambda: hugging_face.llama(shapes.LLAMA_32_3B, "GraLoRA"), 9_175_040),
    ],
)
def test_adapters_have_the_published_number_of_trained_parameters(
    make: Callable[[], Any], expected: int
) -> None:
    assert _parameters(make, trained=True) == expected


def test_every_row_of_a_source_is_built_or_has_a_reason() -> None:
    found: Counter[str] = Counter(row.source.name for row in LLM_ROWS)
    for each in UNBUILT:
        found[each.source.name] += each.num_rows
        assert each.because
    sources = [row.source for row in LLM_ROWS] + [each.source for each in UNBUILT]
    assert found == {source.name: source.num_rows for source in sources}


def test_no_row_is_there_twice() -> None:
    names = Counter((row.source.name, row.what) for row in LLM_ROWS)
    assert [name for name, count in names.items() if count > 1] == []


# ---- how a row is scored ---------------------------------------------------------------------

_PREDICTION = Prediction(
    gpu="a100-40gb",
    variant=Variant(micro_batch=1),
    allocated_bytes=900 * MIB,
    reserved_bytes=1000 * MIB,
    device_bytes=1500 * MIB,
    low_bytes=1450 * MIB,
    high_bytes=1600 * MIB,
    capacity_bytes=40_000 * MIB,
    fits="yes",
    num_retries=0,
    by_category={},
    by_module={},
    peak_at=Moment(step=2, phase="backward", op="aten::mm", module=""),
    step_s=2.0,
    step_low_s=1.0,
    step_high_s=3.0,
    step_from=None,
    samples_per_s=0.5,
    unknowns=(),
    notes=(),
)


def _scored(kind: Any, measured_mib: float, *, is_upper_bound: bool = False) -> llm.LlmScored:
    source = LlmSource(name="a", reference="b/c@d", metric="e", kind=kind, num_rows=1)
    row = LlmRow(
        source=source,
        what="f",
        gpu="a100-40gb",
        workload=lambda: pytest.fail("nothing is rehearsed here"),
        variant=Variant(micro_batch=1),
        measured_mib=measured_mib,
        rounding_mib=5,
        step_s=4.0,
        is_upper_bound=is_upper_bound,
    )
    return llm.LlmScored(row=row, prediction=_PREDICTION, step_s=2.0)


@pytest.mark.parametrize(
    ("kind", "predicted_mib"), [("allocated", 900), ("reserved", 1000), ("device", 1500)]
)
def test_a_figure_is_held_against_its_own_kind(kind: str, predicted_mib: int) -> None:
    scored = _scored(kind, 1000)
    assert scored.predicted_bytes == predicted_mib * MIB
    assert scored.bar == ((predicted_mib - 50) * MIB, (predicted_mib + 100) * MIB)


@pytest.mark.parametrize(
    ("measured_mib", "is_upper_bound", "inside"),
    [
        (950, False, True),
        (946, False, True),  # within the rounding of the figure
        (944, False, False),
        (1105, False, True),
        (1106, False, False),
        (500, True, True),  # shorter sequences than the longest
        (1106, True, False),
    ],
)
def test_an_upper_bound_has_no_lower_end(
    measured_mib: float, is_upper_bound: bool, inside: bool
) -> None:
    assert _scored("reserved", measured_mib, is_upper_bound=is_upper_bound).is_inside is inside


def test_the_summary_counts_what_is_much_too_low_and_the_ratio_of_times() -> None:
    lines = list(llm.summary([_scored("reserved", 1000), _scored("reserved", 1100)]))
    assert any("| 2 | 4.5 % | 9.1 % | 2 of 2 | 1 |" in line for line in lines)
    assert "| a | 2 | 0.50 | - |" in lines
    assert "False alarms: 0 of 2." in lines


def test_the_segmentation_model_is_as_large_as_published() -> None:
    found = _parameters(lambda: segmentation.Fcn((3, 4, 6, 3)))
    assert found // 1_000_000 == segmentation.PARAMETERS_MILLIONS


def test_a_figure_in_gb_is_measured_with_both_readings() -> None:
    for row, gb in zip(segmentation.SEGMENTATION_ROWS, (5.7, 9.2, 6.5, 10.4), strict=True):
        assert row.measured_mib is not None
        assert row.measured_mib - row.rounding_mib <= gb * 1000
        assert row.measured_mib + row.rounding_mib >= gb * 1024
