"""mmsegmentation's FCN on Cityscapes: crops of one size, so that every step is the same.

The rules of cuDNN's workspaces were written before these rows were predicted, and were not changed
since. V100s in 2020, fp32 without TF32, cudnn.benchmark (configs/_base_/default_runtime.py), and
DDP on four GPUs with two crops each. The model is that of configs/_base_/models/fcn_r50-d8.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from accuracy.llm_sources import LlmRow, LlmSource
from oomph.records.workload import Variant, Workload

# The table says "Mem (GB)", and mmcv logs torch.cuda.max_memory_allocated() in MiB. Whether these
# were divided by 1000 or 1024 is not known: both readings lie within the rounding.
MMSEGMENTATION = LlmSource(
    name="mmsegmentation-fcn",
    reference="open-mmlab/mmsegmentation@02e04cc configs/fcn/README.md",
    metric="torch max_memory_allocated, in GB of 1000 or 1024 MiB",
    kind="allocated",
    num_rows=0,
)
_LAST_DIGIT_GB = 0.1

_NUM_CLASSES = 19
_IGNORED = 255
_DEPTHS = {"FCN R-50-D8": (3, 4, 6, 3), "FCN R-101-D8": (3, 4, 23, 3)}
PARAMETERS_MILLIONS = 49  # of R-50-D8 (alibaba/EasyCV docs/source/model_zoo_seg.md: 23M/49M)


def _layer(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, dilation: int, *, first: bool) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, dilation, dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if first:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Any) -> Any:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Fcn(nn.Module):
    """A ResNet V1c whose last two stages are dilated, and two heads of 3 x 3 convolutions."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _layer(3, 32, 2), _layer(32, 32), _layer(32, 64), nn.MaxPool2d(3, 2, 1)
        )
        self.stages = nn.ModuleList()
        inputs = 64
        for number, (depth, stride, dilation) in enumerate(
            zip(depths, (1, 2, 1, 1), (1, 1, 2, 4), strict=True)
        ):
            width, blocks = 64 << number, []
            for place in range(depth):
                first = place == 0
                contracted = max(dilation // 2, 1) if first else dilation  # contract_dilation
                step = stride if first else 1
                blocks.append(Bottleneck(inputs, width, step, contracted, first=first))
                inputs = 4 * width
            self.stages.append(nn.Sequential(*blocks))
        self.head = nn.Sequential(_layer(2048, 512), _layer(512, 512))
        self.joined, self.classes = _layer(2560, 512), nn.Conv2d(512, _NUM_CLASSES, 1)
        self.auxiliary, self.more_classes = _layer(1024, 256), nn.Conv2d(256, _NUM_CLASSES, 1)
        self.dropout = nn.Dropout2d(0.1)

    def forward(self, x: Any) -> tuple[Any, Any]:
        x = self.stem(x)
        outs = [x := stage(x) for stage in self.stages]
        joined = self.joined(torch.cat([x, self.head(x)], dim=1))
        auxiliary = self.more_classes(self.dropout(self.auxiliary(outs[2])))
        return self.classes(self.dropout(joined)), auxiliary


def _loss(model: Any, batch: Any) -> Any:
    images, labels = batch
    total: Any = 0
    for logits, weight in zip(model(images), (1.0, 0.4), strict=True):
        whole = F.interpolate(logits, size=labels.shape[1:], mode="bilinear")
        each = F.cross_entropy(whole, labels, reduction="none", ignore_index=_IGNORED)
        total = total + weight * each.mean()
        whole.topk(1, dim=1)  # mmseg's accuracy
    return total


def _workload(name: str, height: int, width: int) -> Workload:
    torch.backends.cudnn.benchmark = True
    return Workload(
        model=lambda: Fcn(_DEPTHS[name]),
        batch=lambda n: (
            torch.zeros(n, 3, height, width),
            torch.zeros(n, height, width, dtype=torch.long),
        ),
        loss=_loss,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.01, momentum=0.9, foreach=False
        ),
        batch_size=8,
        zero_grad_to_none=False,  # torch's default then
    )


def _row(name: str, height: int, width: int, published_gb: float) -> LlmRow:
    low, high = (
        (published_gb - _LAST_DIGIT_GB / 2) * 1000,
        (published_gb + _LAST_DIGIT_GB / 2) * 1024,
    )
    return LlmRow(
        source=MMSEGMENTATION,
        what=f"{name} 2 x {height} x {width}, 4 ranks of DDP",
        gpu="v100-16gb",
        workload=lambda: _workload(name, height, width),
        variant=Variant(micro_batch=2, num_gpus=4, sharding="ddp"),
        measured_mib=(low + high) / 2,
        rounding_mib=(high - low) / 2,
    )


SEGMENTATION_ROWS: tuple[LlmRow, ...] = (
    _row("FCN R-50-D8", 512, 1024, 5.7),
    _row("FCN R-101-D8", 512, 1024, 9.2),
    _row("FCN R-50-D8", 769, 769, 6.5),
    _row("FCN R-101-D8", 769, 769, 10.4),
)
