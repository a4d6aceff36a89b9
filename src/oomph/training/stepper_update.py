"""Gradients of a whole batch -> one step of the optimizers, whole or not at all.

Unscaled and clipped once, after the last piece; schedulers go on with each step, and not where a
loss scaler skipped one. An optimizer that runs out of memory is set back, if a copy of the weights
was kept, and tried once more parameter by parameter, which needs the least memory. On several
ranks all of them step or none does; ranks.py has the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    ) -> None:
        """ranks: gradients are averaged over them, and all of them step or none does."""
        _check(schedulers, copies)
        self.ranks = ranks
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
        self._finish()
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
            attempt="oomph plan, for an optimizer in 8 bits or on the host. Weights and"
            " optimizer are those of the last whole step",
        ) from None

    def _text(self, failure: _Failure | None) -> str:
        if failure is not None:
            return failure.text
        return f"it failed on rank {self.ranks.worst if self.ranks else 0}"

    def _stepped_though_failed(self) -> OomphError:
        worst = self.ranks.worst if self.ranks else 0
        return OomphError(
            f"the optimizer failed on rank {worst}",
            because="all ranks end together. Those that failed have received the weights and the"
            " optimizer states of those that have stepped",
            attempt=f"the error that rank {worst} shows. Weights and optimizer are those after"
            " this step, on all ranks",
        )

    def _is_healed(self, *, has_stepped: bool) -> bool:
        """Did ranks that failed receive what others have? Without a copy, that is the way back."""
        ranks = self.ranks
        source = ranks.first_that(has_stepped) if ranks is not None else None
        if ranks is None or source is None:
            return False
        return ranks.heal(*_changed_by(self.optimizers), source)

    def _finish(self) -> None:
        is_skipped = False
        if self._scaler:
            before = self._scaler.get_scale() if self._schedulers else 0
            self._scaler.update()
            is_skipped = bool(self._schedulers) and self._scaler.get_scale() < before
        for scheduler in () if is_skipped else self._schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

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


def _changed_by(optimizers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What an update changes, in the same order on all ranks: tensors, and dicts of the rest."""
    tensors, dicts = [], []
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        states = [optimizer.state[p] for p in parameters if p in optimizer.state]
        tensors += parameters
        for each in (*filter(_is_dict, states), *optimizer.param_groups):
            tensors += [each[name] for name in _named(each) if _is_tensor(each[name])]
            dicts.append(each)
    return tensors, dicts


def _named(state: Any) -> Iterator[str]:
    return (name for name in sorted(state) if name != "params")


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _check(schedulers: Sequence[Any], copies: str) -> None:
    if copies not in ("first", "always", "never"):
        raise UsageError(f"{copies!r:.40} is no time to copy weights", attempt='copies="first"')
    if any(isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau) for s in schedulers):
        raise UsageError(
            "ReduceLROnPlateau cannot go on with each step",
            because="it wants a measure of the validation",
            attempt="calling its step(measure) in your loop",
        )
