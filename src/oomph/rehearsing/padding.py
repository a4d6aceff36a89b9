"""An example batch -> what share of it is padding, which is computed and held like the rest.

Grouping examples by length, or packing several into one row, changes which examples share a batch.
So it is advice with a figure, and not a trick that a plan could choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_LEAST_SHARE = 0.1  # judgement: less is not worth another loader
# Masks by their usual names, and whether they are true where a token is padding.
_MASKS = {
    "attention_mask": False,
    "decoder_attention_mask": False,
    "key_padding_mask": True,
    "src_key_padding_mask": True,
    "tgt_key_padding_mask": True,
}


def note_of_padding(batch: Any) -> str | None:
    """Return a sentence on the padding of an example batch, or None if there is little.

    A function that makes batches makes them up, so that their padding says nothing.
    """
    if callable(batch):
        return None
    found = {name: share for name, share in _shares(batch) if share >= _LEAST_SHARE}
    if not found:
        return None
    name, share = max(found.items(), key=lambda one: one[1])
    return (
        f"{share:.0%} of the example batch is padding ({name}), and takes memory and time like the"
        " rest: grouping examples by length, or packing several into a row, saves most of it"
    )


def _shares(batch: Any) -> Iterator[tuple[str, float]]:
    for name, mask in _named(batch):
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.numel() and not mask.is_meta:
            is_padding = mask.bool() if _MASKS[name] else ~mask.bool()
            yield name, float(is_padding.float().mean())


def _named(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the masks of a mapping, of an object with attributes, or of one inside a tuple."""
    if isinstance(batch, list | tuple):
        for one in batch:
            yield from _named(one)
        return
    entries = batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", {})
    yield from ((name, value) for name, value in entries.items() if name in _MASKS)
