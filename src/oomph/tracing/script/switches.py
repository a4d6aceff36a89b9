"""How -> the same script with other tricks around it.

Precision and offloaded activations are entered when a model is trained and left at backward.
What changes the model is put on it when it is first called in training; what changes the optimizer
makes the script's own object into another. What would have to come earlier is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from oomph.errors import UsageError
from oomph.records.workload import How
from oomph.tracing.script.accumulating import Accumulating
from oomph.tracing.script.loop import Loop

_LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def check(how: How, precision: str | None) -> None:
    """Refuses what cannot be put around a script of that precision. Raises UsageError."""
    has_low_weights = precision is not None and precision.startswith("pure")
    refused = {
        "adapters": how.adapters != "none",
        "sharding": how.sharding != "none" or how.num_gpus > 1,
        "optimizer_in_backward": how.optimizer_in_backward,
        "offload_optimizer": how.offload_optimizer,
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
    """What of a How is on at the moment."""

    def __init__(
        self,
        how: How | None,
        precision: str | None,
        apply: Any,
        loop: Loop,
        accumulating: Accumulating,
    ) -> None:
        self._how, self._apply, self._loop = how, apply, loop
        self._accumulating = accumulating
        self._entered: contextlib.ExitStack | None = None
        self._scaler: Any = None
        self._has_optimizers = False
        if how is None:
            return
        check(how, precision)
        loop.on_training.append(self._put_on_model)
        if how.precision == "fp16":
            self._scaler = torch.amp.GradScaler("cuda")
        _force_precision(how.precision)

    def _put_on_model(self, model: Any) -> None:
        """Before a model is first trained: by then the script has made its optimizers."""
        assert self._how is not None  # noqa: S101 - else it is not told
        self._apply.put_on_model(model, self._how)
        if self._has_optimizers:
            return
        self._has_optimizers = True
        for _, optimizer in self._loop.alive():
            if self._how.optimizer != "as-is":
                self._become(optimizer)
            if self._scaler is not None:
                self._scale_steps(optimizer)

    def _become(self, optimizer: Any) -> None:
        """Make the script's own optimizer another, for all who hold it."""
        assert self._how is not None  # noqa: S101 - as above
        own = _twin(optimizer)
        changed = self._apply.put_on_optimizer(lambda _: own, None, self._how)
        for group, before in zip(changed.param_groups, optimizer.param_groups, strict=True):
            for name, value in before.items():  # schedulers keep their own figures there
                group.setdefault(name, value)
        self._loop.forget_optimizer(changed)
        optimizer.__class__ = changed.__class__
        optimizer.__dict__ = {"_opt_called": True, **changed.__dict__}  # schedulers ask for it

    # ---- around each forward -------------------------------------------------------------------

    def before_forward(self, args: Any, kwargs: Any) -> Any:
        if self._how is None or self._entered is not None:
            return args, kwargs
        stack = contextlib.ExitStack()
        low = _LOW.get(self._how.precision)
        if low is not None and not torch.is_autocast_enabled("cuda"):
            stack.enter_context(_own_autocast(low))
        stack.enter_context(self._apply.around_forward(self._how))
        self._entered = stack
        return args, kwargs

    def before_backward(self, args: Any) -> Any:
        if self._entered is not None:
            self._entered.close()
            self._entered = None
        args = self._accumulating.before_backward(args)
        if self._scaler is None:
            return args
        scaled = self._scaler.scale(args[0])
        return (scaled, *args[1:])

    # ---- loss scaling --------------------------------------------------------------------------

    def _scale_steps(self, optimizer: Any) -> None:
        """Let the optimizer step through the scaler, as a script with one does."""
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


def _twin(optimizer: Any) -> Any:
    """Another object that is what the optimizer is: `changed` may use it up."""
    twin = optimizer.__class__.__new__(optimizer.__class__)
    twin.__dict__ = dict(optimizer.__dict__)
    return twin


# ---- precision -------------------------------------------------------------------------------


def _force_precision(precision: str) -> None:
    """Whatever the script asks of autocast and GradScaler, `precision` is what it has."""
    kind: Any = torch.amp.autocast_mode.autocast
    original = kind.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, device_type, *args, **kwargs)
        if device_type == "cuda" and not _Own.is_entering:
            self._enabled = self._enabled and precision in _LOW
            if self._enabled:
                self.fast_dtype = _LOW[precision]

    kind.__init__ = init
    scaler: Any = torch.amp.GradScaler
    enabled = scaler.__init__

    def scaler_init(self: Any, *args: Any, **kwargs: Any) -> None:
        is_scripts = _Own.has_scaler
        enabled(self, *args, **{**kwargs, **({"enabled": False} if is_scripts else {})})

    _Own.has_scaler = True
    scaler.__init__ = scaler_init


class _Own:
    """Whether autocast is entered by us."""

    is_entering = False
    has_scaler = False


@contextlib.contextmanager
def _own_autocast(low: Any) -> Iterator[None]:
    _Own.is_entering = True
    context = torch.autocast("cuda", dtype=low)
    _Own.is_entering = False
    with context:
        yield
