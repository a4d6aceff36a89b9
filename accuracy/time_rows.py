"""The published step times: where they stand, and step_times.csv, a row per distinct run.

Times per step are the sources' own, or examples per step divided by their examples per second (of
all GPUs). Where a source has several runs of one configuration, the row is their median.
lambda's SSD before torch 1.13 printed the images per second of one GPU: they are the same with 1 to
8 GPUs, and the program of that time counted one batch. Where a program switches TF32 on (the
attention of "cs336 on A100", the dashboards), an "fp32" run is one in TF32.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

# "apex": fp16 of level O2, without autocast; "half": model.half(), without copies in fp32.
TimePrecision = Literal["fp32", "tf32", "amp fp16", "amp bf16", "apex", "half"]
# Data-parallel runs with more GPUs are held out.
_IN_SAMPLE_GPUS = 2
Part = Literal["step", "forward", "loss", "backward", "forward+backward", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSource:
    """Who measured. A held-out source was looked at by nobody who made a mechanism."""

    name: str
    reference: str
    is_held_out: bool = False


SOURCES = {
    source.name: source
    for source in (
        TimeSource(
            name="lambda",
            reference="lambdal/deeplearning-benchmark@aa5addb6 pytorch/results",
        ),
        TimeSource(
            name="lambda, SSD and WaveGlow",
            reference="lambdal/deeplearning-benchmark@aa5addb6 pytorch/results",
            is_held_out=True,
        ),
        TimeSource(
            name="torchvision",
            reference="ryujaehun/pytorch-gpu-benchmark@3f47a9e2 new_results, results",
        ),
        TimeSource(
            name="cs336 on A800",
            reference="EnzoDing-rgb/cs336-assignment2-systems@9cb4efb6 reports",
        ),
        TimeSource(
            name="cs336 on A100",
            reference="GAOYUEtianc/Stanford-CS336-assignments@f06a68ce "
            "assignment2-systems/answers.md",
        ),
        TimeSource(
            name="cs336 on RTX 4090",
            reference="LINYUNLinYun/CS336-assignment2-systems@d7b9b891 "
            "cs336_systems/experiments.md",
        ),
        TimeSource(
            name="cs336 on H100",  # scored once while it was held out
            reference="TianqGuo/MachineLearningNotes@5d75f5b0",
        ),
        TimeSource(
            name="DeepLearningExamples",
            reference="NVIDIA/DeepLearningExamples@729963dd PyTorch",
            is_held_out=True,
        ),
        TimeSource(
            name="dynamo dashboards",
            reference="pytorch/pytorch issues 93517 and 93518, "
            "pytorch/torchdynamo issues 681 and 2049",
            is_held_out=True,
        ),
    )
}


# Published times that are not predicted: source, number of them, what they are, why not.
UNBUILT = (
    ("dynamo dashboards", 108, "compiled", "torch.compile is not modelled"),
    ("cs336 on H100", 50, "compiled", "torch.compile is not modelled"),
    ("cs336 on A100", 40, "compiled", "torch.compile is not modelled"),
    ("cs336 on A800", 18, "compiled", "torch.compile is not modelled"),
    ("modded-nanogpt", 18, "compiled", "torch.compile is not modelled"),
    ("nanoGPT", 1, "GPT-2", "whether it was compiled is not stated"),
    ("torchvision", 64, "four GPUs", "DataParallel in one process is not modelled"),
    ("cs336 on A100", 9, "transformer", "a student's own model, of which not all is published"),
    ("dynamo dashboards", 1, "Longformer", "its length depends on the data"),
    ("lambda, SSD and WaveGlow", 2, "WaveGlow in fp16", "apex O1 patches torch op by op"),
    (
        "DeepLearningExamples",
        138,
        "other models, several machines",
        "CUDA graphs, TorchScript, lengths that are not stated, a network that is not stated",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """One published time of a step, or of a part of it."""

    source: TimeSource
    model: str  # "torchvision/resnet18": a family of time_models.py, and which one of it
    gpu: str  # in the catalogue
    num_gpus: int
    precision: TimePrecision
    is_channels_last: bool
    micro_batch: int  # per GPU
    size: int  # tokens of a sequence, or pixels of an edge
    part: Part
    measured_s: float
    torch_version: str  # as far as the source tells, "1.13"; empty if it does not
    num_runs: int  # of which the time is the median

    @property
    def what(self) -> str:
        layout = ", NHWC" if self.is_channels_last else ""
        part = "" if self.part == "step" else f", {self.part}"
        gpus = f"{self.num_gpus} x " if self.num_gpus > 1 else ""
        return f"{gpus}{self.gpu} {self.model} {self.micro_batch} x {self.size}{layout}{part}"

    @property
    def name(self) -> str:
        """Return a short name of the row's setting."""
        setting = f"{self.source.name} {self.what} {self.precision} {self.torch_version}"
        return hashlib.sha256(setting.encode()).hexdigest()[:10]

    @property
    def is_held_out(self) -> bool:
        return self.source.is_held_out or self.num_gpus > _IN_SAMPLE_GPUS

    @property
    def on_one_gpu(self) -> str:
        """Return the name of the same run on one GPU."""
        return replace(self, num_gpus=1).name


def read_rows() -> list[TimeRow]:
    with Path(__file__).with_name("step_times.csv").open(encoding="utf-8") as file:
        return [_row(columns) for columns in csv.DictReader(file)]


def _row(columns: dict[str, str]) -> TimeRow:
    precision, part = columns["precision"], columns["part"]
    assert precision in get_args(TimePrecision)
    assert part in get_args(Part)
    return TimeRow(
        source=SOURCES[columns["source"]],
        model=columns["model"],
        gpu=columns["gpu"],
        num_gpus=int(columns["num_gpus"]),
        precision=precision,  # type: ignore[arg-type] # checked above
        is_channels_last=columns["layout"] == "nhwc",
        micro_batch=int(columns["micro_batch"]),
        size=int(columns["size"]),
        part=part,  # type: ignore[arg-type] # checked above
        measured_s=float(columns["seconds"]),
        torch_version=columns["torch"],
        num_runs=int(columns["runs"]),
    )
