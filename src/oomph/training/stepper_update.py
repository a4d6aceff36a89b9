"""Gradients of a whole batch -> one step of the optimizers, whole or not at all.

Unscaled and clipped once, after the last piece; schedulers go on with each step, and not where a
loss scaler skipped one. An optimizer that runs out of memory is set back, if a copy of the weights
was kept, and tried once more parameter by parameter, which needs the least memory. On several
ranks all of them step or none does; ranks.py has the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from oomph.errors import OomphError, UsageError
from oomph.training.out_of_memory import is_out_of_memory
from oomph.training.ranks import At, Ranks, Said
from oomph.training.recovery import half_updated, release, said_by, tried_twice
from oomph.training.rollback_update import UpdateCopy, parameters_of

Copies = Literal["first", "always", "never"]
_HALF = "oomph: some parameters may have been updated and others not. Load the last checkpoint."


@dataclass(slots=True)
class _Failure:
    """What an optimizer's step raised. One of memory holds no frames any more."""

    error: BaseException
    is_of_memory: bool
    text: str


class Update:
    """The optimizers' side of a Stepper."""

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        *,
        scaler: Any = None,
        clip_grad_norm: float | None = None,
        copies: Copies = "first",
        ranks: Ranks | None = None,
        parameters: Callable[[], list[Any]] | None = None,
    ) -> None:
        """ranks: gradients are averaged over them, and all of them step or none does.

        parameters: whose gradients these are; unless said, the model's and the optimizers'.
        """
        _check(schedulers, copies)
        self.ranks, self._own_parameters = ranks, parameters
        self.optimizers, self._model, self._scaler = tuple(optimizers), model, scaler
        self._schedulers, self._clip, self._copies = tuple(schedulers), clip_grad_norm, copies
        self._num_updated = 0  # parameters that have been updated: they have their states

    def __call__(self, factor: float) -> Any:
        """Step with the gradients that are there, times a factor; the norm, where it is clipped.

        On several ranks `scale` has been called before, and then they have voted.
        """
        try:
            if self.ranks is None:
                self.scale(factor)
            else:
                self.ranks.average()
            norm = self._step(self._clipped if self._clip is not None else None)
        except BaseException:
            self._forget_unscaled()
            raise
        return norm

    def scale(self, factor: float) -> None:
        """Only gradients change: what fails here can be done again."""
        if factor != 1:
            gradients = [p.grad for p in self._parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, factor)
        if self.ranks is not None:
            self.ranks.ready()

    def _clipped(self) -> Any:
        if self._scaler:
            for optimizer in self.optimizers:
                self._scaler.unscale_(optimizer)
        parameters = self._parameters()
        return tried_twice(lambda: torch.nn.utils.clip_grad_norm_(parameters, self._clip or 0))

    def _parameters(self) -> list[Any]:
        if self._own_parameters is not None:
            return self._own_parameters()
        both = [*self._model.parameters(), *(p for o in self.optimizers for p in parameters_of(o))]
        return list({id(parameter): parameter for parameter in both}.values())

    # ---- the step of the optimizers ------------------------------------------------------------

    def _step(self, prepare: Callable[[], Any] | None = None) -> Any:
        """prepare: what gradients need first; what it returns is returned."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        num_parameters = sum(len(group["params"]) for group in groups)
        is_first = num_parameters != self._num_updated
        is_copied = self._copies == "always" or (self._copies == "first" and is_first)
        prepared, copied = self._prepared(prepare, is_copied=is_copied)
        failure = self._tried()
        least = self._least(failure, may_try_again=copied is not None)
        if least is Said.AGAIN and copied is not None:
            copied.restore()
            self._go_one_by_one()
            self._forget_stepped()
            failure = self._tried()
            least = self._least(failure, may_try_again=False)
        if least is not Said.DONE:
            self._end_badly(failure, least, copied)
        if self.ranks is not None:
            self.ranks.end()
        self._num_updated = num_parameters
        return prepared

    def _prepared(
        self, prepare: Callable[[], Any] | None, *, is_copied: bool
    ) -> tuple[Any, UpdateCopy | None]:
        """What `prepare` returns, and a copy of what changes, if all ranks have one."""
        is_unscaled = bool(self._scaler) and (is_copied or self.ranks is not None)
        if prepare is None and not is_copied and not is_unscaled:
            return None, None

        def work() -> tuple[tuple[Any, UpdateCopy | None], Said]:
            result = prepare() if prepare is not None else None
            copied = self._copied() if is_copied else None
            if is_unscaled and (copied is not None or self.ranks is not None):
                self._unscale()
            has_less = is_copied and copied is None
            return (result, copied), Said.AGAIN if has_less else Said.DONE

        if self.ranks is None:
            return work()[0]
        (result, copied), least = self.ranks.together(At.PREPARED, work)
        return result, copied if least is Said.DONE else None

    def _tried(self) -> _Failure | None:
        """Step. None if all went well."""
        try:
            self._step_each()
        except BaseException as error:  # noqa: BLE001 - raised when all ranks know of it
            failure = _Failure(error, is_out_of_memory(error), said_by(error))
            if failure.is_of_memory:
                release(error)
            return failure
        return None

    def _least(self, failure: _Failure | None, *, may_try_again: bool) -> Said:
        """What the rank says that is worst off."""
        mine = Said.DONE
        if failure is not None:
            if not failure.is_of_memory:
                mine = Said.FAILED
            else:
                mine = Said.AGAIN if may_try_again else Said.NO_WAY
        return mine if self.ranks is None else self.ranks.vote(At.UPDATED, mine)

    def _go_one_by_one(self) -> None:
        """One parameter after the other, without temporaries for all of them."""
        for optimizer in self.optimizers:
            _one_by_one(optimizer)

    def _unscale(self) -> None:
        """Before the step: a fused one would do it on its way, and could not do it twice."""
        for optimizer in self.optimizers if self._scaler else ():
            state = self._scaler._per_optimizer_states[id(optimizer)]
            if state["stage"] is torch.amp.grad_scaler.OptState.READY:
                self._scaler.unscale_(optimizer)

    def _copied(self) -> UpdateCopy | None:
        """None if the host has no memory for it: then the step goes on without."""
        try:
            return UpdateCopy(self.optimizers)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            return None

    def _step_each(self) -> None:
        for optimizer in self.optimizers:
            if self._scaler:
                self._scaler.step(optimizer)
            else:
                optimizer.step()

    # ---- when it fails for good ----------------------------------------------------------------

    def _end_badly(self, failure: _Failure | None, least: Said, copied: UpdateCopy | None) -> None:
        """Raise, on all ranks; not if the failure of some could be mended by the others."""
        if copied is not None:
            copied.restore()
        elif self._is_healed(has_stepped=failure is None):
            if least is Said.NO_WAY:  # memory alone: all have stepped now
                self._go_one_by_one()
                return
            if failure is None or failure.is_of_memory:
                raise self._stepped_though_failed()
        elif failure is None and least is Said.FAILED:
            raise self._failed_half_way()
        elif failure is None or failure.is_of_memory:
            raise half_updated(self._text(failure)) from None
        else:
            _note(failure.error, _HALF)
        if failure is not None and not failure.is_of_memory:
            raise failure.error
        if failure is None and least is Said.FAILED and self.ranks is not None:
            raise self.ranks.failed_elsewhere()
        raise OomphError(
            "the optimizer's step does not fit into memory",
            because=self._text(failure),
            attempt="oomph plan, to find an 8-bit optimizer or one on the host. Weights and"
            " optimizer are those of the last whole step",
        ) from None

    def _text(self, failure: _Failure | None) -> str:
        if failure is not None:
            return failure.text
        return f"it failed on rank {self.ranks.worst if self.ranks else 0}"

    def _failed_half_way(self) -> OomphError:
        worst = self.ranks.worst if self.ranks else 0
        return OomphError(
            f"the optimizer failed on rank {worst} in the middle of its step",
            because="this rank has stepped and that one has not, or only in part",
            attempt=f"reading the error of rank {worst}, then loading the last checkpoint;"
            ' Stepper(..., copies="always") can undo such a step',
        )

    def _stepped_though_failed(self) -> OomphError:
        worst = self.ranks.worst if self.ranks else 0
        return OomphError(
            f"the optimizer failed on rank {worst}",
            because="all ranks stop together. Those that failed have received the weights and the"
            " optimizer states of those that have stepped",
            attempt=f"reading the error of rank {worst}. Weights and optimizer are those after"
            " this step, on all ranks",
        )

    def _is_healed(self, *, has_stepped: bool) -> bool:
        """Did ranks that failed receive what others have? Without a copy, that is the way back."""
        ranks = self.ranks
        source = ranks.first_that(has_stepped) if ranks is not None else None
        if ranks is None or source is None:
            return False
        described = ranks.object_of(source, [_described(each) for each in self.optimizers])
        tensors: list[tuple[Any, Any]] = []
        try:
            for optimizer, each in zip(self.optimizers, described, strict=True):
                tensors += [(t, t.detach().contiguous()) for t in _made_like(optimizer, *each)]
            has_room = True
        except RuntimeError:
            has_room = False
        if ranks.first_that(not has_room) is not None:
            return False
        ranks.copy_from(source, tensors)
        return True

    def finish(self) -> None:
        """After a step: what goes on with it. What the user's schedules raise is raised."""
        is_skipped = False
        if self._scaler:
            before = self._scaler.get_scale() if self._schedulers else 0
            self._scaler.update()
            is_skipped = bool(self._schedulers) and self._scaler.get_scale() < before
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        try:
            for scheduler in () if is_skipped else self._schedulers:
                scheduler.step()
        except Exception as error:
            _note(error, "oomph: the optimizer has stepped before; the weights are whole")
            raise

    def _forget_unscaled(self) -> None:
        """The scaler would refuse to unscale the next gradients of these optimizers."""
        if self._scaler:
            for optimizer in self.optimizers:
                self._scaler._per_optimizer_states.pop(id(optimizer), None)

    def _forget_stepped(self) -> None:
        """An optimizer before the one that failed has been set back: it is to step again."""
        if self._scaler:
            for optimizer in self.optimizers:
                state = self._scaler._per_optimizer_states[id(optimizer)]
                if state["stage"] is torch.amp.grad_scaler.OptState.STEPPED:
                    state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED


def _note(error: BaseException, text: str) -> None:
    """Beside the traceback, from Python 3.11 on; the error stays what it is."""
    if hasattr(error, "add_note"):
        error.add_note(text)


def _one_by_one(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group.update({name: False for name in ("foreach", "fused") if name in group})
    # A fused step asks what the scaler has left on the optimizer; others refuse to see it.
    optimizer._step_supports_amp_scaling = False
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


# ---- what an update changes, from rank to rank -------------------------------------------------

_Described = dict[str, Any]  # plain values, and _Shape for tensors


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor without what is in it."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device_kind: str


def _described(optimizer: Any) -> tuple[dict[int, _Described], list[_Described]]:
    """The states by the number of their parameter, and the groups."""
    numbered = enumerate(parameters_of(optimizer))
    states = {n: optimizer.state[p] for n, p in numbered if p in optimizer.state}
    return (
        {n: _entries(state) for n, state in states.items() if isinstance(state, dict)},
        [_entries(group) for group in optimizer.param_groups],
    )


def _entries(state: dict[str, Any]) -> _Described:
    """Objects that are neither tensors nor plain stay what they are on each rank."""
    found: _Described = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            found[name] = _Shape(tuple(value.shape), value.dtype, value.device.type)
        elif isinstance(value, bool | int | float | str | None | tuple):
            found[name] = value
    return found


def _made_like(
    optimizer: Any, states: dict[int, _Described], groups: list[_Described]
) -> list[Any]:
    """Make an optimizer's entries those that are described. All its tensors, to be filled."""
    parameters = parameters_of(optimizer)
    tensors = list(parameters)
    for number, parameter in enumerate(parameters):
        if number in states:
            tensors += _fill_in(optimizer.state[parameter], states[number], parameter.device)
        elif isinstance(optimizer.state.get(parameter), dict):
            del optimizer.state[parameter]
    for group, each in zip(optimizer.param_groups, groups, strict=True):
        tensors += _fill_in(group, each, group["params"][0].device)
    return tensors


def _fill_in(state: dict[str, Any], described: _Described, device: torch.device) -> list[Any]:
    tensors = []
    for name, value in described.items():
        if isinstance(value, _Shape):
            there = state.get(name)
            if not isinstance(there, torch.Tensor) or tuple(there.shape) != value.sizes:
                place = device if device.type == value.device_kind else value.device_kind
                state[name] = torch.empty(value.sizes, dtype=value.dtype, device=place)
            tensors.append(state[name])
        else:
            state[name] = value
    return tensors


def _check(schedulers: Sequence[Any], copies: str) -> None:
    if copies not in ("first", "always", "never"):
        raise UsageError(f"{copies!r:.40} is no time to copy weights", attempt='copies="first"')
    if any(isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau) for s in schedulers):
        raise UsageError(
            "ReduceLROnPlateau cannot go on with each step",
            because="it wants a measure of the validation",
            attempt="calling its step(measure) in your loop",
        )
