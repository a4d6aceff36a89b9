"""Replicas on several ranks (DistributedDataParallel) -> one step on all of them, or on none.

DDP averages gradients during backward, so a rank that runs out of memory there leaves the others
waiting. Here each rank runs its pieces without DDP's averaging (as in `no_sync`), in sizes of its
own. Then the ranks vote, and the vote alone decides what they do next.
"""

# A vote is one all-reduce (MIN) of a few integers on the host. It uses its own gloo group, so it
# does not wait for the GPU and cannot be confused with the model's collectives. The worst answer
# wins (`Answer`). Each rank also sends its position (`At`); if positions differ, all raise.
#
# Every rank follows this protocol in one call of `step(batch)`, whatever fails:
#
# 1. Local: check the wrapper, copy what a rollback needs, run the pieces. After an out-of-memory
#    error a rank rolls back by itself. Before an update it also prepares its gradients for sending,
#    so that everything that allocates happens here.
# 2. Vote (BATCH, LAST_BATCH, or FLUSH for `flush`). DONE: go on. AGAIN: the ranks that answered so
#    rerun their pieces while the others wait at the same vote. DOES_NOT_FIT, FAILED: all roll back
#    and raise. While batches are being accumulated, the call ends here.
# 3. If only some ranks have a gradient for a parameter, the others fill in zeros, and all vote
#    (ZEROS).
# 4. Average the gradients and broadcast the first rank's buffers: collectives on memory that is
#    already allocated.
# 5. Local: unscale, clip, copy the weights. Vote (PREPARED) if any of this was needed. Either all
#    ranks keep a copy or none does. FAILED: all roll back and raise.
# 6. Local: the optimizers step. Vote (UPDATED). DONE: the step is complete on all ranks. AGAIN (a
#    rank ran out of memory and all have copies): all restore their copy and step again, one
#    parameter at a time, then vote again; the same arithmetic on all ranks keeps their weights
#    bit-identical. FAILED with copies: all restore and raise. FAILED without copies: ranks that
#    failed receive weights and optimizer states from a rank that stepped. If memory was the only
#    cause, this repairs the step; otherwise all raise. If no rank has stepped, all raise.
#
# A rank that raises anywhere in 1 to 6 first joins the next vote of the others and answers FAILED,
# so no rank waits for one that has left. Signals are held back from 2 to 6.
#
# Adapters (HF Trainer, Lightning, accelerate) vote once per optimizer step, when the window closes,
# and in the optimizer's step as in 5 and 6. Work that a library does in between, such as clipping,
# is not covered: a rank that fails there leaves the others waiting, as with plain DDP. So does a
# rank that fails outside any call to oomph.

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oomph.errors import OomphError, UsageError
from oomph.training.recovery import Recovery, tried_twice

if TYPE_CHECKING:  # torch may have been built without distributed
    from torch.distributed import ProcessGroup

_T = TypeVar("_T")
_Forwards = AbstractContextManager[Callable[[Any], _T]]
_NEUTRAL = 2**30  # larger than any value of `At` and any rank
_SHARES = 64  # above every `At`
RANK_BITS = 20  # bits of an int32 that hold the rank, below the answer; enough for any cluster


class Answer(IntEnum):
    """A rank's answer in a vote; the lowest answer of all ranks decides."""

    FAILED = 0  # the rank raises
    DOES_NOT_FIT = 1  # not even one example fits
    AGAIN = 2  # pieces: rerun them; a copy: has none; an update: ran out of memory
    DONE = 3


class At(IntEnum):
    """Where in the protocol a rank votes."""

    BATCH = 1  # one of several that are accumulated
    LAST_BATCH = 2
    FLUSH = 3
    NOTHING_TO_FLUSH = 4
    ZEROS = 5
    PREPARED = 6
    UPDATED = 7
    PASS = 8  # before each forward of a sharded model (shards.py)
    EVALUATION = 9  # likewise, in evaluate


class Next(IntEnum):
    """What a rank of a sharded model does next; all ranks do the lowest first (shards.py)."""

    FORWARD = 1  # without backward
    WEIGH = 2  # add up the weights of all ranks' batches
    TRAIN = 3  # forward and backward of a piece
    NOTHING = 4
    NONE = 5  # this is not a vote on what comes next


class FellShortElsewhere(Exception):
    """Another rank of a sharded model ran out of memory: all ranks roll back and run again."""


class Ranks:
    """The ranks that hold replicas of a model, as seen from one of them.

    A process that trains alone is a single rank without replicas: its votes are its own answers.
    """

    def __init__(self, replicas: Sequence[DistributedDataParallel] = ()) -> None:
        """replicas: the DDP wrappers of one model; all must share one process group."""
        for each in replicas:
            _check(each)
        self._replicas = tuple(replicas)
        self._group = replicas[0].process_group if replicas else None
        if any(each.process_group != self._group for each in replicas):
            raise UsageError(
                "this model has DistributedDataParallel parts in different process groups",
                because="all ranks have to agree on each step, and these groups differ",
                attempt="one process group for all parts",
            )
        self.num_ranks = distributed.get_world_size(self._group) if replicas else 1
        self.rank = distributed.get_rank(self._group) if replicas else 0
        averaged = {
            id(parameter): parameter
            for model in replicas
            for name, parameter in model.module.named_parameters()
            if name not in model.parameters_to_ignore
        }
        self._parameters = list(averaged.values())  # those that DDP averages, each once
        self._voters, self._device = voters_of(self._group, self._parameters)
        self._sent: dict[int, torch.Tensor] = {}  # contiguous gradients, by parameter number
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffer, contiguous copy
        self.shared: torch.Tensor | None = None  # added up over the ranks, beside the gradients
        self._is_uneven = False  # some parameter has a gradient on some ranks only
        self._is_used: list[bool] = []  # per parameter: does any rank use it?
        self._weight = 1.0  # of this rank's gradients in the mean
        self._is_awaited = False  # the other ranks vote next and wait for this one
        self.worst = 0  # first rank whose answer decided the last vote

    @property
    def is_replicated(self) -> bool:
        """Return whether the model is in DistributedDataParallel, even if on one rank only."""
        return bool(self._replicas)

    @property
    def is_sharded(self) -> bool:
        """Return whether the model is sharded by FSDP2, even if on one rank only."""
        return False

    @property
    def is_joint(self) -> bool:
        """Return whether the model is replicated or sharded, even if on one rank only."""
        return self.is_replicated or self.is_sharded

    def _global(self, rank: int) -> int:
        """Return the number of a rank among all processes."""
        return rank if self._group is None else distributed.get_global_rank(self._group, rank)

    # ---- begin and end of a call -----------------------------------------------------------------

    def begin(self) -> None:
        """Mark that the others now wait for this rank's vote. Raises UsageError."""
        self._is_awaited = self.num_ranks > 1
        for model in self._replicas:
            _check_again(model)

    def end(self) -> None:
        """Clear the state of this call, once all ranks have done what they voted for."""
        self._is_awaited, self._weight = False, 1.0
        self._sent, self._buffers, self.shared = {}, [], None

    def leave(self) -> None:
        """Answer FAILED in the next vote before this rank raises, unless the others know."""
        if self._is_awaited:
            with suppress(Exception):  # the group may be gone; this rank raises anyway
                self.vote(None, Answer.FAILED)
        self.end()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Run forward and backward without waiting for other ranks."""
        names = ("require_backward_grad_sync", "require_forward_param_sync")
        before = [(model, name, getattr(model, name)) for model in self._replicas for name in names]
        try:
            for model, name, _ in before:
                setattr(model, name, False)
            yield
        finally:
            for model, name, value in before:
                setattr(model, name, value)

    # ---- votes -----------------------------------------------------------------------------------

    def vote(self, at: At | None, mine: Answer) -> Answer:
        """Return the worst answer. Raises UsageError on all ranks if their positions differ.

        at: None for a rank that is leaving, whatever its position.
        """
        if self.num_ranks == 1:
            return mine
        # Ranks that share a number must not meet one that does not: it would wait for ever.
        number = None if at is None else at + _SHARES * (self.shared is not None)
        place = (_NEUTRAL, _NEUTRAL) if number is None else (number, -number)
        facts = self._facts()
        numbers = [mine << RANK_BITS | self.rank, *place, *facts, *(-each for each in facts)]
        answers = self._least(numbers)
        least, self.worst = Answer(answers[0] >> RANK_BITS), answers[0] & ((1 << RANK_BITS) - 1)
        if least < Answer.AGAIN:
            self._is_awaited = False
        elif answers[1] not in (-answers[2], _NEUTRAL):
            self._is_awaited = False
            raise UsageError(
                "the ranks are at different points of the training loop",
                because="they call step(batch), flush() and optimizer.step() in different orders,"
                " or one has more batches than another",
                attempt="loaders that give every rank the same number of batches"
                " (DistributedSampler), and the same accumulate on all ranks",
            )
        else:
            num = len(facts)
            self._note(answers[3 : 3 + num], [-each for each in answers[3 + num :]])
        return least

    def _facts(self) -> list[int]:
        """Return what else a vote tells of this rank: which parameters have a gradient."""
        return [parameter.grad is not None for parameter in self._parameters]

    def _note(self, least: list[int], most: list[int]) -> None:
        """Note the least and the most of all ranks' facts."""
        self._is_used, self._is_uneven = [bool(each) for each in most], least != most

    def _least(self, numbers: list[int]) -> list[int]:
        """Return the minimum of each number over all ranks."""
        if self.num_ranks == 1:
            return numbers
        answers = torch.tensor(numbers, dtype=torch.int32, device=self._device)
        self._all_reduce(answers, distributed.ReduceOp.MIN)
        return [int(each) for each in answers.tolist()]

    def _all_reduce(self, numbers: torch.Tensor, by: Any) -> None:
        """Reduce a few numbers over all ranks. Raises OomphError if a rank is gone."""
        try:
            distributed.all_reduce(numbers, by, group=self._voters)
        except RuntimeError as error:
            self._is_awaited = False
            raise OomphError(
                "the other ranks do not answer",
                because=" ".join(str(error).split())[:200],
                attempt="reading the logs of the other ranks: one of them has probably ended",
            ) from error

    def settle(self, at: At, is_done: bool, recovery: Recovery) -> bool:
        """Wait until all ranks have run their pieces; False if this rank must rerun its own.

        Raises OomphError on all ranks if one of them has failed.
        """
        while True:
            mine = Answer.DONE if is_done else Answer.AGAIN
            least = self._go_on_after(self.vote(at, mine), recovery)
            if least is Answer.DONE or not is_done:
                return is_done

    def _go_on_after(self, least: Answer, recovery: Recovery) -> Answer:
        """Return the answer of a vote. Raises OomphError if a rank cannot go on."""
        if least is Answer.DOES_NOT_FIT:
            raise recovery.nothing_left(
                f"rank {self.worst} could not fit its part of the batch into memory"
            )
        if least is Answer.FAILED:
            raise self.failed_elsewhere()
        return least

    def together(self, at: At, work: Callable[[], tuple[_T, Answer]]) -> tuple[_T, Answer]:
        """Do work without collectives, then vote. If it fails on one rank, all raise."""
        self._is_awaited = self.num_ranks > 1
        try:
            result, mine = work()
        except BaseException:
            self.leave()
            raise
        least = self.vote(at, mine)
        if least < Answer.AGAIN:
            raise self.failed_elsewhere()
        return result, least

    def does_not_fit(self, recovery: Recovery, error_text: str) -> OomphError:
        """Return the error of a rank that cannot go on, after telling all other ranks."""
        if self._is_awaited:
            self.vote(None, Answer.DOES_NOT_FIT)
        return recovery.nothing_left(error_text)

    def failed_elsewhere(self) -> OomphError:
        """Return the error for ranks that did not fail themselves."""
        return OomphError(
            f"rank {self.worst} failed in this step, so no rank has updated",
            because="all ranks step together, or none does",
            attempt=f"reading the error of rank {self.worst}. Weights and optimizer are those of"
            " the last whole step, on all ranks",
        )

    # ---- the weight of a rank --------------------------------------------------------------------

    def weigh(self, total: float) -> None:
        """Let this rank's gradients count by the weight of its batches. All ranks must call it."""
        if self.num_ranks > 1 and not self.is_sharded:
            self._weight = total / self._mean_of(total)

    def _mean_of(self, number: float) -> float:
        """Return the mean of a number over all ranks. All ranks must call it."""
        total = torch.tensor([number], dtype=torch.float64, device=self._device)
        self._all_reduce(total, distributed.ReduceOp.SUM)
        return float(total) / self.num_ranks

    # ---- passes of a sharded model (shards.py) ---------------------------------------------------

    def possible_resorts(self, names: Sequence[str]) -> Sequence[str]:
        """Return those last resorts that one rank may switch on by itself."""
        return names

    def next_pass(self, recovery: Recovery, what: Next = Next.TRAIN) -> None:
        """Wait until it is this rank's turn to run a forward, or until no rank has one left."""

    def end_pass(self, *, has_failed: bool) -> None:
        """End a pass that this rank has run, or failed in, so that no other rank waits for it."""

    def fell_short(self, recovery: Recovery) -> None:
        """Tell the other ranks that this one has run out of memory and runs everything again."""

    def mean_weight(self, total: float, _recovery: Recovery) -> float:
        """Return the mean of the weights of all ranks' batches."""
        return total

    def evaluating(self, work: Callable[[Any], _T], _recovery: Recovery) -> _Forwards[_T]:
        """Return the context of an evaluation, which gives what runs a piece of it."""
        return nullcontext(work)

    # ---- gradients and buffers -------------------------------------------------------------------

    def ready(self, shared: torch.Tensor | None = None) -> None:
        """Compute this rank's part of the mean before the vote; allocate all `average` needs.

        shared: numbers that `average` adds up over the ranks, too.
        """
        self.shared = shared
        if not self._replicas:
            return
        given = {n: p.grad for n, p in enumerate(self._parameters) if p.grad is not None}
        if given:
            torch._foreach_div_(list(given.values()), self.num_ranks)
        # Strides differ between ranks; contiguous tensors have one element order on all.
        self._sent = tried_twice(lambda: {n: each.contiguous() for n, each in given.items()})
        self._buffers = tried_twice(
            lambda: [(each, each.contiguous()) for each in self._shared_buffers()]
        )

    def average(self) -> None:
        """Average all ranks' gradients and copy the first rank's buffers, after the vote."""
        if self.num_ranks == 1:
            return
        if self._is_uneven:
            self.together(At.ZEROS, lambda: (tried_twice(self._fill), Answer.DONE))
        if self._weight != 1 and self._sent:
            torch._foreach_mul_(list(self._sent.values()), self._weight)
        group, first = self._group, self._global(0)
        works = [
            distributed.all_reduce(self._sent[n], group=group, async_op=True)
            for n in sorted(self._sent)
        ]
        works += [
            distributed.broadcast(each, first, group=group, async_op=True)
            for _, each in self._buffers
        ]
        if self.shared is not None:
            works.append(distributed.all_reduce(self.shared, group=group, async_op=True))
        for work in works:
            work.wait()
        with torch.no_grad():
            for number, sent in self._sent.items():
                gradient = self._parameters[number].grad
                if gradient is not None:
                    _copy_back(gradient, sent)
            for buffer, sent in self._buffers:
                _copy_back(buffer, sent)
        # Collectives do not raise the version counter, which a rollback relies on to see changes.
        torch.autograd.graph.increment_version([buffer for buffer, _ in self._buffers])
        self._sent, self._buffers = {}, []

    def _fill(self) -> None:
        """Fill in zeros for parameters that only other ranks' examples used."""
        for number, (parameter, is_used) in enumerate(
            zip(self._parameters, self._is_used, strict=True)
        ):
            if is_used and number not in self._sent:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._sent[number] = parameter.grad.contiguous()

    def _shared_buffers(self) -> Iterator[torch.Tensor]:
        for model in self._replicas:
            if model.forward_sync_buffers:
                ignored = model.parameters_to_ignore
                named = model.module.named_buffers()
                yield from (buffer for name, buffer in named if name not in ignored)

    def clip(self, parameters: Sequence[torch.Tensor], most: float) -> torch.Tensor:
        """Clip the averaged gradients, before the vote; return their norm."""
        return nn.utils.clip_grad_norm_(parameters, most)

    def clipped(self, norm: torch.Tensor, _most: float) -> torch.Tensor:
        """Return the norm, after the vote."""
        return norm

    # ---- repairing an update that failed on some ranks -------------------------------------------

    @property
    def holds_whole_weights(self) -> bool:
        """Return whether any rank could give its weights to another one."""
        return not self.is_sharded

    def first_rank_where(self, is_so: bool) -> int | None:
        """Return the first rank where `is_so` holds. All ranks must call it."""
        (found,) = self._least([self.rank if is_so else _NEUTRAL])
        return None if found == _NEUTRAL else found

    def object_of(self, source: int, mine: Any) -> Any:
        """Return the source rank's object, made of plain values. All ranks must call it."""
        found = [mine]
        origin = self._global(source)
        distributed.broadcast_object_list(found, origin, group=self._voters)
        return found[0]

    def copy_from(self, source: int, tensors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (tensor, itself or a contiguous copy) pairs from the source to all ranks."""
        origin = self._global(source)
        for tensor, sent in tensors:
            is_voters = sent.device.type == self._device.type
            distributed.broadcast(sent, origin, group=self._voters if is_voters else self._group)
            with torch.no_grad():
                _copy_back(tensor, sent)


def _copy_back(tensor: torch.Tensor, sent: torch.Tensor) -> None:
    if sent is not tensor and sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


# ---- the voting group ----------------------------------------------------------------------------

_VOTERS: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def voters_of(
    group: ProcessGroup | None, parameters: Sequence[nn.Parameter]
) -> tuple[ProcessGroup | None, torch.device]:
    """Return a group of the same ranks and its tensors' device: the host if torch has gloo."""
    is_alone = group is None or distributed.get_world_size(group) == 1
    if group is None or is_alone or not distributed.is_gloo_available():
        return group, parameters[0].device if parameters else torch.device("cpu")
    if group not in _VOTERS:
        ranks = distributed.get_process_group_ranks(group)
        _VOTERS[group] = distributed.new_group(
            ranks, timeout=timeout_of(group), backend="gloo", use_local_synchronization=True
        )
    return _VOTERS[group], torch.device("cpu")


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return how long a group waits for a rank; None, torch's default, if it does not show that."""
    backend = group._get_backend(next(iter(group._device_types)))
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


# ---- finding replicated models -------------------------------------------------------------------


def ranks_of(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> Ranks:
    """Return the ranks of a model.

    Its DistributedDataParallel may be inside torch.compile or another module, or around the model.
    Raises UsageError for models and optimizers that wait for other ranks by themselves.
    """
    modules = list(model.modules())
    refuse_waiting([*modules, *optimizers])
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise _refused("tensor parallelism (parameters that are DTensors)")
    replicas = [each for each in modules if isinstance(each, DistributedDataParallel)]
    has_group = distributed.is_available() and distributed.is_initialized()
    if replicas or not has_group or distributed.get_world_size() == 1:
        return Ranks(replicas)
    replicas = _wrappers_around(model)
    if not replicas:
        if any(isinstance(each, nn.SyncBatchNorm) for each in modules):
            raise _refused("SyncBatchNorm")
        model.register_forward_pre_hook(_refuse_late_wrapper)
    return Ranks(replicas)


def _wrappers_around(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the wrappers around a model: its loss may call one that the model does not contain."""
    own = {id(parameter) for parameter in model.parameters()}
    wrappers = [
        each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)
    ]
    return [each for each in wrappers if own & {id(p) for p in each.parameters()}]


def _refuse_late_wrapper(*_: object) -> None:
    """Raise for a wrapper made after the Stepper, or missing from the garbage collector."""
    if DistributedDataParallel._active_ddp_module is not None:
        raise UsageError(
            "this model is called through a DistributedDataParallel that oomph was not given",
            because="after an out-of-memory error on one rank all ranks have to agree, and oomph"
            " does not know the others",
            attempt="Stepper(DistributedDataParallel(model), ...)",
        )


# Matched by name, because importing them all is slow: class, module prefix, display name.
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


def refuse_waiting(things: Iterable[nn.Module | Optimizer]) -> None:
    """Raise UsageError for modules and optimizers that wait for other ranks by themselves."""
    for kind in (kind for thing in things for kind in type(thing).__mro__):
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
        attempt="torch's DistributedDataParallel or fully_shard; or, without oomph's recovery, a"
        " plan that fits (plan.to_code())",
    )


def _check(model: DistributedDataParallel) -> None:
    """Raise UsageError if DDP does more than oomph, or the forward waits for other ranks."""
    modules = list(model.modules())
    _refuse_if(
        {
            "its mixed_precision is DDP's own": model.mixed_precision is not None,
            "SyncBatchNorm waits for other ranks in each forward": any(
                isinstance(each, nn.SyncBatchNorm) for each in modules
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
    """Check what may have changed since construction. Raises UsageError."""
    if model._join_config.enable:
        raise UsageError(
            "oomph cannot train in pieces within model.join()",
            because="it counts the forwards of each rank, and ranks may run different numbers of"
            " pieces",
            attempt="loaders that give every rank the same number of batches (DistributedSampler)",
        )
    # Built-in communication hooks show only in DDP's log.
    logged = model.logger._get_ddp_logging_data().strs_map if model.logger is not None else {}
    _refuse_if(
        {
            "static_graph=True averages in the first backward": model.static_graph,
            "a communication hook would not be called": bool(
                model._comm_hooks or logged.get("comm_hook")
            ),
            "a hook on its buffers would not be called": hasattr(model, "buffer_hook"),
        }
    )


def _refuse_if(reasons: dict[str, bool]) -> None:
    reason = next((text for text, is_so in reasons.items() if is_so), None)
    if reason is not None:
        raise UsageError(
            "this DistributedDataParallel model cannot be trained in pieces",
            because=reason,
            attempt="DistributedDataParallel(model) without it",
        )
