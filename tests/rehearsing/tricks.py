"""Rehearsals of tricks, in a process of their own: `python -m rehearsing.rehearsals tricks 0 2`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from oomph.predicting.combinations import with_step_of
from oomph.predicting.footprint import Footprint, footprint_of
from oomph.predicting.scaling import AffineTrace, OpSlope, with_ordered_frees
from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from rehearsing.zoo.kind import Kind, tokens

MODELS = ("vit", "resnet", "unet", "llama", "encoder")
OPTIMIZERS = ("fused", "foreach", "for-loop", "8-bit", "adafactor", "sgd")
SPLICED = ("fused", "foreach", "for-loop", "adafactor", "sgd")
WAYS = {
    "bf16": Variant(micro_batch=4, precision="bf16"),
    "checkpointed": Variant(micro_batch=4, checkpointing="blocks"),
    "accumulated": Variant(micro_batch=4, accumulation=2),
}
FP32 = Variant(micro_batch=4)
CHECKPOINTED = ("resnet", "unet", "vit", "diffusion", "bert sdpa", "gpt2", "llama", "mixtral")


class Wide(nn.Module):
    """Most of what it takes is its parameters, and what comes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 100)
        wide = [nn.Linear(96, 96) for _ in range(4)]
        self.layers = nn.Sequential(nn.Linear(100, 96), nn.ReLU(), *wide, nn.Linear(96, 51))

    def forward(self, x: Any) -> Any:
        return self.layers(self.table(x))


WIDE = Kind(Wide, tokens(2))


def decayed(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, weight_decay=0.1)  # of which only torchao has 8 bits


def rehearsed(workload: Workload, how: Variant) -> Trace:
    from oomph.rehearsing.rehearse import rehearse

    return rehearse(workload, how, (8, 0))


def tricks(part: int, num_parts: int) -> Iterator[dict[str, Any]]:
    from oomph.rehearsing.rehearse import prepare
    from rehearsing.rehearsals import models, summary

    prepare((8, 0))
    zoo = {"wide": WIDE, **models()}
    for name in ("wide", *MODELS)[part::num_parts]:
        workload = zoo[name].workload()
        references = {q: rehearsed(workload, replace(FP32, optimizer=q)) for q in OPTIMIZERS}
        for optimizer, trace in references.items():
            yield {"model": name, "way": "fp32", "optimizer": optimizer, **summary(trace)}
        for way, how in WAYS.items():
            if way != "checkpointed" or zoo[name].has_blocks:
                yield from _spliced(name, workload, way, how, references)
    if part == 0:
        decaying = rehearsed(replace(WIDE.workload(), optimizer=decayed), _eight_bit())
        yield {"model": "wide", "way": "torchao", "optimizer": "8-bit", **summary(decaying)}
        yield from _scaled(zoo["vit"])
    for name in CHECKPOINTED[part::num_parts]:
        for checkpointing in ("none", "selective", "blocks"):
            trace = rehearsed(
                zoo[name].workload("plain sgd"), replace(FP32, checkpointing=checkpointing)
            )
            yield {"model": name, "way": checkpointing, "optimizer": "plain sgd", **summary(trace)}


def _eight_bit() -> Variant:
    return replace(FP32, optimizer="8-bit")


def _spliced(
    name: str, workload: Workload, way: str, how: Variant, references: dict[str, Trace]
) -> Iterator[dict[str, Any]]:
    trained = rehearsed(workload, how)
    for optimizer in SPLICED:
        direct = rehearsed(workload, replace(how, optimizer=optimizer))
        yield {
            "model": name,
            "way": way,
            "optimizer": optimizer,
            "differences": differences(trained, references[optimizer], direct),
        }


def _scaled(kind: Kind) -> Iterator[dict[str, Any]]:
    """With a gradient scaler, clipped and not."""
    for clip in (None, 1.0):
        workload = kind.workload(clip_grad_norm=clip)
        plain = Variant(micro_batch=4, precision="fp16")
        how = replace(plain, checkpointing="blocks")
        trained = rehearsed(workload, how)
        for optimizer in ("fused", "for-loop"):
            reference = rehearsed(workload, replace(plain, optimizer=optimizer))
            direct = rehearsed(workload, replace(how, optimizer=optimizer))
            yield {
                "model": "vit",
                "way": f"fp16, clipped to {clip}",
                "optimizer": optimizer,
                "differences": differences(trained, reference, direct),
            }


def in_columns(trace: Trace) -> Footprint:
    ordered = replace(
        trace, events=with_ordered_frees(trace.events, [place for place, _ in trace.phase_starts])
    )
    slopes = [0] * len(trace.allocations)
    return footprint_of(AffineTrace(ordered, slopes, [OpSlope(0, 0)] * len(trace.ops)))


def differences(trained: Trace, reference: Trace, direct: Trace) -> list[str]:
    """In what a splice differs from the rehearsal of the two together."""
    spliced, whole = with_step_of(in_columns(trained), in_columns(reference)), in_columns(direct)
    pairs = {
        "requests": (requested(spliced), requested(whole)),
        "peak": (spliced.live_bytes(0), whole.live_bytes(0)),
        "end": (int(spliced.live_by_event(0)[-1]), int(whole.live_by_event(0)[-1])),
        "ops": ([spliced.kernels[n] for n in spliced.op], [whole.kernels[n] for n in whole.op]),
    }
    return [name for name, (one, other) in pairs.items() if one != other]


def requested(footprint: Footprint) -> list[int]:
    sizes, events, *_ = footprint.requests(0)
    return [sizes[event - 1] for event in events if event > 0]
