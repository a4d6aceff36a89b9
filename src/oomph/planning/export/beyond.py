"""Variant, target -> what the target's settings cannot say, and the line of code that does it."""

from __future__ import annotations

from oomph.errors import UsageError
from oomph.records.workload import Variant

# Which levers each target's settings carry. What is not here has to be done in code.
_CARRIED = {
    "hf": {
        "micro-batch",
        "tf32",
        "blocks",
        "every",
        "optimizer:fused",
        "optimizer:foreach",
        "optimizer:8-bit",
        "optimizer:adafactor",
        "sharded-units",
    },
    "lightning": {"weights-in-bf16"},
    "accelerate": {"sharded-units"},
    "deepspeed": {"micro-batch", "weights-in-bf16", "bucket-views", "sharded-units"},
    "code": {
        "micro-batch",
        "tf32",
        "weights-in-bf16",
        "stochastic-rounding",
        "blocks",
        "every",
        "set",
        "selective",
        "optimizer:fused",
        "optimizer:foreach",
        "optimizer:for-loop",
        "optimizer:8-bit",
        "optimizer:adafactor",
        "optimizer:sgd",
        "optimizer-in-backward",
        "offload-activations",
        "offload-optimizer",
        "lora",
        "qlora",
        "sdpa",
        "chunked-loss",
        "expandable-segments",
        "bucket-views",
        "sharded-units",
        "hybrid",
    },
}
_LAUNCHERS = ("torchrun", "slurm", "sge")
TARGETS = (*_CARRIED, *_LAUNCHERS)


def not_expressed(variant: Variant, target: str) -> tuple[str, ...]:
    """A sentence for each part of the plan that the target's settings cannot say."""
    if target in _LAUNCHERS:
        return (
            (
                f"{target} only starts the processes: the script itself must train"
                f" {variant.micro_batch} examples at a time and accumulate {variant.accumulation}"
                " times; plan.to_code() is such a script"
            ),
        )
    if target not in _CARRIED:
        raise UsageError(
            f"{target!r:.60} is no target of an export", attempt=f"one of {', '.join(TARGETS)}"
        )
    carried = _CARRIED[target] | _carried_when_sharded(variant, target)
    return tuple(how for lever, how in _levers(variant).items() if lever not in carried)


def _carried_when_sharded(variant: Variant, target: str) -> set[str]:
    """FSDP's own settings have room for checkpointing and offloading."""
    if target == "deepspeed":
        return {"offload-optimizer"}
    if variant.sharding not in ("fsdp", "hybrid"):
        return set()
    if target in ("hf", "accelerate"):
        return {"offload-optimizer", "blocks"}
    return {"offload-optimizer"} if target == "lightning" else set()


def _levers(variant: Variant) -> dict[str, str]:
    """The levers that the variant pulls, each with what does it in code."""
    return {
        "micro-batch": f"the loader: DataLoader(..., batch_size={variant.micro_batch})",
        **_precision(variant),
        **_checkpointing(variant),
        **_optimizer(variant),
        **_sharding(variant),
        **_others(variant),
    }


def _precision(variant: Variant) -> dict[str, str]:
    if variant.precision == "tf32":
        return {"tf32": 'TF32: torch.set_float32_matmul_precision("high")'}
    if variant.precision != "pure-bf16":
        return {}
    return {
        "weights-in-bf16": "weights in bf16: model.to(torch.bfloat16), or dtype=torch.bfloat16"
        " where the model is loaded",
        "stochastic-rounding": "stochastic rounding, without which most updates are lost in bf16:"
        " torchao.optim._AdamW(parameters, bf16_stochastic_round=True)",
    }


def _checkpointing(variant: Variant) -> dict[str, str]:
    by_hand = (
        "block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward,"
        " use_reentrant=False) on"
    )
    text = variant.checkpointing
    if text == "none":
        return {}
    if text == "selective":
        return {
            "selective": "selective checkpointing: torch.utils.checkpoint with context_fn="
            "create_selective_checkpoint_contexts; plan.to_code() has it"
        }
    if text == "blocks":
        return {"blocks": f"checkpointing: {by_hand} every block"}
    if text.startswith("every-"):
        return {"every": f"checkpointing: {by_hand} every block of number n * {text[6:]}"}
    return {"set": f"checkpointing: {by_hand} the blocks {text.removeprefix('blocks:')} only"}


_OPTIMIZERS = {
    "fused": "your optimizer with fused=True",
    "foreach": "your optimizer with foreach=True",
    "for-loop": "your optimizer with foreach=False",
    "8-bit": "bitsandbytes.optim.AdamW8bit(parameters, lr=...)",
    "adafactor": "torch.optim.Adafactor(parameters, lr=...)",
    "sgd": "torch.optim.SGD(parameters, lr=..., momentum=0.9)",
}


def _optimizer(variant: Variant) -> dict[str, str]:
    levers = {}
    if variant.optimizer in _OPTIMIZERS:
        made = _OPTIMIZERS[variant.optimizer]
        levers[f"optimizer:{variant.optimizer}"] = f"the optimizer: {made}"
    if variant.optimizer_in_backward:
        levers["optimizer-in-backward"] = (
            "the optimizer's step inside backward:"
            " parameter.register_post_accumulate_grad_hook(step) with one optimizer per parameter"
        )
    if variant.offload_optimizer:
        levers["offload-optimizer"] = (
            "the optimizer on the host: torchao.optim.CPUOffloadOptimizer(parameters,"
            " torch.optim.AdamW)"
        )
    return levers


def _sharding(variant: Variant) -> dict[str, str]:
    if variant.sharding == "ddp":
        return {
            "bucket-views": "gradients as views of the buckets, which saves a copy of them:"
            " DistributedDataParallel(..., gradient_as_bucket_view=True)"
        }
    if variant.sharding == "none":
        return {}
    units = {"sharded-units": "the units of FSDP: auto_wrap_policy={the class of the blocks}"}
    if variant.sharding == "fsdp":
        return units
    mesh = "sharding inside a machine and copies across: fully_shard(..., mesh=a mesh of two axes)"
    return {**units, "hybrid": mesh}


def _others(variant: Variant) -> dict[str, str]:
    pulled = {
        "sdpa": variant.attention == "sdpa",
        "chunked-loss": variant.loss == "chunked",
        "offload-activations": variant.offload_activations,
        "lora": variant.adapters == "lora",
        "qlora": variant.adapters == "qlora",
        "expandable-segments": variant.expandable_segments,
    }
    return {lever: _HOW[lever] for lever, is_pulled in pulled.items() if is_pulled}


_LORA = (
    'peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))'
)
_HOW = {
    "sdpa": 'attention: model.set_attn_implementation("sdpa")',
    "chunked-loss": "the loss in chunks: oomph.training.chunked_loss.chunk_loss(model)",
    "offload-activations": "activations on the host: each forward within"
    " torch.autograd.graph.save_on_cpu(pin_memory=True)",
    "lora": f"adapters: {_LORA}",
    "qlora": "adapters on a model in 4 bits: load it with transformers.BitsAndBytesConfig("
    f"load_in_4bit=True), then {_LORA}",
    "expandable-segments": "the allocator: PYTORCH_ALLOC_CONF=expandable_segments:True in the"
    " environment, before CUDA starts",
}
