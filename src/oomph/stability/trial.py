"""A workload -> forward and backward for real, on the CPU, as often as needed from one state.

Nothing is trained: buffers and generators are put back before each run. What asks for a GPU gets
the CPU. In `wide` runs everything is computed in fp64, whatever casts the model has.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from oomph.errors import UsageError
from oomph.records.workload import Workload
from oomph.stability.examples import mapped
from oomph.stability.modes import EveryOp
from oomph.stability.randomness import seed_everything

T = TypeVar("T")
# The dtypes that a dtype is wider than, and what they become in it.
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
    """What one run gave."""

    loss: float
    gradient: Any  # of all parameters, as one vector in fp64, divided by the scale of the loss
    buffers: dict[str, Any]  # afterwards


class Trial:
    """A model and its loss, in one dtype."""

    def __init__(self, workload: Workload, *, wide: bool, seed: int = 0) -> None:
        self.wide, self._seed, self._loss = wide, seed, workload.loss
        seed_everything(seed)
        with on_the_cpu():
            self.model = built(workload)
            if wide:
                self.model.double()
        self.parameters = [
            (name, p) for name, p in self.model.named_parameters() if p.requires_grad
        ]
        if not self.parameters:
            raise UsageError(
                "the model has no parameter to train", attempt="requires_grad_() where it learns"
            )
        self._kept = [
            (module, name, buffer, buffer.detach().clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def run(self, batch: Any, *modes: Any, forward: Sequence[Any] = (), scale: float = 1.0) -> Ran:
        """Forward and backward within `modes`, and forward within `forward`, too."""
        self.put_back()
        with contextlib.ExitStack() as around:
            around.enter_context(on_the_cpu())
            if self.wide:
                around.enter_context(in_fp64())
            for mode in modes:
                around.enter_context(mode)
            with contextlib.ExitStack() as inner:
                for mode in forward:
                    inner.enter_context(mode)
                loss = checked(self._loss(self.model, self._own(batch)))
            # As GradScaler does it: a loss in fp16 becomes one in fp32.
            (loss * torch.tensor(scale) if scale != 1.0 else loss).backward()
        return Ran(float(loss.detach()), self._gradient(scale), self._buffers())

    def put_back(self) -> None:
        """Buffers, gradients and generators as they were at first."""
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for module, name, buffer, value in self._kept:
                buffer.detach_().copy_(value)
                module._buffers[name] = buffer
        seed_everything(self._seed + 1)

    @contextlib.contextmanager
    def rounded(self, dtype: Any) -> Iterator[None]:
        """Within this, weights are as if they came from `dtype`."""
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
        """The batch, as a copy that the user's code may change."""

        def fresh(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.copy(leaf)
            leaf = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            return leaf.to(_WIDE.get(leaf.dtype, leaf.dtype)) if self.wide else leaf

        return mapped(batch, fresh)

    def _gradient(self, scale: float) -> Any:
        return torch.cat([_as_vector(parameter) for _, parameter in self.parameters]) / scale

    def _buffers(self) -> dict[str, Any]:
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    def by_parameter(self, gradient: Any) -> Iterator[tuple[str, Any]]:
        """The parts of a gradient, by the parameter's name."""
        sizes = [_num_values(parameter) for _, parameter in self.parameters]
        names = [name for name, _ in self.parameters]
        return zip(names, gradient.split(sizes), strict=True)


def widest(workload: Workload, run: Callable[[Trial], T]) -> tuple[Trial, T, tuple[str, ...]]:
    """A run in fp64; where the user's code does not take that, in fp32, which is said."""
    try:
        trial = Trial(workload, wide=True)
        return trial, run(trial), ()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:120]
    trial = Trial(workload, wide=False)
    # What fails here as well is the workload's own error.
    return trial, run(trial), (f"compared in fp32, because fp64 fails here: {reason}",)


def built(workload: Workload) -> Any:
    """The user's model, in training mode; one with parts in eval mode stays so (frozen norms)."""
    make: Any = workload.model
    model = copy.deepcopy(make) if isinstance(make, torch.nn.Module) else make()
    if not any(module.training for module in model.modules()):
        model.train()  # as from_pretrained returns it
    return model.cpu()


def checked(loss: Any) -> Any:
    """A loss that backward can start from. Raises UsageError."""
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


def rounded_batch(batch: Any, dtype: Any) -> Any:
    """The batch, with values as if they came from `dtype`."""
    return mapped(batch, lambda _, leaf: _rounded(leaf, dtype))


def _rounded(value: Any, dtype: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype).to(value.dtype) if is_float else value


def _as_vector(parameter: Any) -> Any:
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    gradient = gradient.detach()
    gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    flat = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return flat.reshape(-1).double()


def _num_values(parameter: Any) -> int:
    return int(parameter.numel()) * (2 if parameter.is_complex() else 1)


# ---- where and in what is computed -------------------------------------------------------------


class _CpuForCuda(TorchFunctionMode):
    """What the user's code sends to a GPU stays here."""

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


def on_the_cpu() -> Any:
    return _CpuForCuda()


class Widened(EveryOp):
    """A cast to less than a dtype is none, and what comes from outside in less is taken in it.

    Autocast's own casts are among these, wherever it is switched on.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._narrower = dtype, _NARROWER.get(dtype, {})

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self._widened(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(self._widened, args))
        if not op._schema.is_mutable and self._is_mixed((args, kwargs)):
            args, kwargs = tree_map(self._as_wide, (args, kwargs))
        return op(*args, **kwargs)

    def _is_mixed(self, tree: Any) -> bool:
        """fp64 beside less, as where a loss has weights of its own."""
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
def in_fp64() -> Iterator[None]:
    """What is made in here is in fp64, and stays in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widened(torch.float64):
            yield
    finally:
        torch.set_default_dtype(before)
