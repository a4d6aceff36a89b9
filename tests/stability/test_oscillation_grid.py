"""The oscillation alarm, on runs that its thresholds were not chosen by."""

from __future__ import annotations

import pytest
import torch

from stability.oscillation_grid import cells


@pytest.mark.slow
def test_the_alarm_fires_on_every_broken_run_and_on_no_healthy_one() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = list(cells())
    finally:
        torch.set_num_threads(before)
    assert len(found) >= 40
    broken = [cell for cell in found if cell.is_broken]
    healthy = [cell for cell in found if cell.is_healthy]
    assert len(broken) >= 3
    assert len(healthy) >= 40
    assert [cell for cell in broken if not cell.warned] == []
    assert [cell for cell in healthy if cell.warned] == []
