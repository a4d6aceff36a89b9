"""Verifications by hand, for what judges and shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oomph.records.alignment import Unmatched
from oomph.records.verification import (
    FirstDifference,
    Located,
    Measured,
    Predicted,
    Sequence,
    Settings,
    Site,
    Verification,
    Verified,
)
from oomph.units import GIB, MIB

SITE = Site(
    gpu_name="NVIDIA A100-SXM4-80GB",
    is_emulated=False,
    total_bytes=80 * GIB,
    compute_capability=(8, 0),
    num_sms=108,
    driver_version="550.54",
    torch_version="2.13.0",
    cuda_version="12.8",
    cudnn_version="91002",
    python_version="3.12.1",
    oomph_version="0.1.0",
    allocator="",
)
PREDICTED = Predicted(
    allocated_bytes=8 * GIB,
    reserved_bytes=10 * GIB,
    device_bytes=11 * GIB,
    low_bytes=10 * GIB,
    high_bytes=12 * GIB,
    outside_low_bytes=GIB // 2,
    outside_high_bytes=GIB + GIB // 2,
    step_s=0.1,
    step_low_s=0.08,
    step_high_s=0.14,
    fits="yes",
    doubt=None,
)
MEASURED = Measured(
    allocated_bytes=8 * GIB,
    reserved_bytes=10 * GIB,
    device_bytes=11 * GIB,
    step_s=0.11,
    num_steps=23,
    num_timed=20,
)
DIFFERENCE = FirstDifference(
    when="in step 1",
    predicted=Located(op="aten.mm", module="blocks.0.fc", phase="forward", size_bytes=4 * MIB),
    recorded_bytes=8 * MIB,
    recorded_at="secret.py:12",
    after=None,
)
SEQUENCE = Sequence(
    num_predicted=1000,
    num_recorded=1003,
    num_matched=999,
    explained=(Unmatched(label="workspace of a convolution", size_bytes=MIB, num_blocks=2),),
    only_predicted=(Unmatched(label="aten.mm in blocks.0.fc", size_bytes=4 * MIB, num_blocks=1),),
    only_recorded=(
        Unmatched(label="secret.py:12", size_bytes=8 * MIB, num_blocks=1),
        Unmatched(label="secret.py:13", size_bytes=8 * MIB, num_blocks=1),
    ),
    first_difference=DIFFERENCE,
)


def verified(name: str = "gpt", *, sequence: Sequence | None = None, **figures: Any) -> Verified:
    """One model; figures are those of `Measured` that differ, or of `Predicted`."""
    of_prediction = {key: value for key, value in figures.items() if key in ("fits", "doubt")}
    measured = {key: value for key, value in figures.items() if key not in of_prediction}
    return Verified(
        name=name,
        settings=Settings(micro_batch=8, accumulation=1, precision="fp32", tricks=()),
        predicted=replace(PREDICTED, **of_prediction),
        measured=replace(MEASURED, **measured),
        sequence=sequence,
    )


def zoo(*models: Verified, **changes: Any) -> Verification:
    made = Verification(site=SITE, kind="zoo", scale="full", verified=models, num_asked=len(models))
    return replace(made, **changes)
