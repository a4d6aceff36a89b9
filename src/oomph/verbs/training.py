"""Plan -> training: the functions of the training package that users call directly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomph.records.plan import Plan
    from oomph.records.stability import LearningRateChange, LearningRateRule, NoiseScale
    from oomph.training.adapters import accelerate as accelerate
    from oomph.training.stepper import Stepper as Stepper


def apply(plan: Plan, model: Any, make_optimizer: Callable[[Any], Any] | None = None) -> Any:
    """Return the model with a plan's tricks applied. Call it before making the optimizer.

    With `make_optimizer` (parameters -> optimizer), return the model and its optimizer, as planned.
    """
    from oomph.tricks import apply as training

    return training.apply(plan, model, make_optimizer)


def scale_learning_rate(
    optimizer: Any,
    from_batch: int,
    to_batch: int,
    noise_scale: float | NoiseScale | None = None,
    *,
    rule: LearningRateRule | None = None,
) -> LearningRateChange:
    """Change an optimizer's learning rates in place, to train with another batch size.

    SGD's follow the batch, those of Adam and its like the root of it; with a `noise_scale`
    (`step.noise_scale`, or a number of examples), only as far as a larger batch helps. `rule` is
    "linear", "square-root" or "noise-curve", if not by the optimizer. Adam's betas and epsilon are
    changed with it, and so is what the optimizer's schedulers keep. Return what was changed.
    """
    from oomph.stability import learning_rate

    return learning_rate.scale_learning_rate(
        optimizer, from_batch, to_batch, noise_scale, rule=rule
    )


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
