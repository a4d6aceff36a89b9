"""The oscillation alarm, on runs on real data; some of them chose its thresholds."""

from __future__ import annotations

import pytest
import torch

from stability.oscillation_grid import cells


@pytest.mark.slow
def test_the_alarm_fires_where_a_kept_learning_rate_breaks_and_not_where_it_follows_the_batch() -> (
    None
):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = list(cells())
    finally:
        torch.set_num_threads(before)
    healthy = [cell for cell in found if cell.is_healthy and cell.rule != "kept"]
    assert len(healthy) >= 30
    assert [cell for cell in healthy if cell.warned] == []
    # With wrong labels, a loss that is stuck looks like one of noisy examples (docs/stability.md).
    broken = [cell for cell in found if cell.is_broken and cell.task == "digits"]
    assert len(broken) >= 3
    assert [cell for cell in broken if not cell.warned] == []
