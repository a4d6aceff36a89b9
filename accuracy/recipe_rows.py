"""Published training recipes: who wrote them, recipes.csv with a row each, and which are left out.

A row is one recipe as its author describes it: a model, a card, a batch and the settings, and that
it fitted (with how much memory, if that is said) or ran out of memory. `fixed_by` names the row
that made it fit. A figure in GB is read as the source prints it: 1e9 bytes in litgpt, and
otherwise as it stands. Half of the rows, drawn by a hash of their names, are blind: nobody looked
at their predictions before the last scoring.

What was changed after a first prediction, each time for a line of the source, and for blind rows of
the source alike: DreamBooth trains an image together with one of its class, speechbrain freezes
Whisper's encoder, and before torch 2.0 optimizers went tensor by tensor and gradients were kept.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from accuracy.recipe_workloads import Built
from oomph.records.workload import Precision, Sharding, Variant

FILE = Path(__file__).with_name("recipes.csv")
NUM_COLLECTED = 403  # rows in the collection that these were taken from

Outcome = Literal["fits", "oom"]
# known: every example is as long as posed. longest: the longest is, and set the peak. at most: no
# example is longer, and how long they are is not said.
Lengths = Literal["known", "longest", "at most"]
Metric = Literal["", "max_allocated", "nvidia-smi", "unspecified"]

SOURCES = {
    "litgpt tables": "Lightning-AI/litgpt@2685705 tutorials/resource-tables.md",
    "litgpt hub": "Lightning-AI/litgpt@2685705 config_hub/finetune/README.md",
    "4-bit blog": "huggingface/blog@8dc6a4f 4bit-transformers-bitsandbytes.md",
    "ZeRO blog": "huggingface/blog@8dc6a4f zero-deepspeed-fairscale.md",
    "FSDP blog": "huggingface/blog@8dc6a4f pytorch-fsdp.md",
    "DeepSpeed blog": "huggingface/blog@8dc6a4f accelerate-deepspeed.md",
    "copilot blog": "huggingface/blog@8dc6a4f personal-copilot.md",
    "DreamBooth": "huggingface/diffusers@58eb52c examples/dreambooth/README.md",
    "ControlNet": "huggingface/diffusers@58eb52c examples/controlnet/README.md",
    "SDXL LoRA": "huggingface/diffusers@58eb52c examples/dreambooth/README_sdxl.md",
    "DreamBooth fork": "ShivamShrirao/diffusers examples/dreambooth/README.md",
    "finetune-gpt2xl": "Xirider/finetune-gpt2xl@e0b0249 README.md",
    "DeepSpeed tutorial": "microsoft/DeepSpeed docs/_tutorials/zero.md",
    "Alpaca": "tatsu-lab/stanford_alpaca issue 56",
    "FastChat": "lm-sys/FastChat issue 407",
    "LlamaFactory": "hiyouga/LlamaFactory issue 1158",
    "llama-cookbook": "meta-llama/llama-cookbook issue 835",
    "fast-whisper": "Vaibhavs10/fast-whisper-finetuning@0515e11 README.md",
    "speechbrain": "speechbrain/speechbrain@9c826ef recipes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One published recipe, as it is posed to oomph."""

    id: str
    source: str
    model: str
    tuning: str  # words that the model's own file understands
    size: int  # tokens, seconds of speech, or pixels of an edge
    gpu: str
    num_gpus: int
    micro_batch: int
    accumulation: int
    precision: Precision
    checkpointing: str
    optimizer: str
    sharding: Sharding
    outcome: Outcome
    memory_bytes: float | None
    metric: Metric
    example_s: float | None  # seconds for an example, where published for examples as long
    fixed_by: str  # the row that made it fit
    allow: frozenset[str]  # tricks that change training, which the fix used
    lengths: Lengths
    not_posed: str  # why oomph cannot be asked to predict these settings
    as_published: str
    assumptions: str

    @property
    def batch_size(self) -> int:
        return self.micro_batch * self.accumulation * self.num_gpus

    @property
    def is_blind(self) -> bool:
        return hashlib.sha256(self.id.encode()).digest()[0] % 2 == 1

    @property
    def built(self) -> Built:
        """What the recipe trains."""
        return Built(
            model=self.model, tuning=self.tuning, size=self.size, batch_size=self.batch_size
        )

    @property
    def built_plainly(self) -> Built:
        """The same without the checkpointing of its own, for a plan to choose, and as of today."""
        words = [word for word in self.tuning.split("-") if word not in ("ckpt", "old")]
        return Built(
            model=self.model,
            tuning="-".join(words),
            size=self.size,
            batch_size=self.batch_size,
        )

    @property
    def variant(self) -> Variant:
        return Variant(
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            precision=self.precision,
            checkpointing=self.checkpointing,
            optimizer=self.optimizer,
            sharding=self.sharding,
            num_gpus=self.num_gpus,
        )


def read_rows(path: Path = FILE) -> tuple[Recipe, ...]:
    """Return the recipes. Raises ValueError for a row that is not one."""
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(_as_recipe(row) for row in csv.DictReader(file))


_NUMBERS = ("size", "num_gpus", "micro_batch", "accumulation")
_FIGURES = ("memory_bytes", "example_s")
_WORDS: dict[str, tuple[str, ...]] = {
    "outcome": get_args(Outcome),
    "lengths": get_args(Lengths),
    "metric": get_args(Metric),
    "precision": get_args(Precision),
    "sharding": get_args(Sharding),
}


def _as_recipe(row: dict[str, str]) -> Recipe:
    for name, known in _WORDS.items():
        if row[name] not in known:
            raise ValueError(f"{row['id']}: {name} {row[name]!r} is none of {', '.join(known)}")
    found: dict[str, Any] = {field.name: row[field.name] for field in fields(Recipe)}
    found |= {name: int(row[name]) for name in _NUMBERS}
    found |= {name: float(row[name]) if row[name] else None for name in _FIGURES}
    found["allow"] = frozenset(row["allow"].split())
    return Recipe(**found)


# ---- what is left out ------------------------------------------------------------------------

# Where the recipe is from, how many rows, and why oomph is not asked.
LEFT_OUT: tuple[tuple[str, int, str], ...] = (
    ("mmdetection, detectron2, centerX", 106, "images of variable size, and no models of theirs"),
    ("litgpt tables", 9, "FSDP of 2023 with flat parameters"),
    ("litgpt tables", 12, "the layers of Adapter and Adapter v2 are not rebuilt"),
    ("litgpt hub", 7, "the figure of 4 GPUs is the one of 1 GPU: one device was used"),
    ("litgpt hub", 2, "the same run as another row (llama-3.1-8b, mistral-7b-v0.2)"),
    ("litgpt hub", 2, "less memory than weights, gradients and states of their own configuration"),
    ("litgpt hub", 2, "the rank of LoRA is not stated"),
    ("litgpt hub", 6, "out of memory with 4 GPUs, or FSDP with flat parameters"),
    ("axolotl", 36, "the card is not named, or kernels of its own (cut cross-entropy)"),
    ("diffusers, aMUSEd", 18, "neither the card nor what was measured is stated"),
    ("diffusers, issue 696", 7, "neither the card nor the precision is stated"),
    (
        "diffusers",
        6,
        "DeepFloyd, FLUX, SD3 and SDXL's ControlNet are not rebuilt, or not confirmed",
    ),
    ("speechbrain", 17, "lengths are not stated, or models of its own that are not rebuilt"),
    ("4-bit blog", 4, "LLM.int8() is not rebuilt"),
    ("ZeRO blog", 1, "ZeRO-Offload, out of memory"),
    ("FSDP blog", 8, "the length is not certain"),
    ("peft", 9, "the batch is not stated"),
    ("fast-whisper", 1, "LLM.int8() is not rebuilt"),
    ("DeepSpeed tutorial", 2, "10 billion parameters with ZeRO-2 and ZeRO-Offload"),
    ("issues", 12, "the batch, the lengths or the card is not stated"),
    ("issues", 12, "models that are not rebuilt"),
)


# ---- where oomph and a recipe disagree -------------------------------------------------------

_FLAT = "FSDP with flat parameters is not modelled: on 8 GPUs it took 6 GB more than FSDP2 would"
WHY = {
    "iss-030": _FLAT,
    "iss-031": _FLAT,
    "bnb4bit-013": "perhaps posed wrongly: LLaMA of May 2023 had plain attention, not a fused one",
}
