"""The blocks that are found are those that a person would name."""

from __future__ import annotations

from typing import Any

import pytest
from rehearsing.rehearsals import models
from rehearsing.zoo.images import Residual
from torch import nn

from oomph.tricks.blocks import find_blocks, named_blocks

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = models()


def names(model: Any) -> list[str]:
    return [name for name, _ in named_blocks(model)]


def numbered(*stacks: str, count: int = 2) -> list[str]:
    return [f"{stack}.{number}" for stack in stacks for number in range(count)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert sdpa", numbered("bert.encoder.layer")),
        ("gpt2", numbered("transformer.h")),
        ("llama", numbered("model.layers")),
        ("t5", numbered("encoder.block", "decoder.block")),
        ("bart", numbered("model.encoder.layers", "model.decoder.layers")),
        ("clip", numbered("text_model.encoder.layers", "vision_model.encoder.layers")),
        ("mixtral", numbered("model.layers")),
        ("swin", [f"swin.encoder.layers.{stage}.blocks.0" for stage in range(2)]),
        ("seq2seq", numbered("stack.encoder.layers", "stack.decoder.layers")),
        ("vit", numbered("blocks")),
        ("lora", numbered("blocks")),
        ("resnet", numbered("blocks", count=4)),
        ("unet", ["down.0", "down.1", "middle", "up.0", "up.1"]),
    ],
)
def test_blocks_are_named_in_the_order_of_registration(name: str, expected: list[str]) -> None:
    assert names(MODELS[name].make()) == expected


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "cells", "graph", "experts", "tied"])
def test_what_is_not_repeated_has_no_blocks(name: str) -> None:
    assert find_blocks(MODELS[name].make()) == []


class Bottleneck(nn.Module):
    """Of three convolutions with their norms in a list, as several libraries write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)) for _ in range(3))
        )

    def forward(self, x: Any) -> Any:
        return x + self.layer(x)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        return self.narrow(self.wide(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList([Expert() for _ in range(4)])

    def forward(self, x: Any) -> Any:
        return x + self.experts[0](x)


def test_stages_are_no_blocks_and_parts_of_blocks_are_none_either() -> None:
    stages = [nn.Sequential(*(Bottleneck(width) for _ in range(2))) for width in (8, 16, 32)]
    last = nn.Sequential(Bottleneck(64))
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *stages, last)
    assert names(model) == [*numbered("1", "2", "3"), "4.0"]


def test_stages_that_are_attributes_are_looked_into() -> None:
    model = nn.Module()
    model.layer1 = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1))
    model.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1))
    assert names(model) == numbered("layer1", "layer2")


def test_experts_are_parts_of_their_layer() -> None:
    assert names(nn.ModuleDict({"layers": nn.ModuleList([Layer() for _ in range(3)])})) == numbered(
        "layers", count=3
    )


def test_blocks_that_are_attributes_are_found_where_there_are_no_lists() -> None:
    model = nn.Module()
    model.first, model.head, model.second = Expert(), nn.Linear(8, 2), Expert()
    assert names(model) == ["first", "second"]


def test_a_block_that_is_used_twice_is_one_block() -> None:
    shared = Expert()
    assert names(nn.Sequential(shared, Expert(), shared)) == ["0", "1"]


class WithTextEncoder(nn.Module):
    """As Stable Diffusion: a stack of its own beside a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = nn.ModuleList([MODELS["bert sdpa"].make()])
        self.down = MODELS["resnet"].make()
        self.head = nn.Linear(4, 4)


def test_a_text_encoder_that_declares_its_blocks_hides_none_of_its_neighbours() -> None:
    assert names(WithTextEncoder()) == [
        *numbered("texts.0.bert.encoder.layer"),
        *numbered("down.blocks", count=4),
    ]


def test_a_model_of_transformers_declares_all_of_its_blocks() -> None:
    model = MODELS["bert sdpa"].make()
    model.heads = nn.ModuleList([Expert(), Expert()])
    assert names(model) == numbered("bert.encoder.layer")
