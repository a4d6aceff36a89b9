"""Row -> Workload: the model, the batch and the loop of a published run.

What the script's variables hold between steps is alive here too: `outputs = model(batch)` keeps
the last outputs until the next forward has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from accuracy import bert2022, cnn, gpt, perceptrons
from accuracy.rows import XMEM, Row
from oomph.records.workload import Variant, Workload

_OPTIMIZERS: dict[str, Any] = {
    "hf AdamW": bert2022.LoopAdamW,
    "hf Adafactor": bert2022.LoopAdafactor,
    "bnb Adam8bit": bert2022.Adam8bit,
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,  # without momentum
}
_MOST_TRACED_MICRO_STEPS = 2  # all after the first are alike
_XMEM_MNASNET_CLASSES = 10


def variant_of(row: Row) -> Variant:
    return Variant(
        micro_batch=row.micro_batch,
        accumulation=min(row.accumulation, _MOST_TRACED_MICRO_STEPS),
        precision=row.precision,
    )


def workload_of(row: Row, *, zero_grad_late: bool = False) -> Workload:
    """With `zero_grad_late`, gradients are dropped after the forward pass instead of before."""
    if row.model == "bert-large":
        return _bert(row)
    if row.widths:
        return _perceptron(row)
    is_text = row.model in gpt.PARAMETERS
    loop = _Loop(_text_loss if is_text else _image_loss, zero_grad_late=zero_grad_late)
    optimizer = _OPTIMIZERS[row.optimizer]
    if zero_grad_late:
        optimizer = type("Late", (optimizer,), {"zero_grad": lambda *_, **__: None})
    return Workload(
        model=lambda: gpt.Gpt(row.model) if is_text else _cnn(row),
        batch=lambda n: _text(n, row.size) if is_text else _images(n, row.size),
        loss=loop.loss,
        optimizer=lambda parameters: optimizer(parameters, lr=1e-3),
        batch_size=row.micro_batch,
    )


def _bert(row: Row) -> Workload:
    return Workload(
        model=lambda: bert2022.Bert(checkpointing=row.checkpointing),
        batch=lambda n: {
            "input_ids": torch.zeros(n, row.size, dtype=torch.long),
            "labels": torch.zeros(n, dtype=torch.long),
        },
        loss=lambda model, batch: model(**batch),
        optimizer=_OPTIMIZERS[row.optimizer],
        batch_size=row.micro_batch * row.accumulation,
        clip_grad_norm=1.0,  # the Trainer's default
        zero_grad_to_none=False,  # torch's default then
    )


def _perceptron(row: Row) -> Workload:
    loop = _Loop(_image_loss, zero_grad_late=False)
    return Workload(
        model=lambda: perceptrons.make(row.widths),
        batch=lambda n: (torch.zeros(n, row.widths[0]), torch.zeros(n, dtype=torch.long)),
        loss=loop.loss,
        optimizer=_OPTIMIZERS[row.optimizer],
        batch_size=row.micro_batch,
    )


def _cnn(row: Row) -> Any:
    if row.source is XMEM and row.model == "mnasnet":
        return cnn.make(row.model, _XMEM_MNASNET_CLASSES)
    return cnn.make(row.model)


def _text(num_examples: int, length: int) -> dict[str, Any]:
    names = ("input_ids", "attention_mask", "labels")
    return {name: torch.zeros(num_examples, length, dtype=torch.long) for name in names}


def _images(num_examples: int, edge: int) -> tuple[Any, Any]:
    pixels = torch.zeros(num_examples, 3, edge, edge)
    return pixels, torch.zeros(num_examples, dtype=torch.long)


class _Loop:
    """The variables of a training script, which live from one step to the next."""

    def __init__(self, run: Callable[[Any, Any], tuple[Any, Any]], *, zero_grad_late: bool) -> None:
        self.run, self.zero_grad_late = run, zero_grad_late
        self.outputs: Any = None

    def loss(self, model: Any, batch: Any) -> Any:
        self.outputs, loss = self.run(model, batch)
        if self.zero_grad_late:
            for parameter in model.parameters():
                parameter.grad = None
        return loss


def _text_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    outputs = model(**batch)
    return outputs, outputs.loss


def _image_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    outputs = model(batch[0])
    return outputs, F.cross_entropy(outputs, batch[1])
