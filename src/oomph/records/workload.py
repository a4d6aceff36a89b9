"""Workload: what the user wants to train, as stated. Variant: how to train it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal, get_args

from oomph.errors import UsageError

Precision = Literal["fp32", "tf32", "fp16", "bf16", "pure-bf16"]
Attention = Literal["as-is", "sdpa"]
Loss = Literal["as-is", "chunked"]
Adapters = Literal["none", "lora", "qlora"]
LoraTargets = Literal["all-linear", "attention"]
Sharding = Literal["none", "ddp", "fsdp", "hybrid"]
Keeps = Literal["outputs", "nothing"]

# GPUs joined by a fast link: eight in every DGX and HGX. More GPUs are several machines.
GPUS_PER_NODE = 8

# Another implementation of the user's optimizer, or another optimizer with its hyperparameters.
OPTIMIZERS = ("as-is", "fused", "foreach", "for-loop", "8-bit", "adafactor", "sgd", "muon")


def check_keeps(keeps: str | None) -> Keeps | None:
    """Return the value if a loop can keep that. Raises UsageError."""
    known: dict[str | None, Keeps | None] = {None: None, "outputs": "outputs", "nothing": "nothing"}
    if keeps in known:
        return known[keeps]
    raise UsageError(
        f"keeps={keeps!r:.40} is unknown",
        attempt='"outputs", if your loop keeps `outputs = model(...)`, or "nothing"',
    )


def check_optimizer(name: str) -> str:
    """Return the name if it is one of OPTIMIZERS. Raises UsageError."""
    if name in OPTIMIZERS:
        return name
    raise UsageError(
        f"{name!r:.40} is not an optimizer that oomph knows",
        because=f"it is one of {', '.join(OPTIMIZERS)}",
        attempt="as-is",
    )


LORA_RANK = 16  # judgement: between peft's 8 and QLoRA's 64
_MOST_RANK = 4096  # judgement: beyond the width of most layers adapters save nothing


def check_lora(rank: int | None, targets: str | None) -> dict[str, Any]:
    """Return the settings of adapters, 16 and all-linear by default. Raises UsageError."""
    rank = LORA_RANK if rank is None else rank
    if not 1 <= rank <= _MOST_RANK:
        raise UsageError(
            f"adapters cannot have rank {rank}", attempt=f"1 to {_MOST_RANK}; usual are 8 to 64"
        )
    known: dict[str | None, LoraTargets] = {
        None: "all-linear",
        "all-linear": "all-linear",
        "attention": "attention",
    }
    if targets not in known:
        raise UsageError(
            f"adapters cannot be put on {targets!r:.40}", attempt="all-linear, or attention"
        )
    return {"lora_rank": rank, "lora_targets": known[targets]}


_MADE_BY = {
    "model": "model=lambda: MyModel()",
    "loss": "loss=lambda model, batch: model(**batch).loss",
    "optimizer": "optimizer=lambda parameters: torch.optim.AdamW(parameters)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, a batch, a loss and an optimizer, each as a function that makes it.

    workload = oomph.Workload(
        model=lambda: BertForSequenceClassification(config),
        batch=lambda n: {"input_ids": torch.zeros(n, 512, dtype=torch.long), "labels": ...},
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        batch_size=64,
    )
    """

    model: Callable[[], Any]  # built on tensors without memory, so any size works
    batch: Any  # a function of the number of examples, or one example batch
    loss: Callable[[Any, Any], Any]  # (model, batch) -> a scalar
    optimizer: Callable[[Any], Any]  # (parameters) -> an optimizer
    batch_size: int  # of one optimizer step; every plan keeps it
    clip_grad_norm: float | None = None
    zero_grad_to_none: bool = True  # torch's default since 2.0
    # What the loop keeps of the model's outputs until the next ones: all, as `outputs = model(...)`
    # in a loop does, or only what the loss holds. None: unknown, and the error bar covers both.
    keeps: Keeps | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for what no workload can have."""
        check_keeps(self.keeps)
        size = self.batch_size
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise UsageError(
                f"a workload cannot have batch_size={size!r:.40}",
                because="it is the number of examples of one optimizer step",
                attempt="a whole number above 0, such as batch_size=64",
            )
        for name in ("model", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise UsageError(
                    f"a workload's `{name}` is a function that makes it",
                    because=f"this one is a {type(getattr(self, name)).__name__}",
                    attempt=_MADE_BY[name],
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant of training a workload: its tricks, and how the batch is split.

    micro_batch x accumulation x num_data_gpus is the batch size.
    """

    precision: Precision = "fp32"
    checkpointing: str = "none"  # "blocks", "every-2", "blocks:0,3" or "selective"
    optimizer: str = "as-is"  # or one of OPTIMIZERS
    optimizer_in_backward: bool = False  # each gradient is applied and freed at once
    attention: Attention = "as-is"
    loss: Loss = "as-is"
    channels_last: bool = False  # images as height x width x channels in memory
    offload_activations: bool = False  # saved tensors wait in host memory
    offload_optimizer: bool = False  # the optimizer's state and step are on the host
    zero_offload: bool = False  # 16-bit weights on the GPU, fp32 ones and the step on the host
    adapters: Adapters = "none"
    lora_rank: int = LORA_RANK  # of the adapters; without adapters it says nothing
    lora_targets: LoraTargets = "all-linear"  # the layers of the blocks that have adapters
    sharding: Sharding = "none"
    num_gpus: int = 1
    gpus_per_node: int = GPUS_PER_NODE  # on one machine; with one GPU it says nothing
    tensor_parallel: int = 1  # GPUs that share each layer and the examples that it sees
    micro_batch: int
    accumulation: int = 1
    expandable_segments: bool = False  # PYTORCH_ALLOC_CONF=expandable_segments:True

    def tricks_alone(self) -> Variant:
        """Return the tricks without the split of the batch: what changes model and optimizer."""
        return replace(self, micro_batch=1, accumulation=1, expandable_segments=False)

    @property
    def batch_size(self) -> int:
        return self.micro_batch * self.accumulation * self.num_data_gpus

    @property
    def num_data_gpus(self) -> int:
        """Return how many parts a batch has; with tensor parallelism, several GPUs share one."""
        return self.num_gpus // self.tensor_parallel


# ---- tricks that a model allows ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Possible:
    """The tricks that a model allows, found by inspecting it without running it."""

    block_names: tuple[str, ...]  # blocks that can be recomputed in backward
    # "sdpa" needs no replacement; "none": none was seen; "unknown": the model does not show it.
    attention_is: Literal["eager", "sdpa", "none", "unknown"]
    optimizer_class: str  # "torch.optim.adamw.AdamW"
    batch_norm_names: tuple[str, ...]  # their statistics change with a smaller micro-batch
    has_dropout: bool
    num_parameters: int
    num_trainable: int
    parameter_bytes: int
    # Tricks that cannot be applied to this model, and why.
    impossible: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        return len(self.block_names)


# ---- sharding: number of GPUs <-> their grid -----------------------------------------------------
# "ddp": every GPU holds everything, and gradients are averaged. "fsdp": parameters, gradients and
# optimizer state are sharded among all GPUs. "hybrid": they are sharded within groups, and the
# groups are replicas of each other. With tensor parallelism, this is said of the GPUs that hold the
# same part of each layer: 64 GPUs of which 8 share each layer are 8 times 8.


def check_sharding(
    sharding: str | None,
    num_gpus: int,
    gpus_per_node: int = GPUS_PER_NODE,
    tensor_parallel: int = 1,
) -> Sharding:
    """Return the sharding; by default "ddp" on several GPUs. Raises UsageError."""
    if num_gpus < 1:
        raise UsageError(f"{num_gpus} GPUs are not possible", attempt="1 GPU or more")
    if tensor_parallel != 1:
        return _check_sharding_of_parts(sharding, num_gpus, gpus_per_node, tensor_parallel)
    if sharding is None:
        return "ddp" if num_gpus > 1 else "none"
    if sharding not in get_args(Sharding):
        raise UsageError(
            f"unknown sharding {sharding!r:.40}",
            because="it is ddp, fsdp or hybrid",
            attempt="fsdp",
        )
    if (num_gpus == 1) != (sharding == "none"):
        raise UsageError(
            f"sharding {sharding!r} and {num_gpus} GPU{'s' * (num_gpus > 1)} do not go together",
            because="one GPU has nothing to shard, and several need a kind of sharding",
            attempt="ddp, fsdp or hybrid, with two GPUs or more",
        )
    known: Sharding = sharding  # type: ignore[assignment] # checked above
    if known == "hybrid":
        _shards_of_hybrid(num_gpus, gpus_per_node)
    return known


def _check_sharding_of_parts(
    sharding: str | None, num_gpus: int, gpus_per_node: int, tensor_parallel: int
) -> Sharding:
    """Return the sharding among GPUs with the same part of each layer; by default "fsdp"."""
    if tensor_parallel < 1 or num_gpus % tensor_parallel:
        raise UsageError(
            f"{tensor_parallel} of {num_gpus} GPUs cannot share each layer",
            because="equal groups of them do",
            attempt=f"a number that divides {num_gpus}",
        )
    on_one_machine = min(gpus_per_node, num_gpus)
    if on_one_machine % tensor_parallel:
        raise UsageError(
            f"{tensor_parallel} GPUs that share each layer have to be on one machine",
            because=f"a machine has {on_one_machine}, and every layer waits for what they send",
            attempt=f"a number that divides {on_one_machine}",
        )
    num_data_gpus = num_gpus // tensor_parallel
    if num_data_gpus == 1:
        if sharding in (None, "none"):
            return "none"
        raise UsageError(
            f"sharding {sharding!r:.40} has nothing to divide",
            because=f"all {num_gpus} GPUs share each layer, so each part exists once",
            attempt="leaving it out, or more GPUs",
        )
    if sharding == "ddp":
        raise UsageError(
            "ddp and tensor parallelism do not go together",
            because="torch's DDP does not take parameters that are divided",
            attempt="fsdp, or hybrid",
        )
    return check_sharding(sharding or "fsdp", num_data_gpus, gpus_per_node // tensor_parallel)


def check_grid(
    sharding: str | None, num_gpus: int, gpus_per_node: int, tensor_parallel: int
) -> dict[str, Any]:
    """Return the fields of a variant that say which GPUs hold what. Raises UsageError."""
    check_gpus_per_node(gpus_per_node)
    return {
        "num_gpus": num_gpus,
        "sharding": check_sharding(sharding, num_gpus, gpus_per_node, tensor_parallel),
        "gpus_per_node": gpus_per_node if num_gpus > 1 else GPUS_PER_NODE,
        "tensor_parallel": tensor_parallel,
    }


def check_gpus_per_node(number: int) -> int:
    """Return the number if a machine can have that many GPUs. Raises UsageError."""
    if number < 1:
        raise UsageError(
            f"a machine cannot have {number} GPUs", attempt=f"gpus_per_node={GPUS_PER_NODE}"
        )
    return number


def fills_nodes(num_gpus: int, gpus_per_node: int) -> bool:
    """Return whether the GPUs fit on one machine, or fill several."""
    return num_gpus <= gpus_per_node or num_gpus % gpus_per_node == 0


def torchrun_on(variant: Variant) -> str:
    """Return how torchrun is started on each machine, in short."""
    num_nodes = -(-variant.num_gpus // variant.gpus_per_node)
    if num_nodes == 1:
        return f"torchrun --nproc-per-node {variant.num_gpus}"
    return f"torchrun --nnodes {num_nodes} --nproc-per-node {variant.gpus_per_node}"


def grid_of(variant: Variant) -> tuple[int, int]:
    """Return the number of replicas of the model, and the GPUs that each is sharded among.

    With tensor parallelism, of each part of the model.
    """
    num_gpus = variant.num_data_gpus
    if variant.sharding == "fsdp":
        return 1, num_gpus
    if variant.sharding == "hybrid":
        shards = _shards_of_hybrid(num_gpus, variant.gpus_per_node // variant.tensor_parallel)
        return num_gpus // shards, shards
    return num_gpus, 1


def divides_parameters(variant: Variant) -> bool:
    return variant.sharding in ("fsdp", "hybrid")


def holds_parameters_on_host(variant: Variant) -> bool:
    """Return whether FSDP keeps its shards on the host, with gradients and optimizer."""
    return divides_parameters(variant) and variant.offload_optimizer


def casts_parameters(variant: Variant) -> bool:
    """Return whether FSDP casts parameters when it gathers them; then autocast casts nothing."""
    return divides_parameters(variant) and variant.precision == "bf16"


def divides_layers(variant: Variant) -> bool:
    """Return whether several GPUs share each layer."""
    return variant.tensor_parallel > 1


def divides_model(variant: Variant) -> bool:
    """Return whether a GPU holds a part of the parameters: shards of them, or parts of layers."""
    return divides_parameters(variant) or divides_layers(variant)


def num_groups(variant: Variant) -> int:
    """Return how many process groups communicate: of shards, of replicas, of parts of layers."""
    return sum(size > 1 for size in (*grid_of(variant), variant.tensor_parallel))


def _shards_of_hybrid(num_gpus: int, gpus_per_node: int) -> int:
    """Return the largest number of shards on one machine that gives several groups."""
    numbers = range(min(gpus_per_node, num_gpus - 1), 1, -1)
    found = next((number for number in numbers if num_gpus % number == 0), None)
    if found is None:
        raise UsageError(
            f"{num_gpus} GPUs cannot be put into equal groups",
            because="hybrid divides the model within several groups of 2 GPUs or more, each on one"
            f" machine of {gpus_per_node}",
            attempt="4, 8 or 16 GPUs, or fsdp",
        )
    return found


# ---- checkpointing: text <-> blocks --------------------------------------------------------------
# "none": no block. "blocks": every block. "every-3": every third. "blocks:0-3,6": these, counted
# from 0. "selective": the cheap ops of every block; matmuls and attention are kept.

_MOST_DIGITS = 4


def check_checkpointing(text: str) -> str:
    """Return the text if it is a valid checkpointing setting. Raises UsageError."""
    if text in ("none", "blocks", "selective") or _every(text) or listed_blocks(text):
        return text
    raise UsageError(
        f"unknown checkpointing {text!r:.80}",
        because='it is "none", "blocks", "every-2" for every second block, "blocks:0-3,6" for the'
        ' first four and the seventh, or "selective"',
        attempt="blocks",
    )


def recomputed_blocks(text: str, num_blocks: int) -> list[int]:
    """Return the numbers of the blocks that are recomputed, fully or selectively."""
    if check_checkpointing(text) == "none":
        return []
    listed = listed_blocks(text)
    if listed and max(listed) >= num_blocks:
        raise UsageError(
            f"there is no block {max(listed)} to recompute",
            because=f"the model has {num_blocks} blocks, counted from 0",
            attempt=f"blocks:0 to blocks:{num_blocks - 1}",
        )
    return listed or list(range(0, num_blocks, _every(text) or 1))


def as_text(blocks: Sequence[int], num_blocks: int) -> str:
    """Return the shortest text for a set of blocks."""
    numbers = sorted(set(blocks))
    if not numbers:
        return "none"
    for every in range(1, num_blocks):
        if numbers == list(range(0, num_blocks, every)):
            return "blocks" if every == 1 else f"every-{every}"
    return "blocks:" + ",".join(_ranges(numbers))


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Return runs of consecutive numbers, as 3-6."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found]


def _every(text: str) -> int | None:
    number = text.removeprefix("every-")
    is_number = text != number and number.isdecimal() and len(number) <= _MOST_DIGITS
    return int(number) or None if is_number else None


def listed_blocks(text: str) -> list[int] | None:
    """Return the numbers of "blocks:LIST"; None for any other text."""
    if not text.startswith("blocks:"):
        return None
    found: set[int] = set()
    for part in text.removeprefix("blocks:").split(","):
        first, _, last = part.partition("-")
        ends = (first, last if "-" in part else first)
        if not all(end.isdecimal() and len(end) <= _MOST_DIGITS for end in ends):
            return None
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    return sorted(found) or None
