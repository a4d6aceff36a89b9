"""The twins of the example scripts that train on images and other dense inputs.

Each takes a script's arguments, with the script's own defaults.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from examples.loops import OneByOne, names_of, script, whole, workload
from oomph.records.workload import Variant, Workload

Made = tuple[Workload, Variant]


def mnist_cnn(*, batch_size: int = 64, **_: Any) -> Made:
    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.output = model(batch[0])
        return functional.nll_loss(names.output, batch[1])

    made = workload(
        lambda: script("mnist_cnn").Net(),
        lambda _, n: (torch.zeros(n, 1, 28, 28), whole(n)),
        loss,
        lambda _, parameters: torch.optim.Adadelta(parameters, lr=1.0),
        batch_size,
        clears="before forward",
    )
    return made, Variant(micro_batch=batch_size)


class Vae(nn.Module):
    """As in vae_cuda.py, which trains when it is imported."""

    def __init__(self, hidden: int, latent: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, 784)

    def encode(self, x: Any) -> Any:
        h = functional.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def sample(self, mu: Any, logvar: Any) -> Any:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn(std.size(), device="cuda")
        return mu + eps * std

    def forward(self, x: Any) -> Any:
        mu, logvar = self.encode(x)
        z = self.sample(mu, logvar)
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(z)))), mu, logvar


def vae_cuda(*, batch_size: int = 512, hidden: int = 4096, latent: int = 256, **_: Any) -> Made:
    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.x = batch  # the old one was there while the new one was copied
        names.recon, names.mu, names.logvar = model(batch)
        bce = functional.binary_cross_entropy(names.recon, batch, reduction="sum")
        kld = -0.5 * torch.sum(1 + names.logvar - names.mu.pow(2) - names.logvar.exp())
        return bce + kld

    made = workload(
        lambda: Vae(hidden, latent),
        lambda _, n: torch.zeros(n, 784),
        loss,
        lambda _, parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch_size,
        clears="before forward",
    )
    return made, Variant(micro_batch=batch_size)


def default_device(*, width: int = 1024, depth: int = 6, points: int = 65536, **_: Any) -> Made:
    made = workload(
        lambda: script("default_device").siren(width, depth),
        lambda _, n: (torch.zeros(n, 2), torch.zeros(n, 3)),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        lambda _, parameters: torch.optim.Adam(parameters, lr=1e-4),
        points,
        clears="before backward",
    )
    return made, Variant(micro_batch=points)


def vit_bf16(
    *,
    image: int = 224,
    patch: int = 16,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    batch: int = 128,
    **_: Any,
) -> Made:
    def loss(model: Any, given: Any) -> Any:
        names = names_of(model)
        names.images, names.labels = given["images"], given["labels"]
        names.out = model(names.images)
        return functional.cross_entropy(names.out, names.labels, label_smoothing=0.1)

    def optimizer(_: Any, parameters: Any) -> Any:
        decay = [p for p in parameters if p.dim() > 1]
        no_decay = [p for p in parameters if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decay}, {"params": no_decay}], lr=1e-3, fused=True)

    made = workload(
        lambda: script("vit_bf16").ViT(image, patch, dim, depth, heads),
        lambda model, n: OneByOne(
            names_of(model), {"images": torch.zeros(n, 3, image, image), "labels": whole(n)}
        ),
        loss,
        optimizer,
        batch,
        clip=1.0,
    )
    return made, Variant(micro_batch=batch, precision="bf16")


def unet_amp(*, batch_size: int = 16, size: int = 256, base: int = 64, **_: Any) -> Made:
    def loss(model: Any, batch: Any) -> Any:
        names, (images, true_masks) = names_of(model), batch
        names.masks_pred = model(images)
        loss = functional.cross_entropy(names.masks_pred, true_masks)
        names.probs = functional.softmax(names.masks_pred, dim=1).float()[:, 1]
        loss += script("unet_amp").dice_loss(names.probs, true_masks.float())
        return loss

    made = workload(
        lambda: script("unet_amp").UNet(base=base),
        lambda _, n: (torch.zeros(n, 3, size, size), whole(n, size, size)),
        loss,
        lambda _, parameters: torch.optim.RMSprop(
            parameters, lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True
        ),
        batch_size,
        clip=1.0,
        clears="before backward",
    )
    return made, Variant(micro_batch=batch_size, precision="fp16")


def half_classifier(
    *, tokens: int = 196, dim: int = 768, depth: int = 12, batch: int = 64, **_: Any
) -> Made:
    def loss(model: Any, given: Any) -> Any:
        names = names_of(model)
        names.y = given[1]
        names.out = model(given[0])
        return functional.cross_entropy(names.out.float(), names.y)

    def print_accuracy(model: Any) -> None:
        names = names_of(model)
        if not hasattr(names, "acc"):  # in every tenth step: the first alone is rehearsed
            names.acc = (names.out.argmax(1) == names.y).float().mean()
        del names.y

    made = workload(
        lambda: script("half_classifier").Mixer(tokens, dim, depth, 10).half(),
        lambda _, n: (torch.zeros(n, tokens, 48, dtype=torch.half), whole(n)),
        loss,
        lambda _, parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        batch,
        clears="before forward",
        after_step=print_accuracy,
    )
    return made, Variant(micro_batch=batch)  # nothing is cast: the model is in half precision


def resnet_imagenet(
    *,
    batch_size: int = 256,
    layers: tuple[int, ...] = (3, 4, 6, 3),
    width: int = 64,
    image_size: int = 224,
    **_: Any,
) -> Made:
    last = torch.channels_last

    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.output = model(batch[0])
        loss = functional.cross_entropy(names.output, batch[1])
        names.acc1, names.acc5 = script("resnet_imagenet").accuracy(names.output, batch[1])
        return loss

    made = workload(
        lambda: script("resnet_imagenet").ResNet(layers, width).to(memory_format=last),
        lambda _, n: (
            torch.zeros(n, 3, image_size, image_size).contiguous(memory_format=last),
            whole(n),
        ),
        loss,
        lambda _, parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4),
        batch_size,
        clears="before backward",
        benchmarks=True,
    )
    return made, Variant(micro_batch=batch_size)


def ddpm_ema(*, channels: int = 128, image: int = 64, batch: int = 64, **_: Any) -> Made:
    def loss(model: Any, given: Any) -> Any:
        names, (x0, t, a) = names_of(model), given
        names.noise = torch.randn_like(x0)
        names.noisy = a.sqrt() * x0 + (1 - a).sqrt() * names.noise
        return functional.mse_loss(model(names.noisy, t), names.noise)

    def optimizer(model: Any, parameters: Any) -> Any:
        ema = copy.deepcopy(model).eval().requires_grad_(False)
        names_of(model).ema = ema
        return torch.optim.AdamW(parameters, lr=2e-4)

    made = workload(
        lambda: script("ddpm_ema").Denoiser(channels),
        lambda _, n: (torch.zeros(n, 3, image, image), whole(n), torch.zeros(n, 1, 1, 1)),
        loss,
        optimizer,
        batch,
        clip=1.0,
        clears="before backward",
        after_step=lambda model: script("ddpm_ema").ema_update(names_of(model).ema, model, 0.9999),
    )
    return made, Variant(micro_batch=batch)


def sys_exit_main(
    *, width: int = 64, out: int = 128, size: int = 112, batch: int = 128, **_: Any
) -> Made:
    criterion = nn.TripletMarginLoss(margin=0.5)

    def loss(model: Any, given: Any) -> Any:
        names = names_of(model)
        names.anchor, names.positive, names.negative = given
        return criterion(model(given[0]), model(given[1]), model(given[2]))

    made = workload(
        lambda: script("sys_exit_main").Encoder(width, out),
        lambda _, n: tuple(torch.zeros(n, 3, size, size) for _ in range(3)),
        loss,
        lambda _, parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
        batch,
        clears="before forward",
    )
    return made, Variant(micro_batch=batch)


def runs_and_checkpoints(
    *,
    series: int = 64,
    hidden: int = 512,
    layers: int = 8,
    window: int = 2048,
    batch_size: int = 32,
    **_: Any,
) -> Made:
    def loss(model: Any, wave: Any) -> Any:
        names_of(model).wave = wave
        return functional.l1_loss(model(wave[..., :-1]), wave[..., 1:])

    made = workload(
        lambda: script("runs_and_checkpoints").Forecaster(series, hidden, layers),
        lambda _, n: torch.zeros(n, series, window + 1),
        loss,
        lambda _, parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch_size,
        clears="before backward",
    )
    return made, Variant(micro_batch=batch_size)


def trainer_class(
    *, features: int = 256, width: int = 2048, depth: int = 8, batch_size: int = 4096, **_: Any
) -> Made:
    def loss(model: Any, batch: Any) -> Any:
        names = names_of(model)
        names.logits = model(batch[0])
        return functional.binary_cross_entropy_with_logits(names.logits, batch[1])

    made = workload(
        lambda: script("trainer_class").TabularNet(features, width, depth),
        lambda _, n: (torch.zeros(n, features), torch.zeros(n)),
        loss,
        lambda _, parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size,
        clip=5.0,
        clears="before backward",
    )
    return made, Variant(micro_batch=batch_size)


def train_from_config(*, config: str, **_: Any) -> Made:
    from examples.commands import SCRIPTS

    module = script("train_from_config")
    read = module.load_config(SCRIPTS / config, [])
    train, samples = read["train"], read["data"]["samples"]
    criterion = nn.CrossEntropyLoss(label_smoothing=train["label_smoothing"])
    made = workload(
        lambda: module.build_model(**read["model"]),
        lambda _, n: (torch.zeros(n, 1, samples), whole(n)),
        lambda model, batch: criterion(model(batch[0]), batch[1]),
        lambda _, parameters: torch.optim.AdamW(parameters, **train["optimizer"]["args"]),
        train["batch_size"],
        clip=train["clip_norm"],
        clears="before forward",
    )
    return made, Variant(micro_batch=train["batch_size"])
