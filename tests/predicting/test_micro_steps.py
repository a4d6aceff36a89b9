"""Where the second micro-step is."""

from __future__ import annotations

import numpy as np

from oomph.predicting.speed import second_micro_step


def test_the_second_micro_step_may_be_longer_than_the_first() -> None:
    first = ["input", "forward", "backward"]
    second = ["input", "forward", "backward", "backward"]
    phases = ["zero_grad", *first, *second, "clip", "step"]
    assert second_micro_step(phases, np.arange(len(phases))) == range(4, 8)


def test_a_step_without_accumulation_has_none() -> None:
    assert not second_micro_step(["input", "forward", "backward", "step"], np.arange(4))
    assert not second_micro_step([], np.arange(0))
