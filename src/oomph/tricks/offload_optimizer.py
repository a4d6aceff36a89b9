"""Keep an optimizer's state and run its step on the host.

The host has a copy of each parameter, and the optimizer is made from those copies. Gradients are
copied to the host before its step, and parameters are copied back after it. Otherwise it is the
user's own optimizer: groups, schedulers and state dict work as usual. zero_offload.py builds on
this, with copies in fp32 of weights in 16 bits.

Clip the model's parameters (torch.nn.utils.clip_grad_norm_), not the optimizer's: those are on the
host. The usual loss scaler looks for gradients in the optimizer, and finds none: `scaler_on_host`
looks on the GPU.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from oomph.errors import UsageError
from oomph.records.workload import Variant, divides_parameters
from oomph.tricks.definition import TOO_LATE_IN_SCRIPT, Definition, Fragment, MakeOptimizer
from oomph.tricks.offload_activations import empty_on_host

if TYPE_CHECKING:
    import torch

_MARK = "_oomph_on_host"  # on an optimizer: its OnHost
_MASTER = "_oomph_master"  # on a weight in 16 bits: its original
# torch's optimizers whose fused step also runs on a CPU. It reads and writes each value once.
_FUSED_ON_HOST = ("Adam", "AdamW", "SGD")
_KEY = "masters"  # in the optimizer's state dict


def make_on_host(
    make: MakeOptimizer, parameters: Any, *, has_masters: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer from host copies of these parameters. Raises UsageError.

    With `has_masters`, copies of weights in 16 bits are in fp32.
    """
    import torch

    on_gpu = list(parameters)
    if any(hasattr(parameter, "_local_tensor") for parameter in on_gpu):
        return make(on_gpu)  # FSDP has put its shards on the host
    if not all(isinstance(parameter, torch.Tensor) for parameter in on_gpu):
        raise UsageError(
            "the optimizer cannot be offloaded",
            because="its parameters are not a plain list of tensors",
            attempt="making the groups inside the function that makes the optimizer",
        )
    pairs = [_Pair(parameter, has_master=has_masters) for parameter in on_gpu]
    optimizer = make([pair.there for pair in pairs])
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise UsageError(
            f"{type(optimizer).__name__} cannot be offloaded",
            because="it is not a torch.optim.Optimizer",
            attempt="an optimizer that inherits torch.optim.Optimizer",
        )
    _check_it_took(optimizer, pairs)
    _use_fused_step(optimizer)
    OnHost(optimizer, pairs)
    return optimizer


def _check_it_took(optimizer: torch.optim.Optimizer, pairs: Sequence[_Pair]) -> None:
    """Raise UsageError if it updates other tensors, whose updates would be overwritten."""
    ours = {id(pair.there) for pair in pairs}
    if any(id(p) not in ours for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "the optimizer cannot be offloaded",
            because="the function that makes it does not use the parameters that it is given",
            attempt="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=...)",
        )


def _use_fused_step(optimizer: Any) -> None:
    """Use torch's fused CPU step, unless the user has chosen an implementation."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or kind.__name__ not in _FUSED_ON_HOST:
        return
    groups = optimizer.param_groups
    is_chosen = any(group["fused"] is not None or group["foreach"] is not None for group in groups)
    is_plain = all(isinstance(group["lr"], float | int) for group in groups) and all(
        parameter.is_floating_point() for group in groups for parameter in group["params"]
    )
    if is_chosen or not is_plain or any(group.get("differentiable") for group in groups):
        return
    for settings in (optimizer.defaults, *groups):
        settings.update(fused=True, foreach=False)


class _Pair:
    """A parameter on the GPU and its copy on the host."""

    def __init__(self, here: torch.Tensor, *, has_master: bool) -> None:
        import torch

        self.here = here
        is_low = has_master and here.dtype in (torch.float16, torch.bfloat16)
        # What passes the bus. Without a master that is the copy itself.
        self.low = empty_on_host(here) if is_low else None
        if self.low is None:
            copied = empty_on_host(here)
            copied.copy_(here.detach())
        else:
            copied = self._master()
        self.there = torch.nn.Parameter(copied, requires_grad=here.requires_grad)
        self._seen = self._version()

    def _master(self) -> torch.Tensor:
        import torch

        assert self.low is not None  # noqa: S101 - the caller checked
        self.low.copy_(self.here.detach())
        original = vars(self.here).pop(_MASTER, None)
        if original is None:
            master = empty_on_host(self.here, dtype=torch.float32)
            return master.copy_(self.low)
        return _as_loaded(original, self.low)

    def _version(self) -> tuple[int, int]:
        return self.here._version, self.here.data_ptr()

    def follow(self) -> None:
        """Take over weights that were written since the last step, as load_state_dict does."""
        import torch

        if self._version() == self._seen:
            return
        with torch.no_grad():
            if self.low is None:
                self.there.copy_(self.here)
            else:
                self.low.copy_(self.here)
                self.there.copy_(_as_loaded(self.there, self.low))
        self._seen = self._version()

    def take(self) -> None:
        """Start to copy the gradient to the host."""
        self.there.grad = None
        gradient = self.here.grad
        if gradient is None:
            return
        if self.low is not None:
            self.low.copy_(gradient, non_blocking=True)
            return
        self.there.grad = empty_on_host(gradient)
        self.there.grad.copy_(gradient, non_blocking=True)

    def arrived(self) -> None:
        """Widen a gradient in 16 bits."""
        if self.low is not None and self.here.grad is not None:
            self.there.grad = self.low.float()

    def give(self) -> None:
        """Copy the updated weight back."""
        if self.there.grad is None:
            return
        if self.low is None:
            self.here.copy_(self.there, non_blocking=True)
        else:
            self.low.copy_(self.there)
            self.here.copy_(self.low, non_blocking=True)
        self.there.grad = None
        self._seen = self._version()


def _as_loaded(master: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the master, except where its rounded value is not the weight: that was loaded."""
    import torch

    return torch.where(master.to(low.dtype) == low, master, low.float())


class OnHost:
    """What keeps an optimizer on the host in step with the parameters on the GPU."""

    def __init__(self, optimizer: Any, pairs: Sequence[_Pair]) -> None:
        self.pairs = pairs
        self.has_taken = False
        optimizer.register_step_pre_hook(lambda *_: self._before_step())
        optimizer.register_step_post_hook(lambda *_: self._after_step())
        optimizer.zero_grad = types.MethodType(self._zero_grad(), optimizer)
        if any(pair.low is not None for pair in pairs):
            optimizer.register_state_dict_post_hook(self._save_masters)
            optimizer.register_load_state_dict_pre_hook(self._load_masters)
        # A loss scaler would hand a fused step its scale, instead of unscaling first.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer._step_supports_amp_scaling = False
        setattr(optimizer, _MARK, self)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters on the GPU."""
        return [pair.here for pair in self.pairs]

    @property
    def is_low(self) -> bool:
        """Return whether gradients on the GPU are too short to be unscaled there."""
        return any(pair.low is not None for pair in self.pairs)

    def take(self) -> None:
        """Copy all gradients to the host."""
        import torch

        for pair in self.pairs:
            pair.follow()
            pair.take()
        if any(parameter.is_cuda for parameter in self.parameters):
            torch.cuda.synchronize()  # the host is about to read what was copied
        with torch.no_grad():
            for pair in self.pairs:
                pair.arrived()
        self.has_taken = True

    def _before_step(self) -> None:
        if not self.has_taken:
            self.take()

    def _after_step(self) -> None:
        import torch

        self.has_taken = False
        with torch.no_grad():
            for pair in self.pairs:
                pair.give()

    def _zero_grad(self) -> Callable[..., None]:
        def zero_grad(_: Any, set_to_none: bool = True) -> None:
            self.has_taken = False
            for pair in self.pairs:
                pair.there.grad = None
                if set_to_none:
                    pair.here.grad = None
                elif (gradient := pair.here.grad) is not None:
                    if gradient.grad_fn is not None:  # DDP's are views, which cannot be detached
                        gradient.detach_()
                    gradient.requires_grad_(False).zero_()

        return zero_grad

    def _save_masters(self, _: Any, state: dict[str, Any]) -> None:
        """Add the masters to a checkpoint: the model's own state has only 16 bits of them."""
        state[_KEY] = [pair.there.detach() for pair in self.pairs]

    def _load_masters(self, _: Any, state: dict[str, Any]) -> None:
        import torch

        masters = state.get(_KEY, [])
        if len(masters) != len(self.pairs):
            return
        with torch.no_grad():
            for pair, master in zip(self.pairs, masters, strict=True):
                pair.there.copy_(master)


def keep_master(parameter: torch.Tensor) -> None:
    """Keep a weight on the host before it is rounded, for the optimizer that is made later."""
    vars(parameter)[_MASTER] = parameter.detach().to("cpu", copy=True)


def optimizer_on_host(optimizer: object) -> OnHost | None:
    """Return what moves an optimizer's values, if it is on the host."""
    found: OnHost | None = getattr(optimizer, _MARK, None)
    return found


# ---- a loss scaler, and clipping -----------------------------------------------------------------


def scaler_on_host(device: str, **options: Any) -> torch.amp.GradScaler:
    """Return a loss scaler that finds the gradients of optimizers on the host."""
    made: torch.amp.GradScaler = _scaler_class()(device, **options)
    return made


@functools.cache
def _scaler_class() -> Any:
    import torch

    class ScalerOnHost(torch.amp.GradScaler):
        """Gradients in fp32 are unscaled on the GPU; in fp16 they would underflow there."""

        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            found = optimizer_on_host(optimizer)
            if found is not None and found.is_low:
                found.take()
            super().unscale_(optimizer)

        def _unscale_grads_(self, optimizer: Any, *args: Any) -> Any:
            found = optimizer_on_host(optimizer)
            if found is not None and not found.is_low:
                groups = [{"params": found.parameters}]
                optimizer = types.SimpleNamespace(param_groups=groups)
            return super()._unscale_grads_(optimizer, *args)

    return ScalerOnHost


def knows_host(scaler: object) -> bool:
    """Return whether a loss scaler finds gradients on the host."""
    return isinstance(scaler, _scaler_class())


def to_clip(
    parameters: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """Return the parameters whose gradients to clip: the host's, where they were unscaled."""
    found = list(filter(None, map(optimizer_on_host, optimizers)))
    theirs = {id(pair.there): pair for one in found for pair in one.pairs}
    taken = {
        id(pair.here): pair.there
        for one in found
        if one.has_taken and one.is_low
        for pair in one.pairs
    }
    return [taken.get(id(p), p) for p in parameters if id(p) not in theirs]


# ---- the trick -----------------------------------------------------------------------------------


def why_not_on(model: torch.nn.Module) -> str | None:
    """Return why the optimizer of a model cannot be on the host."""
    is_sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    return "an embedding in it has sparse gradients" if is_sparse else None


def refuse_sparse(model: torch.nn.Module) -> None:
    """Raise UsageError if the optimizer of a model cannot be on the host."""
    why_not = why_not_on(model)
    if why_not is not None:
        raise UsageError(
            "the optimizer cannot be on the host",
            because=why_not,
            attempt="sparse=False in the embedding",
        )


def line_of(variant: Variant) -> str:
    """Return the line of Python that makes the optimizer on the host."""
    made = "oomph.apply(plan, model, make_optimizer)"
    if variant.precision == "fp16":  # torch's own loss scaler finds no gradients in it
        return f"step = oomph.Stepper(*{made}, loss, plan), which has the loss scaler for it"
    return f"model, optimizer = {made}"


def _conflict(variant: Variant, _: bool) -> UsageError | None:
    if variant.precision == "fp16" and divides_parameters(variant):
        return UsageError(
            "what FSDP divides cannot be offloaded with fp16",
            because="the loss scaler looks for gradients on the GPU, and FSDP's are on the host",
            attempt="bf16, or ddp",
        )
    return None


_TORCHAO = "torchao.optim.CPUOffloadOptimizer"


def _by_hand(variant: Variant, target: str) -> tuple[str, ...]:
    if divides_parameters(variant) or target in ("deepspeed", "code"):
        return ()  # their own settings express it
    if variant.precision == "fp16":
        own = f"oomph.Stepper, or plan.to_code(): {_TORCHAO} does not work with a loss scaler"
        return (f"the optimizer on the host: {own}",)
    return (f"the optimizer on the host: {_TORCHAO}(parameters, torch.optim.AdamW)",)


_ON_HOST = '''
class OnHost:
    """The user's optimizer, with its state and its step on the host."""

    def __init__(self, parameters, make_optimizer):
        self.here = [p for p in parameters if p.requires_grad]
        self.there = [p.detach().to("cpu", copy=True).requires_grad_() for p in self.here]
        self.optimizer = make_optimizer(self.there)  # learning rates are changed here
        self.param_groups = [{"params": self.here}]  # what a GradScaler looks at

    def step(self):
        for here, there in zip(self.here, self.there):
            there.grad = None if here.grad is None else here.grad.to("cpu")
        self.optimizer.step()
        with torch.no_grad():
            for here, there in zip(self.here, self.there):
                here.copy_(there)

    def zero_grad(self, set_to_none=True):
        for here in self.here:
            here.grad = None
'''

OFFLOAD_OPTIMIZER = Definition(
    name="offload-optimizer",
    stability="same",
    setting="offload_optimizer",
    what=lambda variant: (
        "keep FSDP's parameters, gradients and optimizer state in host memory, and step there"
        if divides_parameters(variant)
        else "keep the optimizer's state in host memory, and step there"
    ),
    code=lambda variant: (
        "fully_shard(offload_policy=CPUOffloadPolicy())"
        if divides_parameters(variant)
        else line_of(variant)
    ),
    caveat="a step on the host is slow: measure one",
    why_not_in_script=TOO_LATE_IN_SCRIPT,
    conflict=_conflict,
    # The host's step does not depend on the GPU implementation.
    is_pointless=lambda variant: variant.optimizer != "as-is",
    why_not_on=why_not_on,
    put_on_model=lambda model, _: refuse_sparse(model),
    make_optimizer=make_on_host,
    too_late_for_optimizer="an offloaded optimizer",
    by_hand=_by_hand,
    in_code=lambda variant: (
        Fragment()  # FSDP does it
        if divides_parameters(variant)
        else Fragment(functions=[_ON_HOST], optimizer_class="OnHost")
    ),
)
