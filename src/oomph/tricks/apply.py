"""Variant, model, optimizer -> the model and optimizer with the variant's tricks applied.

Tricks apply in this order: to the model as it is built, to the model on its GPU before the
optimizer is made, to the optimizer, and around each forward. Each trick's own file defines what it
does at each point.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch

from oomph.errors import UsageError
from oomph.records.plan import Plan
from oomph.records.workload import Possible, Variant, check_optimizer, divides_parameters
from oomph.tricks.blocks import named_blocks
from oomph.tricks.definition import Definition, MakeOptimizer
from oomph.tricks.sdpa import attention_is
from oomph.tricks.sharding import start_alike
from oomph.tricks.trick import TRICKS, to_put_on

_prepared: WeakSet[Any] = WeakSet()  # models and optimizers that a plan has been applied to


def apply(
    plan: Plan, model: torch.nn.Module, make_optimizer: MakeOptimizer | None = None
) -> torch.nn.Module | tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Apply a plan's tricks to a model, before its optimizer is made, and return the model.

    A plan for several GPUs needs its ranks running (torchrun, init_process_group). The model is
    then returned in DistributedDataParallel, or sharded by FSDP2 with the first rank's weights.

    With `make_optimizer` (parameters -> optimizer), return the model and its planned optimizer.
    Autocast, the loss scaler and offloaded activations go around each forward: use a Stepper.
    """
    variant = plan.variant
    for trick in to_put_on(variant):
        _check_it_is_whole(trick, has_optimizer=make_optimizer is not None)
    for trick in to_put_on(variant):
        trick.before_cuda()
    set_precision(variant)
    put_on_built(model, variant)
    for trick in to_put_on(variant):
        if trick.cast is not None:
            trick.cast(model)
    if divides_parameters(variant):
        start_alike(model, variant)
    model = put_on_model(model, variant)
    _prepared.add(model)
    if make_optimizer is None:
        return model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = put_on_optimizer(make_optimizer, parameters, variant)
    _prepared.add(optimizer)
    return model, optimizer


def _check_it_is_whole(trick: Definition, *, has_optimizer: bool) -> None:
    if trick.needs_optimizer and not has_optimizer:
        raise UsageError(
            f"{trick.name} cannot be applied to a model alone",
            because="an optimizer of your own would train other weights than the plan's",
            attempt="model, optimizer = oomph.apply(plan, model, make_optimizer)",
        )


def put_on_made(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], variant: Variant
) -> None:
    """Apply what is still possible once there is an optimizer. Raises UsageError if too late."""
    tricks = to_put_on(variant)
    if model not in _prepared:
        for trick in tricks:
            _check_not_too_late(trick.too_late_for_model(model))
        put_on_model(model, replace(variant, optimizer="as-is", sharding="none"))
        _prepared.add(model)
    for optimizer in optimizers:
        if optimizer not in _prepared:
            for trick in tricks:
                _check_not_too_late(trick.too_late_for_optimizer)
            for trick in tricks:
                trick.put_on_made(optimizer)
            _prepared.add(optimizer)


def _check_not_too_late(what: str | None) -> None:
    if what is not None:
        raise UsageError(
            f"{what} can no longer be applied",
            because="the optimizer was already made for the unchanged parameters",
            attempt="model, optimizer = oomph.apply(plan, model, make_optimizer)",
        )


def set_precision(variant: Variant) -> None:
    """Set torch's global switches: TF32."""
    for trick in to_put_on(variant):
        trick.switch_on()


def put_on_built(model: torch.nn.Module, variant: Variant) -> torch.nn.Module:
    """Apply the tricks that come before the model is moved to the GPU."""
    for trick in to_put_on(variant):
        if trick.put_on_built is not None:
            trick.put_on_built(model, variant)
    return model


def put_on_model(model: torch.nn.Module, variant: Variant) -> torch.nn.Module:
    """Apply the tricks that change the model. Make the optimizer from the returned parameters.

    Sharding comes last, so that what is gathered for a block stays for its recomputation.
    """
    tricks = to_put_on(variant)
    for trick in tricks:
        trick.put_on_model(model, variant)
    for trick in tricks:
        model = trick.divide(model, variant)
    return model


def exchanged(optimizer: torch.optim.Optimizer, variant: Variant) -> torch.optim.Optimizer:
    """Return the optimizer that replaces the user's own in a variant. Raises UsageError."""
    check_optimizer(variant.optimizer)
    for trick in to_put_on(variant):
        optimizer = trick.exchange_optimizer(optimizer)
    return optimizer


def put_on_optimizer(
    make: MakeOptimizer, parameters: Any, variant: Variant
) -> torch.optim.Optimizer:
    """Make the variant's optimizer, calling the user's function to make theirs."""

    def made(of: Any) -> torch.optim.Optimizer:
        return exchanged(make(of), variant)

    tricks, maker = to_put_on(variant), made
    for trick in tricks:
        maker = functools.partial(trick.make_optimizer, maker)
    optimizer = maker(parameters)
    for trick in tricks:
        optimizer = trick.put_on_optimizer(optimizer)
    return optimizer


@contextlib.contextmanager
def around_forward(variant: Variant) -> Iterator[None]:
    """Run a forward inside the contexts of the variant's tricks."""
    with contextlib.ExitStack() as stack:
        for trick in to_put_on(variant):
            stack.enter_context(trick.around_forward())
        yield


# ---- what can be applied to a model --------------------------------------------------------------

_BATCH_NORMS = (torch.nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (torch.nn.modules.dropout._DropoutNd,)


def possible(model: torch.nn.Module, optimizer: Any) -> Possible:
    """Inspect a model and its optimizer, without running or changing anything."""
    parameters = list(model.parameters())
    kind = type(optimizer)
    looked = ((trick.name, trick.why_not_on(model)) for trick in TRICKS)
    return Possible(
        block_names=tuple(name for name, _ in named_blocks(model)),
        attention_is=attention_is(model),
        optimizer_class=f"{kind.__module__}.{kind.__qualname__}",
        batch_norm_names=tuple(
            name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)
        ),
        has_dropout=any(_drops(module) for module in model.modules()),
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        impossible={name: why for name, why in looked if why is not None},
    )


def _drops(module: torch.nn.Module) -> bool:
    """Return whether it is dropout, or has it as an option (nn.LSTM, nn.MultiheadAttention)."""
    if isinstance(module, _DROPOUTS):
        return bool(module.p > 0)
    dropout = vars(module).get("dropout", 0)  # diffusers' models warn if they are asked for it
    return isinstance(dropout, float) and dropout > 0
