"""A transformer, GPUs of one machine -> each linear layer of its blocks divided among them.

Torch's own `parallelize_module`, with sequence parallelism: between the layers of a block each GPU
has its part of the sequence, inside attention and MLP its part of the heads and of the hidden
units. What is gathered for a layer is reduced and scattered after it. The embedding and the head
are divided by vocabulary, and so is the loss (torch's `loss_parallel`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from oomph.errors import UsageError
from oomph.records.workload import Variant, divides_parameters
from oomph.tricks.definition import Definition
from oomph.tricks.mesh import check_group, mesh_of

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

# Names of linear layers in the models of transformers, torchtitan, llama, nanoGPT's descendants and
# torch itself. Fused ones (qkv_proj, gate_up_proj, c_attn) are not among them: their rows are
# several matrices one after another, and a part of the rows is not a part of each.
_QUERY = ("q_proj", "query", "wq", "to_q", "q_lin", "q")
_KEY_VALUE = ("k_proj", "v_proj", "key", "value", "wk", "wv", "to_k", "to_v", "k_lin", "v_lin")
_IN = ("gate_proj", "up_proj", "w1", "w3", "fc1", "lin1", "linear1", "up", "gate", "dense_h_to_4h")
_COLUMNS = frozenset({*_QUERY, *_KEY_VALUE, "k", "v", *_IN, "intermediate.dense"})
_ROWS = frozenset(
    {"o_proj", "out_proj", "wo", "out_lin", "o", "down_proj", "w2", "fc2", "lin2", "linear2"}
    | {"down", "proj", "dense_4h_to_h", "output.dense"}
)
# The words of transformers' own plans (base_model_tp_plan) for these two.
_DECLARED: Mapping[str, Literal["column", "row"]] = {"colwise": "column", "rowwise": "row"}
_OF_HEADS = "replicated_with_grad_allreduce"  # theirs for a norm of each head
_NUM_HEADS = ("num_key_value_heads", "n_kv_heads", "num_heads", "n_heads", "num_attention_heads")
# Queries, keys and values; attention and MLP; batch, sequence and width.
_NUM_OF_HEADS, _NUM_PARTS, _DIMENSIONS = 3, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The layers of one block, by name."""

    columns: tuple[str, ...]  # linear layers whose outputs are divided
    rows: tuple[str, ...]  # linear layers whose inputs are divided
    norms: tuple[str, ...]  # each GPU normalises its part of the sequence
    norms_of_heads: tuple[str, ...]  # inside attention: each GPU normalises its own heads
    gathering: tuple[str, ...]  # modules whose columns share one gathered input


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """What of a model is divided, by name."""

    blocks: Mapping[str, Block]
    embedding: str | None
    norm: str | None  # between the last block and the head
    head: str | None
    whole: tuple[str, ...]  # modules that every GPU holds and runs whole

    @property
    def first(self) -> str:
        return next(iter(self.blocks))

    @property
    def last(self) -> str:
        return [*self.blocks][-1]


# ---- what of a model can be divided --------------------------------------------------------------


def layers_of(model: torch.nn.Module) -> Layers | str:
    """Return what of a model can be divided; else why it cannot be, as a clause."""
    from oomph.tricks.blocks import named_blocks

    named = named_blocks(model)
    if not named:
        return "it has no repeated blocks"
    declared = _declared_in(model)
    blocks: dict[str, Block] = {}
    for name, module in named:
        block = _block(name, module, declared)
        if isinstance(block, str):
            return block
        blocks[name] = block
    return _around(model, blocks)


def _declared_in(model: torch.nn.Module) -> Mapping[str, str]:
    """Return the plan that a model of transformers declares: pattern of names -> how."""
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    return plan if isinstance(plan, dict) else {}


def _block(name: str, block: torch.nn.Module, declared: Mapping[str, str]) -> Block | str:
    found: dict[str, list[str]] = {"column": [], "row": [], "norm": []}
    for inner, module in block.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        path = f"{name}.{inner}" if inner else name
        role = _role(path, inner, module, declared)
        if role is None:
            return f"{path} ({type(module).__name__}) is no linear layer or norm that oomph divides"
        found[role].append(path)
    columns, rows, norms = found.values()
    sharing: dict[str, list[str]] = {}  # columns with the same input are in the same module
    for column in columns:
        sharing.setdefault(column.rpartition(".")[0], []).append(column)
    attention = next((parent for parent, of in sharing.items() if len(of) == _NUM_OF_HEADS), None)
    if attention is None or len(sharing) != _NUM_PARTS or len(rows) != _NUM_PARTS:
        return f"{name} is not attention with separate queries, keys and values, then one MLP"
    of_heads = [norm for norm in norms if norm.startswith(f"{attention}.")]
    return Block(
        columns=tuple(columns),
        rows=tuple(rows),
        norms=tuple(norm for norm in norms if norm not in of_heads),
        norms_of_heads=tuple(of_heads),
        gathering=tuple(parent for parent, of in sharing.items() if len(of) > 1 and parent != name),
    )


def _role(
    path: str, inner: str, module: torch.nn.Module, declared: Mapping[str, str]
) -> Literal["column", "row", "norm"] | None:
    """Return what becomes of a module with parameters of its own; None if that is not known."""
    from torch import nn

    how = _declared_for(path, declared)
    if isinstance(module, nn.Linear):
        if how is not None:
            return _DECLARED.get(how)
        pair = ".".join(inner.split(".")[-2:])
        last = pair.rpartition(".")[2]
        if last in _COLUMNS or pair in _COLUMNS:
            return "column"
        return "row" if last in _ROWS or pair in _ROWS else None
    is_norm = all(one.dim() == 1 for one in module.parameters())
    return "norm" if is_norm and how in (None, _OF_HEADS) else None


def _declared_for(path: str, declared: Mapping[str, str]) -> str | None:
    """Return what a model's own plan says of a module."""
    for pattern, how in declared.items():
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        if re.search(rf"(^|\.){expression}$", path):
            return how
    return None


def _around(model: torch.nn.Module, blocks: Mapping[str, Block]) -> Layers | str:
    """Return what is divided, with what comes before the blocks and after them."""
    from torch import nn

    outside: list[tuple[str, nn.Module]] = []
    after: list[str] = []  # those registered after the last block
    has_seen_blocks = False
    for name, module in model.named_modules():
        if any(name == block or name.startswith(f"{block}.") for block in blocks):
            has_seen_blocks = True
        elif any(True for _ in module.parameters(recurse=False)):
            if any(True for _ in module.children()):
                return f"{name or 'the model'} has parameters of its own beside its layers"
            outside.append((name, module))
            after += [name] * has_seen_blocks
    linears = [(name, module) for name, module in outside if isinstance(module, nn.Linear)]
    widths = {module.weight.shape[0] for _, module in linears}
    # Positions have an embedding, too; that of the tokens has a row for each output of the head.
    embedding, vocabulary = max(
        (
            (name, module.weight.shape[0])
            for name, module in outside
            if isinstance(module, nn.Embedding)
        ),
        key=lambda one: (one[1] in widths, one[1]),
        default=(None, 0),
    )
    heads = [name for name, module in linears if module.weight.shape[0] == vocabulary]
    head = heads[0] if len(heads) == 1 else None
    between = [name for name in after if name != head]
    norm = between[0] if head is not None and len(between) == 1 else None
    if norm is not None and any(one.dim() > 1 for one in model.get_submodule(norm).parameters()):
        norm = None
    divided = (embedding, head, norm)
    return Layers(
        blocks=blocks,
        embedding=embedding,
        norm=norm,
        head=head,
        whole=tuple(name for name, _ in outside if name not in divided),
    )


# ---- dividing a model ----------------------------------------------------------------------------


def split_layers(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Divide the layers of a model among the GPUs of a mesh. Raises UsageError."""
    from torch.distributed.tensor.parallel import parallelize_module

    layers = layers_of(model)
    if isinstance(layers, str):
        raise _cannot(layers)
    for block in layers.blocks.values():
        _check_parts(model, block, mesh.size())
    shared = _shared_parameters(model)
    for block in layers.blocks.values():
        for name in (*block.norms, *block.columns):
            model.get_submodule(name).register_forward_pre_hook(_check_sequences)
    parallelize_module(model, mesh, dict(_styles(layers)))
    for block in layers.blocks.values():
        for name in block.gathering:
            _gather_before(model.get_submodule(name), mesh)
    _split_before(model.get_submodule(layers.first), mesh)
    _give_on(model.get_submodule(layers.last), mesh, gathers=layers.norm is None)
    for name in layers.whole:
        _hold_whole(model.get_submodule(name), mesh)
    _share_again(model, shared)
    if layers.head is not None:
        _enter_loss_parallel()
    return model


def _cannot(why: str) -> UsageError:
    return UsageError(
        "tensor parallelism cannot be put on this model",
        because=why,
        attempt="--sharding fsdp without --tensor-parallel",
    )


def _check_parts(model: torch.nn.Module, block: Block, num_gpus: int) -> None:
    """Raise UsageError unless every GPU gets whole heads, and as many as the others."""
    for name in (*block.columns, *block.rows):
        module: Any = model.get_submodule(name)
        size = module.out_features if name in block.columns else module.in_features
        if size % num_gpus:
            raise _cannot(f"{name} has {size:,} units, and {num_gpus} GPUs share it")
    for name in {column.rpartition(".")[0] for column in block.columns}:
        module = model.get_submodule(name)
        for source in (module, getattr(module, "config", None)):
            heads = [getattr(source, one, None) for one in _NUM_HEADS]
            odd = [one for one in heads if isinstance(one, int) and one % num_gpus]
            if odd:
                raise _cannot(f"{name} has {min(odd)} heads, and {num_gpus} GPUs share them")


def _check_sequences(_: Any, args: Any) -> None:
    """Raise UsageError for a layer that is called on tokens without their sequences."""
    shape = getattr(args[0], "shape", ()) if args else ()
    if len(shape) != _DIMENSIONS:
        raise _cannot(f"its layers take {tuple(shape)}, not examples, sequence and width")


def _shared_parameters(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each parameter that several modules share, such as tied embeddings."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [of for of in names.values() if len(of) > 1]


def _share_again(model: torch.nn.Module, shared: list[list[str]]) -> None:
    """Let modules share a parameter as before: each was divided by itself."""
    for first, *others in shared:
        parameter: Any = model.get_parameter(first)
        for name in others:
            other: Any = model.get_parameter(name)
            if other.placements != parameter.placements:
                raise _cannot(f"{first} and {name} are one parameter, which is divided in two ways")
            place, _, own = name.rpartition(".")
            model.get_submodule(place).register_parameter(own, parameter)


def _styles(layers: Layers) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield what torch's own styles divide. A row's result is scattered over the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    for block in layers.blocks.values():
        for name in block.columns:
            # What is gathered for several columns is whole. If it were gathered for each of them,
            # backward would reduce it for each of them.
            is_whole = name.rpartition(".")[0] in block.gathering
            yield name, ColwiseParallel(input_layouts=Replicate() if is_whole else Shard(1))
        for name in block.rows:
            yield name, RowwiseParallel(output_layouts=Shard(1))
        for name in block.norms:
            yield name, SequenceParallel(use_local_output=True)
        for name in block.norms_of_heads:  # batch, sequence, heads, width of a head
            yield name, SequenceParallel(sequence_dim=2, use_local_output=True)
    if layers.embedding is not None:
        yield layers.embedding, RowwiseParallel(input_layouts=Replicate())
    if layers.norm is not None:
        yield layers.norm, SequenceParallel()
    if layers.head is not None:
        given = Replicate() if layers.norm is None else Shard(1)
        yield (
            layers.head,
            ColwiseParallel(input_layouts=given, output_layouts=Shard(-1), use_local_output=False),
        )


# Torch's PrepareModuleInput wants to know how many arguments a module is called with, and by which
# names. These hooks take the hidden states as the first argument that is a tensor.


def _on_first(change: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a hook that changes a module's first tensor, given by position or by name."""

    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        import torch

        for place, one in enumerate(args):
            if isinstance(one, torch.Tensor):
                return (*args[:place], change(one), *args[place + 1 :]), kwargs
        for name, one in kwargs.items():
            if isinstance(one, torch.Tensor):
                return args, {**kwargs, name: change(one)}
        return args, kwargs

    return hook


def _gather_before(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Gather the sequence once for all columns of a module."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def gathered(x: Any) -> Any:
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
        return x.redistribute(placements=[Replicate()])

    module.register_forward_pre_hook(_on_first(gathered), with_kwargs=True)


def _split_before(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Give the first block this GPU's part of the sequence."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def part(x: Any) -> Any:
        if x.dim() != _DIMENSIONS or x.shape[1] % mesh.size():
            raise _cannot(
                f"its blocks take {tuple(x.shape)}: {mesh.size()} GPUs share the second dimension,"
                " the sequence, equally"
            )
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(1)]).to_local()

    module.register_forward_pre_hook(_on_first(part), with_kwargs=True)


def _give_on(module: torch.nn.Module, mesh: DeviceMesh, *, gathers: bool) -> None:
    """Hand on the last block's result: to its norm as a part of the sequence, else whole."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def given(x: Any) -> Any:
        divided = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
        return divided.redistribute(placements=[Replicate()]).to_local() if gathers else divided

    def hook(_: Any, __: Any, out: Any) -> Any:
        return (given(out[0]), *out[1:]) if isinstance(out, tuple) else given(out)

    module.register_forward_hook(hook)


def _hold_whole(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Let every GPU hold and run a module outside of the blocks, on the whole sequence."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    def as_whole(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
            return DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return x

    def take(_: Any, args: Any, kwargs: Any) -> Any:
        given = {name: as_whole(one) for name, one in kwargs.items()}
        return tuple(map(as_whole, args)), given

    def give(_: Any, __: Any, out: Any) -> Any:
        return out.to_local() if isinstance(out, DTensor) else out

    distribute_module(module, mesh)
    module.register_forward_pre_hook(take, with_kwargs=True)
    module.register_forward_hook(give)


_loss_parallel: list[Any] = []  # entered for good: backward needs it as well as forward


def _enter_loss_parallel() -> None:
    """Let cross-entropy take logits that are divided by vocabulary. Others do not notice."""
    from torch.distributed.tensor.parallel import loss_parallel

    if not _loss_parallel:
        _loss_parallel.append(loss_parallel())
        _loss_parallel[0].__enter__()


# ---- the trick ---------------------------------------------------------------------------------


def _share_layers(model: torch.nn.Module, variant: Variant) -> torch.nn.Module:
    """Share each layer among all GPUs, where no part of it is sharded."""
    if not divides_parameters(variant):
        check_group(variant.num_gpus)
        device = next(model.parameters()).device.type
        split_layers(model, mesh_of(variant, device)["tensor"])
    return model


def _why_not_divided(model: torch.nn.Module) -> str | None:
    found = layers_of(model)
    return found if isinstance(found, str) else None


# What needs the weights of a layer in one piece, or all logits in one place.
_WHOLE_LAYERS = {
    "adapters": "adapters are put beside whole layers",
    "zero_offload": "ZeRO-Offload's host copy is of whole weights",
    "offload_optimizer": "with the optimizer on the host, it has not been tried",
    "optimizer_in_backward": "with the optimizer in backward, it has not been tried",
    "offload_activations": "with activations on the host, it has not been tried",
}


def _conflict_of_layers(variant: Variant, _: bool) -> UsageError | None:
    plain = Variant(micro_batch=1)
    reasons = [
        why
        for setting, why in _WHOLE_LAYERS.items()
        if getattr(variant, setting) != getattr(plain, setting)
    ]
    if variant.loss == "chunked":
        reasons.append("a loss in pieces reads the whole head")
    if variant.optimizer not in ("as-is", "fused", "foreach", "for-loop"):
        reasons.append(f"{variant.optimizer} has not been tried on parts of layers")
    if variant.precision == "fp16":
        reasons.append("torch's loss scaler has not been tried on parts of layers")
    if not reasons:
        return None
    return UsageError(
        "tensor parallelism does not go with another setting",
        because=reasons[0],
        attempt="leaving one of the two out",
    )


TENSOR_PARALLEL = Definition(
    name="tensor-parallel",
    stability="same",
    setting="tensor_parallel",
    what=lambda v: f"each layer of the blocks divided among {v.tensor_parallel} GPUs of a machine",
    code="parallelize_module(model, mesh, a style for each layer), with sequence parallelism",
    why_not_in_script="a script that starts itself on several GPUs is not rehearsed: a Workload is",
    why_not_on=_why_not_divided,
    conflict=_conflict_of_layers,
    divide=_share_layers,
)
