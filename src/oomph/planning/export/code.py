"""Plan -> a plain PyTorch training loop as text, which does exactly the plan without oomph.

It needs torch 2.6 or newer. One trick has no short form: for the loss in chunks the text imports
oomph, and says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from textwrap import fill

from oomph.errors import UsageError
from oomph.planning.export.code_body import (
    OTHERS,
    functions_of,
    is_ddp,
    is_sharded,
    other_optimizer,
)
from oomph.records.checkpointing import check_checkpointing
from oomph.records.contradictions import contradiction_in
from oomph.records.plan import Plan
from oomph.records.workload import Variant


def as_code(plan: Plan) -> str:
    """The text of a Python file with train(), prepare() and train_step()."""
    how = plan.variant
    _check(how)
    names = plan.block_names if _needs_blocks(how) else ()
    text = "\n\n\n".join(functions_of(how, has_names=bool(names)))
    constants = _constants(how, names)
    return f"{_docstring(plan)}\n\n{_imports(how, names)}\n\n{constants}\n\n\n{text}\n"


def _check(how: Variant) -> None:
    check_checkpointing(how.checkpointing)  # it becomes part of the text
    error = contradiction_in(how, clips_gradients=False)
    if error is None and how.optimizer_in_backward and how.num_gpus > 1:
        error = UsageError(
            "the optimizer cannot step in backward",
            because=f"a gradient is whole only after the {how.num_gpus} GPUs have averaged it",
            attempt="one GPU",
        )
    if error is not None:
        raise error


def _needs_blocks(how: Variant) -> bool:
    return how.checkpointing != "none" or is_sharded(how)


def _docstring(plan: Plan) -> str:
    how = plan.variant
    share = how.micro_batch * how.accumulation
    many = how.num_gpus > 1
    start = f"torchrun --standalone --nproc-per-node {how.num_gpus}" if many else "python"
    loader = "a DistributedSampler, which gives all processes equally many" if many else "workers"
    sentences = [
        (
            f"Training as oomph planned it: {_tame(plan.workload)} on {how.num_gpus} x"
            f" {_tame(plan.gpu)}."
        ),
        (
            f"{how.micro_batch} examples at a time x {how.accumulation} times x {how.num_gpus} GPUs"
            f" = {how.batch_size} for each step of the optimizer."
        ),
        f"Call train(...) at the end of this file and start it with {start} THIS_FILE.py.",
        (
            f"Each batch is what this process trains of it, {share} examples, on the host: make"
            f" them with a DataLoader of batch_size={share}, pin_memory=True and {loader}."
        ),
    ]
    if how.loss == "chunked":
        sentences.append("It needs oomph, for the loss in chunks, which has no short form.")
    return '"""' + "\n\n".join(fill(text, 98) for text in sentences) + '\n"""'


def _quoted(name: str) -> str:
    """A name as Python writes it, with double quotes."""
    return json.dumps(name)


def _tame(name: str) -> str:
    """A name that cannot end the docstring that it stands in."""
    return "".join(c if c.isprintable() and c not in '\\"' else "?" for c in name)[:80]


def _imports(how: Variant, block_names: Sequence[str]) -> str:
    standard = ["import contextlib"] if is_ddp(how) else []
    standard += ["import os"]
    standard += (
        ["from collections import Counter"] if _needs_blocks(how) and not block_names else []
    )
    standard += ["from collections.abc import Mapping"]
    lines = [*standard, ""]
    if how.expandable_segments:
        lines += [
            "# Read once, when CUDA starts. The second name is that of torch before 2.9.",
            'for _name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):',
            '    os.environ.setdefault(_name, "expandable_segments:True")',
            "",
        ]
    return "\n".join([*lines, "import torch", *_torch_imports(how)])


def _torch_imports(how: Variant) -> list[str]:
    wanted = {
        "import torch.distributed as dist": how.num_gpus > 1,
        "from torch.distributed.device_mesh import init_device_mesh": how.sharding == "hybrid",
        f"from torch.distributed.fsdp import {_fsdp_names(how)}": is_sharded(how),
        "from torch.nn.parallel import DistributedDataParallel": is_ddp(how),
        f"from torch.utils.checkpoint import {_checkpoint_names(how)}": how.checkpointing != "none",
        "import peft": how.adapters != "none",
        _import_of(other_optimizer(how)): True,
        "from oomph.training.chunked_loss import chunk_loss": how.loss == "chunked",
    }
    return [line for line, is_wanted in wanted.items() if is_wanted and line]


def _import_of(optimizer: str | None) -> str:
    return OTHERS[optimizer][1] if optimizer else ""


def _fsdp_names(how: Variant) -> str:
    return "CPUOffloadPolicy, fully_shard" if how.offload_optimizer else "fully_shard"


def _checkpoint_names(how: Variant) -> str:
    if how.checkpointing != "selective":
        return "checkpoint"
    names = ("CheckpointPolicy", "checkpoint", "create_selective_checkpoint_contexts")
    return "(\n" + "".join(f"    {name},\n" for name in names) + ")"


def _constants(how: Variant, block_names: Sequence[str]) -> str:
    lines = [
        f"MICRO_BATCH = {how.micro_batch}  # examples at a time",
        f"ACCUMULATE = {how.accumulation}  # times, before each step of the optimizer",
        f"NUM_GPUS = {how.num_gpus}",
        "CLIP_GRAD_NORM = None  # yours, if you clip",
        'LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))',
        (
            'DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else'
            ' torch.device("cpu")'
        ),
    ]
    if how.precision == "fp16":
        lines.append("SCALER = torch.amp.GradScaler(DEVICE.type)  # fp16's gradients underflow")
    if how.precision == "tf32":
        lines += [
            'torch.set_float32_matmul_precision("high")  # matrix products in TF32',
            "torch.backends.cudnn.allow_tf32 = True",
        ]
    if block_names:  # repr: a name of a module cannot become code
        lines += ["BLOCKS = [", *(f"    {_quoted(name)}," for name in block_names), "]"]
    return "\n".join(lines)
