"""Trace -> which attention was computed, where the model itself does not say."""

from __future__ import annotations

from dataclasses import replace

from oomph.records.possible import Possible
from oomph.records.trace import Trace

# What torch's scaled_dot_product_attention runs, whichever of its kernels is chosen. A head of a
# width that none of them takes is computed plainly, and cannot be told from a model's own.
_FUSED = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")
_PLAIN = ("_softmax", "_safe_softmax")  # of scores; a loss has _log_softmax


def with_seen_attention(possible: Possible, trace: Trace) -> Possible:
    """What can be put on a model, with the attention that a rehearsal of it has seen."""
    if possible.attention_is != "unknown":
        return possible
    names = {op.name for op in trace.ops}
    if any(name.startswith(_FUSED) for name in names):
        return replace(possible, attention_is="sdpa")
    if names.isdisjoint(_PLAIN):
        return replace(possible, attention_is="none")
    return possible
