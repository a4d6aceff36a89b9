"""Keep weights and gradients in 16 bits on the GPU, and fp32 weights and the optimizer on the host.

This is DeepSpeed's ZeRO-Offload on one GPU. The optimizer updates the fp32 weights (the masters),
and the GPU receives them rounded. Gradients are widened before the update, and with fp16 unscaled,
too. Forward stays in autocast, so norms and losses are computed in fp32, which DeepSpeed does not
do. What BatchNorm trains stays in fp32, beside its statistics: it is small.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from oomph.errors import UsageError
from oomph.records.workload import Variant, divides_parameters
from oomph.tricks.definition import TOO_LATE_IN_SCRIPT, Definition, Fragment, Request, by_hand
from oomph.tricks.offload_optimizer import (
    keep_master,
    line_of,
    make_on_host,
    refuse_sparse,
    why_not_on,
)

if TYPE_CHECKING:
    import torch

# A sum in bf16 has 8 bits, in fp16 11: from 2 ** bits equal parts on, another one is lost in it.
# Judgement: two bits of each part have to count.
_MOST_ADDED = {"bf16": 2**6, "fp16": 2**9}


def lowered(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that are to have 16 bits."""
    import torch
    from torch.nn.modules.batchnorm import _NormBase

    norms = (module for module in model.modules() if isinstance(module, _NormBase))
    kept = {id(parameter) for norm in norms for parameter in norm.parameters()}
    every = model.parameters()
    return [p for p in every if p.dtype is torch.float32 and id(p) not in kept]


def lower(model: torch.nn.Module, variant: Variant) -> None:
    """Round the weights, and keep the originals of those that are trained on the host."""
    import torch

    refuse_sparse(model)
    dtype = torch.float16 if variant.precision == "fp16" else torch.bfloat16
    wanted = {id(parameter) for parameter in lowered(model)}

    def low(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in wanted or tensor.dtype is not torch.float32:
            return tensor
        # On several GPUs, DDP gives every rank the rounded weights of the first.
        if tensor.requires_grad and variant.num_gpus == 1:
            keep_master(tensor)
        return tensor.detach().to(dtype)

    if wanted:
        model._apply(low)  # as Module.to does: an RNN also keeps its weights in a list


def _why_not(request: Request) -> str | None:
    low = {"bf16", "fp16"}
    if request.precision not in {"fp32", *low}:
        return "it needs autocast to bf16 or fp16"
    if request.precision == "fp32" and low <= request.forbid:
        return "it needs bf16 or fp16"
    return None


def _conflict(variant: Variant, _: bool) -> UsageError | None:
    found: tuple[str, str] | None = None
    most = _MOST_ADDED.get(variant.precision)
    if most is None:
        because = "it keeps weights in bf16 or fp16 on the GPU"
        found = because, "bf16, or fp16 on a GPU without bf16"
    elif variant.offload_optimizer:
        because = "both move the optimizer to the host"
        found = because, "zero-offload alone"
    elif variant.optimizer_in_backward:
        found = "its step runs on the host", "only one of these two tricks"
    elif divides_parameters(variant):
        because = "the optimizer is made of the pieces that FSDP keeps on each GPU"
        found = because, "offload-optimizer, which is FSDP's own"
    elif variant.adapters != "none":
        because = "adapters leave next to nothing to offload, and stay in fp32"
        found = because, "adapters alone"
    elif variant.accumulation > most:
        because = (
            f"gradients are added up in {variant.precision}, where what one of"
            f" {variant.accumulation} micro-batches adds is mostly lost"
        )
        found = because, f"at most {most} micro-batches a step, or offload-optimizer"
    if found is None:
        return None
    return UsageError("ZeRO-Offload is not possible", because=found[0], attempt=found[1])


_ON_HOST = '''
class OnHost:
    """fp32 weights and the user's optimizer on the host; the GPU's weights are rounded."""

    def __init__(self, parameters, make_optimizer):
        self.here = [p for p in parameters if p.requires_grad]
        self.there = [{masters}.float().requires_grad_() for p in self.here]
        self.optimizer = make_optimizer(self.there)  # learning rates are changed here
        self.param_groups = [{"params": self.there}]  # what a GradScaler looks at

    def take(self):
        """Takes over the gradients, before they are unscaled and clipped."""
        for here, there in zip(self.here, self.there):
            there.grad = None if here.grad is None else here.grad.to("cpu").float()

    def step(self):
        self.optimizer.step()
        with torch.no_grad():
            for here, there in zip(self.here, self.there):
                here.copy_(there.to(here.dtype))

    def zero_grad(self, set_to_none=True):
        for here in self.here:
            here.grad = None
'''

_LOWER = '''
MASTERS = {}  # the trained weights before they were rounded


def lower(model):
    """Rounds the weights to 16 bits, but for BatchNorm's, which stay beside its statistics."""
    norms = torch.nn.modules.batchnorm._NormBase
    of_norms = [m for m in model.modules() if isinstance(m, norms)]
    kept = {p for norm in of_norms for p in norm.parameters()}

    def low(tensor):
        is_weight = isinstance(tensor, torch.nn.Parameter) and tensor not in kept
        if not is_weight or tensor.dtype != torch.float32:
            return tensor
        MASTERS[tensor] = tensor.detach().to("cpu", copy=True)
        return tensor.detach().to({dtype})

    model._apply(low)
'''


def _in_code(variant: Variant) -> Fragment:
    dtype = "torch.float16" if variant.precision == "fp16" else "torch.bfloat16"
    # On several GPUs, DDP has given every process the rounded weights of the first.
    original = "MASTERS.get(p, p.detach().cpu())" if variant.num_gpus == 1 else "p.detach().cpu()"
    return Fragment(
        functions=[_LOWER.replace("{dtype}", dtype), _ON_HOST.replace("{masters}", original)],
        on_model=["lower(model)"],
        optimizer_class="OnHost",
    )


ZERO_OFFLOAD = Definition(
    name="zero-offload",
    stability="rounding",
    setting="zero_offload",
    what="16-bit weights and gradients on the GPU; fp32 weights, state and step on the host",
    code=lambda variant: f"{line_of(variant)}; or DeepSpeed's zero_optimization.offload_optimizer",
    caveat="a step on the host is slow: measure one. Gradients are added up in 16 bits",
    why_not=_why_not,
    why_not_on=why_not_on,
    why_not_in_script=TOO_LATE_IN_SCRIPT,
    conflict=_conflict,
    # The host's step does not depend on the GPU implementation.
    is_pointless=lambda variant: variant.optimizer != "as-is",
    put_on_built=lower,
    make_optimizer=partial(make_on_host, has_masters=True),
    needs_optimizer=True,
    too_late_for_model=lambda _: "ZeRO-Offload",
    too_late_for_optimizer="ZeRO-Offload",
    by_hand=by_hand(
        "ZeRO-Offload, with 16-bit weights on the GPU and the rest on the host: DeepSpeed's"
        " zero_optimization.offload_optimizer, or plan.to_code()",
        unless=["deepspeed"],
    ),
    in_code=_in_code,
)
