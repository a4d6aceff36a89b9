"""TimeRow -> Workload and Variant: the models of the published step times, and their loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from accuracy import (
    apex,
    bart,
    bert_squad,
    by_tensor,
    convnets,
    cs336,
    dynamo,
    ssd,
    transformer_xl,
    waveglow,
)
from accuracy.libraries import import_torchvision
from accuracy.time_rows import TimePrecision, TimeRow
from oomph.records.workload import Precision, Variant, Workload

_VARIANT_PRECISION: Mapping[TimePrecision, Precision] = {
    "fp32": "fp32",
    "tf32": "tf32",
    "amp fp16": "fp16",
    "amp bf16": "bf16",
    "apex": "fp32",  # the model itself is in fp16
    "half": "fp32",
}


def variant_of(row: TimeRow) -> Variant:
    return Variant(
        micro_batch=row.micro_batch,
        precision=_VARIANT_PRECISION[row.precision],
        channels_last=row.is_channels_last,
        sharding="ddp" if row.num_gpus > 1 else "none",
        num_gpus=row.num_gpus,
    )


def workload_of(row: TimeRow) -> Workload:
    family, _, name = row.model.partition("/")
    return _FAMILIES[family](row, name)


def _is_old(row: TimeRow) -> bool:
    """zero_grad keeps gradients, and optimizers go tensor by tensor."""
    return row.torch_version.startswith(("0.", "1."))


def _batch_size(row: TimeRow) -> int:
    return row.micro_batch * row.num_gpus


# ---- images ----------------------------------------------------------------------------------


def _images(row: TimeRow) -> Callable[[int], Any]:
    def batch(n: int) -> Any:
        return torch.zeros(n, 3, row.size, row.size), torch.zeros(n, dtype=torch.long)

    return batch


def _in_half(row: TimeRow) -> bool:
    return row.precision in ("apex", "half")


def _image_loss(row: TimeRow) -> Callable[[Any, Any], Any]:
    def loss(model: Any, batch: Any) -> Any:
        pixels, labels = batch
        out = model(pixels.half() if _in_half(row) else pixels)
        value = F.cross_entropy(out.float() if row.precision == "apex" else out, labels)
        return apex.scaled(value) if row.precision == "apex" else value

    return loss


def with_growing_blocks(model: Any) -> Any:
    """Return a DenseNet as before torchvision 0.4: each layer appends its maps to one tensor.

    Since then a block keeps a list, and each layer joins all of it: many more ops in backward.
    """
    for block in model.features:
        if type(block).__name__ == "_DenseBlock":
            block.forward = partial(_grown, block)
    return model


def _grown(block: Any, x: Any) -> Any:
    for layer in block.values():
        inner = layer.conv1(layer.relu1(layer.norm1(x)))
        x = torch.cat((x, layer.conv2(layer.relu2(layer.norm2(inner)))), 1)
    return x


def _torchvision(row: TimeRow, name: str) -> Workload:
    """ryujaehun's loop: zero_grad, forward, loss and backward, no optimizer; cudnn.benchmark."""
    models = import_torchvision()
    torch.backends.cudnn.benchmark = True

    def make() -> Any:
        model = getattr(models, name)()
        if name.startswith("densenet") and row.torch_version.startswith("0."):
            model = with_growing_blocks(model)
        return model.half() if row.precision == "half" else model

    return Workload(
        model=make,
        batch=_images(row),
        loss=_image_loss(row),
        optimizer=lambda ps: by_tensor.Plain(ps, by_tensor.nothing),
        batch_size=_batch_size(row),
        zero_grad_to_none=not _is_old(row),
    )


def _convnet(row: TimeRow, name: str) -> Workload:
    """DeepLearningExamples' ConvNets: SGD with momentum, cudnn.benchmark."""
    torch.backends.cudnn.benchmark = True

    def make() -> Any:
        model = convnets.make(name)
        return apex.in_half(model) if row.precision == "apex" else model

    def optimizer(parameters: Any) -> Any:
        if row.precision == "apex":
            return apex.MasterWeights(parameters, by_tensor.sgd)
        return by_tensor.Plain(parameters, by_tensor.sgd)

    return Workload(
        model=make,
        batch=_images(row),
        loss=_image_loss(row),
        optimizer=optimizer,
        batch_size=_batch_size(row),
        zero_grad_to_none=False,
    )


def _ssd(row: TimeRow, _: str) -> Workload:
    torch.backends.cudnn.benchmark = True
    is_apex = row.precision == "apex"

    def make() -> Any:
        model = ssd.Ssd300()
        return apex.in_half(model) if is_apex else model

    def optimizer(parameters: Any) -> Any:
        if is_apex:
            return apex.MasterWeights(parameters, by_tensor.sgd)
        return by_tensor.Plain(parameters, by_tensor.sgd)

    def loss(model: Any, batch: Any) -> Any:
        value = ssd.loss(model, batch, is_half=is_apex)
        return apex.scaled(value) if is_apex else value

    return Workload(
        model=make,
        batch=lambda n: ssd.batch(n, row.size),
        loss=loss,
        optimizer=optimizer,
        batch_size=_batch_size(row),
        zero_grad_to_none=False,
    )


# ---- sound -----------------------------------------------------------------------------------


def _waveglow(row: TimeRow, _: str) -> Workload:
    """`size` is the length of the audio."""
    torch.backends.cudnn.benchmark = True
    return Workload(
        model=waveglow.WaveGlow,
        batch=lambda n: waveglow.batch(n, row.size),
        loss=waveglow.loss,
        optimizer=lambda parameters: by_tensor.Plain(parameters, by_tensor.adam),
        batch_size=_batch_size(row),
        clip_grad_norm=65504.0,
        zero_grad_to_none=False,
    )


# ---- text ------------------------------------------------------------------------------------


def _tokens(row: TimeRow) -> Callable[[int], Any]:
    def batch(n: int) -> Any:
        return tuple(torch.zeros(n, row.size, dtype=torch.long) for _ in range(2))

    return batch


def _bert_squad(row: TimeRow, name: str) -> Workload:
    return bert_squad.workload(
        name, is_half=row.precision == "apex", length=row.size, batch_size=_batch_size(row)
    )


def _transformer_xl(row: TimeRow, name: str) -> Workload:
    return transformer_xl.workload(
        name,
        is_half=row.precision == "apex",
        length=row.size,
        num_examples=row.micro_batch,
        batch_size=_batch_size(row),
    )


def _cs336(row: TimeRow, name: str) -> Workload:
    return Workload(
        model=lambda: cs336.Transformer(cs336.SIZES[name], row.size),
        batch=_tokens(row),
        loss=cs336.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=_batch_size(row),
    )


def _cs336_own(row: TimeRow, name: str) -> Workload:
    return replace(_cs336(row, name), loss=cs336.own_loss, optimizer=cs336.OwnAdamW)


def _cs336_by_heads(row: TimeRow, name: str) -> Workload:
    plain = _cs336(row, name)
    make = partial(cs336.by_heads, cs336.SIZES[name], row.size)
    return replace(plain, model=make, loss=cs336.sum_loss)


def _attention(row: TimeRow, name: str, *, has_own_softmax: bool) -> Workload:
    """One head, of this width: no optimizer."""
    return Workload(
        model=lambda: cs336.Heads(
            row.micro_batch, row.size, int(name), has_own_softmax=has_own_softmax
        ),
        batch=lambda n: torch.zeros(n),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda ps: by_tensor.Plain(ps, by_tensor.nothing),
        batch_size=_batch_size(row),
    )


def _bart(row: TimeRow, _: str) -> Workload:
    return bart.workload(row.size, _batch_size(row))


def _dynamo(row: TimeRow, name: str) -> Workload:
    return dynamo.workload(name, row.size, _batch_size(row))


_FAMILIES: Mapping[str, Callable[[TimeRow, str], Workload]] = {
    "torchvision": _torchvision,
    "convnet": _convnet,
    "bert-squad": _bert_squad,
    "transformer-xl": _transformer_xl,
    "cs336": _cs336,
    "cs336-own": _cs336_own,
    "cs336-by-heads": _cs336_by_heads,
    "attention": partial(_attention, has_own_softmax=True),
    "attention-fused": partial(_attention, has_own_softmax=False),
    "ssd": _ssd,
    "waveglow": _waveglow,
    "bart": _bart,
    "dynamo": _dynamo,
}
