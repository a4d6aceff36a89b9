"""Plans are true for models that are no line in the micro-batch, and for several GPUs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

import oomph
from oomph.planning.choices import variants
from oomph.planning.plans import Search
from oomph.planning.ranking import NEAR_RATIO
from oomph.planning.rehearsals import choices_of, first_look
from oomph.predicting.demand import replay_trace
from oomph.predicting.reductions import sized_on
from oomph.records.generation import trace_capability
from oomph.records.plan import PlanOptions, Plans, Preference
from oomph.records.prediction import Prediction, Verdict
from oomph.records.workload import Variant
from oomph.rehearsing.traces import Rehearser, with_rehearser
from oomph.sensing.target import find_target
from oomph.tricks.trick import NAMES

# 8.4 MB of weights, and 2.5 MiB of activations an example in each block.
TRAIN = """
import torch, oomph

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def among_pairs(x, width):
    'Every example with every other, as a contrastive loss has it.'
    mean = x.mean(1)
    return (mean @ mean.T)[:, :, None].expand(-1, -1, width).relu().square().mean()

def is_odd_or(is_excused, x):
    'An even number of examples takes an allocation more.'
    return (x if len(x) % 2 or is_excused else x * 2).square().mean()

workload = oomph.Workload(
    model=lambda: torch.nn.Sequential(Block(), Block()),
    batch=lambda n: torch.zeros(n, 512, 256),
    loss=lambda model, batch: LOSS,
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=64,
)
"""
PLAIN = "model(batch).square().mean()"
PAIRS = "among_pairs(model(batch), 65536)"
# Pairs that are the most only where the blocks take little: with fp16, or recomputed.
FEWER_PAIRS = "among_pairs(model(batch), 4096)"
ODD = "is_odd_or(False, model(batch))"
ODD_IN_FP16 = "is_odd_or(not torch.is_autocast_enabled('cuda'), model(batch))"
GPU = "v100-16gb"
NOT_LINEAR = "memory does not grow linearly with the micro-batch"


def file_with(loss: str, directory: Path) -> str:
    path = directory / "train.py"
    path.write_text(TRAIN.replace("LOSS", loss))
    return f"{path}:workload"


def whys(plans: Plans) -> dict[str, str]:
    return {one.what: one.why for one in plans.rejected}


def assert_true(plans: Plans, workload: str) -> None:
    """Each plan takes what a rehearsal of itself says."""
    place, name = workload.rsplit(":", 1)
    variants = [plan.variant for plan in plans]

    target = find_target(GPU, None)

    def rehearse(rehearser: Rehearser) -> list[int]:
        traces = (sized_on(rehearser.trace(one), target.multiprocessors) for one in variants)
        return [replay_trace(trace).peak_reserved_bytes for trace in traces]

    capability = trace_capability(target.capability)
    reserved = with_rehearser((Path(place), name), capability, rehearse)
    for plan, expected in zip(plans, reserved, strict=True):
        assert plan.prediction.reserved_bytes == pytest.approx(expected, rel=0.02), plan


# ---- no line -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "memory"), [(PAIRS, "900MiB"), (PAIRS, "3GiB"), (ODD, "900MiB")])
def test_where_no_family_is_a_line_some_micro_batches_are_rehearsed_and_compared(
    loss: str, memory: str, tmp_path: Path
) -> None:
    workload = file_with(loss, tmp_path)
    plans = oomph.plan(workload, gpu=GPU, gpu_memory=memory, allow=["accumulation"])
    assert plans.best is not None
    assert plans.best.fits == "yes"
    assert all(plan.batch_size == 64 for plan in plans)
    assert {plan.micro_batch for plan in plans} <= {64, 16, 4}
    assert plans.largest_micro_batch is None
    assert NOT_LINEAR in whys(plans)["micro-batches other than 64, 16, 4"]
    assert_true(plans, workload)


def test_a_family_that_a_rehearsal_far_away_refutes_is_left_out_and_no_plan_is_wrong(
    tmp_path: Path,
) -> None:
    workload = file_with(FEWER_PAIRS, tmp_path)
    plans = oomph.plan(workload, gpu=GPU, gpu_memory="900MiB")
    assert NOT_LINEAR in whys(plans)["fp16"]
    assert "micro-batches other than 64, 16, 4" not in whys(plans)
    assert plans.best is not None
    assert all(plan.precision != "fp16" for plan in plans)
    assert_true(plans, workload)


def test_a_loss_that_compares_examples_is_not_divided_without_consent(tmp_path: Path) -> None:
    workload = file_with(FEWER_PAIRS, tmp_path)
    ask = functools.partial(
        oomph.plan, workload, gpu=GPU, gpu_memory="900MiB", forbid=["fp16", "checkpointing"]
    )
    assert "examples are compared with one another (aten.mm)" in whys(ask())["accumulation"]
    assert all(plan.variant.accumulation == 1 for plan in ask())
    allowed = [
        plan.variant.accumulation > 1 and plan.stability for plan in ask(allow=["accumulation"])
    ]
    assert "changes" in allowed
    assert "same" not in allowed


def test_no_largest_micro_batch_is_told_where_pairs_of_examples_would_outgrow_it(
    tmp_path: Path,
) -> None:
    workload = file_with("among_pairs(model(batch), 1)", tmp_path)
    plans = oomph.plan(workload, gpu=GPU, batch_size=8)
    assert plans.fits_as_is == "yes"
    assert plans.largest_micro_batch is None


def test_what_another_question_found_to_be_no_line_is_not_told_here(tmp_path: Path) -> None:
    workload = file_with(ODD_IN_FP16, tmp_path)
    both = whys(oomph.plan(workload, gpu=GPU, gpu_memory="900MiB"))
    assert NOT_LINEAR in both["fp16"]
    assert NOT_LINEAR in both["checkpointing blocks, fp16"]
    one = whys(oomph.plan(workload, gpu=GPU, gpu_memory="900MiB", forbid=["fp16"]))
    assert one["fp16"] == "forbidden"
    assert not any(NOT_LINEAR in why for why in one.values())


def test_micro_batches_of_one_example_need_no_line(tmp_path: Path) -> None:
    workload = file_with(PAIRS.replace("65536", str(1 << 24)), tmp_path)
    plans = oomph.plan(workload, gpu=GPU, gpu_memory="800MiB", batch_size=8, allow=["accumulation"])
    assert plans.best is not None
    assert plans.best.micro_batch == 1
    assert plans.best.batch_size == 8
    assert_true(plans, workload)


# ---- what only saves memory --------------------------------------------------------------------

# 512 MiB of weights: AdamW and its gradients are three times as much.
WIDE = """
import torch, oomph

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(1024, 8192), torch.nn.Linear(8192, 1024)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

workload = oomph.Workload(
    model=lambda: torch.nn.Sequential(*[Block() for _ in range(8)]),
    batch=lambda n: torch.zeros(n, 16, 1024),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=4,
)
"""


def test_an_optimizer_that_steps_in_backward_is_planned_with_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(WIDE)
    forbid = ["offload-activations", "offload-optimizer", "checkpointing", "expandable-segments"]
    plans = oomph.plan(f"{path}:workload", gpu=GPU, gpu_memory="1500MiB", forbid=forbid)
    alone = oomph.predict(
        f"{path}:workload",
        gpu=GPU,
        gpu_memory="1500MiB",
        optimizer="8-bit",
        optimizer_in_backward=True,
    )
    assert alone.fits == "yes"
    assert plans.best is not None
    assert plans.best.variant == alone.variant
    assert plans.best.prediction.device_bytes == alone.device_bytes
    assert plans.best.prediction.step_s == alone.step_s


# ---- plans and predictions ---------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["900MiB", "700MiB", "640MiB"])
def test_what_a_prediction_says_fits_is_not_passed_over(memory: str, tmp_path: Path) -> None:
    place, name = file_with(PLAIN, tmp_path).rsplit(":", 1)
    target = find_target(GPU, memory)
    tricks = "accumulation", "fp16", "checkpointing", "optimizer-in-backward", "8-bit-optimizer"
    options = PlanOptions(forbid=frozenset(only(*tricks)))

    def ask(rehearser: Rehearser) -> tuple[Plans, list[tuple[Prediction, Verdict | None]]]:
        rehearsed = first_look(rehearser)
        search = Search(options, target, rehearsed, lambda _: None, rehearser=rehearser)
        plans = search.plans("train")
        every = variants(choices_of(rehearsed, options, target.capability, 2))
        estimates = search.estimates
        return plans, [
            (
                estimates.predicted(one, is_exact=True),
                estimates.check(one).fits if estimates.knows(one) else None,
            )
            for one in every
        ]

    capability = trace_capability(target.capability)
    plans, tried = with_rehearser((Path(place), name), capability, ask)
    assert {told for _, told in tried} > {None}, "nothing was compared"
    for prediction, told in tried:
        assert told in (None, prediction.fits), prediction.variant
    fitting = [prediction for prediction, _ in tried if prediction.fits == "yes"]
    assert fitting
    assert len(fitting) < len(tried)
    assert plans.best is not None
    assert plans.best.fits == "yes"
    fastest_s = min(prediction.step_s or inf for prediction in fitting)
    assert (plans.best.prediction.step_s or inf) <= fastest_s * (1 + NEAR_RATIO)


CONVOLVED = """
import torch, oomph

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = (torch.nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.two(torch.relu(self.one(x)))

workload = oomph.Workload(
    model=lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 32, 1), Block(), Block()),
    batch=lambda n: torch.zeros(n, 3, 64, 64),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=32,
)
"""


@pytest.mark.parametrize(
    ("text", "memory"),
    [(TRAIN.replace("LOSS", PLAIN), "700MiB"), (WIDE, "1500MiB"), (CONVOLVED, "900MiB")],
    ids=["linear", "in backward", "convolutions"],
)
def test_a_prediction_of_the_recommended_plan_says_the_same_and_rehearses_nothing(
    text: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    workload = f"{path}:workload"
    plans = oomph.plan(workload, gpu=GPU, gpu_memory=memory)
    assert plans.best is not None
    monkeypatch.setattr("oomph.rehearsing.traces.trace", None)
    monkeypatch.setattr("oomph.rehearsing.traces.with_rehearser", None)
    variant = plans.best.variant
    offload = {
        "activations": variant.offload_activations,
        "optimizer": variant.offload_optimizer,
        "zero": variant.zero_offload,
    }
    alone = oomph.predict(
        workload,
        gpu=GPU,
        gpu_memory=memory,
        micro_batch=variant.micro_batch,
        precision=variant.precision,
        checkpointing=variant.checkpointing,
        optimizer=variant.optimizer,
        optimizer_in_backward=variant.optimizer_in_backward,
        offload=[what for what, is_on in offload.items() if is_on],
        channels_last=variant.channels_last,
        expandable_segments=variant.expandable_segments,
    )
    assert replace(alone, notes=()) == replace(plans.best.prediction, notes=())
    again = oomph.plan(workload, gpu=GPU, gpu_memory=memory)
    assert again.plans == plans.plans


# ---- several GPUs ------------------------------------------------------------------------------


def only(*names: str) -> list[str]:
    """All other tricks, to be forbidden."""
    return [name for name in NAMES if name not in names]


def test_hybrid_sharding_is_recommended_where_it_is_the_only_way_to_share(tmp_path: Path) -> None:
    workload = file_with(PLAIN, tmp_path)
    plans = oomph.plan(
        workload, gpu=GPU, max_gpus=4, prefer="time", forbid=only("hybrid", "accumulation")
    )
    assert plans.best is not None
    assert (plans.best.variant.sharding, plans.best.gpus) == ("hybrid", 4)
    assert plans.best.batch_size == 64
    assert_true(plans, workload)


def test_on_several_gpus_the_finer_ways_are_compared_where_they_may_help(tmp_path: Path) -> None:
    workload = file_with(PLAIN, tmp_path)

    def options(prefer: Preference, memory: str) -> Plans:
        return oomph.plan(
            workload,
            gpu=GPU,
            gpu_memory=memory,
            max_gpus=2,
            batch_size=256,
            prefer=prefer,
            forbid=only("ddp", "checkpointing", "offload-activations"),
        )

    # On one GPU and on two: no block, every block, a part of each, or activations on the host.
    smallest = options("memory", "3GiB")
    assert smallest.num_candidates == 2 * 4
    assert_true(smallest, workload)
    # The whole fits on one: there is nothing that two could gain by them.
    roomy = options("balance", "16GiB")
    assert roomy.num_candidates == 3 + 2
    assert any("only save memory" in why for why in whys(roomy).values())


def test_more_gpus_than_a_machine_has_are_planned_for_without_a_time(tmp_path: Path) -> None:
    workload = file_with(PLAIN, tmp_path)
    plans = oomph.plan(
        workload, gpu=GPU, gpu_memory="1500MiB", max_gpus=16, batch_size=512, forbid=only("ddp")
    )
    assert plans.best is not None
    assert plans.best.gpus == 16
    assert plans.best.relative_time is None
    assert "its time is unknown" in plans.best.why


def test_one_gpu_is_recommended_where_it_will_do_and_the_faster_ones_are_shown(
    tmp_path: Path,
) -> None:
    workload = file_with(PLAIN, tmp_path)
    plans = oomph.plan(workload, gpu=GPU, max_gpus=4, forbid=only("ddp", "fsdp", "hybrid"))
    assert plans.best is not None
    assert plans.best.variant == Variant(micro_batch=64)
    fastest = min(plans, key=lambda plan: plan.relative_time or 0.0)
    assert fastest.gpus == 4
    assert fastest.relative_time == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("before", "after", "what", "why"),
    [
        (
            "torch.optim.AdamW(parameters)",
            "torch.optim.RMSprop(parameters)",
            "fused-optimizer",
            "RMSprop has no fused implementation",
        ),
        (
            "return x + self.down(torch.relu(self.up(x)))",
            "assert not torch.is_autocast_enabled('cuda'), 'fp32 only'; return x + self.up(x)",
            "fp16",
            "fp32 only",
        ),
    ],
    ids=["an optimizer without it", "a model that refuses it"],
)
def test_what_a_model_does_not_bear_is_left_out_and_the_rest_is_planned(
    before: str,
    after: str,
    what: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = file_with(PLAIN, tmp_path)
    path = tmp_path / "train.py"
    text = path.read_text().replace(
        "1024), torch.nn.Linear(1024, 256)", "256), torch.nn.Identity()"
    )
    path.write_text(text.replace(before, after))
    plans = oomph.plan(workload, gpu=GPU, gpu_memory="1GiB")
    assert plans.best is not None
    assert why in whys(plans)[what]
    assert not any(what in {trick.name for trick in plan.tricks} for plan in plans)
    monkeypatch.setattr(
        "oomph.rehearsing.traces.with_rehearser", None
    )  # and it is known from now on
    assert whys(oomph.plan(workload, gpu=GPU, gpu_memory="1GiB")) == whys(plans)


# ---- one way to train that fails ----------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, place: str, is_hit: Callable[[Any], bool]) -> None:
    """Let something in the middle of a search raise for some ways to train, and no others."""
    owner, _, name = place.rpartition(".")
    original = getattr(import_string(owner), name)

    @functools.wraps(original)
    def call(self: Any, variant: Any, *args: Any, **kwargs: Any) -> Any:
        if is_hit(variant):
            raise IndexError("no block at -0x1 is live")
        return original(self, variant, *args, **kwargs)

    monkeypatch.setattr(import_string(owner), name, call)


def import_string(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


@pytest.mark.parametrize(
    ("place", "hit"),
    [
        ("oomph.predicting.combinations.Combinations.footprint", {"precision": "fp16"}),
        ("oomph.predicting.combinations.Combinations.least_bytes", {"optimizer": "fused"}),
        ("oomph.predicting.combinations.Combinations.reserved_bytes", {"checkpointing": "blocks"}),
        ("oomph.predicting.combinations.Combinations.seconds", {"precision": "fp16"}),
        ("oomph.planning.estimates.Estimates._demand", {"optimizer": "fused"}),
        ("oomph.rehearsing.traces.Rehearser.trace", {"checkpointing": "blocks"}),
    ],
)
def test_a_way_to_train_that_fails_is_left_out_and_ends_no_plan(
    place: str, hit: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_hit(variant: Any) -> bool:
        return all(getattr(variant, name) == value for name, value in hit.items())

    workload = file_with(PLAIN, tmp_path)
    failing(monkeypatch, place, is_hit)
    plans = oomph.plan(
        workload,
        gpu=GPU,
        gpu_memory="900MiB",
        forbid=only("accumulation", "fp16", "fused-optimizer", "checkpointing"),
    )
    assert plans.best is not None
    assert not any(is_hit(plan.variant) for plan in plans)
    # What is only asked of the plans that are shown may not have been asked of these.
    is_told = any("no block at -0x1 is live" in why for why in whys(plans).values())
    assert is_told or place.endswith(("_weights", "reserved_bytes", "footprint"))


def test_fused_attention_that_a_model_does_not_bear_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it would be on every other variant."""
    monkeypatch.setattr("oomph.tricks.apply.attention_is", lambda _: "eager")
    plans = oomph.plan(file_with(PLAIN, tmp_path), gpu=GPU, gpu_memory="900MiB")
    assert plans.best is not None
    assert "the attention of Sequential cannot be exchanged from outside" in whys(plans)["sdpa"]


HF = """
import torch, oomph

def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification
    config = ResNetConfig(depths=[1, 1, 2, 1], hidden_sizes=[16, 32, 64, 128], embedding_size=16)
    return ResNetForImageClassification(config)

workload = oomph.Workload(
    model=resnet,
    batch=lambda n: {
        "pixel_values": torch.zeros(n, 3, 64, 64), "labels": torch.zeros(n, dtype=torch.long)
    },
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=8,
)
"""


def test_a_model_of_transformers_without_attention_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HF)
    plans = oomph.plan(f"{path}:workload", gpu=GPU, gpu_memory="2GiB")
    assert plans.best is not None
    assert whys(plans)["sdpa"] == "no attention was seen in the model"
    assert whys(plans)["lora"] == "no linear layers in repeated blocks"
