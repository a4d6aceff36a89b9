"""A model, built with memory or without, and its optimizer -> what can be put on them."""

from __future__ import annotations

from typing import Any

import torch

from oomph.records.possible import Possible
from oomph.training.attention import attention_is
from oomph.training.blocks import find_blocks
from oomph.training.chunked_loss import why_not
from oomph.training.low_rank import adaptable

_BATCH_NORMS = (torch.nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (torch.nn.modules.dropout._DropoutNd,)


def possible(model: Any, optimizer: Any) -> Possible:
    """Look at a model and its optimizer. Nothing is run and nothing is changed."""
    names = {id(module): name for name, module in model.named_modules()}
    parameters = list(model.parameters())
    because = why_not(model)
    kind = type(optimizer)
    return Possible(
        block_names=tuple(names[id(block)] for block in find_blocks(model)),
        attention_is=attention_is(model),
        has_causal_head=because is None,
        why_no_chunks=because,
        num_adaptable=len(adaptable(model)),
        optimizer_class=f"{kind.__module__}.{kind.__qualname__}",
        batch_norm_names=tuple(
            name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)
        ),
        has_dropout=any(_drops(module) for module in model.modules()),
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
    )


def _drops(module: Any) -> bool:
    """Dropout as a layer, or as an option of a layer (nn.LSTM, nn.MultiheadAttention)."""
    if isinstance(module, _DROPOUTS):
        return bool(module.p > 0)
    dropout = getattr(module, "dropout", 0)
    return isinstance(dropout, float) and dropout > 0
