"""Every way that is looked at keeps the batch, and does nothing that nobody agreed to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.errors import UsageError
from oomph.planning.choices import (
    Question,
    check_names,
    choices_for,
    micro_batches,
    variants,
)
from oomph.planning.tricks import BATCH_SIZE, NAMES, NEED_CONSENT, levers_of
from oomph.records.contradictions import contradiction_in
from oomph.records.possible import Possible
from planning.plans import whatever_it_takes

BERT = Possible(
    block_names=("layer.0", "layer.1"),
    attention_is="eager",
    has_causal_head=True,
    why_no_chunks=None,
    num_adaptable=12,
    optimizer_class="torch.optim.adamw.AdamW",
    batch_norm_names=(),
    has_dropout=True,
    num_parameters=1000,
    num_trainable=1000,
    parameter_bytes=4000,
)
SPLITTING = ("accumulation", "ddp", "fsdp")

possibles = st.builds(
    replace,
    st.just(BERT),
    block_names=st.sampled_from([(), ("layer.0", "layer.1")]),
    attention_is=st.sampled_from(["eager", "sdpa", "unknown"]),
    has_causal_head=st.booleans(),
    why_no_chunks=st.just("it is no language model"),
    num_adaptable=st.sampled_from([0, 12]),
    optimizer_class=st.sampled_from(
        ["torch.optim.adamw.AdamW", "torch.optim.sgd.SGD", "bitsandbytes.optim.AdamW8bit"]
    ),
    batch_norm_names=st.sampled_from([(), ("stem.norm", "head.norm")]),
)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    allow = draw(st.sets(st.sampled_from(NAMES), max_size=4))
    forbid = draw(st.sets(st.sampled_from(NAMES), max_size=6))
    return Question(
        batch_size=draw(st.integers(1, 96)),
        capability=draw(st.sampled_from([(7, 0), (7, 5), (8, 0), (9, 0)])),
        possible=draw(possibles),
        clips_gradients=draw(st.booleans()),
        max_gpus=draw(st.sampled_from([1, 2, 3, 4])),
        allow=frozenset(allow - forbid),
        forbid=frozenset(forbid),
    )


@whatever_it_takes
@given(questions())
def test_every_way_keeps_the_batch_and_what_was_agreed(question: Question) -> None:
    found = list(variants(choices_for(question, ("selective", "blocks"))))
    assert found
    assert len(set(found)) == len(found)
    may_change = {name for name in NEED_CONSENT if name in question.allow}
    if question.possible.batch_norm_names:
        may_split = {name for name in SPLITTING if name in question.allow}
    else:
        may_split = set(SPLITTING)
    for variant in found:
        names = {lever.name for lever in levers_of(variant)}
        assert not names & question.forbid
        assert names & {*NEED_CONSENT} <= may_change
        assert names & {*SPLITTING} <= may_split
        assert variant.num_gpus <= question.max_gpus
        assert contradiction_in(variant, clips_gradients=question.clips_gradients) is None
        if variant.batch_size != question.batch_size:
            assert BATCH_SIZE in question.allow
            assert question.batch_size % variant.batch_size == 0
        if question.capability < (8, 0):
            assert variant.precision in ("fp32", "fp16")
        if not question.possible.block_names:
            assert variant.checkpointing == "none"


@whatever_it_takes
@given(questions())
def test_what_is_left_out_is_told_with_its_reason(question: Question) -> None:
    choices = choices_for(question, ("selective", "blocks"))
    told = {one.what: one.why for one in choices.rejected}
    used = {lever.name for variant in variants(choices) for lever in levers_of(variant)}
    assert all(told.values())
    assert not used & told.keys()
    for name in question.forbid - {"hybrid"}:  # which is never chosen: ask oomph predict
        assert name in told


def plain(**changes: Any) -> Question:
    given = {"batch_size": 64, "capability": (8, 0), "possible": BERT, "clips_gradients": False}
    return Question(**{**given, **changes})


def left_out(question: Question) -> dict[str, str]:
    return {one.what: one.why for one in choices_for(question, ("blocks",)).rejected}


def test_batch_norm_that_would_see_a_part_of_the_batch_needs_consent() -> None:
    model = replace(BERT, batch_norm_names=("stem.norm",))
    why = left_out(plain(possible=model, max_gpus=4))
    for name in SPLITTING:
        assert "1 BatchNorm layers (stem.norm, ...)" in why[name]
        assert f"--allow {name}" in why[name]
    allowed = plain(possible=model, max_gpus=4, allow=frozenset({"accumulation"}))
    found = {v.accumulation for v in variants(choices_for(allowed, ()))}
    assert max(found) > 1


def test_bf16_makes_fp16_pointless_unless_it_is_asked_for() -> None:
    assert "bf16 is as fast" in left_out(plain())["fp16"]
    assert "fp16" not in left_out(plain(allow=frozenset({"fp16"})))
    assert "fp16" not in left_out(plain(forbid=frozenset({"bf16"})))
    assert "fp16" not in left_out(plain(capability=(7, 0)))


@pytest.mark.parametrize(
    ("batch_size", "num_gpus", "expected"),
    [
        (64, 1, [64, 32, 16, 8, 4, 2, 1]),
        (64, 4, [16, 8, 4, 2, 1]),
        (48, 1, [48, 24, 16, 8, 4, 2, 1]),  # 12, 6 and 3 divide it, too
        (7, 1, [7, 1]),
        (1, 1, [1]),
        (15, 1, [15, 5, 3, 1]),  # nothing in it that kernels like
        (7, 2, []),
    ],
)
def test_micro_batches_divide_the_batch_and_are_friendly(
    batch_size: int, num_gpus: int, expected: list[int]
) -> None:
    assert micro_batches(batch_size, num_gpus) == expected


def test_a_name_that_is_no_trick_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="--allow 'magic': there is no such trick") as raised:
        check_names(["lora", "magic"], "--allow")
    assert "qlora" in str(raised.value)
    assert check_names(["lora", "sgd"], "--allow") == {"lora", "sgd"}
