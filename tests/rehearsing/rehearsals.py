"""Run in a process of its own, since rehearsing patches torch: prints what it found as JSON.

python -m rehearsing.rehearsals small 0 2    every second model of the zoo, in every way
python -m rehearsing.rehearsals batches      whether sizes are affine in the batch
python -m rehearsing.rehearsals large        models of full size
python -m rehearsing.rehearsals tricks 0 2   optimizers and recomputation, every second model
python -m rehearsing.rehearsals on_ranks     what real_ranks.py trains for real
python -m rehearsing.rehearsals on_layers    what real_layers.py trains for real
python -m rehearsing.rehearsals divided      what is held by one of several GPUs
python -m rehearsing.rehearsals units        what fsdp_tracker.py tracks
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from oomph.predicting.links import is_in_layers
from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.self_test import in_order
from rehearsing.zoo import TORCH_MODELS
from rehearsing.zoo.hugging_face import more_transformers_models, transformers_models
from rehearsing.zoo.kind import Kind

CAPABILITY = (8, 0)
EXAMPLES = 4
VARIANTS = {
    "fp32": Variant(micro_batch=EXAMPLES),
    "fp16": Variant(micro_batch=EXAMPLES, precision="fp16"),
    "bf16": Variant(micro_batch=EXAMPLES, precision="bf16"),
    "pure-bf16": Variant(micro_batch=EXAMPLES, precision="pure-bf16"),
    "accumulated": Variant(micro_batch=EXAMPLES, accumulation=2),
    "checkpointed": Variant(micro_batch=EXAMPLES, checkpointing="blocks"),
}
AFFINE = (
    "cnn",
    "resnet",
    "convnext",
    "diffusion",
    "encoder",
    "lstm",
    "graph",
    "gpt2",
    "llama",
    "t5",
)


def models() -> dict[str, Kind]:
    return {**TORCH_MODELS, **dict(transformers_models()), **dict(more_transformers_models())}


def ways(kind: Kind) -> list[str]:
    """Which variants a model can be trained in."""
    refused = {"checkpointed"} if not kind.has_blocks else set()
    if kind.has_sparse_gradients:
        refused |= {"accumulated", "fp16"}
    return [name for name in VARIANTS if name not in refused]


def live_bytes(trace: Trace) -> list[int]:
    """The bytes that are live after each event."""
    live, curve = 0, []
    for event in trace.events:
        size_bytes = trace.allocations[abs(event) - 1].size_bytes
        live += size_bytes if event > 0 else -size_bytes
        curve.append(live)
    return curve


def mistakes(trace: Trace) -> list[str]:
    """What cannot be: a block freed twice or before it was there, an empty block."""
    alive: set[int] = set()
    found = []
    for event in trace.events:
        if event > 0:
            alive.add(event)
        elif -event in alive:
            alive.remove(-event)
        else:
            found.append(f"{event} is freed and is not there")
    found += [
        f"{one} is empty" for one in trace.allocations if one.size_bytes <= 0 and not one.reduction
    ]
    return found[:5]


def summary(trace: Trace) -> dict[str, Any]:
    """What is alive at the end of the last step, by category."""
    freed = {-event for event in trace.events if event < 0}
    at_the_end: Counter[str] = Counter()
    for number, one in enumerate(trace.allocations):
        if number + 1 not in freed:
            at_the_end[one.category] += one.size_bytes
    curve = live_bytes(trace)
    return {
        "at_the_end": at_the_end,
        "live_between_steps": [curve[start - 1] for start in [*trace.step_starts[1:], 0]],
        "peak_bytes": max(curve),
        "num_events": len(trace.events),
        "num_ops": len(trace.ops),
        "flops": sum(op.flops for op in trace.ops),
        "mistakes": mistakes(trace),
        "notes": trace.notes,
        "forward": sorted(
            {f"{a.op} in {a.module}" for a in trace.allocations if a.phase == "forward"}
        ),
        "modules": sorted({one.module for one in trace.allocations if one.phase == "backward"}),
    }


def real_counts(kind: Kind) -> dict[str, int]:
    """Numbers of elements of a real model, after a real backward on the CPU."""
    torch.manual_seed(0)
    model = kind.make().train()
    kind.loss(model, kind.batch(EXAMPLES)).backward()
    parameters, buffers = list(model.parameters()), list(model.buffers())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "with_gradients": sum(p.numel() for p in parameters if p.grad is not None),
        "floating_buffers": sum(b.numel() for b in buffers if b.is_floating_point()),
        "bytes_of_other_buffers": sum(b.nbytes for b in buffers if not b.is_floating_point()),
    }


def small(part: int, num_parts: int) -> Iterator[dict[str, Any]]:
    from oomph.rehearsing.rehearse import prepare, rehearse

    mine = dict(list(models().items())[part::num_parts])
    counts = {name: real_counts(kind) for name, kind in mine.items()}  # on an honest torch
    prepare(CAPABILITY)
    for name, kind in mine.items():
        for way in ways(kind):
            found: dict[str, Any] = {"model": name, "way": way, "real": counts[name]}
            try:
                found |= summary(rehearse(kind.workload(), VARIANTS[way], CAPABILITY))
            except Exception as error:  # noqa: BLE001 - it is reported, and the others go on
                found["error"] = f"{type(error).__name__}: {error}"[:500]
            yield found


def batches() -> Iterator[dict[str, Any]]:
    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    for name in AFFINE:
        workload = models()[name].workload()
        traced = {n: rehearse(workload, Variant(micro_batch=n), CAPABILITY) for n in (2, 3, 5, 8)}
        yield {
            "model": name,
            "has_one_structure": all(
                in_order(trace.events) == in_order(traced[2].events) for trace in traced.values()
            ),
            "wrong": [
                n for n in (5, 8) if extrapolated(traced[2], traced[3], n) != sizes(traced[n])
            ],
        }


def sizes(trace: Trace) -> list[int]:
    return [one.size_bytes for one in trace.allocations]


def extrapolated(of_two: Trace, of_three: Trace, num_examples: int) -> list[int]:
    pairs = zip(sizes(of_two), sizes(of_three), strict=True)
    return [two + (num_examples - 2) * (three - two) for two, three in pairs]


def on_ranks() -> Iterator[dict[str, Any]]:
    from pretending import real_ranks

    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    workload = stack_on_ranks()
    for way, variant in real_ranks.WAYS.items():
        trace = rehearse(workload, variant, CAPABILITY)
        yield {"way": way, "taken": real_ranks.curve(*without_gpus_own(trace))}


def on_layers() -> Iterator[dict[str, Any]]:
    from pretending import real_layers, real_ranks

    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    workload = stack_on_ranks(
        model=real_layers.Transformer, batch=real_layers.examples, loss=real_layers.loss_of
    )
    for way, variant in real_layers.WAYS.items():
        trace = rehearse(workload, variant, CAPABILITY)
        built = next(index for index, phase in trace.phase_starts if phase != "build")
        yield {
            "way": way,
            "taken": real_ranks.curve(
                *without_gpus_own(replace(trace, events=trace.events[built:]))
            ),
            "communication": Counter(op.name for op in trace.ops if is_in_layers(op.name)),
            "sent_bytes": sum(op.moved_bytes for op in trace.ops if is_in_layers(op.name)),
            **summary(trace),
        }


class Keeping:
    """A loop that calls its outputs by a name, which is bound anew when there are new ones."""

    outputs: Any = None

    def loss(self, model: Any, batch: Any) -> Any:
        self.outputs = model(**batch)
        return self.outputs.loss


def outputs() -> Iterator[dict[str, Any]]:
    """What a loop reserves that keeps its outputs: rehearsed, and told from one that does not."""
    import transformers as t

    from oomph.predicting.demand import replay_trace
    from oomph.predicting.replay import with_outputs_kept
    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    config = t.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=20_000)  # with its cache
    dropping = Workload(
        model=lambda: t.GPT2LMHeadModel(config),
        batch=lambda n: dict.fromkeys(
            ("input_ids", "labels"), torch.zeros(n, 128, dtype=torch.long)
        ),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch_size=8,
    )
    for accumulation in (1, 2):
        variant = Variant(micro_batch=8 // accumulation, accumulation=accumulation)
        kept = rehearse(replace(dropping, loss=Keeping().loss), variant, CAPABILITY)
        dropped = rehearse(dropping, variant, CAPABILITY)
        traces = {"kept": kept, "dropped": dropped, "told": with_outputs_kept(dropped)}
        yield {name: replay_trace(trace).peak_reserved_bytes for name, trace in traces.items()}


def stack_on_ranks(**changes: Any) -> Workload:
    from pretending import real_ranks

    return Workload(
        **{
            "model": real_ranks.Stack,
            "batch": real_ranks.examples,
            "loss": real_ranks.loss_of,
            "optimizer": real_ranks.optimizer_of,
            "batch_size": 16,
            **changes,
        }
    )


def divided() -> Iterator[dict[str, Any]]:
    """What is held between steps, by number of GPUs and precision."""
    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    workload = stack_on_ranks(
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), clip_grad_norm=1.0
    )
    grids: list[tuple[Any, int]] = [("none", 1), ("hybrid", 4), ("hybrid", 8)]
    for sharding, num_gpus in [*grids, *(("fsdp", number) for number in range(2, 9))]:
        for precision in ("fp32", "bf16", "fp16", "pure-bf16"):
            variant = Variant(
                micro_batch=EXAMPLES, precision=precision, sharding=sharding, num_gpus=num_gpus
            )
            trace = rehearse(workload, variant, CAPABILITY)
            yield {
                "case": [sharding, num_gpus, precision],
                "streams": sorted({one.stream for one in trace.allocations}),
                "communication": Counter(op.name for op in trace.ops),
                **summary(trace),
            }


def units() -> Iterator[dict[str, Any]]:
    """The peak of forward and backward for what fsdp_tracker.py tracks."""
    from pretending import fsdp_tracker

    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    workload = stack_on_ranks(
        model=fsdp_tracker.units,
        batch=lambda n: torch.zeros(n, fsdp_tracker.WIDTH),
        loss=lambda model, x: model(x).float().mean(),
    )
    for num_gpus, precision in fsdp_tracker.CASES:
        variant = Variant(
            micro_batch=1,
            precision=precision,  # type: ignore[arg-type] # one of them
            sharding="fsdp",
            num_gpus=num_gpus,
        )
        trace = rehearse(workload, variant, CAPABILITY)
        step = next(index for index, phase in trace.phase_starts if phase == "step")
        curve = live_bytes(replace(trace, events=trace.events[:step]))
        workspace = sum(o.size_bytes for o in trace.allocations if o.category == "workspace")
        yield {"case": [num_gpus, precision], "peak_bytes": max(curve) - workspace}


def without_gpus_own(trace: Trace) -> tuple[list[int], list[int]]:
    """Events and sizes without what only a GPU has: copies of inputs, workspaces, temporaries."""
    own = [
        one.category in ("inputs", "workspace") or one.op.endswith("(inside)")
        for one in trace.allocations
    ]
    events = [event for event in trace.events if not own[abs(event) - 1]]
    return events, [one.size_bytes for one in trace.allocations]


def large() -> Iterator[dict[str, Any]]:
    """Models whose live bytes another tracer has told, too."""
    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    for name, workload, variant in large_workloads():
        yield {
            "model": name,
            **summary(rehearse(workload, variant, CAPABILITY)),
            **asdict(variant),
        }


def large_workloads() -> Iterator[tuple[str, Workload, Variant]]:
    import transformers as t

    def workload(make: Any, batch: Any) -> Workload:
        return Workload(
            model=make,
            batch=batch,
            loss=lambda model, given: model(**given).loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            batch_size=8,
        )

    def text(length: int) -> Any:
        return lambda n: dict.fromkeys(
            ("input_ids", "labels"), torch.zeros(n, length, dtype=torch.long)
        )

    bert = t.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    classified = workload(
        lambda: t.BertForSequenceClassification(bert),
        lambda n: {
            "input_ids": torch.zeros(n, 512, dtype=torch.long),
            "labels": torch.zeros(n, dtype=torch.long),
        },
    )
    yield "bert-large", classified, Variant(micro_batch=4)
    yield "bert-large bf16", classified, Variant(micro_batch=4, precision="bf16")
    yield "bert-large checkpointed", classified, Variant(micro_batch=4, checkpointing="blocks")
    gpt2 = workload(lambda: t.GPT2LMHeadModel(t.GPT2Config(use_cache=False)), text(1024))
    yield "gpt2", gpt2, Variant(micro_batch=4)
    llama = t.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        use_cache=False,
    )
    yield (
        "llama-1b",
        workload(lambda: t.LlamaForCausalLM(llama), text(2048)),
        Variant(micro_batch=1, precision="pure-bf16"),
    )
    pictures = workload(
        lambda: t.ViTForImageClassification(t.ViTConfig(num_labels=1000)),
        lambda n: {
            "pixel_values": torch.zeros(n, 3, 224, 224),
            "labels": torch.zeros(n, dtype=torch.long),
        },
    )
    yield "vit-b", pictures, Variant(micro_batch=8, precision="bf16")


def main(what: str, *numbers: str) -> None:
    warnings.simplefilter("ignore")
    from rehearsing.tricks import tricks

    sections: dict[str, Any] = {
        "small": small,
        "batches": batches,
        "large": large,
        "tricks": tricks,
        "on_ranks": on_ranks,
        "on_layers": on_layers,
        "divided": divided,
        "units": units,
        "outputs": outputs,
    }
    for found in sections[what](*map(int, numbers)):
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
