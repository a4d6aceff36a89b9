"""Who published figures of large language models, what they are, and which cannot be rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from oomph.records.workload import Variant, Workload

Kind = Literal["allocated", "reserved", "device", "time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmSource:
    """Who measured, and what."""

    name: str
    reference: str
    metric: str
    kind: Kind
    num_rows: int  # in the collection that this is held against
    torch_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmRow:
    """One published run."""

    source: LlmSource
    what: str
    gpu: str
    workload: Callable[[], Workload]
    variant: Variant  # as traced: all micro-steps after the second are like it
    accumulation: int = 1
    num_ranks: int = 1  # where the workload itself divides among ranks, and not the variant
    measured_mib: float | None = None
    rounding_mib: float = 0.0  # half of the last digit that was printed
    step_s: float | None = None  # of one optimizer step
    is_upper_bound: bool = False  # the lengths are not known, but the greatest
    same_as: str = ""  # rows with the same words here have the same trace
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbuilt:
    """Published runs that are not held against a prediction."""

    source: LlmSource
    num_rows: int
    what: str
    because: str


TORCHTUNE = LlmSource(
    name="torchtune-readme",
    reference="pytorch/torchtune@bd2a0fc README.md",
    metric="torch active_bytes.all.peak",
    kind="allocated",
    num_rows=2,
    torch_version="2.5",
)
TORCHTITAN = LlmSource(
    name="torchtitan-benchmarks",
    reference="pytorch/torchtitan@b5bcd76 benchmarks/llama3_h100_202412_torchtitan.md",
    metric="torch max reserved",
    kind="reserved",
    num_rows=3,
)
PEFT = LlmSource(
    name="peft-metamathqa",
    reference="huggingface/peft@5d602fd method_comparison/MetaMathQA/results",
    metric="torch memory_reserved, the most after any step",
    kind="reserved",
    num_rows=5,
    torch_version="2.13.0+cu130",
)
LITGPT_HUB = LlmSource(
    name="litgpt-config-hub",
    reference="Lightning-AI/litgpt@2685705 config_hub/finetune/README.md",
    metric="torch max_memory_allocated",
    kind="allocated",
    num_rows=7,
)
LITGPT_TABLES = LlmSource(
    name="litgpt-resource-tables",
    reference="Lightning-AI/litgpt@2685705 tutorials/resource-tables.md",
    metric="torch max_memory_allocated",
    kind="allocated",
    num_rows=8,
    torch_version="2.1.0+cu121",
)
# Not said what the figures are. "Model Mem." of Phi-3-mini, 7.12 GiB of weights, is 7.6 GiB: what
# nvidia-smi shows, with the context in it.
UNIVERSAL = LlmSource(
    name="universal-llm-trainer",
    reference="ljm565/universal-llm-trainer@aefdc4a docs/gpu_test.md",
    metric="not said, in whole GiB; read as nvidia-smi, context included",
    kind="device",
    num_rows=9,
    torch_version="2.5.1",
)
# Not said whether allocated or reserved: only reserved explains why ZeRO-1 over 16 and 32 ranks
# differs by so little: nanotron.py, `_all_gather`. Decided after seeing the rows.
ULTRASCALE = LlmSource(
    name="ultrascale-playbook",
    reference="vinjn/nanotron-ultrascale-playbook@924e4d0 fragments/benchmarks_interactive.html",
    metric="torch peak, read as reserved",
    kind="reserved",
    num_rows=264,
)
FOUNDRY = LlmSource(
    name="llm-foundry-benchmarks",
    reference="mosaicml/llm-foundry@8c8dd48 scripts/train/benchmarking/README.md",
    metric="tokens per second and GPU",
    kind="time",
    num_rows=62,
)

UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt(
        source=TORCHTUNE,
        num_rows=1,
        what="the same, compiled, with a chunked loss and checkpointing",
        because="what torch.compile saves and fuses is not predicted",
    ),
    Unbuilt(
        source=TORCHTITAN,
        num_rows=2,
        what="the same, compiled, and compiled with float8",
        because="what torch.compile saves and fuses is not predicted, and float8 is not either",
    ),
    Unbuilt(
        source=LITGPT_HUB,
        num_rows=1,
        what="llama-3.2-1b 4 x 512, full",
        because="8.70 GB is less than the weights, gradients and AdamW states of its own "
        "configuration (9.9 GB in bf16, with the embedding counted once)",
    ),
    Unbuilt(
        source=LITGPT_HUB,
        num_rows=1,
        what="tiny-llama 4 x 512, full, multi-gpu",
        because="its table says that all runs had one GPU; the figure is that of the run above",
    ),
    Unbuilt(
        source=LITGPT_TABLES,
        num_rows=3,
        what="phi-1.5 LoRA on 2 GPUs",
        because="FSDP with flat parameters is not predicted",
    ),
    Unbuilt(
        source=ULTRASCALE,
        num_rows=255,
        what="runs with tensor or pipeline parallelism",
        because="tensor and pipeline parallelism are not predicted",
    ),
    Unbuilt(
        source=FOUNDRY,
        num_rows=3,
        what="MPT-1b in fp8",
        because="float8 layers of TransformerEngine are not predicted",
    ),
)
