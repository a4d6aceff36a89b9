"""Variant -> the same script with other tricks around it.

Precision and offloaded activations start when a model is trained and end at backward. Tricks on the
model are applied at its first call in training. Tricks on the optimizer turn the script's own
object into another. Tricks that would have to come earlier are refused.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from oomph.errors import UsageError
from oomph.pretending.patches import wrap
from oomph.records.script import Overrides
from oomph.records.workload import Variant
from oomph.rehearsing.script.loop import Loop
from oomph.tricks.apply import around_forward, put_on_model, put_on_optimizer


class Accumulating:
    """Turns steps of a script into micro-steps of a larger one.

    The script runs unchanged. Until enough gradients are accumulated, its optimizers do not step,
    nothing is clipped, no gradient is zeroed and no loss scale is updated. Losses are divided by
    the number of micro-steps.
    """

    def __init__(self, num: int | None, loop: Loop) -> None:
        self._num, self._loop = num or 1, loop

    def before_backward(self, args: Any) -> Any:
        """Divide the loss by the number of micro-steps."""
        if self._num == 1 or not args or not isinstance(args[0], torch.Tensor):
            return args
        return (args[0] / self._num, *args[1:])

    def _is_within(self) -> bool:
        """Return whether accumulation has begun and is not complete."""
        num_done = self._loop.backwards_of_step[-1]
        return not self._loop.is_between_steps and 0 < num_done < self._num

    def install(self) -> None:
        """Wrap the patches that watch the loop, which must not see the calls held back here."""
        if self._num == 1:
            return

        def hold(original: Any, *args: Any, **kwargs: Any) -> Any:
            return None if self._is_within() else original(*args, **kwargs)

        def without_clipping(original: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_within():
                return torch.zeros((), device="cuda")  # a norm, because a script may print it
            return original(*args, **kwargs)

        for name in ("step", "update", "unscale_"):
            wrap(name, torch.amp.GradScaler)(hold)
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            wrap("zero_grad", owner)(hold)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(name, torch.nn.utils, torch.nn.utils.clip_grad)(without_clipping)
        held: set[Any] = set()

        @wrap("__init__", torch.optim.Optimizer)
        def init(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            """Hold the steps of an optimizer's class from its first instance on."""
            original(optimizer, *args, **kwargs)
            kind = type(optimizer)
            if kind.step not in held:
                wrap("step", kind)(self._step)
                held.add(kind.step)

    def _step(
        self, original: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._is_within():
            return original(optimizer, *args, **kwargs)
        if (args and args[0] is not None) or kwargs.get("closure") is not None:
            raise UsageError(
                "an optimizer that computes losses itself cannot have them added up",
                because=f"{type(optimizer).__name__}.step was given a closure",
                attempt="the batch as it is: --forbid accumulation",
            )
        return None


_LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _check(how: Variant, precision: str | None) -> None:
    """Raise UsageError for tricks that cannot be put around a script of that precision."""
    has_low_weights = precision is not None and precision.startswith("pure")
    refused = {
        "adapters": how.adapters != "none",
        "sharding": how.sharding != "none" or how.num_gpus > 1,
        "optimizer_in_backward": how.optimizer_in_backward,
        "offload_optimizer": how.offload_optimizer,
        "zero_offload": how.zero_offload,
        how.precision: how.precision != precision
        and (has_low_weights or how.precision == "pure-bf16"),
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise UsageError(
                f"{name} cannot be put around a script",
                because="it must be there when the script makes its model and its optimizer",
                attempt="making the change in the script, or a Workload",
            )


class Switched:
    """The tricks of a variant, put around the script while it runs."""

    def __init__(self, overrides: Overrides, loop: Loop) -> None:
        self._how, self._loop = overrides.how, loop
        self.accumulating = Accumulating(overrides.accumulation, loop)
        self._entered: contextlib.ExitStack | None = None
        self._scaler: Any = None
        self._has_optimizers = False
        if overrides.how is not None:
            _check(overrides.how, overrides.first.precision if overrides.first else None)

    def install(self) -> None:
        if self._how is not None:
            if self._how.precision == "fp16":
                self._scaler = torch.amp.GradScaler("cuda")
            _force_precision(self._how.precision)

    def put_on_model(self, model: torch.nn.Module) -> None:
        """Apply the tricks before a model is first trained: by then the optimizers exist."""
        if self._how is None:
            return
        put_on_model(model, self._how)
        if self._has_optimizers:
            return
        self._has_optimizers = True
        for _, optimizer in self._loop.alive():
            if self._how.optimizer != "as-is":
                self._become(optimizer)
            if self._scaler is not None:
                self._scale_steps(optimizer)

    def _become(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn the script's own optimizer into another, so that every reference sees the change."""
        assert self._how is not None  # noqa: S101 - checked by the caller
        twin = object.__new__(type(optimizer))  # `put_on_optimizer` may consume it
        twin.__dict__ = dict(optimizer.__dict__)
        changed = put_on_optimizer(lambda _: twin, None, self._how)
        for group, before in zip(changed.param_groups, optimizer.param_groups, strict=True):
            for name, value in before.items():  # schedulers keep their own values there
                group.setdefault(name, value)
        self._loop.forget_optimizer(changed)
        optimizer.__class__ = changed.__class__
        optimizer.__dict__ = {"_opt_called": True, **changed.__dict__}  # schedulers check it

    # ---- around each forward -------------------------------------------------------------------

    def before_forward(self) -> None:
        if self._how is None or self._entered is not None:
            return
        self._entered = contextlib.ExitStack()
        low = _LOW.get(self._how.precision)
        if low is not None and not torch.is_autocast_enabled("cuda"):
            self._entered.enter_context(torch.autocast("cuda", dtype=low))
        self._entered.enter_context(around_forward(self._how))

    def before_backward(self, args: Any) -> Any:
        if self._entered is not None:
            self._entered.close()
            self._entered = None
        args = self.accumulating.before_backward(args)
        if self._scaler is None:
            return args
        return (self._scaler.scale(args[0]), *args[1:])

    # ---- loss scaling --------------------------------------------------------------------------

    def _scale_steps(self, optimizer: Any) -> None:
        """Make the optimizer step through the scaler, as in a script with a GradScaler."""
        scaler, original, is_within = self._scaler, optimizer.step, [False]

        def step(closure: Any = None) -> Any:
            if is_within[0]:
                return original()
            returned = None if closure is None else closure()
            is_within[0] = True
            scaler.step(optimizer)
            is_within[0] = False
            scaler.update()
            return returned

        optimizer.step = step

    def before_clip(self) -> None:
        from torch.amp.grad_scaler import OptState

        if self._scaler is None:
            return
        for _, optimizer in self._loop.alive():
            state = self._scaler._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.READY:
                self._scaler.unscale_(optimizer)


# ---- precision -------------------------------------------------------------------------------


def _force_precision(precision: str) -> None:
    """Apply `precision` whatever the script asks of autocast and GradScaler.

    oomph's own GradScaler is made before this.
    """

    @wrap("__init__", torch.amp.autocast_mode.autocast)
    def init(original: Any, self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, device_type, *args, **kwargs)
        if device_type == "cuda":
            self._enabled = self._enabled and precision in _LOW
            if self._enabled:
                self.fast_dtype = _LOW[precision]

    @wrap("__init__", torch.amp.GradScaler)
    def without_scaling(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._enabled = False
