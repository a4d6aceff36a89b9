"""Stable Diffusion as diffusers' example scripts train it: DreamBooth, ControlNet, LoRA on SDXL.

huggingface/diffusers examples: dreambooth/train_dreambooth.py, controlnet/train_controlnet.py and
dreambooth/train_dreambooth_lora_sdxl.py. Images are encoded anew in each step by a frozen VAE, and
texts by a frozen CLIP; both are fp16 in mixed precision. ShivamShrirao's fork encodes all of them
once, and trains with nothing but the U-Net on the GPU.

A tuning is words: "cached" (no VAE and no CLIP), "text" (CLIP is trained as well), "half" (what is
frozen is fp16), "prior" (each example is an image and one of its class, for the loss that preserves
the prior), "eager" (attention without xformers), "ckpt" (diffusers' own checkpointing, which its
scripts switch on), "old" (before torch 2.0: gradients are zeroed and kept).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from accuracy import adapters
from accuracy.libraries import import_diffusers
from oomph.records.workload import Workload

if TYPE_CHECKING:
    from accuracy.recipe_workloads import Built

_WORDS = 77
_PER_EDGE = 8  # pixels of an image for one of its latents


def unet(name: str, words: list[str]) -> Any:
    models = import_diffusers()
    if name == "sdxl":
        made = models.UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
    else:
        made = models.UNet2DConditionModel(**_STABLE)
    return _as_asked(made, words)


_STABLE: dict[str, Any] = {
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
    "block_out_channels": (320, 640, 1280, 1280),
}


def _as_asked(made: Any, words: list[str]) -> Any:
    if "eager" in words:
        processors = importlib.import_module("diffusers.models.attention_processor")
        made.set_attn_processor(processors.AttnProcessor())
    if "ckpt" in words:
        made.enable_gradient_checkpointing()
        made.train()
    return made


def _clip(width: int, layers: int, heads: int) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    return CLIPTextModel(config)


def _vae() -> Any:
    return import_diffusers().AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
    )


class Pipeline(nn.Module):
    """What a script holds on the GPU: the U-Net, and unless cached the VAE and CLIP."""

    def __init__(self, name: str, words: list[str]) -> None:
        super().__init__()
        self.is_xl, self.is_cached = name == "sdxl", "cached" in words
        self.unet = unet(name, words)
        frozen: list[Any] = []
        if name == "controlnet-sd-1.5":
            self.controlnet = _as_asked(import_diffusers().ControlNetModel(**_STABLE), words)
            frozen.append(self.unet)
        if not self.is_cached:
            self.vae = _vae()
            self.texts = nn.ModuleList([_clip(768, 12, 12)])
            if self.is_xl:
                self.texts.append(_clip(1280, 32, 20))
            frozen += [self.vae, *([] if "text" in words else self.texts)]
        if self.is_xl:
            frozen.append(self.unet)
        for part in frozen:
            part.requires_grad_(False)
            if "half" in words:
                part.half()
        if self.is_xl:
            self.vae.float()  # the script keeps it in fp32: it overflows in fp16
            _put_lora_on(self.unet)

    def forward(self, batch: Any) -> Any:
        latents, states, pooled = self._encoded(batch)
        noise = torch.randn_like(latents)
        times = torch.zeros(len(latents), dtype=torch.long, device=latents.device)
        noisy = latents + noise
        extra: dict[str, Any] = {}
        if self.is_xl:
            ids = torch.zeros(len(latents), 6, dtype=states.dtype, device=latents.device)
            extra["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": ids}
        if hasattr(self, "controlnet"):
            down, middle = self.controlnet(
                noisy, times, states, controlnet_cond=batch["condition"], return_dict=False
            )
            kind = next(self.unet.parameters()).dtype
            extra["down_block_additional_residuals"] = [part.to(kind) for part in down]
            extra["mid_block_additional_residual"] = middle.to(kind)
        predicted = self.unet(noisy, times, states, **extra).sample
        return F.mse_loss(predicted.float(), noise.float())

    def _encoded(self, batch: Any) -> tuple[Any, Any, Any]:
        if self.is_cached:
            return batch["latents"], batch["states"], None
        kind = next(self.vae.parameters()).dtype
        latents = self.vae.encode(batch["pixels"].to(kind)).latent_dist.sample() * 0.18215
        outs = [text(batch["words"]) for text in self.texts]
        states = torch.cat([out.last_hidden_state for out in outs], dim=-1)
        wanted = next(self.unet.parameters()).dtype
        return latents.to(wanted), states, outs[-1].pooler_output


def _put_lora_on(made: Any, rank: int = 4) -> None:
    for module in list(made.modules()):
        for name, child in list(module.named_children()):
            if name in ("to_q", "to_k", "to_v"):
                setattr(module, name, adapters.Lora(child, rank))
            elif name == "to_out":
                child[0] = adapters.Lora(child[0], rank)


def workload(built: Built) -> Workload:
    words = built.tuning.split("-")
    latents = built.size // _PER_EDGE

    def batch(n: int) -> dict[str, Any]:
        if "cached" in words:
            return {
                "latents": torch.zeros(n, 4, latents, latents),
                "states": torch.zeros(n, _WORDS, 768),
            }
        num_images = 2 * n if "prior" in words else n
        image = (num_images, 3, built.size, built.size)
        found = {
            "pixels": torch.zeros(image),
            "words": torch.zeros(num_images, _WORDS, dtype=torch.long),
        }
        if built.model.startswith("controlnet"):
            found["condition"] = torch.zeros(image)
        return found

    return Workload(
        model=lambda: Pipeline(built.model, words),
        batch=batch,
        loss=lambda model, of: model(of),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-6),
        batch_size=built.batch_size,
        clip_grad_norm=1.0,
        zero_grad_to_none="old" not in built.tuning.split("-"),
    )
