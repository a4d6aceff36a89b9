"""Speech models of transformers: Whisper, and wav2vec 2.0 with speechbrain's layers for CTC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from oomph.records.workload import Workload

if TYPE_CHECKING:
    from accuracy.recipe_workloads import Built

_FRAMES, _TOKENS = 3000, 128  # 30 s of log-mel features; judgement: tokens of 30 s of speech
_SAMPLES_PER_S = 16000
_CHARACTERS = 32
_SPOKEN_PER_S = 15  # characters; judgement: of read speech


def whisper(name: str, words: tuple[str, ...] = ()) -> Any:
    """Return Whisper; with the word "decoder" its encoder is frozen, as speechbrain does it."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers, width, heads = (32, 1280, 20) if "large" in name else (24, 1024, 16)
    config = WhisperConfig(
        vocab_size=51865,
        encoder_layers=layers,
        decoder_layers=layers,
        d_model=width,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        attn_implementation="eager",
    )
    model = WhisperForConditionalGeneration(config)
    if "decoder" in words:
        model.model.encoder.requires_grad_(False)
    return model


class Recogniser(nn.Module):
    """speechbrain's CTC recipes: the encoder, three layers of 1024 and a layer of characters."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Wav2Vec2Config, Wav2Vec2Model

        config = Wav2Vec2Config(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            feat_extract_norm="layer",
            do_stable_layer_norm=True,
            conv_bias=True,
            layerdrop=0.0,
            apply_spec_augment=False,
            attn_implementation="eager",
        )
        self.encoder = Wav2Vec2Model(config)
        self.encoder.feature_extractor.requires_grad_(False)
        layers = [
            nn.Sequential(
                nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.LeakyReLU(), nn.Dropout(0.15)
            )
            for _ in range(3)
        ]
        self.layers = nn.ModuleList(layers)
        self.characters = nn.Linear(1024, _CHARACTERS)

    def forward(self, speech: Any) -> Any:
        x = self.encoder(speech).last_hidden_state
        batch, length, width = x.shape
        for layer in self.layers:
            x = layer(x.reshape(batch * length, width)).reshape(batch, length, width)
        return self.characters(x)


def ctc(model: Any, batch: Any) -> Any:
    scores = F.log_softmax(model(batch["speech"]), dim=-1).transpose(0, 1)
    frames = torch.full((scores.size(1),), scores.size(0), dtype=torch.long)
    spoken = torch.full((scores.size(1),), batch["text"].size(1), dtype=torch.long)
    return F.ctc_loss(scores, batch["text"], frames, spoken, zero_infinity=True)


def workload(built: Built) -> Workload:
    words = tuple(built.tuning.split("-"))
    is_old = "old" in words
    if built.model.startswith("whisper"):
        bins = 80

        def batch(n: int) -> dict[str, Any]:
            return {
                "input_features": torch.zeros(n, bins, _FRAMES),
                "labels": torch.zeros(n, _TOKENS, dtype=torch.long),
            }

        return Workload(
            model=lambda: whisper(built.model, words),
            batch=batch,
            loss=lambda model, of: model(**of).loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
            batch_size=built.batch_size,
            clip_grad_norm=1.0,
            zero_grad_to_none=not is_old,
        )

    def speech(n: int) -> dict[str, Any]:
        text = torch.ones(n, _SPOKEN_PER_S * built.size, dtype=torch.long)
        return {"speech": torch.zeros(n, _SAMPLES_PER_S * built.size), "text": text}

    return Workload(
        model=Recogniser,
        batch=speech,
        loss=ctc,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
        batch_size=built.batch_size,
        clip_grad_norm=5.0,
        zero_grad_to_none=not is_old,
    )
