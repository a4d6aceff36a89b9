"""What a search puts together of parts is what a rehearsal of the whole takes, trick by trick."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from oomph.planning.choices import variants
from oomph.planning.deadline import Deadline
from oomph.planning.rehearsals import choices_of, complete, first_look, footprint_of_one
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.combinations import Combinations
from oomph.predicting.footprint import Footprint
from oomph.predicting.replay import replay_requests
from oomph.records.plan import PlanOptions
from oomph.records.workload import Variant
from oomph.rehearsing.traces import Rehearser, with_rehearser
from oomph.sensing.catalog import find
from oomph.tricks.trick import NAMES, tricks_on

CAPABILITY = (8, 0)
# What two offloads together take of the host is the sum of what each takes at its most.
MOST_ON_HOST_RATIO = 1.25
SEGMENT_BYTES = 2 << 20
MOST_DRAWN = 12
OTHER_MODELS = ("vit", "unet", "lstm", "experts", "diffusion", "convnext", "mixtral", "whisper")
JOBS = """
import torch, oomph
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x):
        return x + self.two(torch.relu(self.norm(self.one(x))))

def cnn():
    blocks = [Residual() for _ in range(2)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1000)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *head)

def encoder():
    from transformers import BertConfig, BertForSequenceClassification
    config = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=512, vocab_size=2000, attn_implementation="eager")
    return BertForSequenceClassification(config)

def decoder():
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=512, vocab_size=2000,
        attn_implementation="eager")
    return LlamaForCausalLM(config)

def tied():
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=2000, n_positions=64,
        bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)

def tokens(n):
    return torch.zeros(n, 64, dtype=torch.long)

cnn_job = oomph.Workload(
    model=cnn,
    batch=lambda n: (torch.zeros(n, 3, 32, 32), torch.zeros(n, dtype=torch.long)),
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=16,
)
encoder_job = oomph.Workload(
    model=encoder,
    batch=lambda n: {"input_ids": tokens(n), "labels": torch.zeros(n, dtype=torch.long)},
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=16,
)
clipped_job = oomph.Workload(
    model=cnn,
    batch=cnn_job.batch,
    loss=cnn_job.loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=16,
    clip_grad_norm=1.0,
)
decoder_job = oomph.Workload(
    model=decoder,
    batch=lambda n: {"input_ids": tokens(n), "labels": tokens(n)},
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda parameters: torch.optim.Adam(parameters),
    batch_size=16,
)
tied_job = oomph.Workload(
    model=tied,
    batch=decoder_job.batch,
    loss=decoder_job.loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    batch_size=16,
    zero_grad_to_none=False,
)
"""


@dataclass(frozen=True)
class Held:
    """A way to train, what its parts say that it takes, and what a rehearsal of it says."""

    variant: Variant
    by_parts: tuple[int, ...]  # bytes: the bound, live at most, reserved by torch, of the host
    by_itself: tuple[int, ...]
    bound_bytes: int  # in backward: below which it is not rehearsed

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(trick.name for trick in tricks_on(self.variant))


def pairs(every: Iterable[Variant]) -> list[Variant]:
    """For each pair of tricks the plainest way that has both; a single one, and none."""
    found: dict[tuple[str, ...], Variant] = {}
    for variant in sorted(every, key=lambda one: len(tricks_on(one))):
        names = [trick.name for trick in tricks_on(variant)]
        for number in range(3):
            for some in combinations(names, number):
                found.setdefault(some, variant)
    return list(dict.fromkeys(found.values()))


def drawn(every: Iterable[Variant], seed: str) -> list[Variant]:
    """A few of all ways that combine two tricks or more, at any micro-batch."""
    several = [one for one in every if len(tricks_on(one)) > 1]
    return Random(seed).sample(several, min(MOST_DRAWN, len(several)))  # noqa: S311 - no secret


def held_against_rehearsals(
    job: str,
    path: Path,
    max_gpus: int,
    chosen: Callable[[Iterable[Variant]], list[Variant]] = pairs,
) -> list[Held]:
    """The ways that are chosen, by default every pair of tricks, of all that a search compares."""

    def ask(rehearser: Rehearser) -> list[Held]:
        rehearsed = first_look(rehearser)
        options = PlanOptions(max_gpus=max_gpus, allow=frozenset(NAMES))
        wanted = chosen(variants(choices_of(rehearsed, options, CAPABILITY, 2)))
        plain = [replace(one, optimizer_in_backward=False) for one in wanted]
        complete(rehearsed, rehearser, [*wanted, *plain], lambda _: None, Deadline())
        ways = Combinations(
            pass_footprints=rehearsed.pass_footprints,
            steps=rehearsed.steps,
            model=find("a100-80gb").model,
        )
        return [
            _held(one, ways, footprint_of_one(rehearser.trace(_with_few_steps(one))))
            for one in wanted
            if ways.knows(one)
        ]

    return with_rehearser((path, job), CAPABILITY, ask)


def _with_few_steps(variant: Variant) -> Variant:
    """All micro-steps from the second on request the same."""
    return replace(variant, accumulation=min(variant.accumulation, 2))


def _held(variant: Variant, ways: Combinations, own: Footprint) -> Held:
    size, settings = (
        variant.micro_batch,
        AllocatorSettings(expandable_segments=variant.expandable_segments),
    )
    usual = replace(variant, optimizer_in_backward=False)
    reserved = replay_requests(own.requests(size), settings, None).peak_reserved_bytes
    bound = 0
    if variant.optimizer_in_backward and ways.knows(usual):
        bound = ways.least_in_backward_bytes(usual)
    return Held(
        variant,
        (
            ways.least_bytes(variant),
            ways.footprint(variant).live_bytes(size),
            ways.reserved_bytes(variant),
            ways.host_bytes(variant),
        ),
        (own.live_bytes(size), own.live_bytes(size), reserved, own.host_bytes_at(size)),
        bound,
    )


def assert_all_equal(found: Sequence[Held]) -> None:
    for one in found:
        assert one.by_parts[:2] == one.by_itself[:2], one.names
        # A single micro-step is cut out of two, whose loss is divided by two: two more tensors of
        # 4 bytes can move where a segment is cut.
        apart_bytes = abs(one.by_parts[2] - one.by_itself[2])
        assert apart_bytes <= (SEGMENT_BYTES if one.variant.accumulation == 1 else 0), one.names
        assert one.bound_bytes <= one.by_itself[0], one.names
        if one.variant.offload_activations and one.variant.offload_optimizer:
            ratio = one.by_parts[3] / one.by_itself[3]
            assert 1 <= ratio <= MOST_ON_HOST_RATIO, one.names
        else:
            assert one.by_parts[3] == one.by_itself[3], one.names


def assert_there_are(found: Sequence[Held], *wanted: tuple[str, str]) -> None:
    combined = {pair for one in found for pair in combinations(sorted(one.names), 2)}
    assert {tuple(sorted(pair)) for pair in wanted} <= combined


def test_every_pair_of_tricks_takes_what_a_rehearsal_of_it_says(tmp_path: Path) -> None:
    path = tmp_path / "jobs.py"
    path.write_text(JOBS)
    found = held_against_rehearsals("cnn_job", path, max_gpus=1)
    assert_there_are(
        found,
        ("optimizer-in-backward", "8-bit-optimizer"),
        ("optimizer-in-backward", "adafactor"),
        ("offload-activations", "bf16"),
        ("accumulation", "checkpointing"),
        ("zero-offload", "bf16"),
        ("zero-offload", "fp16"),
        ("zero-offload", "accumulation"),
        ("zero-offload", "checkpointing"),
        ("zero-offload", "offload-activations"),
        ("offload-optimizer", "fp16"),
    )
    assert_all_equal(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", ["cnn_job", "clipped_job", "encoder_job", "decoder_job", "tied_job"]
)
def test_every_pair_of_tricks_of_any_model_and_of_two_gpus_takes_what_a_rehearsal_says(
    job: str, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.py"
    path.write_text(JOBS)
    found = held_against_rehearsals(job, path, max_gpus=2)
    assert_there_are(found, ("ddp", "bf16"), ("ddp", "zero-offload"), ("fsdp", "bf16"))
    assert_there_are(found, ("fsdp", "offload-optimizer"))
    if job != "clipped_job":
        assert_there_are(found, ("fsdp", "optimizer-in-backward"))
    if job == "decoder_job":
        assert_there_are(
            found, ("lora", "chunked-loss"), ("qlora", "optimizer-in-backward"), ("sdpa", "lora")
        )
        assert_there_are(found, ("lora", "bf16"), ("muon", "chunked-loss"), ("muon", "bf16"))
    if job == "cnn_job":
        assert_there_are(found, ("channels-last", "bf16"), ("channels-last", "checkpointing"))
    assert_all_equal(found)


@pytest.mark.slow
@pytest.mark.parametrize("model", OTHER_MODELS)
def test_any_tricks_of_a_model_of_another_kind_take_what_a_rehearsal_of_them_says(
    model: str, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.py"
    path.write_text(
        f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from dataclasses import replace
from rehearsing.zoo import TORCH_MODELS
from rehearsing.zoo.hugging_face import more_transformers_models, transformers_models

models = TORCH_MODELS | dict(transformers_models()) | dict(more_transformers_models())
job = replace(models[{model!r}].workload(), batch_size=16)
"""
    )
    found = held_against_rehearsals("job", path, 2, lambda every: drawn(every, model))
    assert len(found) > MOST_DRAWN // 2
    assert_all_equal(found)
