"""The sizes of litgpt's decoders that recipes were published for (litgpt/config.py).

The number of parameters is litgpt's own, where the head is a matrix of its own for every model.
"""

from __future__ import annotations

from accuracy.shapes import LLAMA_31_8B, PHI_3_MINI, Shape

STABLELM_3B = Shape(
    layers=16,
    width=4096,
    heads=32,
    kv_heads=32,
    ffn=16384,
    vocabulary=50688,
    positions=4096,
    parameters=3_637_321_728,
    rotary=0.25,
    mlp="neox",
    is_parallel=True,
    has_layer_norm=True,
    has_biases=True,
)
LLAMA_2_7B = Shape(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=32,
    ffn=11008,
    vocabulary=32000,
    positions=4096,
    parameters=6_738_415_616,
)
LLAMA_2_13B = Shape(
    layers=40,
    width=5120,
    heads=40,
    kv_heads=40,
    ffn=13824,
    vocabulary=32000,
    positions=4096,
    parameters=13_015_864_320,
)
MISTRAL_7B = Shape(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocabulary=32000,
    positions=4096,
    parameters=7_241_732_096,
)
FALCON_7B = Shape(
    layers=32,
    width=4544,
    heads=71,
    kv_heads=1,
    ffn=18176,
    vocabulary=65024,
    positions=2048,
    parameters=7_217_189_760,
    mlp="neox",
    is_parallel=True,
    has_own_norms=False,
    has_layer_norm=True,
)
FALCON_40B = Shape(
    layers=60,
    width=8192,
    heads=128,
    kv_heads=8,
    ffn=32768,
    vocabulary=65024,
    positions=2048,
    parameters=41_835_970_560,
    mlp="neox",
    is_parallel=True,
    has_layer_norm=True,
)
GEMMA_2B = Shape(
    layers=18,
    width=2048,
    heads=8,
    kv_heads=1,
    ffn=16384,
    vocabulary=256000,
    positions=8192,
    parameters=3_030_460_416,
    head_width=256,
)
GEMMA_7B = Shape(
    layers=28,
    width=3072,
    heads=16,
    kv_heads=16,
    ffn=24576,
    vocabulary=256000,
    positions=8192,
    parameters=9_324_112_896,
    head_width=256,
)
GEMMA_2_2B = Shape(
    layers=26,
    width=2304,
    heads=8,
    kv_heads=4,
    ffn=9216,
    vocabulary=256000,
    positions=8192,
    parameters=3_204_165_888,
    head_width=256,
    softcap=True,
)
GEMMA_2_9B = Shape(
    layers=42,
    width=3584,
    heads=16,
    kv_heads=8,
    ffn=14336,
    vocabulary=256000,
    positions=8192,
    parameters=10_159_209_984,
    head_width=256,
    softcap=True,
)
PHI_2 = Shape(
    layers=32,
    width=2560,
    heads=32,
    kv_heads=32,
    ffn=10240,
    vocabulary=51200,
    positions=2048,
    parameters=2_779_683_840,
    is_phi=True,
    rotary=0.4,
)

LITGPT = {
    "stablelm-alpha-3b": STABLELM_3B,
    "llama-2-7b": LLAMA_2_7B,
    "llama-2-13b": LLAMA_2_13B,
    "falcon-7b": FALCON_7B,
    "falcon-40b": FALCON_40B,
    "gemma-2b": GEMMA_2B,
    "gemma-7b": GEMMA_7B,
    "gemma-2-2b": GEMMA_2_2B,
    "gemma-2-9b": GEMMA_2_9B,
    "llama-3-8b": LLAMA_31_8B,
    "llama-3.1-8b": LLAMA_31_8B,
    "mistral-7b": MISTRAL_7B,
    "phi-2": PHI_2,
    "phi-3-mini": PHI_3_MINI,
}
