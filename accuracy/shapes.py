"""The sizes of the published decoders, and how many parameters they have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder with rotary or learned positions."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    positions: int
    parameters: int  # as published, or as the model's own paper counts them
    is_phi: bool = False  # biases, GELU, attention and MLP side by side on one norm
    head_width: int = 0  # 0: the width divided among the heads
    rotary: float | None = None  # share of a head that is turned; None: half of phi's, else all
    # "neox": two linear layers. "gated": three, as Llama's. None: two for phi, else three.
    mlp: Literal["neox", "gated"] | None = None
    is_parallel: bool = False  # attention and MLP side by side
    has_own_norms: bool = True  # side by side, each on a norm of its own
    has_layer_norm: bool = False  # instead of the root mean square's
    has_biases: bool = False
    softcap: bool = False  # Gemma 2: scores and logits through a tanh, and norms after each part

    @property
    def head(self) -> int:
        return self.head_width or self.width // self.heads


LLAMA_32_1B = Shape(
    layers=16,
    width=2048,
    heads=32,
    kv_heads=8,
    ffn=8192,
    vocabulary=128256,
    positions=131072,
    parameters=1_235_814_400,
)
LLAMA_31_8B = Shape(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocabulary=128256,
    positions=131072,
    parameters=8_030_261_248,
)
LLAMA_32_3B = Shape(
    layers=28,
    width=3072,
    heads=24,
    kv_heads=8,
    ffn=8192,
    vocabulary=128256,
    positions=131072,
    parameters=3_212_749_824,
)
TINY_LLAMA = Shape(
    layers=22,
    width=2048,
    heads=32,
    kv_heads=4,
    ffn=5632,
    vocabulary=32000,
    positions=2048,
    parameters=1_100_048_384,
)
PHI_15 = Shape(
    layers=24,
    width=2048,
    heads=32,
    kv_heads=32,
    ffn=8192,
    vocabulary=51200,
    positions=2048,
    parameters=1_418_270_720,
    is_phi=True,
)
# huggingface/nanotron@2411b02 scripts/scaling_benchmarks.py: "1B", all heads their own keys.
NANOTRON_1B = Shape(
    layers=16,
    width=2048,
    heads=32,
    kv_heads=32,
    ffn=8192,
    vocabulary=131072,
    positions=4096,
    parameters=1_342_244_864,
)
PHI_3_MINI = Shape(
    layers=32,
    width=3072,
    heads=32,
    kv_heads=32,
    ffn=8192,
    vocabulary=32064,
    positions=131072,
    parameters=3_821_079_552,
)
# With 2048 positions, as in the tables of mosaicml/llm-foundry scripts/train/benchmarking.
MPT_1B = Shape(
    layers=24,
    width=2048,
    heads=16,
    kv_heads=16,
    ffn=8192,
    vocabulary=50368,
    positions=2048,
    parameters=1_315_950_592,
)
MPT_7B = Shape(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=32,
    ffn=16384,
    vocabulary=50368,
    positions=2048,
    parameters=6_658_859_008,
)
