"""Models and losses of many kinds, small enough to be trained in a test, and OOMs that strike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rehearsing.zoo.attention import Vit
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it
from torch.utils._python_dispatch import TorchDispatchMode
from tricks import language_models

from oomph.tricks.checkpointing import checkpoint_blocks
from oomph.tricks.lora import put_adapters

NUM = 12  # examples in a batch: 12, 6, 3 and 1 at a time
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of"
    " which 1.06 GiB is free."
)


@dataclass(frozen=True)
class Kind:
    """One way to train: everything that a Stepper is given."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Any]
    weight: Any = "mean"
    is_exact: bool = True  # its pieces give the gradient of the whole batch
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return self.model().to(dtype)

    def batches(self, dtype: torch.dtype, count: int, num: int = NUM) -> list[Any]:
        torch.manual_seed(1)
        return [cast(self.batch(num), dtype) for _ in range(count)]


def cast(part: Any, dtype: torch.dtype) -> Any:
    """Floating point inputs in the model's precision."""
    if isinstance(part, torch.Tensor):
        return part.to(dtype) if part.is_floating_point() else part
    if isinstance(part, dict):
        return {name: cast(each, dtype) for name, each in part.items()}
    if isinstance(part, tuple):
        return tuple(cast(each, dtype) for each in part)
    return part


class OutOfMemoryAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises after so many ops; `armed` holds the numbers for one attempt after the other."""

    def __init__(self, on_raise: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops = self.num_raised = 0
        self.armed: list[int] = []
        self._on_raise = on_raise

    def arm(self, numbers: Sequence[int]) -> None:
        self.num_ops, self.armed = 0, list(numbers)

    def disarm(self, *_: Any) -> None:
        self.armed = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.num_ops += func.namespace == "aten"  # not the profiler's, which surround each step
        if self.armed and self.num_ops >= self.armed[0]:
            self.num_ops, self.num_raised = 0, self.num_raised + 1
            del self.armed[0]
            self._on_raise()
            raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


# ---- models ------------------------------------------------------------------------------------


class Cnn(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), norm, nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.head(F.gelu(self.norm(self.conv(x))).mean((2, 3)))


class InEval(nn.Module):
    """A model whose norm is always in eval, as in fine-tuning a detector."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = Cnn(nn.BatchNorm2d(8))
        self.train()

    def forward(self, x: Any) -> Any:
        return self.cnn(x)

    def train(self, mode: bool = True) -> InEval:
        super().train(mode)
        self.cnn.norm.eval()
        return self


class Tagger(nn.Module):
    """A transformer that labels tokens, with padding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: Any) -> Any:
        hidden = self.stack(self.table(ids), src_key_padding_mask=ids == 0)
        return self.head(hidden)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.stack = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)

    def forward(self, source: Any, target: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], dtype=self.table.weight.dtype
        )
        hidden = self.stack(self.table(source), self.table(target), tgt_mask=mask)
        return hidden @ self.table.weight.t()


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 10, 2, batch_first=True), nn.Linear(10, 4)

    def forward(self, x: Any, lengths: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.rnn(packed)[1][0][-1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def checkpointed(make: Callable[[], nn.Module] = Vit) -> nn.Module:
    model = make()
    checkpoint_blocks(model, "blocks")
    return model


def adapted(make: Callable[[], nn.Module] = language_models.gpt2) -> nn.Module:
    model = make()
    put_adapters(model, is_quantised=False)
    return model


# ---- batches and losses ------------------------------------------------------------------------


def rows(num: int) -> Any:
    return torch.randn(num, 8), torch.randint(0, 4, (num,))


def images(num: int) -> Any:
    return {"x": torch.randn(num, 3, 8, 8), "y": torch.randint(0, 4, (num,))}


def large_images(num: int) -> Any:
    return {"x": torch.randn(num, 3, 16, 16), "y": torch.randint(0, 10, (num,))}


def padded(num: int) -> Any:
    """Sequences of 1 to 9 tokens; some of their labels are ignored."""
    ids, labels = torch.randint(1, 20, (num, 9)), torch.randint(0, 5, (num, 9))
    is_padding = torch.arange(9) >= torch.randint(1, 10, (num, 1))
    labels[is_padding | (torch.rand(num, 9) < 0.3)] = -100
    labels[:, 0] = 1  # a piece without any would be left out
    return {"ids": ids.masked_fill(is_padding, 0), "labels": labels}


def sentences(num: int) -> Any:
    target = torch.randint(1, 20, (num, 7))
    labels = target.clone()
    labels[torch.arange(7) >= torch.randint(2, 8, (num, 1))] = -100
    return {"source": torch.randint(1, 20, (num, 5)), "target": target, "labels": labels}


def signals(num: int) -> Any:
    return {
        "x": torch.randn(num, 7, 6),
        "lengths": torch.randint(1, 8, (num,)),
        "y": torch.randint(0, 4, (num,)),
    }


def text(num: int) -> Any:
    ids = torch.randint(0, 96, (num, 11))
    labels = ids.clone()
    labels[torch.arange(11) >= torch.randint(4, 12, (num, 1))] = -100
    return {"input_ids": ids, "labels": labels}


def of_rows(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def of_images(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def of_tokens(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def of_sentences(model: Any, batch: Any) -> Any:
    logits = model(batch["source"], batch["target"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5])


def by_class(model: Any, batch: Any) -> Any:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1], weight=CLASS_WEIGHTS.to(logits.dtype))


def of_text(model: Any, batch: Any) -> Any:
    """As the model's own, which computes it in fp32."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


KINDS: dict[str, Kind] = {
    "mlp": Kind(mlp, rows, of_rows),
    "mlp, summed loss": Kind(
        mlp, rows, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") / 50, "sum"
    ),
    "mlp, loss and a penalty": Kind(
        mlp,
        rows,
        lambda m, b: of_rows(m, b) + 1e-2 * sum(p.square().sum() for p in m.parameters()),
    ),
    "class weights": Kind(mlp, rows, by_class, lambda b: CLASS_WEIGHTS.double()[b[1]].sum()),
    "cnn, GroupNorm": Kind(lambda: Cnn(nn.GroupNorm(2, 8)), images, of_images),
    "cnn, BatchNorm in eval": Kind(InEval, images, of_images),
    "transformer, padding and ignored labels": Kind(Tagger, padded, of_tokens, "tokens"),
    "seq2seq": Kind(Translator, sentences, of_sentences, "tokens"),
    "lstm": Kind(Lstm, signals, lambda m, b: F.cross_entropy(m(b["x"], b["lengths"]), b["y"])),
    "vit": Kind(Vit, large_images, of_images),
    "gpt2": Kind(language_models.gpt2, text, of_text, "next-tokens"),
    "lora": Kind(adapted, text, of_text, "next-tokens"),
    "checkpointed": Kind(checkpointed, large_images, of_images),
}

# Their pieces round, drop or normalise otherwise than the whole batch: they are held against
# training without errors in the same pieces.
IN_PIECES: dict[str, Kind] = {
    "dropout": Kind(lambda: Tagger(0.3), padded, of_tokens, "tokens", is_exact=False),
    "bf16 autocast": Kind(mlp, rows, of_rows, is_exact=False, options={"precision": "bf16"}),
    "fp16 autocast and a scaler": Kind(
        mlp, rows, of_rows, is_exact=False, options={"precision": "fp16"}
    ),
    "BatchNorm": Kind(lambda: Cnn(nn.BatchNorm2d(8)), images, of_images, is_exact=False),
}
