"""WaveGlow as NVIDIA's DeepLearningExamples trains it: waveglow/model.py, its defaults, fp32."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

_FLOWS, _GROUP, _EARLY_EVERY, _EARLY_SIZE = 12, 8, 4, 2
_MELS, _LAYERS, _WIDTH = 80, 8, 512
_HOP = 256  # samples of audio for each frame of the spectrogram


def _normed(*sizes: int, **how: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants its newer one, which the source did not use
        return nn.utils.weight_norm(nn.Conv1d(*sizes, **how))  # type: ignore[arg-type] # ints


class _Gate(torch.autograd.Function):
    """tanh x sigmoid of a sum, which TorchScript makes one kernel in each direction."""

    @staticmethod
    def forward(context: Any, one: Any, other: Any) -> Any:
        context.save_for_backward(one, other)
        return torch.mul(one[:, :_WIDTH], other[:, _WIDTH:])

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        one, other = context.saved_tensors
        gradient = torch.addcmul(one, other, torch.cat((gradients[0], gradients[0]), 1))
        return gradient, gradient


class Net(nn.Module):
    """The network of one flow's coupling."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.start = _normed(width, _WIDTH, 1)
        self.end = nn.Conv1d(_WIDTH, 2 * width, 1)
        self.inner = nn.ModuleList(
            _normed(_WIDTH, 2 * _WIDTH, 3, dilation=2**i, padding=2**i) for i in range(_LAYERS)
        )
        self.condition = nn.ModuleList(
            _normed(_MELS * _GROUP, 2 * _WIDTH, 1) for _ in range(_LAYERS)
        )
        self.skip = nn.ModuleList(
            _normed(_WIDTH, _WIDTH if i == _LAYERS - 1 else 2 * _WIDTH, 1) for i in range(_LAYERS)
        )

    def forward(self, audio: Any, mels: Any) -> Any:
        audio, out = self.start(audio), None
        for inner, condition, skip in zip(self.inner, self.condition, self.skip, strict=True):
            passed = skip(_Gate.apply(inner(audio), condition(mels)))
            if passed.size(1) > _WIDTH:
                audio = passed[:, :_WIDTH, :] + audio
                passed = passed[:, _WIDTH:, :]
            out = passed if out is None else passed + out
        return self.end(out)


class WaveGlow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose1d(_MELS, _MELS, 1024, stride=_HOP)
        widths = [_GROUP - _EARLY_SIZE * (k // _EARLY_EVERY) for k in range(_FLOWS)]
        self.mixes = nn.ModuleList(nn.Conv1d(width, width, 1, bias=False) for width in widths)
        self.nets = nn.ModuleList(Net(width // 2) for width in widths)

    def forward(self, mels: Any, audio: Any) -> Any:
        mels = self.upsample(mels)[:, :, : audio.size(1)]
        mels = mels.unfold(2, _GROUP, _GROUP).permute(0, 2, 1, 3)
        mels = mels.contiguous().view(mels.size(0), mels.size(1), -1).permute(0, 2, 1)
        audio = audio.unfold(1, _GROUP, _GROUP).permute(0, 2, 1)
        early, scales, determinants = [], [], []
        for k, (mix, net) in enumerate(zip(self.mixes, self.nets, strict=True)):
            if k and k % _EARLY_EVERY == 0:
                early.append(audio[:, :_EARLY_SIZE, :])
                audio = audio[:, _EARLY_SIZE:, :]
            weight: Any = mix.weight
            determinants.append(audio.size(0) * audio.size(2) * torch.logdet(weight.squeeze()))
            audio = mix(audio)
            half = audio.size(1) // 2
            out = net(audio[:, :half, :], mels)
            scale, shift = out[:, half:, :], out[:, :half, :]
            moved = torch.exp(scale) * audio[:, half:, :] + shift
            scales.append(scale)
            audio = torch.cat([audio[:, :half, :], moved], 1)
        return torch.cat([*early, audio], 1), scales, determinants


def batch(num_examples: int, length: int) -> Any:
    frames = length // _HOP + 1
    return torch.zeros(num_examples, _MELS, frames), torch.zeros(num_examples, length)


def loss(model: Any, examples: Any) -> Any:
    z, scales, determinants = model(*examples)
    scale = sum(each.sum() for each in scales)
    return (torch.sum(z * z) / 2 - scale - sum(determinants)) / z.numel()
