"""Scripts in the styles that people write are rehearsed with no edit."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.predicting.timeline import find_peak
from rehearsing.rehearsals import mistakes
from rehearsing.script.rehearsed import rehearsed
from rehearsing.script.styles import STYLES


@pytest.mark.parametrize("style", list(STYLES))
def test_a_style_is_rehearsed_up_to_its_second_step(tmp_path: Path, style: str) -> None:
    trace, seen = rehearsed(tmp_path, STYLES[style])
    assert seen.has_stepped
    assert seen.num_parameters > 0
    assert mistakes(trace) == []
    assert len(trace.step_starts) >= 1
    assert find_peak(trace).live_bytes > seen.parameter_bytes
    live = {"parameters", "gradients"}
    assert live <= {one.category for one in trace.allocations}
