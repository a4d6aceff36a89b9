"""A script and the same training as a Workload have the same trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.predicting.timeline import find_peak
from rehearsing.script import written_twice
from rehearsing.script.rehearsed import rehearsed, second_step, trained


@pytest.mark.parametrize("kind", ["net", "transformer"])
@pytest.mark.parametrize("loop", list(written_twice.LOOPS))
def test_a_script_takes_what_its_workload_takes(tmp_path: Path, kind: str, loop: str) -> None:
    _, changes, variant = written_twice.LOOPS[loop]
    of_script, _ = rehearsed(tmp_path, written_twice.script(kind, loop))
    of_workload = trained(written_twice.workload(kind, **changes), variant)
    assert second_step(of_script) == second_step(of_workload)
    assert find_peak(of_script).live_bytes == find_peak(of_workload).live_bytes
    assert of_script.ops == of_workload.ops
