"""Adam or AdamW -> the same optimizer with 8-bit state, from bitsandbytes or torchao.

Memory for a parameter of n elements, from bitsandbytes 0.50 (optim/optimizer.py,
Optimizer2State.init_state) and torchao 0.18 (optim/adam.py, optim/subclass_8bit.py):

- bitsandbytes: 2 x n bytes of codes, 2 x ceil(n / 256) fp32 scales, and two 1 KiB tables in total.
  State is fp32 below 4096 elements and, as in Hugging Face's Trainer, for embeddings. The update
  is one kernel without temporaries.
- torchao: 2 x n bytes of codes, 2 x n / 256 fp32 scales, and two 1 KiB tables per parameter. State
  has the parameter's dtype below 4096 elements, or if 256 does not divide n. The update is
  compiled, one parameter at a time. Inductor's code for it (torch 2.13, for the CPU) takes two
  fp32 tensors of n elements and two of n / 256; on a GPU it may take less.

A rehearsal runs bitsandbytes' own code. A stand-in that takes the same memory replaces a library
that is not installed, and torchao, which would compile.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, cast

from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks.definition import Definition, Request, by_hand
from oomph.tricks.optimizers import groups_of, other_optimizer_code, refuse_sparse

if TYPE_CHECKING:
    import torch

_OPTIONS = ("lr", "betas", "eps", "weight_decay")
_BLOCK = 256  # elements per scale, in both libraries
_LEAST = 4096  # smaller tensors keep their state unquantised, in both libraries
_TABLE = 256  # fp32 values in a code table
_MARK = "_oomph_is_embedding"


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Ask torch's unpatched getter for meta: the tensors of a rehearsal report a GPU."""
    import torch

    return bool(torch._C.TensorBase.is_meta.__get__(tensor))  # type: ignore[attr-defined]


def _mark_embeddings(model: torch.nn.Module, variant: Variant) -> None:
    """Mark embedding tables, whose state stays unquantised: their gradients are rare and rough."""
    import torch

    refuse_sparse(model, variant)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            setattr(module.weight, _MARK, True)


def eight_bit(original: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make the 8-bit optimizer on the user's parameter groups. Raises UsageError."""
    is_decoupled = _is_decoupled(original)
    groups = groups_of(original, _OPTIONS)
    name, module, problems = _library(is_decoupled)
    is_rehearsal = any(
        _has_no_memory(p) for group in original.param_groups for p in group["params"]
    )
    kind = "AdamW8bit" if is_decoupled else "Adam8bit"
    if module is not None and name == "bitsandbytes":
        return _of_bitsandbytes(module, kind, groups)
    if is_rehearsal:
        return cast("torch.optim.Optimizer", stand_in()(groups, library=name))
    if module is not None:
        return cast("torch.optim.Optimizer", getattr(module, kind)(groups))
    raise UsageError(
        "there is no 8-bit optimizer here",
        because="; ".join(problems),
        attempt=f"pip install {name}",
    )


def _is_decoupled(original: torch.optim.Optimizer) -> bool:
    """Return whether weight decay is decoupled, as in AdamW; refuse what has no 8-bit form."""
    import torch

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
    """Return the library to use, its module if installed, and why the others are not used."""
    problems: list[str] = []
    # bitsandbytes' Adam8bit also decouples weight decay: it is AdamW (kernels.cu, backends/cpu).
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


def _of_bitsandbytes(module: Any, kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make its optimizer with a separate manager: the global one knows parameters by position."""
    optimizer: Any = getattr(module, kind)(groups)
    manager: Any = type(optimizer.mng)
    optimizer.mng = manager.__new__(manager)
    optimizer.mng.initialize()
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            if hasattr(parameter, _MARK):
                optimizer.mng.index2config[i, j] = {"optim_bits": 32}
    return cast("torch.optim.Optimizer", optimizer)


@functools.cache
def stand_in() -> Any:
    """Return a class that takes the memory of an 8-bit optimizer but does not train."""
    import torch

    class StandIn(torch.optim.Optimizer):
        def __init__(self, groups: Any, *, library: str) -> None:
            super().__init__(groups, {"lr": 0.0})
            self._is_torchao = library == "torchao"
            self._tables: list[torch.Tensor] = []  # one pair shared by all parameters

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        _take(self.state[parameter], parameter, self._is_torchao, self._tables)

    return StandIn


def _take(
    state: dict[str, Any], parameter: torch.Tensor, is_torchao: bool, tables: list[torch.Tensor]
) -> None:
    """Allocate what the step of one parameter allocates."""
    import torch

    if not _has_no_memory(parameter) or parameter.grad is None:
        raise RuntimeError("a stand-in of a rehearsal trains nothing")
    if "taken" not in state:
        state["taken"] = (
            _state_of_torchao(parameter)
            if is_torchao
            else _state_of_bitsandbytes(parameter, tables)
        )
    if is_torchao and state["taken"][0].dtype == torch.uint8:
        size = parameter.numel()
        sizes = (size // _BLOCK, size // _BLOCK, size, size)
        temporaries = [_fp32(one, parameter) for one in sizes]
        del temporaries
    parameter.add_(parameter.grad)  # stands for the memory traffic of the single kernel


def _state_of_bitsandbytes(
    parameter: torch.Tensor, tables: list[torch.Tensor]
) -> list[torch.Tensor]:
    import torch

    if parameter.numel() < _LEAST or hasattr(parameter, _MARK):
        return [torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2)]
    if not tables:
        tables += [_fp32(_TABLE, parameter) for _ in range(2)]
    codes = [torch.zeros_like(parameter, dtype=torch.uint8) for _ in range(2)]
    return codes + [_fp32(-(-parameter.numel() // _BLOCK), parameter) for _ in range(2)]


def _state_of_torchao(parameter: torch.Tensor) -> list[torch.Tensor]:
    import torch

    if parameter.numel() < _LEAST or parameter.numel() % _BLOCK:
        return [torch.zeros_like(parameter) for _ in range(2)]
    taken: list[torch.Tensor] = []
    for _ in range(2):
        taken.append(torch.zeros_like(parameter, dtype=torch.uint8))
        taken += [_fp32(parameter.numel() // _BLOCK, parameter), _fp32(_TABLE, parameter)]
    return taken


def _fp32(num_elements: int, like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.zeros(num_elements, dtype=torch.float32, device=like.device)


def _why_not(request: Request) -> str | None:
    kind = request.possible.optimizer_class.rpartition(".")[2]
    return None if kind in ("Adam", "AdamW") else f"made for Adam, and this is {kind}"


EIGHT_BIT_OPTIMIZER = Definition(
    name="8-bit-optimizer",
    stability="rounding",
    setting="optimizer",
    value="8-bit",
    what="the optimizer's state in 8 bits a value, embeddings in 32",
    code="bitsandbytes.optim.AdamW8bit, or torchao.optim.AdamW8bit",
    caveat="for a new run: the state of an old one is not carried over",
    why_not=_why_not,
    put_on_model=_mark_embeddings,
    exchange_optimizer=eight_bit,
    too_late_for_optimizer="8-bit",
    by_hand=by_hand(
        "the optimizer: bitsandbytes.optim.AdamW8bit(parameters, lr=...)", unless=["hf"]
    ),
    in_code=lambda _: other_optimizer_code(
        "8-bit",
        "bitsandbytes.optim.AdamW8bit(groups)",
        options=_OPTIONS,
        imported="import bitsandbytes",
        # Rows of an embedding are updated rarely, and 8 bits do not hold such states (bitsandbytes'
        # own advice).
        on_model=[
            "states = bitsandbytes.optim.GlobalOptimManager.get_instance()",
            "for module in model.modules():",
            "    if isinstance(module, torch.nn.Embedding):",
            '        states.register_module_override(module, "weight", {"optim_bits": 32})',
        ],
    ),
)
