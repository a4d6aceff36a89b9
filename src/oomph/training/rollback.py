"""The state of training before a step -> the same again, after a step that could not be finished.

Kept are gradients, torch's generators, and what a forward writes into the model and other modules
that it uses (rollback_state.py). Weights and the optimizer's state change only in the update, which
has its own guard (rollback_update.py). When nothing fails this is a few microseconds.

Several Steppers may train parts of one whole, as the two of a GAN do: the generator's loss goes
through the discriminator and leaves gradients there, and running statistics. A Stepper's gradients
are its own: what other Steppers have accumulated is put aside while one runs, and put back.

Not kept: what is neither in a module nor found from the loss, and generators that the user made
elsewhere. Those of Python and numpy are kept if asked for: reading them takes longer than the rest.
"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from oomph.errors import UsageError
from oomph.training.rollback_state import State, modules_used_by

_Restore = Callable[[Any], Any]
Rngs = list[tuple[_Restore, Any]]  # how to restore each generator, and what to


class Rollback:
    """One point to go back to; `take` makes it, `undo` goes there, as often as is needed."""

    def __init__(
        self,
        model: Any,
        optimizers: Iterable[Any],
        *,
        keeps_other_rngs: bool,
        loss: Any = None,
        beside: Iterable[nn.Module] = (),
        updates_in_backward: bool = False,
    ) -> None:
        """loss: the modules that it names are kept, too. beside: more of them."""
        self._model, self._optimizers = model, tuple(optimizers)
        self.loss, self._beside = loss, tuple(beside)
        self._keeps_other_rngs = keeps_other_rngs
        self._parameters: list[Any] = []
        self._shape: list[int] = []
        self._gradients: list[tuple[Any, Any]] = []
        self._state = State(self._roots, self._find_updated if updates_in_backward else tuple)
        self._rngs: Rngs = []

    def take(self, *, keeps_gradients: bool = True) -> None:
        """keeps_gradients=False: those that are there have been used."""
        self._find_parameters()
        kept = [p for p in self._parameters if keeps_gradients and p.grad is not None]
        self._gradients = [(p, on_host(p.grad)) for p in kept]
        self._rngs = rng_states(self._device_kind(), self._keeps_other_rngs)
        self._state.take()

    def parameters(self) -> list[Any]:
        """Every parameter that a gradient may be added to."""
        return self._parameters

    def undo(self) -> None:
        """Raises OomphError that names what cannot be set back, when all else has been."""
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.to(parameter.device, copy=True)
        restore_rngs(self._rngs)
        torch.clear_autocast_cache()  # weights that were cast, and the graph that they are in
        self._state.undo()

    def observe(self) -> None:
        """After an attempt that went well. Raises OomphError if the one before left something."""
        self._state.observe()

    def written(self) -> list[str]:
        """The names of what a forward has changed since the last `undo`, beside gradients."""
        return self._state.written()

    def pause(self) -> None:
        """After a batch, when more of them belong to the step."""
        self._state.pause()

    def resume(self) -> None:
        """Before the next: what was written since is not undone."""
        self._state.resume()

    def _device_kind(self) -> str:
        kind: str = self._parameters[0].device.type if self._parameters else "cpu"
        return kind

    def _find_parameters(self) -> None:
        """Every parameter that a gradient may be added to; found again when groups are added."""
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        shape = [len(group) for group in groups]
        if shape == self._shape:
            return
        self._shape = shape
        both = [*self._model.parameters(), *(p for group in groups for p in group)]
        self._parameters = list({id(parameter): parameter for parameter in both}.values())

    def _find_updated(self) -> Iterator[Any]:
        return (
            parameter
            for each in self._optimizers
            for group in each.param_groups
            for parameter in group["params"]
        )

    def _roots(self) -> list[nn.Module]:
        return [self._model, *self._beside, *modules_used_by(self.loss)]


# ---- several that train parts of one whole -----------------------------------------------------


class OwnRollback(Rollback):
    """A Stepper's: gradients are its own.

    At the beginning of a step there are none: what is there is dropped, as `zero_grad` before
    `backward` does it, unless the Stepper adds to it (`keeps_gradients`).
    """

    _others: ClassVar[weakref.WeakSet[OwnRollback]] = weakref.WeakSet()

    def __init__(
        self,
        model: Any,
        optimizers: Iterable[Any],
        *,
        keeps_gradients: bool = False,
        say: Callable[[str], None],
        **options: Any,
    ) -> None:
        super().__init__(model, optimizers, **options)
        self._keeps_gradients, self._say, self._has_said = keeps_gradients, say, False
        self._own: set[int] = set()  # identities of the optimizers' parameters
        self._aside: list[tuple[Any, Any]] = []
        self._is_begun = False  # batches have been accumulated
        self._others.add(self)

    # ---- around each batch ---------------------------------------------------------------------

    def enter(self) -> None:
        """Put the gradients of other Steppers aside."""
        self._aside = []
        if len(self._others) == 1:
            return
        self._find_parameters()
        if any(map(self._would_add_to, self._others)):
            gc.collect()  # of a Stepper that nobody has any more
        for other in self._others:
            if other is not self:
                other._find_parameters()
                self._put_aside(other)

    def _would_add_to(self, other: OwnRollback) -> bool:
        """Has another one accumulated gradients where this one's go?"""
        is_begun = other is not self and other._is_begun and not self._is_begun
        return is_begun and any(
            id(p) in self._own and p.grad is not None for p in other._parameters
        )

    def _put_aside(self, other: OwnRollback) -> None:
        if self._would_add_to(other):
            raise _both_accumulate()
        for parameter in other._parameters:
            if id(parameter) not in self._own and id(parameter) in other._own:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def leave(self) -> None:
        """Put them back, and drop what this one's backward has left there."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []

    # ---- around each step ----------------------------------------------------------------------

    def take(self, *, keeps_gradients: bool = False) -> None:
        self._find_parameters()
        keeps = keeps_gradients or self._keeps_gradients
        if not keeps:
            self._drop_gradients()
        super().take(keeps_gradients=keeps)
        self._is_begun = True

    def undo(self) -> None:
        for parameter, _ in self._aside:
            parameter.grad = None
        super().undo()

    def begin(self) -> None:
        """Gradients were accumulated before a checkpoint, and are there."""
        self._is_begun = True

    def drop_gradients(self) -> None:
        """Also those that were to come back."""
        self._gradients = []
        for parameter in self.parameters():
            parameter.grad = None

    def end(self) -> None:
        """The optimizer has stepped, or the step is given up."""
        self._is_begun = False

    def own_parameters(self) -> list[Any]:
        """As `parameters`, between two batches."""
        self.enter()
        try:
            return self.parameters()
        finally:
            self.leave()

    def parameters(self) -> list[Any]:
        """Whose gradients are this Stepper's: the model's and the optimizers', not another's."""
        self._find_parameters()
        others = {id(parameter) for parameter, _ in self._aside}
        return [parameter for parameter in self._parameters if id(parameter) not in others]

    def _drop_gradients(self) -> None:
        dropped = [p for p in self._parameters if p.grad is not None]
        others = {id(parameter) for parameter, _ in self._aside} if dropped else set()
        dropped = [p for p in dropped if id(p) not in others]
        for parameter in dropped:
            parameter.grad = None
        if dropped and not self._has_said:
            self._has_said = True
            self._say(self._told_of(dropped))

    def _told_of(self, dropped: list[Any]) -> str:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        first = names.get(id(dropped[0]), "a parameter of the optimizer")
        rest = f" and {len(dropped) - 1} more" if len(dropped) > 1 else ""
        if any(id(parameter) in self._own for parameter in dropped):
            return (
                f"oomph dropped gradients from before the step ({first}{rest}), as zero_grad()"
                " would. Stepper(..., keeps_gradients=True) adds to them instead"
            )
        return (
            f"no optimizer of this Stepper updates {first}{rest}, so oomph drops the gradients that"
            " each step leaves there. requires_grad_(False) saves their time and memory"
        )

    def _find_parameters(self) -> None:
        before = self._parameters
        super()._find_parameters()
        if self._parameters is not before:
            self._own = {id(parameter) for parameter in self._find_updated()}

    def _roots(self) -> list[nn.Module]:
        others = [other._model for other in self._others if other is not self]
        return [*super()._roots(), *others]


def _both_accumulate() -> UsageError:
    return UsageError(
        "two Steppers accumulate gradients of the same parameters",
        because="another Stepper has begun a step, and its gradients would be added to this one's",
        attempt="one Stepper with both optimizers: Stepper(model, [one, other], loss); or"
        " flush() on one before the other begins",
    )


def on_host(tensor: Any) -> Any:
    """A copy that takes no memory of the GPU."""
    return tensor.detach().to("cpu", copy=True)


# ---- generators --------------------------------------------------------------------------------


def rng_states(device_kind: str, keeps_other_rngs: bool) -> Rngs:
    states: Rngs = [(torch.set_rng_state, torch.get_rng_state())]
    device: Any = getattr(torch, device_kind, None)  # torch.cuda, torch.mps, torch.xpu
    if device_kind != "cpu" and hasattr(device, "get_rng_state"):
        states.append((device.set_rng_state, device.get_rng_state()))
    if keeps_other_rngs:
        states.append((random.setstate, random.getstate()))
        if numpy := sys.modules.get("numpy"):
            states.append((numpy.random.set_state, numpy.random.get_state()))
    return states


def restore_rngs(states: Rngs) -> None:
    for restore, state in states:
        restore(state)
