"""How, a model, an optimizer -> the same with the tricks put on them, in the order that they need.

First the model as it is built, then on its GPU, before its optimizer is made; then the optimizer;
then what is around each forward.
Torch is imported when something is put on, and not before.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from oomph.errors import UsageError
from oomph.records.plan import Plan
from oomph.records.workload import How, Variant

_prepared: WeakSet[Any] = WeakSet()  # models and optimizers that a plan has been put on
# Switches of the user's own optimizer; whatever else a plan has is another optimizer.
_SWITCHES = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}


def apply(plan: Plan, model: Any, make_optimizer: Callable[[Any], Any] | None = None) -> Any:
    """The model with a plan's tricks on it, before its optimizer is made.

    With `make_optimizer` (parameters -> optimizer) the model and its optimizer, as planned.
    Autocast, the loss scaler and offloaded activations are around each forward: a Stepper does it.
    """
    how = plan.variant
    set_allocator(how)
    set_precision(how)
    put_on_built(model, how)
    if how.precision == "pure-bf16":
        import torch

        model.to(torch.bfloat16)
    model = put_on_model(model, how)
    _prepared.add(model)
    if make_optimizer is None:
        return model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = put_on_optimizer(make_optimizer, parameters, how)
    _prepared.add(optimizer)
    return model, optimizer


def put_on_made(model: Any, optimizers: Sequence[Any], how: How) -> None:
    """What a plan can still change once there is an optimizer. Raises UsageError for the rest."""
    if model not in _prepared:
        _check_not_too_late("adapters", how.adapters != "none")
        _check_not_too_late("pure bf16", how.precision == "pure-bf16" and _is_in_fp32(model))
        put_on_model(model, replace(how, optimizer="as-is", sharding="none"))
        _prepared.add(model)
    for optimizer in optimizers:
        if optimizer not in _prepared:
            _put_on_made_optimizer(optimizer, how)
            _prepared.add(optimizer)


def _put_on_made_optimizer(optimizer: Any, how: How) -> None:
    _check_not_too_late("an offloaded optimizer", how.offload_optimizer)
    _check_not_too_late(how.optimizer, how.optimizer not in ("as-is", *_SWITCHES))
    for group in optimizer.param_groups if how.optimizer in _SWITCHES else ():
        group.update({n: on for n, on in _SWITCHES[how.optimizer].items() if n in group})
    if how.optimizer_in_backward:
        from oomph.training.in_backward import step_in_backward

        step_in_backward(optimizer)


def _check_not_too_late(what: str, is_wanted: bool) -> None:
    if is_wanted:
        raise UsageError(
            f"{what} cannot be put on any more",
            because="the optimizer has been made of the parameters as they are",
            attempt="model, optimizer = oomph.apply(plan, model, make_optimizer)",
        )


def _is_in_fp32(model: Any) -> bool:
    return any(parameter.element_size() > 2 for parameter in model.parameters())


def set_precision(how: How) -> None:
    """TF32 is a switch of torch itself."""
    if how.precision == "tf32":
        import torch

        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True


def set_allocator(how: Variant) -> None:
    """Expandable segments, which CUDA's allocator reads when it starts. Raises UsageError."""
    if not how.expandable_segments:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        if "expandable_segments:True" in (settings or ""):
            return
        raise UsageError(
            "expandable segments cannot be switched on any more",
            because="CUDA has started, and its allocator with it",
            attempt="PYTORCH_ALLOC_CONF=expandable_segments:True in the environment",
        )
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # torch since 2.9, and before
        os.environ.setdefault(name, "expandable_segments:True")


def put_on_built(model: Any, how: How) -> Any:
    """The model with what of `how` comes before it is moved to the GPU."""
    if how.adapters != "none":
        from oomph.training.low_rank import put_adapters

        put_adapters(model, is_quantised=how.adapters == "qlora")
    return model


def put_on_model(model: Any, how: How) -> Any:
    """The model with what of `how` changes it. The optimizer is made of its parameters."""
    if how.attention == "sdpa":
        from oomph.training.attention import use_sdpa

        use_sdpa(model)
    if how.loss == "chunked":
        from oomph.training.chunked_loss import chunk_loss

        chunk_loss(model)
    if how.checkpointing != "none":
        from oomph.training.checkpointing import checkpoint_blocks

        checkpoint_blocks(model, how.checkpointing)
    if how.optimizer != "as-is":
        from oomph.training.eight_bits import mark_embeddings
        from oomph.training.optimizers import check_model

        check_model(model, how.optimizer)
        mark_embeddings(model)
    if how.sharding != "none":  # last: what is gathered for a block is kept for its recomputation
        from oomph.training.sharding import put_on_ranks

        return put_on_ranks(model, how)
    return model


def put_on_optimizer(make: Callable[[Any], Any], parameters: Any, how: How) -> Any:
    """The optimizer that `how` asks for, made as the user makes theirs."""

    def made(of: Any) -> Any:
        if how.optimizer == "as-is":
            return make(of)
        from oomph.training.optimizers import changed

        return changed(make(of), how.optimizer)

    if how.offload_optimizer:
        from oomph.training.offload_optimizer import make_on_host

        return make_on_host(made, parameters)
    if how.optimizer_in_backward:
        from oomph.training.in_backward import step_in_backward

        return step_in_backward(made(parameters))
    return made(parameters)


def around_forward(how: How) -> AbstractContextManager[Any]:
    """What each forward runs in."""
    if how.offload_activations:
        from oomph.training.offload_activations import offloaded_activations

        return offloaded_activations()
    return contextlib.nullcontext()
