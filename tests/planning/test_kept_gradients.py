"""Gradients that stay in memory during forward: the answer says what freeing them would save."""

from __future__ import annotations

from pathlib import Path

import pytest

import oomph
from oomph.units import MIB
from planning.test_offers import EXACT, TRAIN

# 268 MB of weights. Examples that are large enough for the peak to be in forward and backward.
LARGE = TRAIN.replace("torch.zeros(n, 2048)", "torch.zeros(n, 2048, 2048)")
KEPT = "zero_grad_to_none=False, batch_size=8,"
UNCHANGED = (*EXACT, "fp16", "checkpointing", "accumulation", "channels-last")


def planned(text: str, folder: Path) -> oomph.Plans:
    path = folder / "train.py"
    path.write_text(text)
    return oomph.plan(f"{path}:workload", gpu="a100-40gb", gpu_memory="16GiB", forbid=UNCHANGED)


def advice_in(plans: oomph.Plans) -> list[str]:
    return [one for one in plans.caveats if "zero_grad(set_to_none=True)" in one]


def test_what_is_said_to_be_saved_is_what_the_freed_gradients_save(tmp_path: Path) -> None:
    kept = planned(LARGE.replace("batch_size=8,", KEPT), tmp_path)
    freed = planned(LARGE, tmp_path)
    assert kept.best is not None
    assert freed.best is not None
    assert kept.best.variant == freed.best.variant
    (said,) = advice_in(kept)
    spared = kept.best.prediction.allocated_bytes - freed.best.prediction.allocated_bytes
    assert 0 < spared < 300e6
    number, unit = said.split()[-2:]
    assert unit == "MiB"
    assert float(number) * MIB == pytest.approx(spared, rel=0.02)
    assert not advice_in(freed)


def test_gradients_that_the_peak_does_not_feel_are_not_spoken_of(tmp_path: Path) -> None:
    assert not advice_in(planned(TRAIN.replace("batch_size=8,", KEPT), tmp_path))
