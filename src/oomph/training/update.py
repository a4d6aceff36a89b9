"""Gradients of a whole batch -> one optimizer step, complete or not at all.

Gradients are unscaled and clipped once, after the last piece. Schedulers advance with every step
except those that the loss scaler skips. If an optimizer runs out of memory and a copy of the
weights exists, its step is undone and retried parameter by parameter, which needs the least memory.
With several ranks, all of them step or none does (see ranks.py).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import functools
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from oomph.errors import OomphError, UsageError
from oomph.out_of_memory import is_out_of_memory
from oomph.training.noise_meter import NoiseMeter
from oomph.training.ranks import Answer, At, Ranks
from oomph.training.recovery import (
    half_updated,
    if_memory_allows,
    own_part,
    release,
    text_of,
    tried_twice,
)
from oomph.training.rollback import on_host, parameters_of
from oomph.tricks.offload_optimizer import to_clip

Copies = Literal["first", "always", "never"]
_HALF = "oomph: some parameters may have been updated and others not. Load the last checkpoint."


def several(one_or_more: Any) -> tuple[Any, ...]:
    """Return a tuple, given None, a single object, or a list or tuple of them."""
    if one_or_more is None:
        return ()
    return tuple(one_or_more) if isinstance(one_or_more, list | tuple) else (one_or_more,)


class UpdateCopy:
    """A host copy of everything that an update changes.

    The first update allocates the optimizer's state, so it is the one that may run out of memory.
    Later updates need no more than the first and are copied only on request.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._weights = [(p, on_host(p)) for p in parameters_of(*self._optimizers)]
        self._states = [
            {p: _copied_state(state) for p, state in each.state.items()}
            for each in self._optimizers
        ]
        self._groups = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for each in self._optimizers
            for group in each.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back: shards into this rank's own part."""
        for optimizer, states in zip(self._optimizers, self._states, strict=True):
            for parameter in [p for p in optimizer.state if p not in states]:
                del optimizer.state[parameter]
            for parameter, copied in states.items():
                _restore_state(optimizer.state[parameter], copied)
        for parameter, weight in self._weights:
            own_part(parameter).copy_(weight)
        for group, before in self._groups:
            group.update(before)


def _copied_state(state: Any) -> Any:
    """Return each entry as (tensor, host copy of its content) or (plain value, None)."""
    if not isinstance(state, dict):
        return state
    return {
        name: (value, on_host(value)) if isinstance(value, torch.Tensor) else (value, None)
        for name, value in state.items()
    }


def _restore_state(state: Any, copied: Any) -> None:
    if not isinstance(copied, dict):
        return
    state.clear()
    for name, (value, content) in copied.items():
        if content is not None:
            own_part(value).copy_(content)
        state[name] = value


@dataclass(slots=True)
class _Failure:
    """What an optimizer's step raised. Out-of-memory errors have had their frames released."""

    error: BaseException
    is_of_memory: bool
    text: str


class Update:
    """Steps the optimizers of a Stepper."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Callable[[], Sequence[torch.Tensor]],
        schedulers: Sequence[Any] = (),
        *,
        scaler: torch.amp.GradScaler | None = None,
        clip_grad_norm: float | None = None,
        copies: Copies = "first",
        ranks: Ranks,
        meter: NoiseMeter | None = None,
    ) -> None:
        """parameters: all that have gradients, including ones that no optimizer updates.

        ranks: average gradients over these ranks; all of them step or none does.
        meter: sees the gradients of the whole step, before they are clipped.
        """
        _check(schedulers, copies)
        self.ranks, self._parameters = ranks, parameters
        self.optimizers, self._scaler = tuple(optimizers), scaler
        self._schedulers, self._clip, self._copies = tuple(schedulers), clip_grad_norm, copies
        self._meter = meter or NoiseMeter(parameters, "off")
        self._factor = 1.0  # that the gradients have been scaled by
        self._num_updated = 0  # parameters updated so far; these have optimizer state

    def scale(self, factor: float) -> None:
        """Scale the gradients before the ranks vote.

        Nothing else changes, so this can be repeated after a failure.
        """
        if factor != 1:
            gradients = [own_part(p.grad) for p in self._parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, factor)
        self._factor = factor
        self.ranks.ready(self._meter.shared(self.ranks.num_ranks))

    def __call__(self) -> torch.Tensor | None:
        """Step with the scaled gradients, after the vote; return their norm if they are clipped."""
        try:
            self.ranks.average()
            self._meter.finish(self.ranks.shared, self._factor)
            return self._step()
        except BaseException:
            self._forget_unscaled()
            raise

    def _clipped(self, most: float) -> torch.Tensor:
        if self._scaler:
            for optimizer in self.optimizers:
                self._scaler.unscale_(optimizer)
        parameters = to_clip(self._parameters(), self.optimizers)
        return tried_twice(lambda: self.ranks.clip(parameters, most))

    # ---- the optimizer step --------------------------------------------------------------------

    def _step(self) -> torch.Tensor | None:
        """Clip the gradients if asked to, then step the optimizers; return the norm."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        num_parameters = sum(len(group["params"]) for group in groups)
        is_first = num_parameters != self._num_updated
        is_copied = self._copies == "always" or (self._copies == "first" and is_first)
        norm, copied = self._prepared(is_copied=is_copied)
        failure = self._tried()
        least = self._least(failure, may_try_again=copied is not None)
        if least is Answer.AGAIN and copied is not None:
            copied.restore()
            self._go_one_by_one()
            self._forget_stepped()
            failure = self._tried()
            least = self._least(failure, may_try_again=False)
        if least is not Answer.DONE:
            self._end_badly(failure, least, copied)
        self.ranks.end()
        self._num_updated = num_parameters
        return norm

    def _prepared(self, *, is_copied: bool) -> tuple[torch.Tensor | None, UpdateCopy | None]:
        """Return the norm if gradients are clipped, and a copy if all ranks have one."""
        is_unscaled = bool(self._scaler) and (is_copied or self.ranks.is_joint)
        if self._clip is None and not is_copied and not is_unscaled:
            return None, None

        def work() -> tuple[tuple[torch.Tensor | None, UpdateCopy | None], Answer]:
            norm = None if self._clip is None else self._clipped(self._clip)
            copied = self._copied() if is_copied else None
            if is_unscaled and (copied is not None or self.ranks.is_joint):
                self._unscale()
            has_less = is_copied and copied is None
            return (norm, copied), Answer.AGAIN if has_less else Answer.DONE

        (norm, copied), least = self.ranks.together(At.PREPARED, work)
        if norm is not None and self._clip is not None:
            norm = self.ranks.clipped(norm, self._clip)
        return norm, copied if least is Answer.DONE else None

    def _tried(self) -> _Failure | None:
        """Step; return None if it succeeds."""
        try:
            self._step_each()
        except BaseException as error:  # noqa: BLE001 - raised once all ranks know of it
            failure = _Failure(error, is_out_of_memory(error), text_of(error))
            if failure.is_of_memory:
                release(error)
            return failure
        return None

    def _least(self, failure: _Failure | None, *, may_try_again: bool) -> Answer:
        """Return the worst answer of all ranks."""
        mine = Answer.DONE
        if failure is not None:
            if not failure.is_of_memory:
                mine = Answer.FAILED
            else:
                mine = Answer.AGAIN if may_try_again else Answer.DOES_NOT_FIT
        return self.ranks.vote(At.UPDATED, mine)

    def _go_one_by_one(self) -> None:
        """Make the optimizers step one parameter at a time, without temporaries for all of them."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.update({name: False for name in ("foreach", "fused") if name in group})
            # A fused step reads what the scaler left on the optimizer; other steps reject it.
            vars(optimizer)["_step_supports_amp_scaling"] = False
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)

    def _unscale(self) -> None:
        """Unscale first: a fused step would unscale as it runs and could not be repeated."""
        if self._scaler is not None:
            for optimizer in self.optimizers:
                state = self._scaler._per_optimizer_states[id(optimizer)]
                if state["stage"] is OptState.READY:
                    self._scaler.unscale_(optimizer)

    def _copied(self) -> UpdateCopy | None:
        """Return None if the host lacks memory for a copy; the step then goes on without one."""
        with if_memory_allows():
            return UpdateCopy(self.optimizers)
        return None

    def _step_each(self) -> None:
        for optimizer in self.optimizers:
            if self._scaler:
                self._scaler.step(optimizer)
            else:
                optimizer.step()

    # ---- unrecoverable failures ----------------------------------------------------------------

    def _end_badly(
        self, failure: _Failure | None, least: Answer, copied: UpdateCopy | None
    ) -> None:
        """Raise on all ranks, unless the ranks that stepped could repair the ones that failed."""
        if copied is not None:
            copied.restore()
        elif self._is_healed(has_stepped=failure is None):
            if least is Answer.DOES_NOT_FIT:  # only memory failed: all ranks have stepped now
                self._go_one_by_one()
                return
            if failure is None or failure.is_of_memory:
                raise self._stepped_though_failed()
        elif failure is None and least is Answer.FAILED:
            raise self._failed_half_way()
        elif failure is None or failure.is_of_memory:
            raise half_updated(self._text(failure)) from None
        else:
            _note(failure.error, _HALF)
        if failure is not None and not failure.is_of_memory:
            raise failure.error
        if failure is None and least is Answer.FAILED:
            raise self.ranks.failed_elsewhere()
        raise OomphError(
            "the optimizer's step does not fit into memory",
            because=self._text(failure),
            attempt="oomph plan, to find an 8-bit optimizer or one on the host. Weights and"
            " optimizer are those of the last whole step",
        ) from None

    def _text(self, failure: _Failure | None) -> str:
        return f"it failed on rank {self.ranks.worst}" if failure is None else failure.text

    def _failed_half_way(self) -> OomphError:
        worst = self.ranks.worst
        return OomphError(
            f"the optimizer failed on rank {worst} in the middle of its step",
            because="this rank has stepped and that one has not, or only in part",
            attempt=f"reading the error of rank {worst}, then loading the last checkpoint;"
            ' Stepper(..., copies="always") can undo such a step',
        )

    def _stepped_though_failed(self) -> OomphError:
        worst = self.ranks.worst
        return OomphError(
            f"the optimizer failed on rank {worst}",
            because="all ranks stop together. Those that failed have received the weights and the"
            " optimizer states of those that have stepped",
            attempt=f"reading the error of rank {worst}. Weights and optimizer are those after"
            " this step, on all ranks",
        )

    def _is_healed(self, *, has_stepped: bool) -> bool:
        """Copy weights and state from a rank that stepped to the ranks that failed.

        Return True on success. Without a host copy, this is the only way to recover.
        """
        if not self.ranks.holds_whole_weights:
            return False
        source = self.ranks.first_rank_where(has_stepped)
        if source is None:
            return False
        described = self.ranks.object_of(source, [_described(each) for each in self.optimizers])
        tensors: list[tuple[Any, Any]] = []
        try:
            for optimizer, each in zip(self.optimizers, described, strict=True):
                tensors += [(t, t.detach().contiguous()) for t in _made_like(optimizer, *each)]
            has_room = True
        except RuntimeError:
            has_room = False
        if self.ranks.first_rank_where(not has_room) is not None:
            return False
        self.ranks.copy_from(source, tensors)
        return True

    def finish(self) -> None:
        """Update the loss scaler, clear the gradients and advance the schedulers after a step.

        Errors raised by the user's schedulers are passed on.
        """
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
            _note(error, "oomph: the optimizer has already stepped; the weights are complete")
            raise

    def _forget_unscaled(self) -> None:
        """Reset the scaler, which would otherwise refuse to unscale the next gradients."""
        if self._scaler:
            for optimizer in self.optimizers:
                self._scaler._per_optimizer_states.pop(id(optimizer), None)

    def _forget_stepped(self) -> None:
        """Let optimizers step again whose step was undone because a later optimizer failed."""
        if self._scaler:
            for optimizer in self.optimizers:
                state = self._scaler._per_optimizer_states[id(optimizer)]
                if state["stage"] is OptState.STEPPED:
                    state["stage"] = OptState.UNSCALED


def _note(error: BaseException, text: str) -> None:
    """Add a note below the traceback (Python 3.11 and later); the error itself stays unchanged."""
    if hasattr(error, "add_note"):
        error.add_note(text)


# ---- sending an update from rank to rank -------------------------------------------------------

_Described = dict[str, Any]  # plain values, and _Shape in place of tensors


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor's shape, dtype and kind of device, without its content."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device_kind: str


def _described(optimizer: Optimizer) -> tuple[dict[int, _Described], list[_Described]]:
    """Return the states, by parameter number, and the groups."""
    numbered = enumerate(parameters_of(optimizer))
    states = {n: optimizer.state[p] for n, p in numbered if p in optimizer.state}
    return (
        {n: _entries(state) for n, state in states.items() if isinstance(state, dict)},
        [_entries(group) for group in optimizer.param_groups],
    )


def _entries(state: dict[str, Any]) -> _Described:
    """Return tensors as shapes, and plain values; each rank keeps its own other objects."""
    found: _Described = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            found[name] = _Shape(tuple(value.shape), value.dtype, value.device.type)
        elif isinstance(value, bool | int | float | str | None | tuple):
            found[name] = value
    return found


def _made_like(
    optimizer: Optimizer, states: dict[int, _Described], groups: list[_Described]
) -> list[torch.Tensor]:
    """Give an optimizer the entries described, and return all its tensors, still to be filled."""
    parameters = parameters_of(optimizer)
    tensors: list[torch.Tensor] = [*parameters]
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
        raise UsageError(
            f"copies={copies!r:.40} is unknown", attempt='copies="first", "always" or "never"'
        )
    if any(isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau) for s in schedulers):
        raise UsageError(
            "ReduceLROnPlateau cannot be stepped once per optimizer step",
            because="its step() needs a validation metric",
            attempt="calling its step(metric) in your loop",
        )


# ---- optimizers that a library steps -----------------------------------------------------------
# The library calls `optimizer.step` at any time, with a closure or without, before or after a
# scheduler has wrapped it. An out-of-memory error in it is handled as in a Stepper: if the weights
# were copied, the step is undone and retried parameter by parameter. With several ranks, all of
# them step or none does.

_MARK = "_whole_or_not_at_all"


def make_whole(optimizer: Optimizer, copies: Copies = "first", ranks: Ranks | None = None) -> None:
    """Wrap an optimizer's step, once, to recover from out-of-memory errors.

    An optimizer that evaluates its closure more than once is left alone. `ranks` take each step
    together; if they become known later, pass them in a second call.
    """
    step = optimizer.step
    if hasattr(step, _MARK):
        getattr(step, _MARK).ranks = ranks or Ranks()
        return
    # Torch's own optimizers call their closure once and then step; others may not.
    is_known = type(optimizer).__module__.startswith(("torch.optim.", "transformers.optimization"))
    if not is_known or isinstance(optimizer, torch.optim.LBFGS):
        return
    guard = _LibraryUpdate(optimizer, copies, ranks or Ranks())

    # functools.wraps copies attributes too: schedulers look for theirs.
    @functools.wraps(getattr(step, "__func__", step))
    def whole(_: Any, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = closure() if closure is not None else None
        guard.step_by(functools.partial(step, **options))
        return result

    setattr(whole, _MARK, guard)
    vars(optimizer)["step"] = types.MethodType(whole, optimizer)  # schedulers expect a method


class _LibraryUpdate(Update):
    """Guards one optimizer; scaling, clipping and schedulers stay with the library."""

    def __init__(self, optimizer: Optimizer, copies: Copies, ranks: Ranks) -> None:
        super().__init__([optimizer], lambda: parameters_of(optimizer), copies=copies, ranks=ranks)
        self._library_step: Callable[[], Any] = lambda: None

    def step_by(self, step: Callable[[], Any]) -> None:
        self._library_step = step
        try:
            self._step()
        except BaseException:
            self.ranks.leave()
            raise

    def _step_each(self) -> None:
        self._library_step()


# ---- signals -----------------------------------------------------------------------------------
# Ctrl-C during an update takes effect right after it. Signals are held back only in the main
# thread, where Python delivers them, and only if a Python function handles them: the default action
# ends the process, so no half-updated state survives.

_HELD = (int(_signal.SIGINT), int(_signal.SIGTERM))


class SignalsHeld:
    """Holds signals back during work that must not be interrupted, then delivers them."""

    __slots__ = ("_handlers", "_received")

    def __enter__(self) -> None:
        self._received: list[tuple[int, types.FrameType | None]] = []
        self._handlers: dict[int, Any] = {}
        if threading.get_ident() != threading.main_thread().ident:
            return
        for number in _HELD:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _: BaseException | None,
        __: types.TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            _signal.signal(number, handler)
        received, self._received = self._received, []
        for number, frame in received:
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._received.append((number, frame))
