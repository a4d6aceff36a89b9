"""Small models of all kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rehearsing.zoo.attention import Diffusion, Encoder, Seq2Seq, Vit
from rehearsing.zoo.images import (
    Autoencoder,
    Cnn,
    ConvNext,
    EfficientNet,
    Mlp,
    ResNet,
    UNet,
    Volumes,
    Warped,
)
from rehearsing.zoo.kind import Kind, images, tokens
from rehearsing.zoo.sequences import (
    Bags,
    Experts,
    Graph,
    Packed,
    Recurrent,
    RoutedByWhere,
    Scan,
    SparseTable,
    Speech,
)
from rehearsing.zoo.ways import (
    Adapted,
    Branches,
    Cells,
    Composite,
    Losses,
    Masked,
    Mathematics,
    OwnFunction,
    Reparametrised,
    Tied,
)


def _torch_models() -> dict[str, Kind]:
    rows = images(20)
    sequences = images(12, 8)
    edges = {"x": 5, "edges": 40}
    # The CPU has kernels of its own (recurrence, bags, CTC) where the meta device composes, or
    # shapes depend on values: only rehearsed.
    not_here: dict[str, Any] = {"is_comparable": False}
    return {
        "mlp": Kind(Mlp, rows),
        "cnn": Kind(Cnn, images(3, 16, 16)),
        "resnet": Kind(ResNet, images(3, 32, 32), has_blocks=True),
        "efficientnet": Kind(EfficientNet, images(3, 16, 16), has_blocks=True),
        "unet": Kind(UNet, images(3, 16, 16), has_blocks=True),
        "autoencoder": Kind(Autoencoder, images(3, 16, 16), lambda model, batch: model(**batch)),
        "convnext": Kind(ConvNext, images(3, 16, 16), has_blocks=True),
        "volumes": Kind(Volumes, images(1, 8, 8, 8)),
        "warped": Kind(Warped, images(3, 8, 8)),
        "vit": Kind(Vit, images(3, 16, 16), has_blocks=True),
        "diffusion": Kind(
            Diffusion,
            lambda n: {"x": torch.rand(n, 3, 8, 8), "t": torch.rand(n)},
            has_blocks=True,
        ),
        "encoder": Kind(Encoder, tokens(10), has_blocks=True),
        "seq2seq": Kind(Seq2Seq, tokens(10), has_blocks=True),
        "lstm": Kind(
            lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), tokens(6), **not_here
        ),
        "gru": Kind(lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.1), tokens(6), **not_here),
        "rnn": Kind(lambda: Recurrent(nn.RNN), tokens(6), **not_here),
        "packed lstm": Kind(Packed, images(7, 6), **not_here),
        "cells": Kind(Cells, sequences),
        "graph": Kind(
            Graph,
            lambda n: {
                "x": torch.rand(n, edges["x"], 8),
                "edges": torch.arange(n * 2 * edges["edges"]).view(-1, 2) % (n * edges["x"]),
            },
        ),
        "experts": Kind(Experts, sequences),
        "routed by where": Kind(RoutedByWhere, sequences, **not_here),
        "scan": Kind(Scan, sequences),
        "bags": Kind(Bags, tokens(6), **not_here),
        "speech": Kind(Speech, sequences, **not_here),
        "sparse table": Kind(SparseTable, tokens(6), has_sparse_gradients=True),
        "lora": Kind(Adapted, images(3, 16, 16), has_blocks=True),
        "branches": Kind(Branches, images(8)),
        "own function": Kind(OwnFunction, rows),
        "reparametrised": Kind(Reparametrised, rows),
        "tied": Kind(Tied, tokens(6)),
        "masked": Kind(Masked, rows, **not_here),
        "mathematics": Kind(Mathematics, rows),
        "composite": Kind(Composite, rows, **not_here),
        "losses": Kind(Losses, rows),
    }


TORCH_MODELS = _torch_models()
