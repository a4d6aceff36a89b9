"""Hugging Face's Trainer, accelerate and Lightning are rehearsed, and what they do is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.records.workload import Variant
from rehearsing.rehearsals import mistakes
from rehearsing.script.frameworks import FRAMEWORKS
from rehearsing.script.rehearsed import rehearsed


@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_the_loop_of_a_framework_is_seen(tmp_path: Path, name: str) -> None:
    text, expected = FRAMEWORKS[name]
    trace, seen = rehearsed(tmp_path, text)
    assert {field: getattr(seen, field) for field in expected} == expected
    assert seen.num_optimizer_steps == 2
    assert mistakes(trace) == []


def test_a_loader_that_accelerate_has_prepared_has_its_workers(tmp_path: Path) -> None:
    _, seen = rehearsed(tmp_path, FRAMEWORKS["accelerate"][0])
    assert seen.loader is not None
    assert seen.loader.num_workers == 2


@pytest.mark.parametrize("name", ["trainer", "accelerate", "lightning"])
def test_the_batch_of_a_framework_is_varied(tmp_path: Path, name: str) -> None:
    text, _ = FRAMEWORKS[name]
    _, first = rehearsed(tmp_path, text)
    _, seen = rehearsed(tmp_path, text, micro_batch=6, first=first)
    assert seen.micro_batch == 6
    assert seen.accumulation == first.accumulation


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (
            "trainer",
            Variant(micro_batch=1, precision="fp16", checkpointing="blocks:0", optimizer="sgd"),
        ),
        ("accelerate", Variant(micro_batch=1, precision="bf16", optimizer="fused")),
        ("lightning", Variant(micro_batch=1, precision="fp16")),
    ],
)
def test_tricks_are_put_around_a_framework(tmp_path: Path, name: str, how: Variant) -> None:
    _, seen = rehearsed(tmp_path, FRAMEWORKS[name][0], how=how)
    assert seen.precision == how.precision
    assert seen.uses_grad_scaler == (how.precision == "fp16")
    assert seen.is_fused or how.optimizer != "fused"
    assert (seen.optimizer == "SGD") == (how.optimizer == "sgd")
    assert seen.num_optimizer_steps == 2
