"""Save the training state before a step, and restore it if the step cannot be finished.

Saved are gradients, torch's generators, and what a forward writes into the model and other modules
it uses (rollback_state.py). Weights and optimizer state change only in the update, which has its
own guard (update.py). If nothing fails, this costs a few microseconds.
"""

# Several Steppers may train parts of one model, like the two of a GAN: the generator's loss goes
# through the discriminator and leaves gradients and running statistics there. Each Stepper owns its
# gradients: while one runs, those accumulated by others are set aside, then put back.
#
# Not saved: state that is neither in a module nor reachable from the loss, and generators that the
# user made elsewhere. Python's and numpy's generators are saved only on request, because reading
# them takes longer than all the rest.

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oomph.errors import UsageError
from oomph.training.recovery import own_part
from oomph.training.rollback_state import State, modules_used_by

_Restore = Callable[[Any], Any]
Rngs = list[tuple[_Restore, Any]]  # (function that restores a generator, its state)


def parameters_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    return [p for each in optimizers for group in each.param_groups for p in group["params"]]


class Rollback(State):
    """A point to return to: `take` sets it, `undo` returns there, any number of times."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        *,
        keeps_other_rngs: bool,
        loss: Any = None,
        beside: Iterable[nn.Module] = (),
        updates_in_backward: bool = False,
    ) -> None:
        """loss: modules it refers to are saved too. beside: further modules."""
        super().__init__()
        self._model, self._optimizers = model, tuple(optimizers)
        self.loss, self._beside = loss, tuple(beside)
        self._keeps_other_rngs, self._updates_in_backward = keeps_other_rngs, updates_in_backward
        self._parameters: list[Tensor] = []
        self._shape: list[int] = []
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._rngs: Rngs = []

    def take(self, *, keeps_gradients: bool = True) -> None:
        """Save the state. keeps_gradients=False skips gradients, which have been used."""
        self._find_parameters()
        parameters = self._parameters if keeps_gradients else []
        self._gradients = [(p, _whole_copy(p.grad)) for p in parameters if p.grad is not None]
        device_kind = self._parameters[0].device.type if self._parameters else "cpu"
        self._rngs = rng_states(device_kind, self._keeps_other_rngs)
        super().take()

    def parameters(self) -> list[Tensor]:
        """Return every parameter that may receive a gradient."""
        return self._parameters

    def undo(self) -> None:
        """Restore the state. Raises OomphError at the end, naming what cannot be restored."""
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.to(parameter.device, copy=True)
        restore_rngs(self._rngs)
        torch.clear_autocast_cache()  # cast weights, and the graph they belong to
        super().undo()

    def _find_parameters(self) -> None:
        """Find every parameter that may receive a gradient; again when groups are added."""
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        shape = [len(group) for group in groups]
        if shape == self._shape:
            return
        self._shape = shape
        both = [*self._model.parameters(), *(p for group in groups for p in group)]
        self._parameters = list({id(parameter): parameter for parameter in both}.values())

    def _updated(self) -> list[nn.Parameter]:
        return parameters_of(*self._optimizers) if self._updates_in_backward else []

    def _roots(self) -> list[nn.Module]:
        return [self._model, *self._beside, *modules_used_by(self.loss)]


class OwnRollback(Rollback):
    """The rollback of a Stepper, which owns its gradients.

    A step starts without gradients: existing ones are dropped, like `zero_grad` before `backward`,
    unless the Stepper adds to them (`keeps_gradients`).
    """

    _others: ClassVar[weakref.WeakSet[OwnRollback]] = weakref.WeakSet()

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        *,
        keeps_gradients: bool = False,
        say: Callable[[str], None],
        **options: Any,
    ) -> None:
        super().__init__(model, optimizers, **options)
        self._keeps_gradients, self._say, self._has_warned = keeps_gradients, say, False
        self._own: set[int] = set()  # ids of the optimizers' parameters
        self._aside: list[tuple[Tensor, Tensor | None]] = []
        self.is_begun = False  # gradients are being accumulated, maybe since before a checkpoint
        self._others.add(self)

    # ---- around each batch ---------------------------------------------------------------------

    @property
    def adds_to_gradients(self) -> bool:
        """Return whether the step adds to gradients from before it."""
        return self._keeps_gradients

    def enter(self) -> None:
        """Set aside the gradients of other Steppers."""
        self._aside = []
        if len(self._others) == 1:
            return
        self._find_parameters()
        if any(map(self._would_add_to, self._others)):
            gc.collect()  # a Stepper that is no longer in use
        for other in self._others:
            if other is not self:
                other._find_parameters()
                self._put_aside(other)

    def _would_add_to(self, other: OwnRollback) -> bool:
        """Return whether another Stepper has accumulated gradients where this one's go."""
        is_begun = other is not self and other.is_begun and not self.is_begun
        return is_begun and any(
            id(p) in self._own and p.grad is not None for p in other._parameters
        )

    def _put_aside(self, other: OwnRollback) -> None:
        if self._would_add_to(other):
            raise UsageError(
                "two Steppers accumulate gradients of the same parameters",
                because="another Stepper has begun a step, and its gradients would be added to"
                " this one's",
                attempt="one Stepper with both optimizers: Stepper(model, [one, other], loss); or"
                " flush() on one before the other begins",
            )
        for parameter in other._parameters:
            if id(parameter) not in self._own and id(parameter) in other._own:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def leave(self) -> None:
        """Put other Steppers' gradients back, and drop what this backward left there."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []

    # ---- around each step ----------------------------------------------------------------------

    def take(self, *, keeps_gradients: bool = False) -> None:
        self._find_parameters()
        keeps = keeps_gradients or self._keeps_gradients
        if not keeps:
            self._drop_leftovers()
        super().take(keeps_gradients=keeps)
        self.is_begun = True

    def undo(self) -> None:
        for parameter, _ in self._aside:
            parameter.grad = None
        super().undo()

    def drop_gradients(self) -> None:
        """Drop the gradients, including the saved ones."""
        self._gradients = []
        for parameter in self.parameters():
            parameter.grad = None

    def own_parameters(self) -> list[Tensor]:
        """Return `parameters` between two batches, when no gradients are set aside."""
        self.enter()
        try:
            return self.parameters()
        finally:
            self.leave()

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the model and optimizers, without those of other Steppers."""
        self._find_parameters()
        others = {id(parameter) for parameter, _ in self._aside}
        return [parameter for parameter in self._parameters if id(parameter) not in others]

    def _drop_leftovers(self) -> None:
        """Drop gradients from before the step, and warn of them once."""
        dropped = [p for p in self._parameters if p.grad is not None]
        others = {id(parameter) for parameter, _ in self._aside} if dropped else set()
        dropped = [p for p in dropped if id(p) not in others]
        for parameter in dropped:
            parameter.grad = None
        if dropped and not self._has_warned:
            self._has_warned = True
            self._say(self._in_words(dropped))

    def _in_words(self, dropped: list[Tensor]) -> str:
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
            self._own = {id(parameter) for parameter in parameters_of(*self._optimizers)}

    def _roots(self) -> list[nn.Module]:
        others = [other._model for other in self._others if other is not self]
        return [*super()._roots(), *others]


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy that uses no GPU memory."""
    return own_part(tensor).detach().to("cpu", copy=True)


def _whole_copy(gradient: Tensor) -> Tensor:
    """Return a copy on the host that can become a gradient again: one of shards stays sharded."""
    return gradient.detach().to("cpu", copy=True)


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
