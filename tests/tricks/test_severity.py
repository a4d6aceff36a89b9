"""How severe a trick's change of training is: every one is graded, and says what changes."""

from __future__ import annotations

from oomph.planning.ranking import severity_of
from oomph.tricks.definition import Severity
from oomph.tricks.trick import BY_NAME, TRICKS


def test_every_trick_that_changes_training_is_graded_and_says_what_changes() -> None:
    changing = [trick for trick in TRICKS if trick.stability == "changes"]
    assert changing
    for trick in changing:
        assert trick.severity is not Severity.UNGRADED, trick.name
        assert trick.price, trick.name


def test_the_order_is_the_documented_one() -> None:
    names = ("pure-bf16", "adafactor", "lora", "qlora", "sgd")
    severities = [severity_of(BY_NAME[name]) for name in names]
    assert severities == sorted(severities)
    assert len(set(severities)) == len(names)


def test_splitting_a_batch_is_as_severe_as_another_batch_size() -> None:
    assert severity_of(BY_NAME["accumulation"]) == Severity.BATCH
    assert severity_of(BY_NAME["fsdp"]) == Severity.BATCH


def test_a_trick_that_a_check_refuted_is_the_most_severe() -> None:
    assert severity_of(BY_NAME["fp16"]) == max(Severity)
