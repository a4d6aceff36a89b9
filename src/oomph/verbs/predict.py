"""The verb predict: Workload or Script -> Prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from oomph.records.prediction import Prediction
    from oomph.records.script import Script
    from oomph.records.workload import Adapters, Attention, Keeps, Loss, Precision, Workload


def predict(
    workload: Workload | Script | str,
    *,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    micro_batch: int | None = None,
    precision: Precision | None = None,
    checkpointing: str = "none",
    optimizer: str = "as-is",
    attention: Attention = "as-is",
    loss: Loss = "as-is",
    optimizer_in_backward: bool = False,
    offload: Collection[str] = (),
    adapters: Adapters = "none",
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    channels_last: bool = False,
    expandable_segments: bool = False,
    measured_step_s: float | None = None,
    measured_micro_batch: int | None = None,
    measured_precision: Precision | None = None,
    measured_checkpointing: str | None = None,
    num_gpus: int = 1,
    sharding: str | None = None,
    tensor_parallel: int = 1,
    gpus_per_node: int = 8,
    link: str | None = None,
    keeps: Keeps | None = None,
    unprotected: bool = False,
    fresh: bool = False,
    say: Callable[[str], None] | None = None,
) -> Prediction:
    """Predict the memory and time of a training step on a GPU, which need not be in this machine.

    `workload` is a Workload, or where to find one: "train.py:workload"; or an unchanged script: its
    path, or a Script with its arguments. A script runs in a sandbox, up to its second optimizer
    step; `unprotected` runs it even if no sandbox is possible, `fresh` rehearses it again. Nothing
    is trained, and a child process rehearses. `say` is called when something takes seconds.

    `precision` defaults to the script's own, and to "fp32" for a workload. `checkpointing` is
    "none", "blocks" (all), "every-2", "blocks:0,3" (the first and the fourth) or "selective" (what
    is cheap to recompute). `optimizer` is "as-is"; the user's own as "fused", "foreach" or
    "for-loop", or with state in "8-bit"; or another one: "adafactor", "sgd", "muon".

    `attention="sdpa"` replaces eager attention by torch's fused one, `loss="chunked"` computes a
    language model's loss in pieces, `optimizer_in_backward` applies and frees each gradient at
    once, `offload` moves "activations" or the "optimizer" to the host, or with "zero" the optimizer
    and the fp32 weights. `adapters` trains "lora" or "qlora" instead of the whole model, of
    `lora_rank` (16) on the blocks' linear layers or, with `lora_targets="attention"`, on those of
    attention. `keeps="outputs"`: your loop keeps `outputs = model(...)` until the next step.

    On several GPUs, `sharding` is "ddp" (the default), "fsdp" (all divide the model and its
    optimizer) or "hybrid" (groups do); micro-batch and memory are per GPU. With `tensor_parallel=8`
    8 GPUs share each layer. `link` joins machines of `gpus_per_node`: "infiniband-400". Times are
    scaled to `measured_step_s`, the time of a step on that GPU at the `measured_` settings.
    """
    from dataclasses import replace

    from oomph.planning.predictions import (
        check_measured_step,
        check_tricks,
        predict_script,
        predict_workload,
        refuse_keeps,
        refuse_measured_step,
        what_to_train,
    )
    from oomph.progress import silent
    from oomph.records.script import Script
    from oomph.records.workload import (
        Variant,
        check_checkpointing,
        check_grid,
        check_keeps,
        check_lora,
        check_optimizer,
    )
    from oomph.rehearsing.traces import Request
    from oomph.sensing.target import find_target
    from oomph.verbs.notebook import draw_in_notebooks

    draw_in_notebooks()
    offload = (offload,) if isinstance(offload, str) else tuple(offload)
    check_tricks(attention, loss, adapters, offload, (lora_rank, lora_targets))
    target = find_target(gpu, gpu_memory).joined_by(link)
    tricks = Variant(
        micro_batch=1,
        precision=precision or "fp32",
        checkpointing=check_checkpointing(checkpointing),
        optimizer=check_optimizer(optimizer),
        attention=attention,
        loss=loss,
        optimizer_in_backward=optimizer_in_backward,
        offload_activations="activations" in offload,
        offload_optimizer="optimizer" in offload,
        zero_offload="zero" in offload,
        adapters=adapters,
        **check_lora(lora_rank, lora_targets),
        channels_last=channels_last,
        **check_grid(sharding, num_gpus, gpus_per_node, tensor_parallel),
    )
    request = Request(tricks=tricks, micro_batch=micro_batch, keeps=check_keeps(keeps))
    like = replace(
        request,
        micro_batch=measured_micro_batch or micro_batch,
        tricks=replace(
            tricks,
            precision=measured_precision or tricks.precision,
            checkpointing=check_checkpointing(measured_checkpointing or checkpointing),
        ),
    )
    described = (measured_micro_batch, measured_precision, measured_checkpointing)
    check_measured_step(measured_step_s, described, is_named=gpu is not None)
    measured = None if measured_step_s is None else (like, measured_step_s)
    tell, trained = say or silent, what_to_train(workload)
    if isinstance(trained, Script):
        refuse_measured_step(measured)
        refuse_keeps(keeps)
        return predict_script(
            trained,
            target,
            request,
            has_own_precision=precision is None,
            expandable_segments=expandable_segments,
            say=tell,
            is_unprotected=unprotected,
            is_fresh=fresh,
        )
    return predict_workload(
        trained,
        target,
        request,
        expandable_segments=expandable_segments,
        measured=measured,
        say=tell,
    )
