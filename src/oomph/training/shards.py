"""A model sharded by FSDP2 -> passes (forward and backward) that all ranks go through together.

FSDP2 gathers parameters and reduces gradients in every pass, so a rank that stops in the middle of
one leaves the others waiting. Here such a rank goes on without its examples: it issues the
collectives that are still to come, and adds zeros. When the pass is over, the ranks vote.
"""

# Every rank follows this protocol, beside that of ranks.py:
#
# 1. Before each pass all vote on what comes next (`Next`): the lowest wins. Ranks that wanted it
#    run their piece. The others have fewer pieces, or none of this kind: they follow.
# 2. A rank that follows asks a rank that runs which collectives it issues, and issues the same:
#    it gathers parameters that it does not use, and reduces zeros. Its shard of the gradients grows
#    as on every other rank. Nothing is asked in a pass that all run.
# 3. A rank that fails in its piece, for whatever reason, frees its activations, follows to the end
#    of the pass, and rolls back. After an out-of-memory error it votes AGAIN, and all roll back and
#    run the batches since the last update again: gradients of several ranks cannot be told apart
#    once they are reduced. Sizes stay each rank's own. After another error it votes FAILED.
# 4. When no rank has a piece left, all go on as in ranks.py. There is nothing to average: an update
#    changes each rank's shards by itself. One that fails without a copy cannot be repaired, since
#    no other rank has these shards.
#
# What a rank issues is a list (`_Tape`), which its main thread only appends to. A thread of its own
# sleeps in the process group's store until somebody asks, and then writes the list there, also
# while the main thread waits inside a collective. So nobody has to know in advance what a model
# will issue, and passes may differ from one another.

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oomph.errors import OomphError, UsageError
from oomph.out_of_memory import is_out_of_memory
from oomph.training.ranks import (
    RANK_BITS,
    Answer,
    At,
    FellShortElsewhere,
    Next,
    Ranks,
    ranks_of,
    refuse_waiting,
    timeout_of,
    voters_of,
)
from oomph.training.recovery import Recovery, own_part, release, tried_twice
from oomph.training.restarting import HOW, NotRecovered
from oomph.training.update import SignalsHeld
from oomph.tricks.blocks import find_blocks

if TYPE_CHECKING:  # torch may have been built without distributed
    from torch.distributed.distributed_c10d import ProcessGroup, Store

_T = TypeVar("_T")
_FOR_EVER = timedelta(days=365)
_LONG = timedelta(minutes=30)  # torch's default, for a group that does not show its own
_LEFT, _DONE = "left", "done"  # how a rank's pass has ended
_GATHER, _REDUCE = "gather", "reduce"


def ranks_of_any(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> Ranks:
    """Return the ranks of a model, which may be replicated, sharded by FSDP2, or neither.

    Raises UsageError for models and optimizers that wait for other ranks in other ways.
    """
    roots = _roots(model)
    return ShardedRanks(model, roots, optimizers) if roots else ranks_of(model, optimizers)


class ShardedRanks(Ranks):
    """The ranks that hold the shards of a model, as seen from one of them."""

    def __init__(
        self, model: nn.Module, roots: Sequence[nn.Module], optimizers: Iterable[Optimizer]
    ) -> None:
        """roots: the outermost modules that fully_shard was applied to."""
        super().__init__()
        self._model, self._shards = model, _shards_of(roots)
        _check(model, self._shards, optimizers)
        mesh, self._group = self._shards.mesh, self._shards.group
        self.num_ranks = distributed.get_world_size(self._group)
        self.rank = distributed.get_rank(self._group)
        self._voters, self._device = voters_of(self._group, list(model.parameters()))
        self._num_copies = 1 if mesh.ndim == 1 else int(mesh.size(0))
        self._clipped: list[torch.Tensor] = []  # gradients to be clipped after the vote
        self._next = Next.NONE  # what this rank votes for
        # What the last vote chose, and a rank that runs it.
        self._chosen, self._leader = Next.NONE, 0
        self._runs: Next | None = None  # what this rank runs now
        self._passes_at = At.PASS
        if self.num_ranks > 1:
            self._shards.tape.listen(self.rank)

    @property
    def is_sharded(self) -> bool:
        return True

    def begin(self) -> None:
        super().begin()
        _check_again(self._shards)

    def leave(self) -> None:
        self.end_pass(has_failed=True)
        super().leave()

    def ready(self, shared: torch.Tensor | None = None) -> None:
        """Do nothing: gradients have been reduced in the passes, and none are measured."""

    def average(self) -> None:
        """Do nothing, as in `ready`."""

    def possible_resorts(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names, without checkpointing if recomputed blocks would gather again."""
        blocks = find_blocks(self._model)
        inside = (each for block in blocks for each in block.modules() if each is not block)
        gathers_again = any(map(_is_sharded, inside))
        return [name for name in names if not (gathers_again and name == "checkpointing")]

    # ---- votes -----------------------------------------------------------------------------------

    def _facts(self) -> list[int]:
        return [self._next << RANK_BITS | self.rank]

    def _note(self, least: list[int], _most: list[int]) -> None:
        self._chosen = Next(least[0] >> RANK_BITS)
        self._leader = least[0] & ((1 << RANK_BITS) - 1)

    def settle(self, at: At, is_done: bool, recovery: Recovery) -> bool:
        """Vote once all ranks have run all pieces; False if all must run them again."""
        if not is_done:  # this rank has told the others, or has been told
            return False
        return self._go_on_after(self.vote(at, Answer.DONE), recovery) is Answer.DONE

    def fell_short(self, recovery: Recovery) -> None:
        if self.num_ranks > 1:
            self._go_on_after(self.vote(None, Answer.AGAIN), recovery)

    def mean_weight(self, total: float, recovery: Recovery) -> float:
        if self.num_ranks == 1:
            return total
        self.next_pass(recovery, Next.WEIGH)
        return self._mean_of(total)

    # ---- passes ----------------------------------------------------------------------------------

    def next_pass(self, recovery: Recovery, what: Next = Next.TRAIN) -> None:
        """Vote until all ranks want to do the same, following those that have something before.

        Raises FellShortElsewhere if another rank has run out of memory in the last pass.
        """
        with SignalsHeld():
            self.end_pass(has_failed=False)
            while self.num_ranks > 1 and self._vote_on(what, recovery) is not what:
                self._shards.tape.open()
                self._follow()
            if what in (Next.TRAIN, Next.FORWARD):
                self._shards.tape.open()
                self._runs = what

    def _vote_on(self, what: Next, recovery: Recovery) -> Next:
        """Return what all ranks do next."""
        self._next = what
        try:
            least = self.vote(self._passes_at, Answer.DONE)
        finally:
            self._next = Next.NONE
        if self._go_on_after(least, recovery) is Answer.AGAIN:
            raise FellShortElsewhere
        return self._chosen

    def end_pass(self, *, has_failed: bool) -> None:
        """End the pass that this rank runs, if it runs one."""
        runs, self._runs = self._runs, None
        if runs is None:
            return
        if self._shards.tape.is_broken:
            self._is_awaited = False  # nobody can vote any more
            raise _cannot_follow("a collective has failed: another rank has probably ended")
        if has_failed:
            self._follow()
            return
        self._shards.tape.end(_DONE)
        if runs is Next.FORWARD:  # no backward has cleaned up after it
            self._shards.reset()

    def _follow(self) -> None:
        try:
            with SignalsHeld():
                self._shards.follow(self._leader, self.rank, self.num_ranks)
        except (RuntimeError, MemoryError) as error:
            self._is_awaited = False  # they wait in a collective, not in a vote
            raise _cannot_follow(str(error) or type(error).__name__) from error

    @contextmanager
    def evaluating(
        self, work: Callable[[Any], _T], recovery: Recovery
    ) -> Iterator[Callable[[Any], _T]]:
        def run(data: Any) -> _T:
            self.next_pass(recovery, Next.FORWARD)
            try:
                return work(data)
            except BaseException as error:
                if is_out_of_memory(error):
                    release(error)
                self.end_pass(has_failed=True)
                raise

        if self._runs is not None:
            raise UsageError(
                "a sharded model cannot be evaluated in the middle of a batch",
                because="the other ranks wait for the backward of this one",
                attempt="step.evaluate(batch) between two batches",
            )
        self._passes_at = At.EVALUATION
        try:
            self.begin()
            yield run
            self.next_pass(recovery, Next.NOTHING)
        except BaseException:
            self.leave()
            raise
        finally:
            self._passes_at = At.PASS
        self.end()

    # ---- clipping --------------------------------------------------------------------------------

    def clip(self, parameters: Sequence[torch.Tensor], _most: float) -> torch.Tensor:
        """Return the square of the norm of this rank's shards; `clipped` clips, after the vote."""
        self._clipped = [own_part(p.grad) for p in parameters if p.grad is not None]
        if not self._clipped:
            return torch.zeros(())
        norms = torch._foreach_norm(self._clipped, 2)
        return torch.stack([each.double().cpu() for each in norms]).square().sum()

    def clipped(self, norm: torch.Tensor, most: float) -> torch.Tensor:
        squares = self._mean_of(float(norm)) * self.num_ranks / self._num_copies
        whole = squares**0.5
        share = most / (whole + 1e-6)  # as torch's clip_grad_norm_ has it
        if self._clipped and not share >= 1:
            torch._foreach_mul_(self._clipped, share)
        self._clipped = []
        return torch.tensor(whole, dtype=torch.float64)


def _cannot_follow(because: str) -> OomphError:
    return NotRecovered(
        "this rank cannot finish the pass that the others are in",
        because=" ".join(because.split())[:200],
        attempt=HOW,
    )


# ---- what a rank issues --------------------------------------------------------------------------

# ["gather", group] or ["reduce", group, numbers of the parameters that have gradients]
Entry = list[Any]


class _Tape:
    """The collectives of the pass that this rank is in, for other ranks to read."""

    def __init__(self, store: Store, timeout: timedelta) -> None:
        self._store, self._timeout = store, timeout
        self._changed = threading.Condition()
        self._pass = 0
        self._ended, self._is_listening = _DONE, False
        self._num_own = 0  # entries until this rank left the pass
        self.entries: list[Entry] = []
        self.is_broken = False  # a collective has failed: another rank is gone

    @property
    def is_open(self) -> bool:
        return self._ended != _DONE

    def open(self) -> None:
        with self._changed:
            self._pass += 1
            self.entries, self._ended = [], ""
            self._changed.notify_all()

    def add(self, *entry: Any) -> None:
        if self.is_open:
            with self._changed:
                self.entries.append([*entry])
                self._changed.notify_all()

    def end(self, how: str) -> None:
        with self._changed:
            self._ended, self._num_own = how, len(self.entries)
            self._changed.notify_all()

    # ---- asking and answering ------------------------------------------------------------------

    def entries_of(self, peer: int) -> Iterator[tuple[list[Entry], str]]:
        """Ask a peer, and yield what it issues in this pass as it goes on, and how it ended."""
        number = self._store.add(f"asked/{peer}", 1)
        self._store.set(f"asked/{peer}/{number}", str(self._pass))
        for part in itertools.count():
            key = _key(self._pass, peer, part)
            self._store.wait([key], self._timeout)
            entries, ended = json.loads(self._store.get(key))
            yield entries, ended
            if ended:
                return

    def listen(self, rank: int) -> None:
        """Answer other ranks from now on, in a thread."""
        if not self._is_listening:
            self._is_listening = True
            # A store waits with one request at a time.
            target, own = self._answer, cast("Any", self._store).clone()
            threading.Thread(
                target=target, args=(own, rank), name="oomph-shards", daemon=True
            ).start()

    def _answer(self, store: Store, rank: int) -> None:
        told, keys = 0, list[str]()  # the last pass that was written, and where
        for number in itertools.count(1):
            asked_by = f"asked/{rank}/{number}"
            try:
                store.wait([asked_by], _FOR_EVER)
                asked = int(store.get(asked_by))
                store.delete_key(asked_by)
                if asked > told:  # for whoever asked first; the others read the same
                    for key in keys:  # all ranks have left that pass
                        store.delete_key(key)
                    told, keys = asked, [*self._write(store, asked, rank)]
            except RuntimeError:  # the store has ended, and with it the job
                return

    def _write(self, store: Store, asked: int, rank: int) -> Iterator[str]:
        """Write what this rank issues until its pass ends; yield the keys."""
        num_told = 0
        for part in itertools.count():
            with self._changed:
                self._changed.wait_for(lambda: self._has_more(asked, num_told))  # noqa: B023
                if self._pass != asked:
                    return
                stop = self._num_own if self._ended else None
                entries, ended = self.entries[num_told:stop], self._ended
            num_told += len(entries)
            key = _key(asked, rank, part)
            store.set(key, json.dumps([entries, ended]))
            yield key
            if ended:
                return

    def _has_more(self, asked: int, num_told: int) -> bool:
        is_there = self._pass == asked and (len(self.entries) > num_told or bool(self._ended))
        return self._pass > asked or is_there


def _key(number: int, rank: int, part: int) -> str:
    return f"issued/{number}/{rank}/{part}"


class _Gathers:
    """FSDP2's all-gather, noted on the tape."""

    def __init__(self, inner: Any, tape: _Tape, note: Callable[[], None]) -> None:
        self._inner, self._tape, self._note = inner, tape, note
        self.allocate = inner.allocate

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        with SignalsHeld():  # what is noted is issued
            self._note()
            try:
                return self._inner(*tensors, **options)
            except BaseException:
                self._tape.is_broken = True
                raise


class _Reduces(_Gathers):
    """FSDP2's reduce-scatter, noted on the tape."""


# ---- the shards ----------------------------------------------------------------------------------


class _Shards:
    """The groups of parameters that FSDP2 gathers and reduces, in an order equal on all ranks."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.roots: tuple[Any, ...] = tuple(roots)
        self.modules = [each for root in roots for each in root.modules() if _is_sharded(each)]
        groups = [g for each in self.modules for g in _state_of(each)._fsdp_param_groups]
        self.groups: list[Any] = list({id(group): group for group in groups}.values())
        if not self.groups:
            raise _refused("no parameters are sharded")
        self.mesh: Any = self.groups[0].mesh_info.mesh
        self.group = _group_of(self.mesh)
        c10d: Any = distributed.distributed_c10d
        # All ranks of a group make their Steppers in the same order.
        number = _NUMBERS[self.group] = _NUMBERS.get(self.group, 0) + 1
        prefix = f"oomph/shards/{self.group.group_name}/{number}"
        store = c10d.PrefixStore(prefix, c10d._get_default_store().clone())
        self.tape = _Tape(store, timeout_of(self.group) or _LONG)
        self._reduced: list[list[int]] = [[] for _ in self.groups]
        for number, group in enumerate(self.groups):
            self._listen_to(number, group)

    def _listen_to(self, number: int, group: Any) -> None:
        tape, reduced, post_backward = self.tape, self._reduced, group.post_backward

        def finish(*unused: Any) -> None:
            if tape.is_open:
                members = enumerate(group.fsdp_params)
                reduced[number] = [n for n, each in members if _has_gradient(each)]
            with SignalsHeld():  # with copies, an all-reduce follows the reduce-scatter
                post_backward(*unused)

        group.post_backward = finish
        group._all_gather_comm = _Gathers(
            group._all_gather_comm, tape, lambda: tape.add(_GATHER, number)
        )
        group._reduce_scatter_comm = _Reduces(
            group._reduce_scatter_comm, tape, lambda: tape.add(_REDUCE, number, reduced[number])
        )

    def reset(self) -> None:
        """Return to the state between two steps: everything sharded, no pass begun.

        Gradients that have been reduced stay.
        """
        for root in self.roots:
            root.reset_iter_state()
        for group in self.groups:
            group.finalize_backward()
            for each in group.fsdp_params:
                each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None

    def follow(self, leader: int, rank: int, num_ranks: int) -> None:
        """Issue what the other ranks issue until the pass is over, adding nothing to it."""
        tape = self.tape
        tape.end(_LEFT)
        for root in self.roots:
            _state_of(root)._lazy_init()
        self.reset()
        with torch.no_grad():
            for number in range(num_ranks):
                peer = (leader + number) % num_ranks
                if peer != rank and self._follow(peer):
                    break
        self.reset()
        tape.end(_DONE)

    def _follow(self, peer: int) -> bool:
        """Follow one rank; return False if it left the pass."""
        num_seen, has_ended = 0, ""
        for entries, ended in self.tape.entries_of(peer):
            for entry in entries:
                num_seen += 1
                if num_seen > len(self.tape.entries):
                    self._issue(*entry)
            has_ended = ended
        return has_ended == _DONE

    def _issue(self, kind: str, number: int, members: Sequence[int] = ()) -> None:
        group = self.groups[number]
        if kind == _GATHER:
            tried_twice(group.unshard)
            group.wait_for_unshard()
            group._to_sharded()
            return
        for each in members:
            parameter = group.fsdp_params[each]._unsharded_param
            parameter.grad = tried_twice(lambda: torch.zeros_like(parameter))  # noqa: B023
        group.post_backward()


def _has_gradient(parameter: Any) -> bool:
    if not hasattr(parameter, "_unsharded_param"):
        return False
    has_one = parameter._unsharded_param.grad is not None
    return has_one or parameter.unsharded_accumulated_grad is not None


_NUMBERS: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()  # of shards in each group


def _shards_of(roots: Sequence[nn.Module]) -> _Shards:
    """Return the shards of these modules, which several Steppers may train."""
    state = _state_of(roots[0])
    if not hasattr(state, "_oomph_shards"):
        state._oomph_shards = _Shards(roots)
    shards: _Shards = state._oomph_shards
    return shards


# ---- finding sharded models ----------------------------------------------------------------------


def _is_sharded(module: nn.Module) -> bool:
    kinds = type(module).__mro__
    is_replicated = any(kind.__name__ == "ReplicateModule" for kind in kinds)
    return not is_replicated and any(
        kind.__name__ == "FSDPModule" and kind.__module__.startswith("torch.") for kind in kinds
    )


def _state_of(module: Any) -> Any:
    return module._get_fsdp_state()


def _roots(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that are sharded."""
    if _is_sharded(model):
        return [model]
    found = [root for child in model.children() for root in _roots(child)]
    return list(dict.fromkeys(found))


def _group_of(mesh: Any) -> ProcessGroup:
    """Return the process group of all ranks of a mesh."""
    ranks = sorted(int(each) for each in mesh.mesh.flatten())
    if mesh.ndim == 1:
        return cast("ProcessGroup", mesh.get_group())
    if len(ranks) == distributed.get_world_size():
        return cast("ProcessGroup", distributed.group.WORLD)
    return cast("ProcessGroup", distributed.new_group(ranks, use_local_synchronization=True))


def _refused(because: str) -> UsageError:
    return UsageError(
        "this model in fully_shard (FSDP2) cannot be trained in pieces",
        because=because,
        attempt="fully_shard(model) without it; or, without oomph's recovery, a plan that fits"
        " (plan.to_code())",
    )


def _check(model: nn.Module, shards: _Shards, optimizers: Iterable[Optimizer]) -> None:
    """Raise UsageError for what waits for other ranks outside of FSDP2's own collectives."""
    if not hasattr(shards.roots[0], "reset_iter_state"):
        raise _refused(f"torch {torch.__version__} cannot return from a pass that failed; 2.13 can")
    inside = {id(each) for each in shards.modules}
    plain = [each for each in model.modules() if id(each) not in inside]
    refuse_waiting([*plain, *optimizers])
    if any(isinstance(each, nn.SyncBatchNorm) for each in plain):
        raise _refused("SyncBatchNorm waits for other ranks in each forward")
    if any(isinstance(each, DistributedDataParallel) for each in plain):
        raise _refused("a part of it is in DistributedDataParallel")
    if any(group.mesh_info.mesh != shards.mesh for group in shards.groups):
        raise _refused("its parts are sharded over different ranks")
    sharded = [each for group in shards.groups for each in group.fsdp_params]
    if any(each.is_dtensor for each in sharded):
        raise _refused("its parameters are divided by tensor parallelism, too")
    known = {id(each.sharded_param) for each in sharded}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise _refused(f"{name} is not sharded, so its gradient would differ between ranks")
    _check_again(shards)


def _check_again(shards: _Shards) -> None:
    """Check what may have changed since construction. Raises UsageError."""
    for group in shards.groups:
        reasons = {
            "set_requires_gradient_sync(False) keeps whole gradients": not group.reduce_grads,
            "set_requires_all_reduce(False) leaves its copies apart": not group.all_reduce_grads,
            "set_reshard_after_backward(False) keeps what it gathered": (
                not group.reshard_after_backward
            ),
            "reshard_after_forward is a number of ranks": group._use_post_forward_mesh,
            "its all-reduce hook may wait for other ranks": group._all_reduce_hook is not None,
        }
        reason = next((text for text, is_so in reasons.items() if is_so), None)
        if reason is not None:
            raise _refused(reason)
