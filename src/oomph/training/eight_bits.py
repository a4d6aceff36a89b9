"""Adam or AdamW -> the same with its state in 8 bits: that of bitsandbytes, or of torchao.

What they take, read in bitsandbytes 0.50 (optim/optimizer.py, Optimizer2State.init_state) and
torchao 0.18 (optim/adam.py, optim/subclass_8bit.py), for a parameter of n elements:

- bitsandbytes: 2 x n bytes of codes and 2 x ceil(n / 256) fp32 scales, two tables of 1 KiB for all;
  fp32 for fewer than 4096 elements and, as Hugging Face's Trainer has it, for embeddings. The
  update is one kernel without temporaries.
- torchao: 2 x n bytes of codes, 2 x n / 256 fp32 scales and two tables of 1 KiB for each parameter;
  the dtype of the parameter for fewer than 4096 elements, or where 256 does not divide n. The
  update is compiled, one parameter at a time. Inductor's code for it (torch 2.13, for the CPU)
  takes two fp32 tensors of n elements and two of n / 256; on a GPU it may take less.

A rehearsal runs the code of bitsandbytes itself. A library that is not installed, and torchao,
which would compile, have a stand-in there: it takes what they take.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from oomph.errors import UsageError

OPTIONS = ("lr", "betas", "eps", "weight_decay")
_BLOCK = 256  # elements with one scale, in both libraries
_LEAST = 4096  # elements from which on a state has 8 bits, in both
_TABLE = 256  # fp32 values that codes stand for
_MARK = "_oomph_is_embedding"
# Tensors of a rehearsal say that they are on a GPU; torch's own getter, unpatched, says they have
# no memory.
_has_no_memory = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]


def mark_embeddings(model: Any) -> None:
    """Remember which parameters are tables: their gradients are rare and rough, and they stay."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            setattr(module.weight, _MARK, True)


def eight_bit(original: Any, groups: list[dict[str, Any]]) -> Any:
    """The 8-bit optimizer on the groups of the user's own. Raises UsageError."""
    is_decoupled = _is_decoupled(original)
    name, module, problems = _library(is_decoupled)
    is_rehearsal = any(
        _has_no_memory(p) for group in original.param_groups for p in group["params"]
    )
    kind = "AdamW8bit" if is_decoupled else "Adam8bit"
    if module is not None and name == "bitsandbytes":
        return _of_bitsandbytes(module, kind, groups)
    if is_rehearsal:
        return StandIn(groups, library=name)
    if module is not None:
        return getattr(module, kind)(groups)
    raise UsageError(
        "there is no 8-bit optimizer here",
        because="; ".join(problems),
        attempt=f"pip install {name}",
    )


def _is_decoupled(original: Any) -> bool:
    """Is weight decay apart from the gradient, as in AdamW? Refuses what has no 8-bit form."""
    if not isinstance(original, torch.optim.Adam):
        raise UsageError(
            f"{type(original).__name__} has no 8-bit form",
            because="there is one of torch.optim.Adam and torch.optim.AdamW",
            attempt="as-is, or torch.optim.AdamW",
        )
    for option in ("amsgrad", "maximize"):
        if any(group[option] for group in original.param_groups):
            raise UsageError(
                f"8-bit Adam has no {option}",
                because="bitsandbytes does not compute it",
                attempt=f"{option}=False, or another optimizer",
            )
    return all(
        group["decoupled_weight_decay"] or not group["weight_decay"]
        for group in original.param_groups
    )


def _library(is_decoupled: bool) -> tuple[str, Any, list[str]]:
    """The library to use, its module if there is one, and why others are not."""
    problems: list[str] = []
    # bitsandbytes' Adam8bit decouples weight decay, too: it is AdamW (kernels.cu, backends/cpu).
    wanted = ("bitsandbytes", "torchao") if is_decoupled else ("torchao",)
    for name in wanted:
        module = _imported(f"{name}.optim", problems)
        if module is not None:
            return name, module, problems
    return wanted[0], None, problems


def _imported(name: str, problems: list[str]) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        problems.append(" ".join(str(error).split())[:150])
        return None


def _of_bitsandbytes(module: Any, kind: str, groups: list[dict[str, Any]]) -> Any:
    """Its optimizer, with a manager of its own: the global one knows parameters by their places."""
    optimizer = getattr(module, kind)(groups)
    manager: Any = type(optimizer.mng)
    optimizer.mng = manager.__new__(manager)
    optimizer.mng.initialize()
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            if hasattr(parameter, _MARK):
                optimizer.mng.index2config[i, j] = {"optim_bits": 32}
    return optimizer


class StandIn(torch.optim.Optimizer):
    """Takes the memory of an 8-bit optimizer, and trains nothing: for tensors without memory."""

    def __init__(self, groups: Any, *, library: str) -> None:
        super().__init__(groups, {"lr": 0.0})
        self._take_state = self._as_bitsandbytes if library == "bitsandbytes" else self._as_torchao
        self._is_torchao = library == "torchao"
        self._tables: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter)

    def _update(self, parameter: Any) -> None:
        if not _has_no_memory(parameter):
            raise RuntimeError("a stand-in of a rehearsal trains nothing")
        if not self.state[parameter]:
            self.state[parameter]["taken"] = self._take_state(parameter)
        is_low = self.state[parameter]["taken"][0].dtype == torch.uint8
        if self._is_torchao and is_low:
            self._take_temporaries(parameter)
        parameter.add_(parameter.grad)  # stands for the traffic of the one kernel

    def _as_bitsandbytes(self, parameter: Any) -> list[Any]:
        if parameter.numel() < _LEAST or hasattr(parameter, _MARK):
            return [torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2)]
        if not self._tables:
            self._tables = [_fp32(_TABLE, parameter) for _ in range(2)]
        codes = [torch.zeros_like(parameter, dtype=torch.uint8) for _ in range(2)]
        return codes + [_fp32(-(-parameter.numel() // _BLOCK), parameter) for _ in range(2)]

    def _as_torchao(self, parameter: Any) -> list[Any]:
        if parameter.numel() < _LEAST or parameter.numel() % _BLOCK:
            return [torch.zeros_like(parameter) for _ in range(2)]
        taken: list[Any] = []
        for _ in range(2):
            taken.append(torch.zeros_like(parameter, dtype=torch.uint8))
            taken += [_fp32(parameter.numel() // _BLOCK, parameter), _fp32(_TABLE, parameter)]
        return taken

    def _take_temporaries(self, parameter: Any) -> None:
        scales = [_fp32(parameter.numel() // _BLOCK, parameter) for _ in range(2)]
        scaled = [_fp32(parameter.numel(), parameter) for _ in range(2)]
        del scales, scaled


def _fp32(num_elements: int, like: Any) -> Any:
    return torch.zeros(num_elements, dtype=torch.float32, device=like.device)
