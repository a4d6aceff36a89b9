"""Plan -> training: the functions of the training package that users call directly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomph.records.plan import Plan
    from oomph.training.adapters import accelerate as accelerate
    from oomph.training.stepper import Stepper as Stepper


def apply(plan: Plan, model: Any, make_optimizer: Callable[[Any], Any] | None = None) -> Any:
    """Return the model with a plan's tricks applied. Call it before making the optimizer.

    With `make_optimizer` (parameters -> optimizer), return the model and its optimizer, as planned.
    """
    from oomph.tricks import apply as training

    return training.apply(plan, model, make_optimizer)


def offloaded_activations() -> Any:
    """Return a context for a forward and its loss: what backward needs waits in host memory.

    Copies run beside the computation. torch's own save_on_cpu also moves parameters, and waits for
    each copy.
    """
    from oomph.tricks import offload_activations

    return offload_activations.offloaded_activations()


def __getattr__(name: str) -> Any:
    if name == "accelerate":
        from oomph.training.adapters import accelerate

        return accelerate
    if name != "Stepper":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from oomph.training.stepper import Stepper

    return Stepper
