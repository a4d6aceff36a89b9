"""Precision: TF32 matmuls, autocast to bf16 or fp16, or everything in bf16.

Autocast and the loss scaler go around each forward and step: a Stepper does that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomph.records.generation import generation_of
from oomph.records.workload import Variant, casts_parameters, divides_parameters
from oomph.tricks.definition import (
    TOO_LATE_IN_SCRIPT,
    Definition,
    Fragment,
    Request,
    Severity,
    by_hand,
)
from oomph.tricks.optimizers import EXCHANGED, other_optimizer_code

if TYPE_CHECKING:
    import torch


def _why_no_bf16(request: Request) -> str | None:
    has_bf16 = generation_of(request.capability).has_bf16
    return None if has_bf16 else "this GPU has no tensor cores for it"


def _why_no_fp16(request: Request) -> str | None:
    is_better = "fp16" not in request.allow and request.why_not(BF16) is None
    return "bf16 is as fast, and needs no loss scaler" if is_better else None


def _use_tf32() -> None:
    import torch

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def _cast(model: torch.nn.Module) -> None:
    import torch

    model.to(torch.bfloat16)


def _why_too_late(model: torch.nn.Module) -> str | None:
    is_wide = any(parameter.element_size() > 2 for parameter in model.parameters())
    return "pure bf16" if is_wide else None


TF32 = Definition(
    name="tf32",
    stability="rounding",
    setting="precision",
    value="tf32",
    what="products of matrices with 10 bits of mantissa, sums in fp32",
    code='torch.set_float32_matmul_precision("high")',
    why_not=_why_no_bf16,
    switch_on=_use_tf32,
    by_hand=by_hand('TF32: torch.set_float32_matmul_precision("high")', unless={"hf"}),
    in_code=lambda _: Fragment(
        constants=[
            'torch.set_float32_matmul_precision("high")  # matrix products in TF32',
            "torch.backends.cudnn.allow_tf32 = True",
        ]
    ),
    has_edit=True,
)

BF16 = Definition(
    name="bf16",
    stability="rounding",
    setting="precision",
    value="bf16",
    what=lambda v: (
        "compute in bf16" if v.zero_offload else "compute in bf16: weights and sums stay fp32"
    ),
    code=lambda v: (
        "fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
        if divides_parameters(v)
        else 'torch.autocast("cuda", dtype=torch.bfloat16)'
    ),
    why_not=_why_no_bf16,
    in_code=lambda variant: Fragment(
        around_forward=(
            []  # FSDP casts what it gathers
            if casts_parameters(variant)
            else ["torch.autocast(DEVICE.type, torch.bfloat16)"]
        )
    ),
    has_edit=True,
)

FP16 = Definition(
    name="fp16",
    stability="rounding",
    setting="precision",
    value="fp16",
    what="autocast to fp16, with a loss scaler",
    code='torch.autocast("cuda", dtype=torch.float16) and torch.amp.GradScaler',
    caveat="values above 65504 overflow: watch for skipped steps",
    why_not=_why_no_fp16,
    in_code=lambda _: Fragment(
        constants=["SCALER = torch.amp.GradScaler(DEVICE.type)  # fp16's gradients underflow"],
        around_forward=["torch.autocast(DEVICE.type, torch.float16)"],
    ),
    has_edit=True,
)


def _pure_in_code(variant: Variant) -> Fragment:
    cast = ["model.to(torch.bfloat16)"]
    if variant.optimizer in EXCHANGED:
        return Fragment(on_model=cast)
    return other_optimizer_code(
        "bf16 with stochastic rounding",
        "_AdamW(groups, bf16_stochastic_round=True)",
        options=("lr", "betas", "eps", "weight_decay"),
        imported="from torchao.optim import _AdamW",
        on_model=cast,
    )


def _pure_by_hand(_: Variant, target: str) -> list[str]:
    weights = (
        "weights in bf16: model.to(torch.bfloat16), or dtype=torch.bfloat16"
        " where the model is loaded"
    )
    rounding = (
        "stochastic rounding, without which most updates are lost in bf16:"
        " torchao.optim._AdamW(parameters, bf16_stochastic_round=True)"
    )
    if target == "code":
        return []
    return [rounding] if target in ("lightning", "deepspeed") else [weights, rounding]


PURE_BF16 = Definition(
    name="pure-bf16",
    stability="changes",
    setting="precision",
    value="pure-bf16",
    what="weights, gradients and state in bf16",
    code="model.to(torch.bfloat16), with stochastic rounding in the optimizer",
    caveat="small updates are lost without stochastic rounding",
    severity=Severity.NUMBERS,
    price="weights and optimizer state keep only 8 significant bits",
    why_not=_why_no_bf16,
    why_not_in_script=TOO_LATE_IN_SCRIPT,
    cast=_cast,
    too_late_for_model=_why_too_late,
    by_hand=_pure_by_hand,
    in_code=_pure_in_code,
)
