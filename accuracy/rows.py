"""The published measurements that predictions are held against: the figures, and where they stand.

Nothing here was measured by this project. The rows are not unseen: what the scripts keep alive,
where xMem calls zero_grad and what some kernels take beside their outputs was found by looking
for the reason where a row was off. No predicted figure has a number that was fitted to them. Which
rules of cuDNN's workspaces are likely was chosen with the convolutional rows in view, and the
widths of the error bar follow from what is left of all rows (accuracy/bars.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oomph.records.workload import Precision

Model = Literal[
    "bert-large",
    "gpt2",
    "gpt-neo-125m",
    "resnet50",
    "resnet101",
    "vgg16",
    "mobilenet_v2",
    "mnasnet",
    "perceptron",
]
Optimizer = Literal["hf AdamW", "hf Adafactor", "bnb Adam8bit", "AdamW", "Adam", "SGD"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Who measured, what, and on which GPU."""

    name: str
    reference: str
    metric: str
    gpu: str  # in the catalogue
    torch_version: str | None  # None: not known
    # What of CUDA's context is in the figure: None is all of it, and nobody says how much.
    context_mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run. All are fp32 weights on one GPU."""

    source: Source
    model: Model
    micro_batch: int
    size: int  # tokens of a sequence, or pixels of an edge
    optimizer: Optimizer
    measured_mib: int | None  # None: it ran out of memory
    accumulation: int = 1
    precision: Precision = "fp32"
    checkpointing: bool = False
    step_s: float | None = None  # of one optimizer step, where it was published
    remark: str = ""
    widths: tuple[int, ...] = ()  # of a perceptron, from its inputs to its outputs

    @property
    def what(self) -> str:
        name = " ".join([self.model, "-".join(map(str, self.widths))]).strip()
        parts = [f"{name} {self.micro_batch}"]
        if self.accumulation > 1:
            parts[0] += f" x {self.accumulation}"
        parts += [self.optimizer, *([self.precision] if self.precision != "fp32" else [])]
        return ", ".join([*parts, *(["checkpointing"] if self.checkpointing else [])])


HUGGING_FACE = Source(
    name="hf-perf-train-gpu-one",
    reference="huggingface/transformers@71abd3a docs/source/en/perf_train_gpu_one.mdx",
    metric="NVML used, whole GPU, after training",
    gpu="v100-16gb",
    torch_version=None,
    context_mib=1343,  # the page's own reading, after torch.ones((1, 1)).to("cuda")
)
XMEM = Source(
    name="xmem",
    reference="Stone-ResearchLife/xMem@d61e076 plot/data",
    metric="NVML peak minus NVML at the start",
    gpu="rtx3060-12gb",
    torch_version="2.6.0+cu124",
    # set_per_process_memory_fraction makes the context before the first reading.
    context_mib=0,
)
GPUMEMNET = Source(
    name="gpumemnet-cnn",
    reference="itu-rad/GPUMemNet@f01eb05 Test_Pipeline/GPUMemNet_CNN.xlsx",
    metric="nvidia-smi maximum, context included",
    gpu="a100-40gb",
    # Not stated. The scripts call Tensor._typed_storage, which torch 2.0 brought.
    torch_version="2.0",
    # Of its own: the smallest of its perceptrons, which has 22 MiB of torch's, shows 1451 MiB.
    context_mib=1429,
)


def _bert(
    micro_batch: int,
    measured_mib: int,
    epoch_s: float,  # of 128 optimizer steps
    optimizer: Optimizer = "hf AdamW",
    precision: Precision = "fp32",
    *,
    checkpointing: bool = False,
) -> Row:
    return Row(
        source=HUGGING_FACE,
        model="bert-large",
        step_s=epoch_s / 128,
        micro_batch=micro_batch,
        accumulation=4 // micro_batch,
        size=512,
        optimizer=optimizer,
        precision=precision,
        checkpointing=checkpointing,
        measured_mib=measured_mib,
    )


def _xmem(
    model: Model,
    micro_batch: int,
    optimizer: Optimizer,
    measured_mib: int | None,
    *,
    remark: str = "",
) -> Row:
    return Row(
        source=XMEM,
        model=model,
        micro_batch=micro_batch,
        size=128 if model.startswith("gpt") else 86,
        optimizer=optimizer,
        measured_mib=measured_mib,
        remark=remark,
    )


def _gpumemnet(model: Model, micro_batch: int, measured_mib: int) -> Row:
    return Row(
        source=GPUMEMNET,
        model=model,
        micro_batch=micro_batch,
        size=224,
        optimizer="Adam",
        measured_mib=measured_mib,
    )


ROWS: tuple[Row, ...] = (
    _bert(4, 14949, 57.82),
    _bert(1, 8681, 66.03),
    _bert(1, 6775, 85.47, checkpointing=True),
    _bert(4, 13939, 27.46, precision="fp16"),
    _bert(1, 7275, 50.76, precision="fp16", checkpointing=True),
    _bert(4, 12295, 64.31, "hf Adafactor"),
    _bert(1, 4847, 56.54, "hf Adafactor", "fp16", checkpointing=True),
    _bert(4, 13085, 55.95, "bnb Adam8bit"),
    _bert(1, 5363, 49.46, "bnb Adam8bit", "fp16", checkpointing=True),
    _xmem("gpt-neo-125m", 20, "AdamW", 7198),
    _xmem("gpt-neo-125m", 35, "SGD", 10188),
    _xmem(
        "gpt-neo-125m",
        5,
        "AdamW",
        3352,
        remark="the length of its four batches is at most 128 and not published",
    ),
    _xmem("gpt-neo-125m", 38, "AdamW", 11594),
    _xmem("gpt2", 27, "AdamW", 9368),
    _xmem("gpt2", 54, "AdamW", None, remark="it held 11242 MiB before it ran out"),
    _xmem("resnet101", 351, "SGD", 8076),
    _xmem("vgg16", 543, "Adam", 10616),
    _xmem("mnasnet", 500, "AdamW", 4092),
    _xmem("mnasnet", 400, "AdamW", 3532),
    _gpumemnet("resnet50", 32, 5262),
    _gpumemnet("resnet50", 64, 8536),
    _gpumemnet("resnet50", 128, 15120),
    _gpumemnet("mobilenet_v2", 32, 4544),
    _gpumemnet("mobilenet_v2", 64, 7224),
    _gpumemnet("mobilenet_v2", 128, 12578),
)
