"""Blocks of a model -> the same blocks, recomputed in backward instead of kept.

The forward of a block is wrapped, and not the block: the keys of the state dict stay as they are.
What is recomputed gives what was computed: dropout drops the same (torch keeps the state of its
generators), statistics are not updated twice, nothing is written to a cache of keys and values.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint as torch_checkpoint

from oomph.errors import UsageError
from oomph.records.checkpointing import recomputed_blocks
from oomph.training.blocks import find_blocks

# "selective" keeps what these return and recomputes the rest: element by element, norms, dropout.
# They take nearly all the time of a block. As torchtitan's list (torchtitan/distributed/
# activation_checkpoint.py), and every matmul, where torchtitan keeps every second.
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
# What blocks of transformers call the cache of keys and values (GradientCheckpointingLayer).
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def checkpoint_blocks(model: Any, checkpointing: str) -> None:
    """Recompute blocks in backward. Raises UsageError where there are none."""
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
    """The model's own recomputation, and its cache of keys and values, which both would fill."""
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
    if hasattr(model, "set_grad_checkpointing"):  # timm's name
        model.set_grad_checkpointing(False)
    without: dict[int, Any] = {}  # copies: the user's own configuration stays as it is
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            if id(config) not in without:
                without[id(config)] = copy.copy(config)
                without[id(config)].use_cache = False
            module.config = without[id(config)]


class _Recomputed:
    """A block's forward, checkpointed without reentrance: keyword arguments and hooks work."""

    def __init__(self, block: Any, *, keeps_matmuls: bool) -> None:
        functools.update_wrapper(self, block.forward)  # its signature is asked for
        self._forward = block.forward
        self._contexts = _contexts(block, keeps_matmuls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return torch_checkpoint.checkpoint(
            self._forward,
            *map(_as_it_is_now, args),
            use_reentrant=False,
            context_fn=self._contexts,
            **{name: _as_it_is_now(value) for name, value in _without_cache(kwargs).items()},
        )


def _as_it_is_now(argument: Any) -> Any:
    """A list that the model goes on to fill (as a DenseNet does) is recomputed as it was."""
    return argument.copy() if type(argument) in (list, dict) else argument


def _without_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without the cache of keys and values, which the recomputation would fill once more."""
    changed = dict.fromkeys(_CACHES) | {"use_cache": False}
    return {name: changed.get(name, value) for name, value in arguments.items()}


# ---- what forward and recomputation run in ----------------------------------------------------

_Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def _contexts(block: Any, keeps_matmuls: bool) -> _Contexts:
    norms = [
        module
        for module in block.modules()
        if isinstance(module, _NormBase) and module.track_running_stats
    ]
    selective: _Contexts = functools.partial(
        torch_checkpoint.create_selective_checkpoint_contexts, _policy
    )
    outer = selective if keeps_matmuls else torch_checkpoint.noop_context_fn
    return functools.partial(_with_statistics_kept, norms, outer) if norms else outer


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> torch_checkpoint.CheckpointPolicy:
    is_kept = getattr(op, "namespace", "") == "aten" and op._schema.name[6:] in KEPT
    policies = torch_checkpoint.CheckpointPolicy
    return policies.MUST_SAVE if is_kept else policies.PREFER_RECOMPUTE


def _with_statistics_kept(
    norms: list[Any], contexts: _Contexts
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, recomputation = contexts()
    return forward, _both(recomputation, norms)


@contextlib.contextmanager
def _both(recomputation: AbstractContextManager[Any], norms: list[Any]) -> Iterator[None]:
    with recomputation, _statistics_kept(norms):
        yield


@contextlib.contextmanager
def _statistics_kept(norms: list[Any]) -> Iterator[None]:
    """Running statistics are updated by 0, and batches counted elsewhere (pytorch#96136)."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 0.0
            norm.num_batches_tracked = _ELSEWHERE
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


_ELSEWHERE = torch.zeros((), dtype=torch.long)  # on the host: it takes no memory of the GPU
