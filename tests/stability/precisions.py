"""Models that train under autocast, and some that do not, in fp16, in bf16 or in both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from oomph.records.workload import Workload
from stability.accumulations import (
    CLASSES,
    LENGTH,
    WIDTH,
    Tagger,
    TiedModel,
    cnn,
    cross_entropy,
    images,
    info_nce,
    mlp,
    next_word,
    pairs,
    per_word,
    rows,
    sentences,
)


@dataclass(frozen=True)
class Case:
    """A workload, and what the checks should say of it."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Any]
    fp16: str = "passes"
    bf16: str = "passes"
    module: str | None = ""  # where it breaks
    op: str | None = None
    said: str = ""  # part of the finding, or of the conclusion

    @property
    def workload(self) -> Workload:
        return Workload(
            model=self.model,
            batch=self.batch,
            loss=self.loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=32,
        )


class Body(nn.Module):
    """Two layers with something in between."""

    def __init__(self, between: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.between = between

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.between(self.first(x)))


class Between(nn.Module):
    """A function as a module of its own, to be found by its name."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def named(function: Callable[[torch.Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Body(Between(function))


def write_into_buffer(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32)
    out[torch.arange(x.size(0))] = x
    return out


class Square(torch.autograd.Function):
    """Keeps its input and gives a product with an fp32 matrix: nobody cast it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, matrix)
        return x @ matrix

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, matrix = ctx.saved_tensors
        return grads[0] @ matrix.T, x.T @ grads[0]


class SafeSquare(torch.autograd.Function):
    """The same, as torch's documents have it."""

    @staticmethod
    @torch.amp.custom_fwd(  # type: ignore[untyped-decorator]
        device_type="cuda", cast_inputs=torch.float32
    )
    def forward(ctx: Any, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, matrix)
        return x @ matrix

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, matrix = ctx.saved_tensors
        return grads[0] @ matrix.T, x.T @ grads[0]


class WithFunction(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.matrix = nn.Parameter(torch.randn(16, 16) / 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.function.apply(self.first(x), self.matrix))


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """By hand, in the activation's own precision, of large activations."""
    x = x * 500
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True))


def rms_norm_in_fp32(x: torch.Tensor) -> torch.Tensor:
    wide = (x * 500).float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True))).to(x.dtype)


def small_epsilon(x: torch.Tensor) -> torch.Tensor:
    shifted = (x - x).abs()  # a norm of 0, which the epsilon is for
    return x / (shifted + 1e-8) * 1e-8


def attention(mask: Callable[[torch.Tensor], Any]) -> Callable[[], nn.Module]:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 16)
            self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
            self.mask, self.head = Between(mask), nn.Linear(16, CLASSES)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.words(x)
            scores = self.query(hidden) @ self.key(hidden).transpose(1, 2) / 4
            return self.head(self.mask(scores).softmax(-1) @ hidden)

    return Attention


def _future() -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


class Residual(nn.Module):
    """A stream to which every layer adds, and that may grow."""

    def __init__(self, layers: int, growth: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head, self.growth = nn.Linear(WIDTH, CLASSES), growth

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(functional.layer_norm(x, (WIDTH,))).tanh() + self.growth * x
        return self.head(x)


class Positions(nn.Module):
    """Sines of positions that are counted in the precision of activations."""

    def __init__(self, *, in_fp32: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.sines = Between(self._sines)
        self.in_fp32 = in_fp32

    def _sines(self, hidden: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if self.in_fp32 else hidden.dtype
        start = torch.arange(4000, 4000 + hidden.size(0)).to(dtype) * 1.37
        return torch.sin(start)[:, None].to(hidden.dtype)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        return self.last(hidden * (self.sines(hidden) + 0.1))


class Teacher(nn.Module):
    """One network without gradients, then with: autocast keeps the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            target = self.net(x).softmax(-1)
        return self.net(x * 1.1) * self.scale + 0 * target


class OneKey(nn.Module):
    """Only the first word is used, which sees only itself: query and key learn rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        words = torch.stack([x, x.flip(-1)], 1)
        query, key = self.query(words), self.key(words)
        mixed = functional.scaled_dot_product_attention(
            query, key, words.to(query.dtype), is_causal=True
        )
        return self.head(mixed[:, 0])


class Rotary(nn.Module):
    """As transformers have it: autocast is switched off by the device of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            places = torch.arange(hidden.size(0)).float()[:, None] + 4000
            angles = places @ torch.full((1, 16), 1.37)
        return self.last(hidden * angles.cos().to(hidden.dtype))


class Moments(nn.Module):
    """A linear solve in the middle, as whitening or a Gaussian process has it."""

    def __init__(self, *, in_fp32: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 4), nn.Linear(4, CLASSES)
        self.in_fp32 = in_fp32

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        with torch.autocast("cuda", enabled=not self.in_fp32):
            wide = hidden.float() if self.in_fp32 else hidden
            moments = wide.T @ wide + torch.eye(4).to(wide)
            white = wide @ torch.linalg.inv(moments)
        return self.last(white)


def wide_rows(low: float, high: float) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda n: {
        "x": torch.empty(n, WIDTH).uniform_(low, high),
        "y": torch.randint(0, CLASSES, (n,)),
    }


def values(size: float) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda n: {"x": torch.randn(n, WIDTH), "y": size * torch.randn(n, CLASSES)}


def squared(model: Any, batch: Any) -> Any:
    return functional.mse_loss(model(batch["x"]).float(), batch["y"])


def squared_in_low(model: Any, batch: Any) -> Any:
    """Squares of what the model gives, in the precision of what it gives."""
    out = model(batch["x"])
    apart = out - batch["y"].to(out.dtype)
    return (apart * apart).mean()


def times(factor: float) -> Callable[[Any, Any], Any]:
    return lambda model, batch: factor * functional.cross_entropy(model(batch["x"]), batch["y"])


def blown_up(model: Any, batch: Any) -> Any:
    """With logits of a size that softmax can do with."""
    return functional.cross_entropy(model(batch["x"]).float() / 1e6, batch["y"])


def after_sigmoid(model: Any, batch: Any) -> Any:
    truth = functional.one_hot(batch["y"], CLASSES).to(torch.get_default_dtype())
    return functional.binary_cross_entropy(model(batch["x"]).sigmoid(), truth)


def with_logits(model: Any, batch: Any) -> Any:
    truth = functional.one_hot(batch["y"], CLASSES).to(torch.get_default_dtype())
    return functional.binary_cross_entropy_with_logits(model(batch["x"]), truth)


class _TimesSmall(torch.autograd.Function):
    """Makes gradients small, and large again behind: nothing a loss scale can help."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


class SmallInside(nn.Module):
    """One branch with gradients of 1e-12 beside one with gradients of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.faint = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        faint: Any = _TimesSmall.apply
        return self.plain(x) + faint(self.faint(x), 1e-14)


def fourier(x: torch.Tensor) -> Any:
    return torch.fft.rfft(x).abs().repeat(1, 2)[:, :16]


CASES = {
    # Those of the study that the check was made from.
    "an MLP": Case(mlp(), rows, cross_entropy()),
    "GroupNorm": Case(cnn(lambda: nn.GroupNorm(2, 8)), images, cross_entropy()),
    "BatchNorm": Case(cnn(lambda: nn.BatchNorm2d(8)), images, cross_entropy()),
    "a transformer with dropout": Case(Tagger, sentences, per_word()),
    "BCE of logits": Case(mlp(), rows, with_logits),
    "large targets": Case(mlp(), values(1e3), squared),
    "24 residual layers": Case(lambda: Residual(24, 1.0), rows, cross_entropy()),
    "BCE after a sigmoid": Case(
        mlp(), rows, after_sigmoid, "fails", "fails", None, None, "unsafe to autocast"
    ),
    "a mask of -1e9": Case(
        attention(lambda s: s.masked_fill(_future(), -1e9)),
        sentences,
        per_word(),
        "fails",
        "passes",
        "mask",
        "masked_fill",
        "without overflow",
    ),
    "writing into an fp32 buffer": Case(
        named(write_into_buffer),
        rows,
        cross_entropy(),
        "fails",
        "fails",
        "between",
        None,
        "ndex put",
    ),
    "an inverse": Case(
        lambda: Moments(in_fp32=False), rows, cross_entropy(), "fails", "fails", "", None, "inv"
    ),
    "a function of one's own": Case(
        lambda: WithFunction(Square),
        rows,
        cross_entropy(),
        "fails",
        "fails",
        "",
        "mm",
        "same dtype",
    ),
    "raw inputs up to 100000": Case(
        mlp(),
        wide_rows(3e4, 1e5),
        cross_entropy(),
        "fails",
        "passes",
        "0",
        "_to_copy",
        "inf or NaN",
    ),
    "a residual stream that blows up": Case(
        lambda: Residual(30, 1.6),
        rows,
        blown_up,
        "fails",
        "passes",
        "head",
        "_to_copy",
        "inf or NaN",
    ),
    "an epsilon that fp16 does not have": Case(
        named(small_epsilon),
        rows,
        cross_entropy(),
        "fails",
        "passes",
        "between",
        "div",
        "inf or NaN",
    ),
    "RMSNorm by hand of large values": Case(
        named(rms_norm), rows, cross_entropy(), "fails", "passes", "between", "mul", "inf or NaN"
    ),
    "positions in low precision": Case(
        lambda: Positions(in_fp32=False),
        rows,
        cross_entropy(),
        "fails",
        "fails",
        "sines",
        None,
        "wrong by",
    ),
    "gradients of 1e-14 inside": Case(
        SmallInside, rows, cross_entropy(), "fails", "passes", "faint", None, "become 0"
    ),
    "a loss of 1e-11": Case(mlp(), rows, times(1e-11), said="init_scale=2.0**20"),
    # Others.
    "positions in fp32": Case(lambda: Positions(in_fp32=True), rows, cross_entropy()),
    "RMSNorm by hand in fp32": Case(named(rms_norm_in_fp32), rows, cross_entropy()),
    "an inverse in an island of fp32": Case(lambda: Moments(in_fp32=True), rows, cross_entropy()),
    "a function with custom_fwd": Case(lambda: WithFunction(SafeSquare), rows, cross_entropy()),
    "an island by the tensor's device": Case(Rotary, rows, cross_entropy()),
    "a mask of -inf": Case(
        attention(lambda s: s.masked_fill(_future(), -math.inf)), sentences, per_word()
    ),
    "a mask of finfo's minimum": Case(
        attention(
            lambda s: s + torch.zeros_like(s).masked_fill(_future(), torch.finfo(s.dtype).min)
        ),
        sentences,
        per_word(),
    ),
    "an fp32 mask cast down": Case(
        attention(lambda s: s + (_future().float() * -1e30).to(s.dtype)),
        sentences,
        per_word(),
        said="harmless",
    ),
    "tied weights and a GRU": Case(TiedModel, sentences, next_word),
    "parameters that have nothing to learn": Case(OneKey, rows, cross_entropy()),
    "in-batch negatives": Case(mlp(), pairs, info_nce),
    "a transform of 16 values": Case(
        named(fourier),
        rows,
        cross_entropy(),
        "uncertain",
        "fails",
        "between",
        None,
        "Unsupported dtype",
    ),
    "squares of 300 in low precision": Case(
        mlp(), values(300), squared_in_low, "fails", "passes", None, "mul", "inf or NaN"
    ),
    "a loss of 1e6": Case(mlp(), rows, times(1e6)),
    "weights used without gradients first": Case(
        Teacher, rows, cross_entropy(), "fails", "fails", "net", None, "points in another direction"
    ),
    "values of 20000": Case(
        named(lambda x: x * 20000),
        rows,
        lambda m, b: 1e-4 * m(b["x"]).float().square().mean(),
        "uncertain",
        "passes",
        "between",
        None,
        "65504",
    ),
    "float16 made by hand": Case(named(lambda x: x.half().float()), rows, cross_entropy()),
}
