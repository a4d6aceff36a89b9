"""The kinds of stepper_kinds.py, large enough that a GPU's memory decides how they are split."""

from __future__ import annotations

from typing import Any

import torch
from rehearsing.zoo.attention import TransformerBlock, Vit
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

from training.stepper_kinds import (
    CLASS_WEIGHTS,
    Cnn,
    InEval,
    Kind,
    Tagger,
    Translator,
    adapted,
    checkpointed,
    of_images,
    of_sentences,
    of_text,
    of_tokens,
)

LENGTH, SIDE, WIDTH = 1024, 128, 64


class Signals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 256, 2, batch_first=True), nn.Linear(256, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0][:, -1])


class LargeTagger(Tagger):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.table = nn.Embedding(20, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout, activation="gelu", batch_first=True
        )
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)


class LargeTranslator(Translator):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.stack = nn.Transformer(
            WIDTH, 2, 1, 1, 2 * WIDTH, 0.0, activation="gelu", batch_first=True
        )


class LargeVit(Vit):
    def __init__(self, patch: int = 8) -> None:
        super().__init__()
        num_patches = (SIDE // patch) ** 2
        self.patches = nn.Conv2d(3, WIDTH, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, num_patches + 1, WIDTH))
        self.blocks = nn.Sequential(*[TransformerBlock(WIDTH, 2) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 4)


def deep() -> nn.Module:
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 4))


def gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=1024,
        n_embd=WIDTH,
        n_layer=3,
        bos_token_id=None,
        eos_token_id=None,
        n_head=2,
        n_positions=160,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


# ---- batches and losses ------------------------------------------------------------------------


def rows(num: int, length: int = LENGTH) -> Any:
    return {"x": torch.randn(num, length, 8), "y": torch.randint(0, 4, (num, length))}


def long_rows(num: int) -> Any:
    return rows(num, 3 * LENGTH)


def images(num: int) -> Any:
    return {"x": torch.randn(num, 3, SIDE, SIDE), "y": torch.randint(0, 4, (num,))}


def padded(num: int) -> Any:
    ids, labels = torch.randint(1, 20, (num, 400)), torch.randint(0, 5, (num, 400))
    is_padding = torch.arange(400) >= torch.randint(1, 401, (num, 1))
    labels[is_padding | (torch.rand(num, 400) < 0.3)] = -100
    labels[:, 0] = 1
    return {"ids": ids.masked_fill(is_padding, 0), "labels": labels}


def sentences(num: int) -> Any:
    target = torch.randint(1, 20, (num, 320))
    labels = target.clone()
    labels[torch.arange(320) >= torch.randint(2, 321, (num, 1))] = -100
    return {"source": torch.randint(1, 20, (num, 320)), "target": target, "labels": labels}


def signals(num: int) -> Any:
    return {"x": torch.randn(num, 80, 16), "y": torch.randint(0, 4, (num,))}


def text(num: int) -> Any:
    ids = torch.randint(0, 1024, (num, 160))
    labels = ids.clone()
    labels[torch.arange(160) >= torch.randint(4, 161, (num, 1))] = -100
    return {"input_ids": ids, "labels": labels}


def of_rows(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def summed(model: Any, batch: Any) -> Any:
    logits = model(batch["x"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["y"].flatten(), reduction="sum") / 5000


def by_class(model: Any, batch: Any) -> Any:
    logits = model(batch["x"]).flatten(0, 1)
    weights = CLASS_WEIGHTS.to(logits.device, logits.dtype)
    return F.cross_entropy(logits, batch["y"].flatten(), weight=weights)


KINDS: dict[str, Kind] = {
    "mlp": Kind(deep, rows, of_rows),
    "mlp, summed loss": Kind(deep, rows, summed, "sum"),
    "class weights": Kind(
        deep, rows, by_class, lambda b: CLASS_WEIGHTS.double()[b["y"].cpu()].sum()
    ),
    "cnn, GroupNorm": Kind(lambda: Cnn(nn.GroupNorm(2, 8)), images, of_images),
    "cnn, BatchNorm in eval": Kind(InEval, images, of_images),
    "transformer, padding and ignored labels": Kind(LargeTagger, padded, of_tokens, "tokens"),
    "seq2seq": Kind(LargeTranslator, sentences, of_sentences, "tokens"),
    "lstm": Kind(Signals, signals, of_images),
    "vit": Kind(LargeVit, images, of_images),
    "gpt2": Kind(gpt2, text, of_text, "next-tokens"),
    "lora": Kind(lambda: adapted(gpt2), text, of_text, "next-tokens"),
    "checkpointed": Kind(lambda: checkpointed(lambda: LargeVit(5)), images, of_images),
}

# Held against the same pieces without errors, bit for bit: see stepper_kinds.IN_PIECES.
IN_PIECES: dict[str, Kind] = {
    "bf16 autocast": Kind(deep, long_rows, of_rows, is_exact=False, options={"precision": "bf16"}),
    "dropout": Kind(lambda: LargeTagger(0.3), padded, of_tokens, "tokens", is_exact=False),
    "BatchNorm": Kind(lambda: Cnn(nn.BatchNorm2d(8)), images, of_images, is_exact=False),
}
