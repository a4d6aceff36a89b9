"""Run forward and backward of a workload for real, on the CPU, any number of times from one state.

Nothing is trained: buffers and generators are restored before each run. Requests for a GPU get the
CPU. `wide` runs compute everything in fp64, whatever casts the model contains.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from oomph.errors import UsageError
from oomph.records.check import SAME_IN_FP32, SAME_IN_FP64, Finding
from oomph.records.workload import Workload
from oomph.stability.examples import mapped
from oomph.stability.randomness import EveryOp, seed_everything

T = TypeVar("T")
NOT_REPEATABLE = Finding(
    what="something draws random numbers from a generator that no seed controls, or keeps state"
    " outside of the model's buffers",
    module="",
    do="seed it from torch, or make it a buffer",
)
# A dtype -> the narrower dtypes, and what they become in it.
_NARROWER: dict[torch.dtype, dict[torch.dtype, torch.dtype]] = {
    torch.float32: {torch.float16: torch.float32, torch.bfloat16: torch.float32},
    torch.float64: {
        torch.float16: torch.float64,
        torch.bfloat16: torch.float64,
        torch.float32: torch.float64,
        torch.complex32: torch.complex128,
        torch.complex64: torch.complex128,
    },
}
_WIDE = _NARROWER[torch.float64]


@dataclass(frozen=True)
class Ran:
    """The result of one run."""

    loss: float
    # Of all parameters, as one vector in fp64, divided by the loss scale.
    gradient: torch.Tensor
    buffers: dict[str, torch.Tensor]  # after the run


class Trial:
    """A model and its loss, in one dtype."""

    def __init__(self, workload: Workload, *, wide: bool, seed: int = 0) -> None:
        self.wide, self._seed, self._loss = wide, seed, workload.loss
        self.tolerance = SAME_IN_FP64 if wide else SAME_IN_FP32  # for equal gradients
        seed_everything(seed)
        with _CpuForCuda():
            self.model = _built(workload)
            if wide:
                self.model.double()
        self.parameters = [
            (name, p) for name, p in self.model.named_parameters() if p.requires_grad
        ]
        if not self.parameters:
            raise UsageError(
                "the model has no parameter to train", attempt="requires_grad_() where it learns"
            )
        self._at_first = [
            (module, name, buffer, buffer.detach().clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def run(
        self,
        batch: Any,
        *modes: AbstractContextManager[Any],
        forward: Sequence[AbstractContextManager[Any]] = (),
        scale: float = 1.0,
    ) -> Ran:
        """Run forward and backward within `modes`, and forward within `forward` as well."""
        self.put_back()
        with contextlib.ExitStack() as around:
            around.enter_context(_CpuForCuda())
            if self.wide:
                around.enter_context(_in_fp64())
            for mode in modes:
                around.enter_context(mode)
            with contextlib.ExitStack() as inner:
                for mode in forward:
                    inner.enter_context(mode)
                loss = _checked(self._loss(self.model, self._own(batch)))
            # Like GradScaler: a loss in fp16 becomes one in fp32.
            torch.autograd.backward(loss * torch.tensor(scale) if scale != 1.0 else loss)
        gradient = torch.cat([as_vector(parameter) for _, parameter in self.parameters])
        return Ran(float(loss.detach()), gradient / scale, self._buffers())

    def put_back(self) -> None:
        """Restore the initial buffers and generators, and clear the gradients."""
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for module, name, buffer, value in self._at_first:
                buffer.detach_().copy_(value)
                module._buffers[name] = buffer
        seed_everything(self._seed + 1)

    def buffers_at_first(self) -> dict[str, torch.Tensor]:
        self.put_back()
        return self._buffers()

    @contextlib.contextmanager
    def rounded(self, dtype: torch.dtype) -> Iterator[None]:
        """Round the weights to `dtype` within this context."""
        before = [parameter.detach().clone() for _, parameter in self.parameters]
        with torch.no_grad():
            for _, parameter in self.parameters:
                parameter.copy_(_rounded(parameter, dtype))
        try:
            yield
        finally:
            with torch.no_grad():
                for (_, parameter), value in zip(self.parameters, before, strict=True):
                    parameter.copy_(value)

    def _own(self, batch: Any) -> Any:
        """Return a copy of the batch that the user's code may change."""

        def fresh(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.copy(leaf)
            leaf = own_tensor(leaf)
            return leaf.to(_WIDE.get(leaf.dtype, leaf.dtype)) if self.wide else leaf

        return mapped(batch, fresh)

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    def by_parameter(self, gradient: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the parts of a gradient, by parameter name."""
        sizes = [p.numel() * (2 if p.is_complex() else 1) for _, p in self.parameters]
        names = [name for name, _ in self.parameters]
        return zip(names, gradient.split(sizes), strict=True)


def widest(workload: Workload, run: Callable[[Trial], T]) -> tuple[Trial, T, tuple[str, ...]]:
    """Run in fp64, or in fp32 if the user's code does not support fp64; a note then says so."""
    try:
        trial = Trial(workload, wide=True)
        return trial, run(trial), ()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        reason = one_line(error, 120)
    trial = Trial(workload, wide=False)
    # If this fails too, the error is the workload's own.
    return trial, run(trial), (f"compared in fp32, because fp64 fails here: {reason}",)


def one_line(error: BaseException, most: int) -> str:
    """Return the start of an error's message, on one line."""
    return " ".join(str(error).split())[:most]


def _built(workload: Workload) -> nn.Module:
    """Return the user's model in training mode; parts in eval mode stay so (frozen norms)."""
    make: Any = workload.model
    model: nn.Module = copy.deepcopy(make) if isinstance(make, nn.Module) else make()
    if not any(module.training for module in model.modules()):
        model.train()  # from_pretrained returns it in eval mode
    return model.cpu()


def _checked(loss: Any) -> torch.Tensor:
    """Return a loss that backward can start from. Raises UsageError."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(
            "the workload's loss is not a scalar", because=f"it is {shape}", attempt="loss.mean()"
        )
    if not loss.requires_grad:
        raise UsageError(
            "the workload's loss needs no gradient",
            because="nothing that leads to it has requires_grad",
            attempt="is there a torch.no_grad() or a detach() around the model?",
        )
    return loss.reshape(())


def own_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that the user's code may change."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def rounded_batch(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its values rounded to `dtype`."""
    return mapped(batch, lambda _, leaf: _rounded(leaf, dtype))


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype).to(value.dtype) if is_float else value


def as_vector(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, flat and in fp64; zeros if it has none."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradient = gradient.detach()
    gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    flat = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return flat.reshape(-1).double()


# ---- device and precision ----------------------------------------------------------------------


class _CpuForCuda(TorchFunctionMode):
    """Keeps on the CPU what the user's code sends to a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        args, kwargs = tree_map(_on_cpu, (tuple(args), dict(kwargs or {})))
        return function(*args, **kwargs)


def _on_cpu(argument: Any) -> Any:
    is_text = isinstance(argument, str) and argument.split(":")[0] == "cuda"
    is_gpu = isinstance(argument, torch.device) and argument.type == "cuda"
    return torch.device("cpu") if is_text or is_gpu else argument


class Widened(EveryOp):
    """Ignores casts to narrower dtypes, including autocast's, and widens narrower inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._narrower = dtype, _NARROWER.get(dtype, {})

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {name: self._widened(value) for name, value in kwargs.items()}
        args = tuple(map(self._widened, args))
        if not op._schema.is_mutable and self._is_mixed((args, kwargs)):
            args, kwargs = tree_map(self._as_wide, (args, kwargs))
        return op(*args, **kwargs)

    def _is_mixed(self, tree: Any) -> bool:
        """Return whether the wide dtype meets narrower ones, such as a loss's own weights."""
        found = {t.dtype for t in tree_leaves(tree) if isinstance(t, torch.Tensor)}
        return self._dtype in found and bool(found & self._narrower.keys())

    def _as_wide(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self._narrower.get(value.dtype, value.dtype))

    def _widened(self, argument: Any) -> Any:
        is_dtype = isinstance(argument, torch.dtype)
        return self._narrower.get(argument, argument) if is_dtype else argument


@contextlib.contextmanager
def _in_fp64() -> Iterator[None]:
    """Create tensors in fp64 and keep them in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widened(torch.float64):
            yield
    finally:
        torch.set_default_dtype(before)
