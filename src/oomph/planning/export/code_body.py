"""Variant -> the functions of the exported training loop, as text."""

from __future__ import annotations

from oomph.planning.export import code_parts as parts
from oomph.records.checkpointing import listed_blocks
from oomph.records.workload import Variant

_DTYPES = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}
_FLAGS = {
    "fused": '{"fused": True, "foreach": False}',
    "foreach": '{"fused": False, "foreach": True}',
    "for-loop": '{"fused": False, "foreach": False}',
}
_ADAM = '("lr", "betas", "eps", "weight_decay")'
_LR = '("lr", "weight_decay")'
# What is made, what has to be imported for it, and what of the user's own settings it takes.
OTHERS = {
    "8-bit": ("bitsandbytes.optim.AdamW8bit(groups)", "import bitsandbytes", _ADAM),
    "adafactor": ("torch.optim.Adafactor(groups)", "", _LR),
    "sgd": ("torch.optim.SGD(groups, momentum=0.9)", "", _LR),
    "bf16 with stochastic rounding": (
        "_AdamW(groups, bf16_stochastic_round=True)",
        "from torchao.optim import _AdamW",
        _ADAM,
    ),
}


def functions_of(how: Variant, *, has_names: bool) -> list[str]:
    """Every function that the loop needs, and no other, in the order of the file.

    `has_names`: the names of the model's blocks are known; else they are looked for.
    """
    is_recomputed = how.checkpointing != "none"
    functions = {
        parts.BATCHES: True,
        parts.KEPT_ON_HOST: how.offload_activations,
        parts.START: how.num_gpus > 1,
        parts.NAMED_BLOCKS if has_names else parts.BLOCKS: is_recomputed or is_sharded(how),
        parts.SELECTIVE: how.checkpointing == "selective",
        _recompute(how): is_recomputed,
        parts.SAME_START: is_sharded(how),
        _planned_optimizer(how): True,
        parts.IN_BACKWARD: how.optimizer_in_backward,
        parts.ON_HOST: _is_on_host(how),
        _prepare(how): True,
        _train_step(how): True,
        parts.TRAIN.format(share=how.micro_batch * how.accumulation): True,
    }
    return [text.strip("\n") for text, is_needed in functions.items() if is_needed and text]


def is_sharded(how: Variant) -> bool:
    return how.sharding in ("fsdp", "hybrid")


def is_ddp(how: Variant) -> bool:
    return how.num_gpus > 1 and not is_sharded(how)


def other_optimizer(how: Variant) -> str | None:
    """The optimizer of OTHERS that is made in place of the user's own."""
    if how.optimizer in OTHERS:
        return how.optimizer
    return "bf16 with stochastic rounding" if how.precision == "pure-bf16" else None


def _is_on_host(how: Variant) -> bool:
    return how.offload_optimizer and not is_sharded(how)  # FSDP has its own offloading


def _recompute(how: Variant) -> str:
    if how.checkpointing != "selective":
        arguments = "forward, *args, use_reentrant=False, **kwargs"
    else:
        context = "context_fn=lambda: create_selective_checkpoint_contexts(keep_what_is_dear)"
        lines = ["forward", "*args", "use_reentrant=False", context, "**kwargs"]
        arguments = "\n" + "".join(f"            {line},\n" for line in lines) + "        "
    return parts.CHECKPOINT.replace("{arguments}", arguments)


def _planned_optimizer(how: Variant) -> str:
    if other := other_optimizer(how):
        made, _, names = OTHERS[other]
        return parts.ANOTHER.format(what=other, made=made, names=names)
    if how.optimizer in _FLAGS:
        return parts.IMPLEMENTATION.format(what=how.optimizer, flags=_FLAGS[how.optimizer])
    return ""


def _prepare(how: Variant) -> str:
    body = ["start()"] if how.num_gpus > 1 else []
    body += ["model = make_model()", *_on_model(how)]
    body += _sharding(how) if is_sharded(how) else ["model.to(DEVICE)"]
    # Before the optimizer: a copy of the weights on the host must be of those that DDP has given
    # to every process.
    body += _data_parallel() if is_ddp(how) else []
    body += [f"optimizer = {_made_optimizer(how)}", "return model, optimizer"]
    return parts.PREPARE.replace("{body}", "\n    ".join(body))


def _made_optimizer(how: Variant) -> str:
    is_planned = bool(_planned_optimizer(how))
    if how.optimizer_in_backward or _is_on_host(how):
        wrapper = "InBackward" if how.optimizer_in_backward else "OnHost"
        inner = "lambda own: planned_optimizer(own, make_optimizer)"
        return f"{wrapper}(model.parameters(), {inner if is_planned else 'make_optimizer'})"
    if is_planned:
        return "planned_optimizer(model.parameters(), make_optimizer)"
    return "make_optimizer(model.parameters())"


def _on_model(how: Variant) -> list[str]:
    lines = []
    if how.adapters == "qlora":
        lines.append("model = peft.prepare_model_for_kbit_training(model)  # loaded in 4 bits")
    if how.adapters != "none":
        lora = 'peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")'
        lines += [f"adapters = {lora}", "model = peft.get_peft_model(model, adapters)"]
    if how.precision == "pure-bf16":
        lines.append("model.to(torch.bfloat16)")
    if how.attention == "sdpa":
        lines.append('model.set_attn_implementation("sdpa")  # of a Hugging Face model')
    if how.loss == "chunked":
        lines.append("chunk_loss(model)")
    if how.optimizer == "8-bit":
        lines += _EMBEDDINGS
    return [*lines, *_recomputed_blocks(how.checkpointing)]


# Their rows are rarely seen, and 8 bits do not hold such states (bitsandbytes' own advice).
_EMBEDDINGS = [
    "states = bitsandbytes.optim.GlobalOptimManager.get_instance()",
    "for module in model.modules():",
    "    if isinstance(module, torch.nn.Embedding):",
    '        states.register_module_override(module, "weight", {"optim_bits": 32})',
]


def _recomputed_blocks(checkpointing: str) -> list[str]:
    if checkpointing == "none":
        return []
    listed = listed_blocks(checkpointing)
    if listed is not None:
        numbers = ", ".join(map(str, listed))
        chosen = ["blocks = blocks_of(model)", f"for number in [{numbers}]:"]
        return [*chosen, "    recompute(blocks[number])"]
    is_every = checkpointing.startswith("every-")
    every = f"[::{checkpointing.removeprefix('every-')}]" if is_every else ""
    return [f"for block in blocks_of(model){every}:", "    recompute(block)"]


def _sharding(how: Variant) -> list[str]:
    lines = ["start_alike(model)", "how = {}"]
    if how.sharding == "hybrid":
        lines += [
            'each = int(os.environ["LOCAL_WORLD_SIZE"])  # sharded inside a machine, copied across',
            "shape = (NUM_GPUS // each, each)",
            'names = ("copy", "shard")',
            'how["mesh"] = init_device_mesh(DEVICE.type, shape, mesh_dim_names=names)',
        ]
    if how.offload_optimizer:
        policy = 'CPUOffloadPolicy(pin_memory=DEVICE.type == "cuda")'
        lines.append(f'how["offload_policy"] = {policy}')
    blocks = ["for block in blocks_of(model):", "    fully_shard(block, **how)"]
    return [*lines, *blocks, "fully_shard(model, **how)"]


def _data_parallel() -> list[str]:
    # Gradients that are no views of the buckets are there twice.
    wrapped = "DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)"
    return ['ids = [LOCAL_RANK] if DEVICE.type == "cuda" else None', f"model = {wrapped}"]


def _train_step(how: Variant) -> str:
    total = ["total = sum(weights)"]
    if how.num_gpus > 1:
        total = [
            "counted = torch.tensor(sum(weights), dtype=torch.float64, device=DEVICE)",
            "dist.all_reduce(counted)",
            "total = counted.item() / NUM_GPUS  # gradients are averaged over the processes",
        ]
    text = parts.STEP.replace("{total}", "\n    ".join(total))
    text = text.replace("{each}", "\n        ".join(_each_part(how)))
    return text.replace("{update}", "\n    ".join(_update(how)))


def _each_part(how: Variant) -> list[str]:
    """Forward and backward of MICRO_BATCH examples."""
    forward = ["loss = loss_of(model, with_tensors(part, on_device))"]
    if contexts := _around(how):
        forward = [f"with {', '.join(contexts)}:", *_indented(forward)]
    share = "loss * (weight / total)"
    backward = f"({share}).backward()"
    if how.precision == "fp16":
        backward = f"SCALER.scale({share}).backward()"
    why = "# Each mean counts as much as it has examples: the last one may have fewer."
    lines = [*forward, why, backward]
    if not is_ddp(how):
        return lines
    return [
        "# Gradients are averaged over the processes once, with the last part.",
        "is_last = part is parts[-1]",
        "with contextlib.nullcontext() if is_last else model.no_sync():",
        *_indented(lines),
    ]


def _around(how: Variant) -> list[str]:
    """What each forward runs in."""
    contexts = []
    if how.precision in _DTYPES:
        contexts.append(f"torch.autocast(DEVICE.type, {_DTYPES[how.precision]})")
    if how.offload_activations:
        contexts.append("kept_on_host()")
    return contexts


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _update(how: Variant) -> list[str]:
    if how.optimizer_in_backward:
        return ["# Every parameter has been updated: backward did it."]
    is_scaled = how.precision == "fp16"
    return [
        "if CLIP_GRAD_NORM is not None:",
        *(["    SCALER.unscale_(optimizer)"] if is_scaled else []),
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)",
        *(["SCALER.step(optimizer)", "SCALER.update()"] if is_scaled else ["optimizer.step()"]),
        "optimizer.zero_grad(set_to_none=True)",
    ]
