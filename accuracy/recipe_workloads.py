"""The name of a recipe's workload -> the Workload: "llama_2_7b__lora_8_qv_nf4__1304__128".

The parts of a name are the model, its tuning, the length or the edge of an image, and the batch.
Predictions and plans are asked for by file and name, so that rehearsals are stored as a user's are.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accuracy.recipe_shapes import LITGPT

if TYPE_CHECKING:
    from oomph.records.workload import Workload

LANGUAGE = (
    "llama-7b",
    "llama-13b",
    "llama-3.2-1b",
    "gpt2-xl",
    "megatron-1.5b",
    "gpt-neo-2.7b",
    "starcoder",
    "baichuan2-13b",
    "t5-large",
    "t5-3b",
    "deberta-v2-xlarge",
    "blenderbot-400m",
)
SPEECH = ("whisper-large-v2", "whisper-medium", "wav2vec2-large")
DIFFUSION = ("sd-1.4-unet", "sd-1.4", "controlnet-sd-1.5", "sdxl")
# Which file builds which models, so that a change in one does not make the others' rehearsals old.
_FILES = {
    **dict.fromkeys(LITGPT, "accuracy.recipe_litgpt"),
    **dict.fromkeys(LANGUAGE, "accuracy.recipe_language"),
    **dict.fromkeys(SPEECH, "accuracy.recipe_speech"),
    **dict.fromkeys(DIFFUSION, "accuracy.recipe_diffusion"),
}
MODELS = tuple(_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a workload is built from."""

    model: str
    tuning: str  # "full", or words that the model's own file understands: "lora-8-qv-nf4"
    size: int  # tokens, or pixels of an edge
    batch_size: int

    @property
    def name(self) -> str:
        parts = (self.model, self.tuning, str(self.size), str(self.batch_size))
        return "__".join(_as_identifier(part) for part in parts)


def _as_identifier(part: str) -> str:
    return part.replace("-", "_").replace(".", "_")


_MODEL_NAMED = {_as_identifier(name): name for name in _FILES}


def built_from(name: str) -> Built:
    """Return what a name says. Raises ValueError."""
    model, tuning, size, batch_size = name.split("__")
    return Built(
        model=_MODEL_NAMED[model],
        tuning=tuning.replace("_", "-"),
        size=int(size),
        batch_size=int(batch_size),
    )


def __getattr__(name: str) -> Workload:
    try:
        built = built_from(name)
    except (ValueError, KeyError):
        raise AttributeError(name) from None
    made: Workload = importlib.import_module(_FILES[built.model]).workload(built)
    return made
