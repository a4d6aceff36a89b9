"""Accumulation: compute a step's gradient from several micro-batches, one after the other."""

from __future__ import annotations

from oomph.tricks.definition import Definition

ACCUMULATION = Definition(
    name="accumulation",
    stability="same",
    setting="accumulation",
    what=lambda v: f"{v.micro_batch} examples at a time, {v.accumulation} times a step",
    code=lambda v: f"(loss / {v.accumulation}).backward() {v.accumulation} times, then step()",
    caveat="weight micro-batches by what the loss averages over (examples or tokens)",
    splits_batch=True,
    has_edit=True,
)
