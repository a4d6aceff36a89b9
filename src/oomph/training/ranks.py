"""Replicas on several ranks (DistributedDataParallel) -> one step of all of them, or of none.

DDP averages gradients in the middle of backward: a rank that runs out of memory there leaves the
others waiting. So each rank runs its pieces without DDP's averaging (as in `no_sync`), in sizes of
its own. Ranks then vote, and what they do next follows from the vote alone.

A vote is one all-reduce (MIN) of a few integers on the host, over a gloo group of its own: it does
not wait for the GPU and cannot be taken for one of the model's collectives. The worst answer wins
(`Said`). Each rank also says where it is (`At`): ranks at different places all raise.

The protocol of one call of `step(batch)`, which is the same on every rank, whatever fails:

1. Local: check the wrapper, copy what a rollback needs, run the pieces. After an out-of-memory
   error a rank rolls back by itself. Before an update it also makes its gradients ready to be sent:
   everything that allocates is done here.
2. Vote (BATCH, LAST_BATCH, or FLUSH for `flush`). DONE: go on. AGAIN: those that said so run their
   pieces again, the others wait at the same vote. NO_WAY, FAILED: all roll back, all raise.
   While batches are accumulated the call ends here.
3. If a parameter has a gradient on some ranks only, the others make zeros for it, and all vote
   (ZEROS).
4. Gradients are averaged and buffers are the first rank's: collectives on memory that is there.
5. Local: unscale, clip, copy the weights. Vote (PREPARED), if there is anything of that to do. All
   have a copy, or none keeps one. FAILED: all roll back, all raise.
6. Local: the optimizers step. Vote (UPDATED). DONE: the step is whole on all ranks. AGAIN (a rank
   ran out of memory, and all have copies): all restore their copy and all step again, parameter by
   parameter, since the same arithmetic on all ranks keeps their weights bit-identical; then they
   vote again. FAILED with copies: all restore, all raise. FAILED without: ranks that failed receive
   weights and optimizer states from a rank that has stepped, then all raise unless the failure was
   one of memory, which is thereby mended. If no rank has stepped, all raise.

A rank that raises anything, anywhere in 1 to 6, first takes part in the vote that the others come
to next and says FAILED: nobody waits for a rank that has left. Signals are held from 2 to 6.

Adapters (HF Trainer, Lightning, accelerate) vote once per optimizer step, when the window closes,
and in their optimizer's step as in 5 and 6. What a library does between the two, such as clipping,
is its own: a rank that fails there leaves the others waiting, as with DDP alone. So does a rank
that fails outside of any call of oomph's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from oomph.errors import OomphError, UsageError
from oomph.training.recovery import Recovery, tried_twice

_T = TypeVar("_T")
_NEUTRAL = 2**30  # larger than any place
_RANK_BITS = 20


class Said(IntEnum):
    """What a rank answers in a vote; the least of all ranks decides."""

    FAILED = 0  # it raises
    NO_WAY = 1  # not even one example fits
    AGAIN = 2  # pieces: it runs them again; a copy: it has none; an update: it ran out of memory
    DONE = 3


class At(IntEnum):
    """Where a rank is when it votes."""

    BATCH = 1  # of several that are accumulated
    LAST_BATCH = 2
    FLUSH = 3
    NOTHING_TO_FLUSH = 4
    ZEROS = 5
    PREPARED = 6
    UPDATED = 7


class Ranks:
    """The ranks of a model that is replicated on them, as one of them sees them."""

    def __init__(self, replicas: Sequence[DistributedDataParallel]) -> None:
        """replicas: the wrappers of one model. More than one have the same process group."""
        for each in replicas:
            _check(each)
        self._replicas, self._group = tuple(replicas), replicas[0].process_group
        if any(each.process_group != self._group for each in replicas):
            raise UsageError(
                "this model has DistributedDataParallel parts in different process groups",
                because="all ranks have to agree on each step, and these groups differ",
                attempt="one process group for all parts",
            )
        self.num_ranks = distributed.get_world_size(self._group)
        self.rank = distributed.get_rank(self._group)
        self._parameters = _synchronised(replicas)
        self._voters, self._device = _voters(self._group, self._parameters)
        self._sent: dict[int, Any] = {}  # by parameter: its gradient, contiguous
        self._buffers: list[tuple[Any, Any]] = []
        self._is_uneven = False  # a parameter has gradients on some ranks only
        self._is_used: list[bool] = []  # each parameter, by any rank
        self._is_awaited = False  # others take part in a vote next, and count on this one
        self.worst = 0  # the first rank whose answer decided the last vote

    # ---- a call, from its beginning to its end ---------------------------------------------------

    def begin(self) -> None:
        """From here on the others count on this rank's vote. Raises UsageError."""
        self._is_awaited = self.num_ranks > 1
        for model in self._replicas:
            _check_again(model)

    def end(self) -> None:
        """All ranks have done what they voted for."""
        self._is_awaited = False
        self._sent, self._buffers = {}, []

    def leave(self) -> None:
        """Before this rank raises: say so in the vote that the others come to, unless they know."""
        if self._is_awaited:
            with suppress(Exception):  # the group may be gone: this rank raises anyway
                self.vote(None, Said.FAILED)
        self.end()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Forward and backward in here wait for no other rank."""
        with ExitStack() as stack:
            for model in self._replicas:
                stack.enter_context(_unsynchronised(model))
            yield

    # ---- votes -----------------------------------------------------------------------------------

    def vote(self, at: At | None, mine: Said) -> Said:
        """The worst answer. Raises UsageError, on all ranks, if they are at different places.

        at: None for a rank that leaves from wherever it is.
        """
        if self.num_ranks == 1:
            return mine
        place = (_NEUTRAL, _NEUTRAL) if at is None else (at, -at)
        has = [parameter.grad is not None for parameter in self._parameters]
        numbers = [mine << _RANK_BITS | self.rank, *place, *has, *(-each for each in has)]
        said = self._least(numbers)
        least, self.worst = Said(said[0] >> _RANK_BITS), said[0] & ((1 << _RANK_BITS) - 1)
        if least < Said.AGAIN:
            self._is_awaited = False
        elif said[1] != -said[2]:
            self._is_awaited = False
            raise _apart()
        else:
            num = len(has)
            by_all, by_any = said[3 : 3 + num], [-each for each in said[3 + num :]]
            self._is_used, self._is_uneven = [bool(each) for each in by_any], by_all != by_any
        return least

    def _least(self, numbers: list[int]) -> list[int]:
        """Of each number, the least of all ranks."""
        said = torch.tensor(numbers, dtype=torch.int32, device=self._device)
        try:
            distributed.all_reduce(said, distributed.ReduceOp.MIN, group=self._voters)
        except RuntimeError as error:
            self._is_awaited = False
            raise OomphError(
                "the other ranks do not answer",
                because=" ".join(str(error).split())[:200],
                attempt="reading the logs of the other ranks: one of them has probably ended",
            ) from error
        return [int(each) for each in said.tolist()]

    def settle(self, at: At, is_done: bool, recovery: Recovery) -> bool:
        """Wait until all have run their pieces. False if this rank is to run its own again.

        Raises OomphError, on all ranks, if one of them has failed.
        """
        while True:
            least = self.vote(at, Said.DONE if is_done else Said.AGAIN)
            if least is Said.NO_WAY:
                raise recovery.nothing_left(
                    f"rank {self.worst} could not fit its part of the batch into memory"
                )
            if least is Said.FAILED:
                raise self.failed_elsewhere()
            if least is Said.DONE or not is_done:
                return is_done

    def together(self, at: At, work: Callable[[], tuple[_T, Said]]) -> tuple[_T, Said]:
        """Do something that has no collectives, and vote. If it fails on one rank, all raise."""
        self._is_awaited = self.num_ranks > 1
        try:
            result, mine = work()
        except BaseException:
            self.leave()
            raise
        least = self.vote(at, mine)
        if least < Said.AGAIN:
            raise self.failed_elsewhere()
        return result, least

    def failed_elsewhere(self) -> OomphError:
        """What ranks raise that have not failed themselves."""
        return OomphError(
            f"rank {self.worst} failed in this step, so no rank has updated",
            because="all ranks step together, or none does",
            attempt=f"reading the error of rank {self.worst}. Weights and optimizer are those of"
            " the last whole step, on all ranks",
        )

    # ---- gradients and buffers -------------------------------------------------------------------

    def ready(self) -> None:
        """Before the vote: this rank's part of the mean, and all memory that `average` needs."""
        given = {n: p.grad for n, p in enumerate(self._parameters) if p.grad is not None}
        if given:
            torch._foreach_div_(list(given.values()), self.num_ranks)
        # One order of elements on all ranks: strides are a rank's own.
        self._sent = {n: tried_twice(each.contiguous) for n, each in given.items()}
        self._buffers = [(each, tried_twice(each.contiguous)) for each in self._shared_buffers()]

    def average(self) -> None:
        """After the vote: the mean of all ranks' gradients, and the first rank's buffers."""
        if self.num_ranks == 1:
            return
        if self._is_uneven:
            self.together(At.ZEROS, lambda: (tried_twice(self._fill), Said.DONE))
        group, first = self._group, distributed.get_global_rank(self._group, 0)
        works = [
            distributed.all_reduce(self._sent[n], group=group, async_op=True)
            for n in sorted(self._sent)
        ]
        works += [
            distributed.broadcast(each, first, group=group, async_op=True)
            for _, each in self._buffers
        ]
        for work in works:
            work.wait()
        with torch.no_grad():
            for number, sent in self._sent.items():
                _copy_back(self._parameters[number].grad, sent)
            for buffer, sent in self._buffers:
                _copy_back(buffer, sent)
        # Collectives do not count as writes, by which a rollback knows what has changed.
        torch.autograd.graph.increment_version([buffer for buffer, _ in self._buffers])
        self._sent, self._buffers = {}, []

    def _fill(self) -> None:
        """Zeros for parameters that only other ranks' examples have gone through."""
        for number, (parameter, is_used) in enumerate(
            zip(self._parameters, self._is_used, strict=True)
        ):
            if is_used and number not in self._sent:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._sent[number] = parameter.grad.contiguous()

    def _shared_buffers(self) -> Iterator[Any]:
        for model in self._replicas:
            if model.forward_sync_buffers:
                ignored = model.parameters_to_ignore
                named = model.module.named_buffers()
                yield from (buffer for name, buffer in named if name not in ignored)

    # ---- an update that some ranks could not make ------------------------------------------------

    def first_that(self, is_so: bool) -> int | None:
        """The first rank of which something is so. All ranks call it."""
        (found,) = self._least([self.rank if is_so else _NEUTRAL])
        return None if found == _NEUTRAL else found

    def object_of(self, source: int, mine: Any) -> Any:
        """What the source has; plain values. All ranks call it."""
        found = [mine]
        origin = distributed.get_global_rank(self._group, source)
        distributed.broadcast_object_list(found, origin, group=self._voters)
        return found[0]

    def copy_from(self, source: int, tensors: Iterable[tuple[Any, Any]]) -> None:
        """Give all ranks what the source has: each tensor, with itself or a contiguous copy."""
        origin = distributed.get_global_rank(self._group, source)
        for tensor, sent in tensors:
            is_voters = sent.device.type == self._device.type
            distributed.broadcast(sent, origin, group=self._voters if is_voters else self._group)
            with torch.no_grad():
                _copy_back(tensor, sent)


def no_way(ranks: Ranks | None, recovery: Recovery, error_text: str) -> OomphError:
    """The error of a rank that has found none, after all others have heard of it."""
    if ranks is not None:
        ranks.vote(None, Said.NO_WAY)
    return recovery.nothing_left(error_text)


def _apart() -> UsageError:
    return UsageError(
        "the ranks are at different points of the training loop",
        because="they call step(batch), flush() and optimizer.step() in different orders, or one"
        " has more batches than another",
        attempt="loaders that give every rank the same number of batches (DistributedSampler), and"
        " the same accumulate on all ranks",
    )


@contextmanager
def _unsynchronised(model: Any) -> Iterator[None]:
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = False
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before


def _copy_back(tensor: Any, sent: Any) -> None:
    if sent is not tensor and sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


def _synchronised(replicas: Sequence[DistributedDataParallel]) -> list[Any]:
    """The parameters whose gradients DDP averages, each once."""
    found: dict[int, Any] = {}
    for model in replicas:
        ignored = model.parameters_to_ignore
        for name, parameter in model.module.named_parameters():
            if name not in ignored:
                found.setdefault(id(parameter), parameter)
    return list(found.values())


# ---- the group that votes ------------------------------------------------------------------------

_VOTERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _voters(group: Any, parameters: Sequence[Any]) -> tuple[Any, torch.device]:
    """A group of the same ranks, and where its tensors are: on the host, if torch has gloo."""
    if distributed.get_world_size(group) == 1 or not distributed.is_gloo_available():
        return group, parameters[0].device if parameters else torch.device("cpu")
    if group not in _VOTERS:
        ranks = distributed.get_process_group_ranks(group)
        _VOTERS[group] = distributed.new_group(
            ranks, timeout=_timeout(group), backend="gloo", use_local_synchronization=True
        )
    return _VOTERS[group], torch.device("cpu")


def _timeout(group: Any) -> Any:
    """What the user has set for the model's group; None, for torch's own, if it does not say."""
    backend = group._get_backend(next(iter(group._device_types)))
    return getattr(getattr(backend, "options", None), "_timeout", None)


# ---- which models are replicated -----------------------------------------------------------------


def ranks_of(model: Any, optimizers: Iterable[Any] = ()) -> Ranks | None:
    """The ranks of a model, wherever its DistributedDataParallel is: inside of torch.compile or of
    another module, or around the model. None for a model of one process.

    Raises UsageError for models and optimizers whose work waits for other ranks.
    """
    modules = list(model.modules())
    for each in (*modules, *optimizers):
        _refuse_kind(each)
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise _refused("tensor parallelism (parameters that are DTensors)")
    replicas = [each for each in modules if isinstance(each, DistributedDataParallel)]
    if not replicas and _num_processes() > 1:
        replicas = _wrappers_around(model)
        if not replicas and any(isinstance(each, torch.nn.SyncBatchNorm) for each in modules):
            raise _refused("SyncBatchNorm")
        if not replicas:
            model.register_forward_pre_hook(_refuse_late_wrapper)
    return Ranks(replicas) if replicas else None


def _num_processes() -> int:
    is_there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_there else 1


def _wrappers_around(model: Any) -> list[DistributedDataParallel]:
    """A loss may call a wrapper that the model does not know of."""
    own = {id(parameter) for parameter in model.parameters()}
    wrappers = [
        each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)
    ]
    return [each for each in wrappers if own & {id(p) for p in each.parameters()}]


def _refuse_late_wrapper(*_: Any) -> None:
    """A wrapper that was made after the Stepper, or that the collector of garbage does not show."""
    if DistributedDataParallel._active_ddp_module is not None:
        raise UsageError(
            "this model is called through a DistributedDataParallel that oomph was not given",
            because="after an out-of-memory error on one rank all ranks have to agree, and oomph"
            " does not know the others",
            attempt="Stepper(DistributedDataParallel(model), ...)",
        )


# By name, since importing them all takes its time: class, where it is defined, what it is called.
_WAITING = (
    ("FullyShardedDataParallel", "", "FullyShardedDataParallel (FSDP)"),
    ("ReplicateModule", "torch.", "composable replicate()"),
    ("DDP", "torch.distributed._composable", "composable replicate()"),
    ("FSDPModule", "", "fully_shard (FSDP2)"),
    ("DataParallel", "torch.", "torch.nn.DataParallel"),
    ("Pipe", "torch.distributed", "pipeline parallelism"),
    ("DeepSpeedEngine", "", "DeepSpeed's engine"),
    ("ShardedDataParallel", "", "fairscale's ShardedDataParallel"),
    ("ZeroRedundancyOptimizer", "", "ZeroRedundancyOptimizer"),
    ("PostLocalSGDOptimizer", "", "PostLocalSGDOptimizer"),
    ("_DistributedOptimizer", "horovod", "Horovod's DistributedOptimizer"),
)


def _refuse_kind(thing: Any) -> None:
    """Raises UsageError for a module or an optimizer that waits for other ranks in its own way."""
    for kind in type(thing).__mro__:
        for name, place, called in _WAITING:
            if kind.__name__ == name and kind.__module__.startswith(place):
                raise _refused(called)
        if kind.__name__ == "DistributedDataParallel" and kind is not DistributedDataParallel:
            raise _refused(f"{kind.__module__}.DistributedDataParallel")


def _refused(called: str) -> UsageError:
    return UsageError(
        f"oomph cannot train {called} in pieces",
        because="its forward, backward or step waits for other GPUs: an out-of-memory error on one"
        " would leave the others waiting",
        attempt="torch's DistributedDataParallel; or, without oomph's recovery, a plan that fits"
        " (plan.to_code())",
    )


def _check(model: DistributedDataParallel) -> None:
    """Raises UsageError where DDP does more than is done here, or the forward waits for others."""
    modules = list(model.modules())
    _refuse_if(
        {
            "its mixed_precision is DDP's own": model.mixed_precision is not None,
            "SyncBatchNorm waits for other ranks in each forward": any(
                isinstance(each, torch.nn.SyncBatchNorm) for each in modules
            ),
            "gradients of sparse embeddings are not averaged": any(
                getattr(each, "sparse", False) is True for each in modules
            ),
            "delay_all_reduce_named_params averages in each backward": bool(
                model._delay_all_reduce_params
            ),
            'optimize_ddp="python_reducer" averages in each backward': model._use_python_reducer,
        }
    )
    _check_again(model)


def _check_again(model: DistributedDataParallel) -> None:
    """What may have been put on since. Raises UsageError."""
    if model._join_config.enable:
        raise UsageError(
            "oomph cannot train in pieces within model.join()",
            because="it counts the forwards of each rank, and ranks may run different numbers of"
            " pieces",
            attempt="loaders that give every rank the same number of batches (DistributedSampler)",
        )
    _refuse_if(
        {
            "static_graph=True averages in the first backward": model.static_graph,
            "a communication hook would not be called": _has_hook(model),
            "a hook on its buffers would not be called": hasattr(model, "buffer_hook"),
        }
    )


def _has_hook(model: DistributedDataParallel) -> bool:
    """One of Python's, or one that torch has built in, of which only its log knows."""
    logged = model.logger._get_ddp_logging_data().strs_map if model.logger is not None else {}
    return bool(model._comm_hooks or logged.get("comm_hook"))


def _refuse_if(reasons: dict[str, bool]) -> None:
    reason = next((text for text, is_so in reasons.items() if is_so), None)
    if reason is not None:
        raise UsageError(
            "this DistributedDataParallel model cannot be trained in pieces",
            because=reason,
            attempt="DistributedDataParallel(model) without it",
        )
