"""The learning rate that goes with another batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.tricks.batch_size import new_rate


@given(st.floats(0.01, 1), st.floats(0.01, 1))
def test_two_changes_are_one(first: float, second: float) -> None:
    for optimizer in ("torch.optim.sgd.SGD", "torch.optim.adamw.AdamW"):
        both = new_rate(optimizer, first).factor * new_rate(optimizer, second).factor
        assert new_rate(optimizer, first * second).factor == pytest.approx(both)


def test_sgd_goes_with_the_batch_and_adam_with_its_root() -> None:
    assert new_rate("torch.optim.sgd.SGD", 0.25).factor == 0.25
    adam = new_rate("torch.optim.adam.Adam", 0.25)
    assert adam.factor == 0.5
    # The half-life of the second moment stays the same number of examples.
    assert adam.beta2_power == 0.25
    assert "beta2" in adam.advice
    assert "beta2" not in new_rate("torch.optim.sgd.SGD", 0.5).advice
