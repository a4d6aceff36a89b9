"""Recompute a model's blocks in backward instead of keeping their activations.

The forward of a block is wrapped, not the block itself, so state dict keys do not change. The
recomputation gives the same result: dropout drops the same elements (torch restores its RNG state),
running statistics are not updated twice, and nothing is added to a key-value cache.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from oomph.errors import UsageError
from oomph.records.workload import (
    Possible,
    Variant,
    divides_parameters,
    listed_blocks,
    recomputed_blocks,
)
from oomph.tricks.definition import Definition, Fragment

if TYPE_CHECKING:
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

# "selective" keeps the results of these ops, which take nearly all the time of a block, and
# recomputes the rest: elementwise ops, norms, dropout. The list follows torchtitan's
# (torchtitan/distributed/activation_checkpoint.py), except that torchtitan keeps every second
# matmul and oomph keeps every one.
KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
# The names of the key-value cache in transformers' blocks (GradientCheckpointingLayer).
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def checkpoint_blocks(model: torch.nn.Module, checkpointing: str) -> None:
    """Recompute blocks in backward. Raises UsageError if the model has no blocks."""
    from oomph.tricks.blocks import find_blocks

    blocks = find_blocks(model)
    if not blocks:
        raise UsageError(
            "this model has no repeated blocks to checkpoint",
            because="no two modules in it have one class and parts of their own",
            attempt="checkpointing inside the model, with torch.utils.checkpoint",
        )
    _switch_off_own(model)
    for number in recomputed_blocks(checkpointing, len(blocks)):
        block = blocks[number]
        if isinstance(block.forward, _Recomputed):
            raise UsageError("the blocks of this model are recomputed already")
        block.forward = _Recomputed(block, keeps_matmuls=checkpointing == "selective")


def _switch_off_own(model: Any) -> None:
    """Switch off the model's own checkpointing, and its key-value cache, which both would fill."""
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
    if hasattr(model, "set_grad_checkpointing"):  # in timm
        model.set_grad_checkpointing(False)
    without: dict[int, Any] = {}  # copies, so that the user's own configuration does not change
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            if id(config) not in without:
                without[id(config)] = copy.copy(config)
                without[id(config)].use_cache = False
            module.config = without[id(config)]


class _Recomputed:
    """A block's forward, checkpointed non-reentrantly so that keyword arguments and hooks work."""

    def __init__(self, block: torch.nn.Module, *, keeps_matmuls: bool) -> None:
        functools.update_wrapper(self, block.forward)  # callers inspect its signature
        self._forward = block.forward
        self._contexts = _contexts(block, keeps_matmuls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(
            self._forward,
            *map(_as_it_is_now, args),
            use_reentrant=False,
            context_fn=self._contexts,
            **{name: _as_it_is_now(value) for name, value in _without_cache(kwargs).items()},
        )


def _as_it_is_now(argument: Any) -> Any:
    """Copy a list that the model goes on to fill (as DenseNet does), for the recomputation."""
    return argument.copy() if type(argument) in (list, dict) else argument


def _without_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the key-value cache, which the recomputation would fill a second time."""
    changed = dict.fromkeys(_CACHES) | {"use_cache": False}
    return {name: changed.get(name, value) for name, value in arguments.items()}


# ---- contexts for forward and recomputation ---------------------------------------------------

_Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def _contexts(block: torch.nn.Module, keeps_matmuls: bool) -> _Contexts:
    from torch.nn.modules.batchnorm import _NormBase
    from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

    norms = [
        module
        for module in block.modules()
        if isinstance(module, _NormBase) and module.track_running_stats
    ]
    _elsewhere()  # create it now: the recomputation must not run any new op
    selective: _Contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    outer = selective if keeps_matmuls else noop_context_fn

    def with_statistics() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, recomputation = outer()
        return forward, _statistics_kept(norms, recomputation)

    return with_statistics if norms else outer


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    from torch.utils.checkpoint import CheckpointPolicy

    is_kept = getattr(op, "namespace", "") == "aten" and op._schema.name[6:] in KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _statistics_kept(
    norms: list[Any], recomputation: AbstractContextManager[Any]
) -> Iterator[None]:
    """Update running statistics by 0 and count batches elsewhere (pytorch#96136)."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 0.0
            norm.num_batches_tracked = _elsewhere()
        with recomputation:
            yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


@functools.cache
def _elsewhere() -> torch.Tensor:
    """Return a counter on the host, where it takes no GPU memory."""
    import torch

    return torch.zeros((), dtype=torch.long)


# ---- the trick -----------------------------------------------------------------------------------


def _what(variant: Variant) -> str:
    text = variant.checkpointing
    if text == "selective":
        return "recompute in backward what is cheap; keep products of matrices and attention"
    if text == "blocks":
        return "recompute every block in backward"
    if text.startswith("every-"):
        return f"recompute one block of {text.removeprefix('every-')} in backward"
    return f"recompute in backward the {text.replace(':', ' ')}"


def code_of(variant: Variant) -> str:
    """Return the line of Python that recomputes these blocks, and nothing else."""
    text = variant.checkpointing
    listed = listed_blocks(text)
    names = "plan.block_names"
    if listed is not None:
        names = f"[{names}[number] for number in {listed}]"
    elif text.startswith("every-"):
        names = f"{names}[::{text.removeprefix('every-')}]"
    options = "use_reentrant=False"
    if text == "selective":
        kept = ", ".join(map(repr, KEPT))
        ops = f"[getattr(torch.ops.aten, name).default for name in ({kept})]"
        options += f", context_fn=partial(create_selective_checkpoint_contexts, {ops})"
    return (
        f"for block in map(model.get_submodule, {names}):"
        f" block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, {options})"
    )


def _code(variant: Variant) -> str:
    return f"oomph.apply; or, without BatchNorm: {code_of(variant)}"


def _by_hand(variant: Variant, target: str) -> list[str]:
    text = variant.checkpointing
    is_fsdps = text == "blocks" and target == "accelerate" and divides_parameters(variant)
    is_hfs = target == "hf" and (text == "blocks" or text.startswith("every-"))
    if target == "code" or is_hfs or is_fsdps:
        return []
    if text == "selective":
        which = "what is cheap in every block"
    elif text == "blocks":
        which = "every block"
    elif text.startswith("every-"):
        which = f"every block of number n * {text.removeprefix('every-')}"
    else:
        which = f"the blocks {text.removeprefix('blocks:')} only"
    return [f"checkpointing of {which}: {_code(variant)}"]


_RECOMPUTE = '''
def recompute(block):
    """Keeps nothing of the block's forward: backward runs it again. Names stay as they are."""
    forward = block.forward

    def recomputed(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=lambda: contexts(block), **kwargs
        )

    block.forward = recomputed
'''
_CONTEXTS = '''
def contexts(block):
    """What runs around a block's forward, and around its recomputation."""
    forward, again = {contexts}
    every = [m for m in block.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase)]
    norms = [norm for norm in every if norm.track_running_stats]
    return forward, statistics_kept(norms, again) if norms else again


@contextlib.contextmanager
def statistics_kept(norms, again):
    """BatchNorm does not count a batch a second time when it is recomputed."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        with again:
            yield
    finally:
        for norm, (momentum, count) in zip(norms, before):
            norm.momentum, norm.num_batches_tracked = momentum, count
'''
_SELECTIVE = '''
def keep_expensive_ops(_context, op, *_args, **_kwargs):
    """Matrix products, convolutions and attention are kept; the rest is cheap to run again."""
    policy = CheckpointPolicy
    is_expensive = op.name().split(".")[0] in EXPENSIVE
    return policy.MUST_SAVE if is_expensive else policy.PREFER_RECOMPUTE
'''
_NO_CACHE = [
    'if getattr(getattr(model, "config", None), "use_cache", False):',
    "    model.config.use_cache = False  # a recomputation would fill it a second time",
]
_SELECTIVE_IMPORT = """from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)"""


_SELECTIVELY = "create_selective_checkpoint_contexts(keep_expensive_ops)"
_EXPENSIVE = ["EXPENSIVE = (", *(f'    "aten::{name}",' for name in KEPT), ")"]


def _contexts_code(is_selective: bool) -> str:
    plain = "contextlib.nullcontext(), contextlib.nullcontext()"
    return _CONTEXTS.replace("{contexts}", _SELECTIVELY if is_selective else plain)


def _in_code(variant: Variant) -> Fragment:
    text = variant.checkpointing
    is_selective = text == "selective"
    contexts = _contexts_code(is_selective)
    imported = "from torch.utils.checkpoint import checkpoint"
    listed = listed_blocks(text)
    if listed is not None:
        lines = [
            "blocks = blocks_of(model)",
            f"for number in [{', '.join(map(str, listed))}]:",
            "    recompute(blocks[number])",
        ]
    else:
        every = f"[::{text.removeprefix('every-')}]" if text.startswith("every-") else ""
        lines = [f"for block in blocks_of(model){every}:", "    recompute(block)"]
    return Fragment(
        imports=["import contextlib", _SELECTIVE_IMPORT if is_selective else imported],
        constants=_EXPENSIVE if is_selective else [],
        functions=[*([_SELECTIVE] if is_selective else []), contexts, _RECOMPUTE],
        needs_blocks=True,
        on_model=[
            *_NO_CACHE,
            *lines,
        ],
    )


# A script's own names stay free: only `torch` is used, and functions that are not in it yet. What a
# deep copy of the model copies is in the arguments of `partial`, and so are its own blocks.
_IN_SCRIPT = '''
def recompute(model, names):
    """Keep nothing of these modules for backward, which computes them again."""
    for block in map(model.get_submodule, names):
        block.forward = functools.partial(recomputed, block, block.forward)


def recomputed(block, forward, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return torch.utils.checkpoint.checkpoint({arguments})
'''


def _in_script(variant: Variant, possible: Possible) -> Fragment:
    """Return the lines that recompute the blocks that a rehearsal found, by their names."""
    numbers = recomputed_blocks(variant.checkpointing, possible.num_blocks)
    names = [possible.block_names[number] for number in numbers]
    is_selective = variant.checkpointing == "selective"
    has_statistics = any(
        norm == name or norm.startswith(f"{name}.")
        for norm in possible.batch_norm_names
        for name in names
    )
    context, functions = "", [_IN_SCRIPT]
    if has_statistics:
        context = "context_fn=lambda: contexts(block)"
        functions.append(_contexts_code(is_selective))
    elif is_selective:
        context = f"context_fn=lambda: {_SELECTIVELY}"
    given = "forward, *args, use_reentrant=False, **kwargs"
    if context:
        given = (
            f"\n        forward,\n        *args,\n        use_reentrant=False,\n        {context},"
        )
        given += "\n        **kwargs,\n    "
    functions[0] = _IN_SCRIPT.replace("{arguments}", given)
    if possible.attention_is in ("eager", "sdpa"):  # a model of transformers
        first = "    for block in map("
        cache = "".join(f"    {line}\n" for line in _NO_CACHE)
        functions[0] = functions[0].replace(first, cache + first)
    text = "\n".join([*functions, *([_SELECTIVE] if is_selective else [])])
    for name in ("CheckpointPolicy", "create_selective_checkpoint_contexts"):
        text = re.sub(rf"(?<![.\w]){name}\b", f"torch.utils.checkpoint.{name}", text)
    return Fragment(
        imports=[
            *(["import contextlib"] if has_statistics else []),
            "import functools",
            "import torch.utils.checkpoint",
        ],
        constants=_EXPENSIVE if is_selective else [],
        functions=[text],
        on_model=[f"recompute(model, {in_short(names)})"],
    )


def in_short(names: Sequence[str]) -> str:
    """Return a Python expression for names of modules: numbers that follow each other as a range.

    [f"layers.{n}" for n in range(12)] if they differ in one number, else the list.
    """
    parts = [re.split(r"(\d+)", name) for name in names]
    differing = {
        place
        for each in parts[1:]
        for place, (one, other) in enumerate(zip(each, parts[0], strict=False))
        if one != other
    }
    listed = repr(list(names)).replace("'", '"')
    if len(names) < 3 or len(differing) != 1 or len({len(each) for each in parts}) > 1:
        return listed
    (place,) = differing
    if place % 2 == 0 or any(str(int(each[place])) != each[place] for each in parts):
        return listed
    numbers = [int(each[place]) for each in parts]
    step = numbers[1] - numbers[0]
    if step < 1 or numbers != list(range(numbers[0], numbers[-1] + 1, step)):
        return listed
    first = f"{numbers[0]}, " if numbers[0] or step > 1 else ""
    every = f", {step}" if step > 1 else ""
    before, after = "".join(parts[0][:place]), "".join(parts[0][place + 1 :])
    return f'[f"{before}{{n}}{after}" for n in range({first}{numbers[-1] + 1}{every})]'


CHECKPOINTING = Definition(
    name="checkpointing",
    stability="same",
    setting="checkpointing",
    what=_what,
    code=_code,
    why_not=lambda request: (
        None if request.possible.num_blocks else "the model has no repeated blocks"
    ),
    put_on_model=lambda model, variant: checkpoint_blocks(model, variant.checkpointing),
    by_hand=_by_hand,
    in_code=_in_code,
    in_script=_in_script,
)
