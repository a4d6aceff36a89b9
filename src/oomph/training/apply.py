"""How, a model, an optimizer -> the same with the tricks put on them, in the order that they need.

First the model as it is built, then on its GPU, before its optimizer is made; then the optimizer;
then what is around each forward.
Torch is imported when something is put on, and not before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from oomph.records.workload import How


def put_on_built(model: Any, how: How) -> Any:
    """The model with what of `how` comes before it is moved to the GPU."""
    if how.adapters != "none":
        from oomph.training.adapters import put_adapters

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
