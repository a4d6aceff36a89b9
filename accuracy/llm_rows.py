"""Published runs of large language models.

Nothing here was measured by this project, and no number was fitted to a row. Which of them had been
seen before they were first predicted stands in llm.py.
"""

from __future__ import annotations

from accuracy import hugging_face, litgpt, mpt, nanotron, torchtitan, torchtune
from accuracy.litgpt import Tuning
from accuracy.llm_sources import (
    FOUNDRY,
    LITGPT_HUB,
    LITGPT_TABLES,
    PEFT,
    TORCHTITAN,
    TORCHTUNE,
    ULTRASCALE,
    UNIVERSAL,
    LlmRow,
)
from accuracy.shapes import (
    LLAMA_31_8B,
    LLAMA_32_1B,
    LLAMA_32_3B,
    MPT_1B,
    MPT_7B,
    NANOTRON_1B,
    PHI_3_MINI,
    PHI_15,
    TINY_LLAMA,
)
from oomph.records.workload import Variant

_GB_IN_MIB = 1e9 / 2**20


# ---- rows ------------------------------------------------------------------------------------


def _litgpt_table(micro_batch: int, gigabytes: float, bits: str = "") -> LlmRow:
    """The longest example of Alpaca, 1044 tokens, comes first, so that it fails at once if at all.

    r = 8 on queries and values: the 1,572,864 trained parameters that the page prints.
    """
    tuning = Tuning(rank=8, bits=bits)
    return LlmRow(
        source=LITGPT_TABLES,
        what=f"phi-1.5 {micro_batch} x 1044, LoRA{f' on {bits}' if bits else ''}",
        gpu="a100-40gb",
        workload=lambda: litgpt.workload(PHI_15, tuning, 1044, micro_batch, longest_first=True),
        variant=Variant(micro_batch=micro_batch, accumulation=2),
        measured_mib=gigabytes * _GB_IN_MIB,
        rounding_mib=0.005 * _GB_IN_MIB,
    )


def _litgpt_hub(
    name: str, tuning: Tuning, micro_batch: int, gigabytes: float, *, accumulation: int
) -> LlmRow:
    shape = TINY_LLAMA if name == "tiny-llama" else LLAMA_32_1B
    way = "full" if not tuning.rank else "QLoRA" if tuning.bits else "LoRA"
    return LlmRow(
        source=LITGPT_HUB,
        what=f"{name} {micro_batch} x 512, {way}",
        gpu="a10g",
        workload=lambda: litgpt.workload(shape, tuning, 512, micro_batch),
        variant=Variant(micro_batch=micro_batch, accumulation=min(accumulation, 2)),
        accumulation=accumulation,
        measured_mib=gigabytes * _GB_IN_MIB,
        rounding_mib=0.005 * _GB_IN_MIB,
        is_upper_bound=True,
    )


def _peft(adapter: str, measured_mib: float) -> LlmRow:
    return LlmRow(
        source=PEFT,
        what=f"Llama-3.2-3B 4 x 768, {adapter or 'full'}",
        gpu="l40s",
        workload=lambda: hugging_face.metamath(LLAMA_32_3B, adapter, 768, 4),
        variant=Variant(micro_batch=4),
        measured_mib=measured_mib,
        is_upper_bound=True,
    )


def _universal(gpu: str, tuning: str, gibibytes: int, iteration_s: float) -> LlmRow:
    """The page's seconds are of one micro-batch: 32 of them cannot take as long as one."""
    return LlmRow(
        source=UNIVERSAL,
        what=f"Phi-3-mini 2 x 8192, {tuning or 'full'}, {gpu}",
        gpu=gpu,
        workload=lambda: hugging_face.universal(PHI_3_MINI, tuning, 8192, 2),
        variant=Variant(micro_batch=2),
        measured_mib=1024.0 * gibibytes,
        rounding_mib=512.0,
        step_s=iteration_s,
    )


def _ultrascale(
    num_ranks: int, zero: int, micro_batch: int, accumulation: int, gib: float, speed: int
) -> LlmRow:
    return LlmRow(
        source=ULTRASCALE,
        what=f"llama-1B {micro_batch} x {accumulation} x 4096, {num_ranks} ranks, ZeRO-{zero}",
        gpu="h100-80gb",
        workload=lambda: nanotron.workload(
            NANOTRON_1B, 4096, micro_batch * accumulation, num_ranks, is_sharded=bool(zero)
        ),
        variant=Variant(micro_batch=micro_batch, accumulation=2),
        accumulation=accumulation,
        num_ranks=num_ranks,
        measured_mib=1024.0 * gib,
        rounding_mib=51.2,
        step_s=micro_batch * accumulation * 4096 / speed,
        same_as="" if zero else f"ZeRO-0 {micro_batch} {accumulation}",
    )


def _foundry(
    size: str, gpu: str, num_gpus: int, length: int, micro_batch: int, way: str, speed: int
) -> LlmRow:
    shape = MPT_7B if size == "7b" else MPT_1B
    return LlmRow(
        source=FOUNDRY,
        what=f"MPT-{size} {micro_batch} x {length}{way and ', ' + way}, {num_gpus} x {gpu}",
        gpu=gpu,
        workload=lambda: mpt.workload(shape, length, micro_batch),
        variant=Variant(micro_batch=micro_batch, checkpointing="blocks" if way else "none"),
        step_s=micro_batch * length / speed,
        same_as=f"{size} {gpu} {length} {micro_batch} {way}",
    )


_ON_ALL = Tuning(rank=32, on_keys=True, on_all=True)
_ON_ALL_NF4 = Tuning(rank=32, on_keys=True, on_all=True, bits="nf4")
_C = "checkpointing"

LLM_ROWS: tuple[LlmRow, ...] = (
    LlmRow(
        source=TORCHTUNE,
        what="Llama-3.2-3B 2 x 4096, packed, eager",
        gpu="a100-80gb",
        workload=lambda: torchtune.workload(LLAMA_32_3B, 4096, 2),
        variant=Variant(micro_batch=2),
        measured_mib=61440.0,
        rounding_mib=51.2,
        step_s=2 * 4096 / 7075,
    ),
    LlmRow(
        source=TORCHTITAN,
        what="Llama-3.1-8B 2 x 8192, 8 ranks of FSDP2, selective checkpointing, eager",
        # An H100 with 96 GiB of HBM2e that NVIDIA does not list: for memory, the NVL is like it.
        gpu="h100-nvl",
        workload=lambda: torchtitan.workload(LLAMA_31_8B, 8192, 16),
        variant=Variant(micro_batch=2, precision="bf16", sharding="fsdp", num_gpus=8),
        measured_mib=82.4 * 1024,
        rounding_mib=51.2,
    ),
    _litgpt_table(1, 4.82),
    _litgpt_table(2, 6.76),
    _litgpt_table(4, 10.68),
    _litgpt_table(1, 3.78, "nf4"),
    _litgpt_table(1, 3.72, "nf4-dq"),
    _litgpt_hub("llama-3.2-1b", Tuning(rank=32), 1, 4.49, accumulation=8),
    _litgpt_hub("llama-3.2-1b", Tuning(rank=32, bits="nf4"), 2, 5.53, accumulation=4),
    _litgpt_hub("tiny-llama", Tuning(), 4, 14.10, accumulation=8),
    _litgpt_hub("tiny-llama", _ON_ALL, 8, 13.50, accumulation=1),
    _litgpt_hub("tiny-llama", _ON_ALL_NF4, 8, 16.24, accumulation=1),
    _peft("", 37068),
    _peft("LoRA", 21260),
    _peft("AdaLoRA", 21726),
    _peft("DeLoRA", 21316),
    _peft("GraLoRA", 21264),
    *(
        _universal(gpu, tuning, gibibytes, seconds)
        for gpu, times in (
            ("h100-80gb", (4.0, 5.0, 17.6)),
            ("rtx-pro-6000", (8.0, 9.2, 20.7)),
            ("a100-80gb", (7.4, 8.5, 36.1)),
        )
        for (tuning, gibibytes), seconds in zip(
            (("", 40), ("LoRA", 17), ("QLoRA", 21)), times, strict=True
        )
    ),
    _ultrascale(8, 0, 2, 16, 50.2, 40150),
    _ultrascale(8, 0, 1, 32, 36.7, 39273),
    _ultrascale(8, 1, 1, 32, 24.2, 39006),
    _ultrascale(16, 1, 2, 8, 35.0, 38840),
    _ultrascale(16, 1, 1, 16, 24.0, 37698),
    _ultrascale(16, 0, 1, 16, 36.7, 37610),
    _ultrascale(32, 1, 2, 4, 34.9, 36990),
    _ultrascale(32, 1, 1, 8, 23.8, 35951),
    _ultrascale(32, 0, 1, 8, 36.7, 35368),
    _foundry("7b", "h100-80gb", 512, 2048, 6, "", 9670),
    _foundry("7b", "h100-80gb", 256, 2048, 6, "", 10119),
    _foundry("7b", "h100-80gb", 128, 2048, 6, "", 10475),
    _foundry("1b", "h100-80gb", 512, 2048, 12, "", 39837),
    _foundry("1b", "h100-80gb", 256, 2048, 12, "", 42555),
    _foundry("1b", "h100-80gb", 128, 2048, 12, "", 44123),
    _foundry("7b", "h100-80gb", 8, 65536, 1, _C, 1956),
    _foundry("7b", "h100-80gb", 8, 32768, 2, _C, 3318),
    _foundry("7b", "h100-80gb", 8, 8192, 8, _C, 6935),
    _foundry("7b", "h100-80gb", 8, 4096, 16, _C, 8611),
    _foundry("7b", "h100-80gb", 8, 2048, 6, "", 10643),
    _foundry("7b", "h100-80gb", 8, 1024, 64, _C, 10203),
    _foundry("1b", "h100-80gb", 8, 65536, 1, _C, 5506),
    _foundry("1b", "h100-80gb", 8, 32768, 1, "", 12025),
    _foundry("1b", "h100-80gb", 8, 16384, 2, "", 19649),
    _foundry("1b", "h100-80gb", 8, 8192, 3, "", 29157),
    _foundry("1b", "h100-80gb", 8, 4096, 7, "", 38535),
    _foundry("1b", "h100-80gb", 64, 2048, 20, "", 44402),
    _foundry("1b", "h100-80gb", 32, 2048, 20, "", 45130),
    _foundry("1b", "h100-80gb", 16, 2048, 20, "", 46037),
    _foundry("1b", "h100-80gb", 8, 2048, 14, "", 45455),
    _foundry("1b", "h100-80gb", 8, 1024, 18, "", 48910),
    _foundry("1b", "h100-80gb", 8, 512, 56, "", 52275),
    _foundry("7b", "a100-80gb", 8, 65536, 1, _C, 1013),
    _foundry("7b", "a100-80gb", 8, 32768, 2, _C, 1672),
    _foundry("7b", "a100-80gb", 8, 16384, 4, _C, 2453),
    _foundry("7b", "a100-80gb", 8, 8192, 8, _C, 3206),
    _foundry("7b", "a100-80gb", 8, 4096, 16, _C, 3684),
    _foundry("7b", "a100-80gb", 8, 2048, 6, "", 4641),
    _foundry("7b", "a100-80gb", 8, 1024, 64, _C, 4357),
    _foundry("1b", "a100-80gb", 8, 65536, 1, _C, 3044),
    _foundry("1b", "a100-80gb", 8, 32768, 1, "", 6275),
    _foundry("1b", "a100-80gb", 8, 16384, 2, "", 9956),
    _foundry("1b", "a100-80gb", 8, 8192, 3, "", 13814),
    _foundry("1b", "a100-80gb", 8, 4096, 7, "", 17807),
    _foundry("1b", "a100-80gb", 8, 2048, 14, "", 20513),
    _foundry("1b", "a100-80gb", 8, 1024, 18, "", 22112),
    _foundry("1b", "a100-80gb", 8, 512, 56, "", 23148),
    _foundry("7b", "a100-40gb", 8, 16384, 1, _C, 2249),
    _foundry("7b", "a100-40gb", 8, 8192, 3, _C, 2887),
    _foundry("7b", "a100-40gb", 8, 4096, 6, _C, 3366),
    _foundry("7b", "a100-40gb", 128, 2048, 18, _C, 3623),
    _foundry("7b", "a100-40gb", 64, 2048, 18, _C, 3665),
    _foundry("7b", "a100-40gb", 32, 2048, 18, _C, 3725),
    _foundry("7b", "a100-40gb", 16, 2048, 16, _C, 3645),
    _foundry("7b", "a100-40gb", 8, 2048, 12, _C, 3679),
    _foundry("7b", "a100-40gb", 8, 1024, 24, _C, 3854),
    _foundry("7b", "a100-40gb", 8, 512, 48, _C, 3895),
    _foundry("1b", "a100-40gb", 8, 32768, 1, _C, 5095),
    _foundry("1b", "a100-40gb", 8, 16384, 1, "", 9715),
    _foundry("1b", "a100-40gb", 8, 8192, 2, "", 13474),
    _foundry("1b", "a100-40gb", 8, 4096, 4, "", 16856),
    _foundry("1b", "a100-40gb", 128, 2048, 10, "", 18647),
    _foundry("1b", "a100-40gb", 64, 2048, 10, "", 19001),
    _foundry("1b", "a100-40gb", 32, 2048, 10, "", 15555),
    _foundry("1b", "a100-40gb", 16, 2048, 8, "", 19085),
    _foundry("1b", "a100-40gb", 8, 2048, 8, "", 19271),
    _foundry("1b", "a100-40gb", 8, 1024, 16, "", 20959),
    _foundry("1b", "a100-40gb", 8, 512, 32, "", 21782),
)
