"""What a trick saves is seen in the rehearsal, where its mechanism says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.errors import UsageError
from oomph.predicting.scaling import affine
from oomph.predicting.timeline import by_category, find_peak, live_at
from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.child import in_a_child
from oomph.rehearsing.traces import with_rehearser

WIDTH, LAYERS, VOCABULARY, LENGTH, EXAMPLES = 256, 4, 8192, 256, 4
CAPABILITY = (8, 0)


def llama(**options: Any) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=2 * WIDTH,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def text(num_examples: int) -> dict[str, torch.Tensor]:
    return dict.fromkeys(
        ("input_ids", "labels"), torch.zeros(num_examples, LENGTH, dtype=torch.long)
    )


def workload(**options: Any) -> Workload:
    return Workload(
        model=lambda: llama(**options),
        batch=text,
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        batch_size=EXAMPLES,
    )


EAGER = {"attn_implementation": "eager"}
# name -> options of the model, how to train, micro-batches
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, {}, (1, EXAMPLES)),
    "eager": (EAGER, {}, (EXAMPLES,)),
    "sdpa": (EAGER, {"attention": "sdpa"}, (EXAMPLES,)),
    "chunked": ({}, {"loss": "chunked"}, (EXAMPLES,)),
    "chunked bf16": ({}, {"loss": "chunked", "precision": "bf16"}, (2, 3, EXAMPLES)),
    "in backward": ({}, {"optimizer_in_backward": True}, (1, EXAMPLES)),
    "activations": ({}, {"offload_activations": True}, (2, 3, EXAMPLES)),
    "optimizer": ({}, {"offload_optimizer": True}, (EXAMPLES,)),
    "bf16": ({}, {"precision": "bf16"}, (EXAMPLES,)),
    "zero bf16": ({}, {"precision": "bf16", "zero_offload": True}, (EXAMPLES,)),
    "zero fp16": ({}, {"precision": "fp16", "zero_offload": True}, (EXAMPLES,)),
    "fsdp": ({}, {"sharding": "fsdp", "num_gpus": 4}, (1,)),
    "fsdp on host": ({}, {"sharding": "fsdp", "num_gpus": 4, "offload_optimizer": True}, (1,)),
    "lora": ({}, {"adapters": "lora"}, (EXAMPLES,)),
    "lora bf16": ({}, {"adapters": "lora", "precision": "pure-bf16"}, (EXAMPLES,)),
    "qlora": ({}, {"adapters": "qlora", "precision": "pure-bf16"}, (EXAMPLES,)),
    "together": (
        {},
        {
            "loss": "chunked",
            "checkpointing": "blocks",
            "offload_activations": True,
            "optimizer_in_backward": True,
            "adapters": "lora",
            "precision": "bf16",
        },
        (EXAMPLES,),
    ),
}


def all_rehearsed() -> dict[str, list[Trace]]:
    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    return {
        name: [
            rehearse(workload(**options), Variant(micro_batch=n, **how), CAPABILITY) for n in sizes
        ]
        for name, (options, how, sizes) in CASES.items()
    }


@pytest.fixture(scope="module")
def found() -> dict[str, list[Trace]]:
    return in_a_child(all_rehearsed)


@pytest.fixture(scope="module")
def rehearsed(found: dict[str, list[Trace]]) -> dict[str, Trace]:
    return {name: traces[-1] for name, traces in found.items()}


def peak_bytes(trace: Trace) -> int:
    return find_peak(trace).live_bytes


def at_the_end(trace: Trace) -> dict[str, int]:
    """What is alive at the end, by category."""
    live = live_at(trace.events, len(trace.events))
    held = by_category([trace.allocations[number] for number in live])
    return {str(category): size_bytes for category, size_bytes in held.items()}


def at_most(trace: Trace, category: str) -> int:
    """The most that one category holds at a time."""
    live = most = 0
    for event in trace.events:
        one = trace.allocations[abs(event) - 1]
        if one.category == category:
            live += one.size_bytes if event > 0 else -one.size_bytes
            most = max(most, live)
    return most


def parameter_bytes() -> int:
    with torch.device("meta"):
        return sum(4 * p.numel() for p in llama().parameters())


def test_fused_attention_keeps_no_matrix_of_length_by_length(rehearsed: dict[str, Trace]) -> None:
    matrices = LAYERS * EXAMPLES * 8 * LENGTH * LENGTH * 4
    saved = peak_bytes(rehearsed["eager"]) - peak_bytes(rehearsed["sdpa"])
    assert saved >= 0.9 * matrices
    assert peak_bytes(rehearsed["sdpa"]) == peak_bytes(rehearsed["plain"])


def test_a_loss_in_pieces_never_has_all_logits(rehearsed: dict[str, Trace]) -> None:
    plain, chunked = rehearsed["plain"], rehearsed["chunked"]
    logits = EXAMPLES * LENGTH * VOCABULARY * 4
    assert max(one.size_bytes for one in plain.allocations) == logits
    workspaces = [one for one in chunked.allocations if one.category == "workspace"]
    others = [one for one in chunked.allocations if one not in workspaces]
    assert max(one.size_bytes for one in others) <= logits / 2
    # log_softmax's output, the gradient and its product: what a whole loss has at its peak.
    assert peak_bytes(plain) - peak_bytes(chunked) > logits
    assert at_the_end(chunked)["optimizer"] == at_the_end(plain)["optimizer"]


@pytest.mark.parametrize("name", ["chunked bf16", "activations"])
def test_two_micro_batches_tell_a_third(name: str, found: dict[str, list[Trace]]) -> None:
    two, three, exact = found[name]
    told = affine(two, three).at(EXAMPLES)
    assert (told.host_peak_bytes, peak_bytes(told)) == (exact.host_peak_bytes, peak_bytes(exact))


def test_steps_in_backward_leave_no_gradients(found: dict[str, list[Trace]]) -> None:
    # At a micro-batch of 1 the loss is small, and the peak is in the optimizer's step.
    plain, trace = found["plain"][0], found["in backward"][0]
    assert at_most(plain, "gradients") == parameter_bytes()
    head = VOCABULARY * WIDTH * 4
    assert at_most(trace, "gradients") < 1.5 * head
    assert at_the_end(trace)["optimizer"] == 2 * parameter_bytes()
    assert peak_bytes(trace) < peak_bytes(plain)


def test_offloaded_activations_are_on_the_host_and_come_back(rehearsed: dict[str, Trace]) -> None:
    plain, trace = rehearsed["plain"], rehearsed["activations"]
    assert at_most(trace, "activations") < 0.7 * at_most(plain, "activations")
    assert peak_bytes(trace) < peak_bytes(plain)
    out = sum(op.moved_bytes for op in trace.ops if op.name == "copy_to_host")
    back = sum(op.moved_bytes for op in trace.ops if op.name == "copy_from_host")
    assert trace.host_peak_bytes == out  # all of them, at the end of forward
    assert 0.4 * out < back < out  # the newest stayed
    assert at_the_end(trace) == at_the_end(plain)


def test_an_offloaded_optimizer_has_its_state_on_the_host(rehearsed: dict[str, Trace]) -> None:
    plain, trace = rehearsed["plain"], rehearsed["optimizer"]
    assert "optimizer" not in at_the_end(trace)
    assert at_the_end(plain)["optimizer"] == 2 * parameter_bytes()
    # A copy of the parameters, two states, the gradients, and a temporary of the largest.
    expected = 4 * parameter_bytes()
    assert expected <= trace.host_peak_bytes <= expected + 3 * VOCABULARY * WIDTH * 4
    for name in ("copy_to_host", "copy_from_host"):
        moved = sum(op.moved_bytes for op in trace.ops if op.name == name)
        assert moved == parameter_bytes()
    assert any(op.name == "on_host" for op in trace.ops)
    assert peak_bytes(trace) <= peak_bytes(plain) - 2 * parameter_bytes()


@pytest.mark.parametrize("name", ["zero bf16", "zero fp16"])
def test_zero_offload_has_16_bits_on_the_gpu_and_18_bytes_a_parameter_on_the_host(
    name: str, rehearsed: dict[str, Trace]
) -> None:
    plain, trace, num = rehearsed["bf16"], rehearsed[name], parameter_bytes() // 4
    held = at_the_end(trace)
    assert "optimizer" not in held
    assert held["parameters"] == pytest.approx(2 * num, rel=0.01)
    assert held["gradients"] == pytest.approx(2 * num, rel=0.01)
    assert peak_bytes(trace) <= peak_bytes(plain) - (2 + 2 + 8) * num
    # fp32 weights, gradients and two states, and 16 bits of each that pass the bus.
    expected = 18 * num
    assert expected <= trace.host_peak_bytes <= expected + 3 * VOCABULARY * WIDTH * 4
    for way in ("copy_to_host", "copy_from_host"):
        moved = sum(op.moved_bytes for op in trace.ops if op.name == way)
        assert moved == pytest.approx(2 * num, rel=0.01)


def test_the_host_reads_and_writes_what_adam_does(rehearsed: dict[str, Trace]) -> None:
    """Its fused step reads a weight, a gradient and two states, and writes all four."""
    steps = [op for op in rehearsed["optimizer"].ops if op.name == "on_host"]
    moved = sum(op.moved_bytes for op in steps)
    assert moved == pytest.approx(2 * 4 * parameter_bytes(), rel=1e-5)  # and its counters
    assert {op.phase for op in steps} == {"step"}


def test_fsdp_on_the_host_keeps_nothing_on_the_gpu_between_steps(
    rehearsed: dict[str, Trace],
) -> None:
    plain, trace, shard = rehearsed["fsdp"], rehearsed["fsdp on host"], parameter_bytes() // 4
    held = at_the_end(trace)
    assert at_the_end(plain)["optimizer"] == 2 * shard
    assert not {"optimizer", "gradients"} & held.keys()
    assert held["parameters"] < 0.01 * shard  # buffers
    assert peak_bytes(plain) - 4 * shard <= peak_bytes(trace) <= peak_bytes(plain) - 2 * shard
    # Parameters, gradients and two states, and temporaries of a step in a loop.
    assert 4 * shard <= trace.host_peak_bytes <= 4 * shard + 3 * VOCABULARY * WIDTH
    moved = {
        way: sum(op.moved_bytes for op in trace.ops if op.name == way)
        for way in ("copy_to_host", "copy_from_host")
    }
    assert moved["copy_to_host"] == shard  # gradients
    # Shards for forward, and for backward those of the blocks, which FSDP frees in between.
    root = 2 * VOCABULARY * WIDTH + WIDTH * 4 // 4
    assert moved["copy_from_host"] == pytest.approx(2 * shard - root, rel=0.02)


def test_adapters_alone_have_gradients_and_states(rehearsed: dict[str, Trace]) -> None:
    trace = rehearsed["lora"]
    wide = 2 * WIDTH
    each = 4 * 2 * WIDTH + 3 * (WIDTH + wide)
    adapters = LAYERS * 16 * each * 4
    assert at_the_end(trace)["parameters"] >= parameter_bytes() + adapters
    assert at_the_end(trace)["gradients"] == adapters
    assert at_the_end(trace)["optimizer"] == 2 * adapters


def test_quantised_weights_take_half_a_byte_and_their_scales(rehearsed: dict[str, Trace]) -> None:
    lora, qlora = rehearsed["lora bf16"], rehearsed["qlora"]
    num_weights = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * 2 * WIDTH)
    saved = at_the_end(lora)["parameters"] - at_the_end(qlora)["parameters"]
    scales = num_weights / 64 * (1 + 4 / 256)
    assert saved == pytest.approx(num_weights * 1.5 - scales, rel=1e-3)
    whole = [
        one
        for one in qlora.allocations
        if one.size_bytes == 2 * 2 * WIDTH * WIDTH and "zeros" in one.op
    ]
    assert {one.phase for one in whole} == {"forward", "backward"}
    assert {one.category for one in whole} == {"temporaries"}


def test_tricks_go_together(rehearsed: dict[str, Trace]) -> None:
    alone = [peak_bytes(trace) for name, trace in rehearsed.items() if name != "together"]
    assert peak_bytes(rehearsed["together"]) < min(alone)


def test_what_cannot_go_together_is_refused() -> None:
    from oomph.rehearsing.rehearse import rehearse

    variant = Variant(micro_batch=2, accumulation=2, optimizer_in_backward=True)
    with pytest.raises(UsageError, match="cannot step in backward"):
        rehearse(workload(), variant, CAPABILITY)


def test_a_workload_can_be_looked_at_without_memory() -> None:
    found = with_rehearser(workload(), CAPABILITY, lambda one: one.look())
    assert found.num_blocks == LAYERS
    assert not {"chunked-loss", "lora", "qlora"} & found.impossible.keys()
    assert found.parameter_bytes == parameter_bytes()
