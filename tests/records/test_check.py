"""What checks say to a planner, and how one verdict comes of several."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from oomph.records.check import (
    AccumulationCheck,
    CheckpointingCheck,
    Checks,
    CheckVerdict,
    Finding,
    PrecisionCheck,
    stability_of_check,
)
from oomph.records.stored import as_json, from_json


def checks(accumulation: CheckVerdict, fp16: CheckVerdict, checkpointing: CheckVerdict) -> Checks:
    return Checks(
        workload="train.py:workload",
        num_examples=8,
        accumulation=AccumulationCheck(verdict=accumulation, conclusion="so"),
        fp16=PrecisionCheck(
            verdict=fp16,
            conclusion="so",
            dtype="fp16",
            findings=(Finding(what="inf", module="a.b", op="mul", do="fp32"),),
        ),
        bf16=None,
        checkpointing=CheckpointingCheck(verdict=checkpointing, conclusion="so"),
    )


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (("passes", "passes", "skipped"), "passes"),
        (("passes", "uncertain", "passes"), "uncertain"),
        (("fails", "uncertain", "passes"), "fails"),
        (("skipped", "skipped", "skipped"), "skipped"),
    ],
)
def test_the_verdict_of_all_is_the_worst(
    verdicts: tuple[CheckVerdict, CheckVerdict, CheckVerdict], whole: CheckVerdict
) -> None:
    assert checks(*verdicts).verdict == whole


def test_a_planner_learns_what_each_lever_does_to_this_model() -> None:
    said = stability_of_check(checks("passes", "passes", "passes"))
    assert said == {
        **dict.fromkeys(("accumulation", "ddp", "fsdp", "hybrid", "checkpointing"), "same"),
        "fp16": "rounding",
    }


def test_what_couples_examples_changes_training_wherever_a_batch_is_divided() -> None:
    said = stability_of_check(checks("fails", "fails", "passes"))
    assert {name for name, stability in said.items() if stability == "changes"} == {
        *("accumulation", "ddp", "fsdp", "hybrid", "fp16")
    }


def test_what_is_uncertain_or_was_not_checked_says_nothing() -> None:
    assert stability_of_check(checks("uncertain", "uncertain", "skipped")) == {}


def test_checks_are_read_back_as_they_were_written() -> None:
    written = checks("passes", "fails", "skipped")
    assert from_json(Checks, as_json(written)) == written


def test_every_field_of_a_check_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "checking.md").read_text()
    for record in (Checks, Finding, AccumulationCheck, PrecisionCheck, CheckpointingCheck):
        for field in fields(record):
            assert f"`{field.name}`" in documented, f"{record}.{field.name}"
