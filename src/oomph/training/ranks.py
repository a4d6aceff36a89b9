"""Replicas on several ranks (DistributedDataParallel) -> one step of all of them, or of none.

DDP averages gradients in the middle of backward: a rank that runs out of memory there would leave
the others waiting. So pieces are run without it (as in `no_sync`), each rank in pieces of its own
size. When a rank has its gradients, or has not, it says so; those that have none run theirs again
while the others wait. When all have theirs, gradients are averaged, as DDP does it: whatever fails
where, every rank makes the same calls in the same order.

The price: gradients are sent after backward, not during it, tensor by tensor, and each step waits
once for the GPU. A rank that ends with another error leaves the others waiting, as with DDP alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from oomph.errors import OomphError, UsageError
from oomph.training.recovery import Recovery


class Has(IntEnum):
    """What became of a rank's pieces; the least of all ranks decides."""

    NO_WAY = 0  # not even one example fits
    NOT_YET = 1  # it runs them again
    GRADIENTS = 2


class Ranks:
    """The ranks of a model that is replicated on them, as one of them sees them."""

    def __init__(self, model: DistributedDataParallel) -> None:
        _check(model)
        self._model, self._group = model, model.process_group
        self._num_ranks = distributed.get_world_size(self._group)
        ignored = model.parameters_to_ignore
        named = model.module.named_parameters()
        self._parameters = [parameter for name, parameter in named if name not in ignored]
        # Here and now: there may be no memory for it when it is needed.
        kinds = {"dtype": torch.int32, "device": self._parameters[0].device}
        self._said = torch.zeros(1 + len(self._parameters), **kinds)
        self._is_used: list[bool] = []  # each parameter, by any rank

    def begin(self) -> None:
        """Before a step: buffers (running statistics) are the first rank's, as DDP has it."""
        if self._model._join_config.enable:
            raise UsageError(
                "pieces cannot be run within model.join()",
                because="it counts the forwards of each rank, and ranks have pieces of other sizes",
                attempt="loaders that give each rank as many batches (DistributedSampler)",
            )
        if self._model.will_sync_module_buffers():
            self._model._sync_buffers()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Forward and backward in here wait for no other rank."""
        model = self._model
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = False
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    def least(self, mine: Has) -> Has:
        """What the rank has that is worst off. All ranks call it as often."""
        has_gradient = (-int(parameter.grad is not None) for parameter in self._parameters)
        self._said.copy_(torch.tensor([int(mine), *has_gradient], dtype=torch.int32))
        distributed.all_reduce(self._said, distributed.ReduceOp.MIN, group=self._group)
        least, *used = self._said.tolist()
        self._is_used = [bool(each) for each in used]
        return Has(least)

    def average(self) -> None:
        """The mean of all ranks' gradients, after all of them have some."""
        used = [p for p, is_used in zip(self._parameters, self._is_used, strict=True) if is_used]
        for parameter in used:
            if parameter.grad is None:  # another rank's examples have gone through it
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in used]
        torch._foreach_div_(gradients, self._num_ranks)
        # One order of elements on all ranks: strides are a rank's own.
        sent = [gradient.contiguous() for gradient in gradients]
        works = [distributed.all_reduce(each, group=self._group, async_op=True) for each in sent]
        for gradient, received, work in zip(gradients, sent, works, strict=True):
            work.wait()
            if received is not gradient:
                gradient.copy_(received)


def no_way(ranks: Ranks | None, recovery: Recovery, error_text: str) -> OomphError:
    """The error of a rank that has found none, after all others have heard of it."""
    if ranks is not None:
        ranks.least(Has.NO_WAY)
    return recovery.nothing_left(error_text)


def is_settled(ranks: Ranks, is_done: bool, recovery: Recovery) -> bool:
    """Waits until all have their gradients. False if this one is to run its pieces again.

    Raises OomphError, on all ranks, if one of them has found no way.
    """
    while True:
        least = ranks.least(Has.GRADIENTS if is_done else Has.NOT_YET)
        if least is Has.NO_WAY:
            raise recovery.nothing_left("another rank has found no way for its part")
        if least is Has.GRADIENTS or not is_done:
            return is_done


def ranks_of(model: Any) -> Ranks | None:
    """None for a model of one process. Raises UsageError for one that is divided over several."""
    if isinstance(model, DistributedDataParallel):
        return Ranks(model)
    if _is_divided(model):
        raise UsageError(
            "a model that is divided over ranks is not trained in pieces",
            because="its forward waits for the other ranks: an out-of-memory error of one would"
            " leave them waiting",
            attempt="DistributedDataParallel, or a plan that fits without (plan.to_code())",
        )
    return None


def _is_divided(model: Any) -> bool:
    """FSDP, FSDP2, tensor parallel: known by names, since importing them all takes its time."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        return True
    return any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())


def _check(model: DistributedDataParallel) -> None:
    """Raises UsageError where DDP does more than is done here, or the forward waits for others."""
    modules = list(model.modules())
    reasons = {
        "static_graph=True averages in the first backward": model.static_graph,
        "its mixed_precision is DDP's own": model.mixed_precision is not None,
        "a communication hook would not be called": bool(model._comm_hooks),
        "SyncBatchNorm waits for other ranks in each forward": any(
            isinstance(each, torch.nn.SyncBatchNorm) for each in modules
        ),
        "gradients of sparse embeddings are not averaged": any(
            getattr(each, "sparse", False) is True for each in modules
        ),
    }
    reason = next((text for text, is_so in reasons.items() if is_so), None)
    if reason is not None:
        raise UsageError(
            "this DistributedDataParallel model cannot be trained in pieces",
            because=reason,
            attempt="DistributedDataParallel(model) without it",
        )
