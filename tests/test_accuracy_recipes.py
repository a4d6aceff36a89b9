"""The published recipes, how they are posed, and what is said of oomph's answers to them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accuracy import litgpt, recipe_language, recipe_speech, recipes
from accuracy.litgpt import Tuning
from accuracy.recipe_litgpt import tuning_of
from accuracy.recipe_rows import LEFT_OUT, NUM_COLLECTED, SOURCES, Recipe, read_rows
from accuracy.recipe_shapes import LITGPT, LLAMA_2_7B
from accuracy.recipe_workloads import MODELS, Built, built_from
from accuracy.recipes import Answers, Planned, Predicted, Scored
from oomph.records.workload import check_checkpointing, check_optimizer, check_sharding
from oomph.tricks.trick import NAMES
from oomph.verbs.gpus import find_gpu

ROWS = read_rows()
BY_ID = {row.id: row for row in ROWS}
GB = 10**9


# ---- the rows --------------------------------------------------------------------------------


def test_each_recipe_has_one_row_and_those_left_out_are_counted() -> None:
    assert [name for name, num in Counter(row.id for row in ROWS).items() if num > 1] == []
    assert len(ROWS) + sum(number for _, number, _ in LEFT_OUT) == NUM_COLLECTED


def test_sources_models_and_blind_rows_are_many() -> None:
    assert {row.source for row in ROWS} == set(SOURCES)
    assert {row.model for row in ROWS} == set(MODELS)
    assert len(MODELS) >= 25
    assert len([row for row in ROWS if row.fixed_by]) >= 20
    assert 0.4 < sum(row.is_blind for row in ROWS) / len(ROWS) < 0.6


def test_every_row_can_be_asked() -> None:
    for row in ROWS:
        assert find_gpu(row.gpu).model.name == row.gpu
        check_checkpointing(row.checkpointing)
        check_optimizer(row.optimizer)
        assert check_sharding(row.sharding, row.num_gpus) == row.sharding
        assert row.allow <= set(NAMES)
        assert built_from(row.built.name) == row.built


def test_what_made_it_fit_is_a_row_that_fits() -> None:
    fixed = [row for row in ROWS if row.fixed_by]
    assert {row.outcome for row in fixed} == {"oom"}
    assert {BY_ID[row.fixed_by].outcome for row in fixed} == {"fits"}


def test_a_memory_figure_says_what_was_measured() -> None:
    assert {row.id for row in ROWS if bool(row.memory_bytes) != bool(row.metric)} == set()


def test_a_word_that_no_row_may_have_is_an_error(tmp_path: Path) -> None:
    from accuracy.recipe_rows import FILE

    text = FILE.read_text("utf-8").replace(",oom,", ",oops,", 1)
    (tmp_path / "rows.csv").write_text(text, "utf-8")
    with pytest.raises(ValueError, match="outcome 'oops' is none of fits, oom"):
        read_rows(tmp_path / "rows.csv")


# ---- the models ------------------------------------------------------------------------------


def _parameters(make: Callable[[], Any], *, trained: bool = False) -> int:
    with torch.device("meta"):
        model = make()
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


@pytest.mark.parametrize("name", sorted(LITGPT))
def test_decoders_of_litgpt_have_their_number_of_parameters(name: str) -> None:
    shape = LITGPT[name]
    assert _parameters(lambda: litgpt.Gpt(shape, Tuning())) == shape.parameters


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("stablelm-alpha-3b", 2_097_152),
        ("llama-2-7b", 4_194_304),
        ("llama-2-13b", 6_553_600),
        ("falcon-40b", 12_042_240),
    ],
)
def test_adapters_of_litgpt_have_the_published_number_of_parameters(
    name: str, published: int
) -> None:
    tuning = tuning_of("lora-8-qv")
    assert _parameters(lambda: litgpt.Gpt(LITGPT[name], tuning), trained=True) == published


def test_words_of_a_tuning_are_those_of_litgpt() -> None:
    assert tuning_of("full") == Tuning()
    assert tuning_of("lora-32-qv-nf4-dq") == Tuning(rank=32, bits="nf4-dq")
    assert tuning_of("lora-8-all") == Tuning(rank=8, on_keys=True, on_all=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")  # by transformers' GPTBigCode
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-3.2-1b", 1_235_814_400),
        ("gpt2-xl", 1_557_611_200),
        ("gpt-neo-2.7b", 2_651_307_520),
        ("starcoder", 15_517_456_384),
        ("t5-large", 737_668_096),
        ("t5-3b", 2_851_598_336),
        ("blenderbot-400m", 364_802_560),
    ],
)
def test_language_models_have_the_published_number_of_parameters(name: str, published: int) -> None:
    assert _parameters(lambda: recipe_language.model(name, "full")) == published


def test_speech_models_have_the_published_number_of_parameters() -> None:
    assert _parameters(lambda: recipe_speech.whisper("whisper-large-v2")) == 1_543_304_960
    assert _parameters(lambda: recipe_speech.whisper("whisper-medium")) == 763_857_920
    assert _parameters(lambda: recipe_speech.Recogniser().encoder) == 315_438_720
    of_decoder = _parameters(
        lambda: recipe_speech.whisper("whisper-medium", ("decoder",)), trained=True
    )
    assert of_decoder == 763_857_920 - 307_216_384


def test_a_quantised_base_is_frozen_and_its_adapters_are_trained() -> None:
    trained = _parameters(lambda: recipe_language.model("llama-7b", "lora-8-qv-nf4"), trained=True)
    assert trained == LLAMA_2_7B.layers * 2 * 8 * 2 * LLAMA_2_7B.width


# ---- what is said of the answers -------------------------------------------------------------


def said(fits: str, **changes: Any) -> Predicted:
    found = Predicted(
        fits=fits,
        allocated_bytes=9 * GB,
        reserved_bytes=10 * GB,
        device_bytes=11 * GB,
        low_bytes=10 * GB,
        high_bytes=12 * GB,
        capacity_bytes=40 * GB,
        step_s=8.0,
        step_high_s=12.0,
    )
    return replace(found, **changes)


def planned(**changes: Any) -> Planned:
    found = Planned(
        fits="yes",
        what="a plan",
        num_changes=0,
        num_gpus=1,
        device_bytes=10 * GB,
        step_s=8.0,
        step_low_s=6.0,
    )
    return replace(found, **changes)


def a_row(**changes: Any) -> Recipe:
    row = BY_ID["litgpt-001"]
    return replace(row, micro_batch=4, accumulation=1, example_s=None, **changes)


@pytest.mark.parametrize(
    ("outcome", "fits", "verdict"),
    [
        ("fits", "yes", "right"),
        ("fits", "no", "wrong"),
        ("oom", "no", "right"),
        ("oom", "yes", "wrong"),
        ("oom", "uncertain", "uncertain"),
    ],
)
def test_a_verdict_is_right_wrong_or_uncertain(outcome: Any, fits: str, verdict: str) -> None:
    scored = Scored(row=a_row(outcome=outcome), predicted=said(fits), planned=None)
    assert scored.verdict == verdict


def test_what_ran_with_unknown_lengths_does_not_contradict_a_prediction_for_the_longest() -> None:
    row = a_row(outcome="fits", lengths="at most")
    assert Scored(row=row, predicted=said("no"), planned=None).verdict == "uncertain"
    assert Scored(row=row, predicted=said("yes"), planned=None).verdict == "right"


def test_what_was_measured_is_held_against_the_same_figure() -> None:
    row = a_row(memory_bytes=10.0 * GB)
    scored = Scored(row=row, predicted=said("yes"), planned=None)
    assert scored.error_ratio == pytest.approx(-0.1)
    of_device = replace(scored, row=replace(row, metric="nvidia-smi"))
    assert of_device.error_ratio == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (planned(), ()),
        (planned(fits="uncertain"), ("no plan fits for certain: a plan",)),
        (planned(num_changes=1), ("1 changes of training",)),
        (planned(num_gpus=2), ("2 GPUs instead of 1",)),
        (planned(step_s=11.0), ()),
        (planned(step_s=13.0), ("3250.0 ms an example instead of at most 3000.0",)),
    ],
)
def test_a_plan_is_as_good_if_it_fits_changes_no_more_and_is_no_slower(
    plan: Planned, why: tuple[str, ...]
) -> None:
    assert Scored(row=a_row(), predicted=said("yes"), planned=plan).plan_fails == why


def test_a_plan_may_not_be_slower_than_what_was_published() -> None:
    row = replace(a_row(), example_s=1.0)
    scored = Scored(row=row, predicted=said("yes"), planned=planned())
    assert scored.plan_fails == ("at least 1500.0 ms an example, published 1000.0",)


def test_a_plan_for_what_ran_out_of_memory_is_held_against_its_fix() -> None:
    row = a_row(outcome="oom", fixed_by="litgpt-009", allow=frozenset({"lora"}))
    fix = replace(a_row(), num_gpus=2, accumulation=2, sharding="ddp")
    both = planned(num_changes=1, num_gpus=2, step_s=2.0, step_low_s=1.0)
    scored = Scored(row=row, predicted=said("no"), planned=both, fix=fix, fix_predicted=said("yes"))
    assert scored.plan_fails == ()  # 500 ms an example, the fix at most 12 s / 16
    slower = replace(scored, planned=replace(both, step_s=4.0))
    assert slower.plan_fails == ("1000.0 ms an example instead of at most 750.0",)


def test_answers_are_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(row: Recipe) -> Predicted:
        asked.append(row.id)
        return said("yes")

    monkeypatch.setattr(recipes, "_predict", ask)
    file, row = tmp_path / "answers.json", BY_ID["litgpt-001"]
    assert Answers(file).predicted(row) == Answers(file).predicted(row) == said("yes")
    assert asked == ["litgpt-001"]
    assert list(json.loads(file.read_text())) == ["predict litgpt-001"]
    assert Answers(file, asks=False).predicted(row) == said("yes")
    assert Answers(file, asks=False).predicted(BY_ID["litgpt-002"]) is None


def test_settings_that_oomph_has_no_word_for_are_not_predicted() -> None:
    row = next(row for row in ROWS if row.not_posed)
    assert Answers(None).predicted(row) is None


def test_each_disagreement_is_a_line_and_all_are_counted() -> None:
    wrong = Scored(row=a_row(outcome="oom"), predicted=said("yes"), planned=None)
    worse = Scored(row=a_row(), predicted=said("yes"), planned=planned(num_gpus=2))
    lines = list(recipes.disagreements([wrong, worse]))
    assert [line.rpartition(": ")[2] for line in lines] == [
        "oom, predicted 10.2 of 37.3 GiB; not known why",
        "2 GPUs instead of 1",
    ]
    asked = "Plans were asked for 1 of 1 recipes, 0 of them for what had run out of memory."
    assert asked in list(recipes.report([wrong, worse]))
    total = list(recipes.summary([wrong, worse]))[-1]
    assert total == "| all | 2 | 1 | 0 | 1 | 2 | 7.1 % | 1 | 0 |"


def test_a_plan_chooses_the_checkpointing_that_the_recipe_has_built_in() -> None:
    row = BY_ID["sddb-002"]
    assert row.built.tuning == "prior-sdpa-ckpt"
    assert row.built_plainly == Built(model="sd-1.4", tuning="prior-sdpa", size=512, batch_size=1)


def test_half_of_the_rows_can_be_chosen() -> None:
    seen, blind = (recipes.chosen(ROWS, [], half) for half in ("seen", "blind"))
    assert len(seen) + len(blind) == len(ROWS)
    assert {row.source for row in recipes.chosen(ROWS, ["litgpt hub"], "both")} == {"litgpt hub"}
