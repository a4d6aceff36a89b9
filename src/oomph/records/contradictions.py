"""A way to train -> what of it cannot go together, before anything is built."""

from __future__ import annotations

from oomph.errors import UsageError
from oomph.records.sharding import divides_parameters
from oomph.records.workload import Variant


def contradiction_in(variant: Variant, *, clips_gradients: bool) -> UsageError | None:
    """Why a way cannot be trained in; None if nothing speaks against it from here."""
    if variant.optimizer_in_backward:
        found = _against_step_in_backward(variant, clips_gradients=clips_gradients)
        if found is not None:
            return found
    if variant.offload_optimizer and variant.precision == "fp16":
        return UsageError(
            "the optimizer cannot be offloaded",
            because="the loss scaler of fp16 looks for gradients on the GPU in it",
            attempt="bf16",
        )
    if variant.offload_optimizer and divides_parameters(variant):
        return UsageError(
            "the optimizer cannot be offloaded where FSDP divides it",
            because="its state is made of the pieces that FSDP keeps on each GPU",
            attempt="ddp, or FSDP's own CPUOffloadPolicy, which oomph does not predict",
        )
    if variant.adapters == "qlora" and variant.precision in ("fp16", "tf32", "fp32"):
        return UsageError(
            "QLoRA computes in bf16",
            because=f"{variant.precision} was asked for, and what is not quantised is in bf16",
            attempt="bf16 or pure-bf16",
        )
    if variant.adapters == "qlora" and divides_parameters(variant):
        return UsageError(
            "QLoRA cannot be divided among GPUs",
            because="FSDP would cast the packed 4-bit weights as if they were numbers",
            attempt="ddp, or lora",
        )
    return None


def _against_step_in_backward(variant: Variant, *, clips_gradients: bool) -> UsageError | None:
    what = "the optimizer cannot step in backward"
    if variant.sharding == "ddp":
        return UsageError(
            what,
            because="DDP averages gradients after they are there",
            attempt="fsdp, which averages them first",
        )
    if variant.offload_optimizer:
        return UsageError(what, because="its step is the host's", attempt="one of the two")
    if variant.accumulation > 1:
        return UsageError(
            what,
            because="a step adds up the gradients of several micro-batches",
            attempt="the whole batch at once",
        )
    if clips_gradients:
        return UsageError(
            what,
            because="clip_grad_norm needs all gradients before the first is used",
            attempt="a workload without clip_grad_norm",
        )
    if variant.precision == "fp16":
        return UsageError(
            what,
            because="the loss scaler of fp16 must see all gradients before the first is used",
            attempt="bf16",
        )
    return None
