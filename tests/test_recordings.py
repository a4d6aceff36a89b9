"""Recorded programs of others, rehearsed block by block; `make recordings` shows all of them.

They are not part of the repository. Where they, or what they import, are not at hand, these tests
are skipped.
"""

from __future__ import annotations

import pytest

from accuracy.libraries import FOLDER as LIBRARIES
from accuracy.recordings import FOLDER, RECORDINGS, Recording, compare

are_here = all((FOLDER / one.snapshot).exists() for one in RECORDINGS)
can_run = (LIBRARIES.parent / "recordings" / "einops").exists()


@pytest.mark.slow
@pytest.mark.skipif(not (are_here and can_run), reason="the recordings are not here")
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda one: one.name)
def test_the_gpu_allocated_what_is_rehearsed(recording: Recording) -> None:
    found = compare(recording)
    assert found.alignment.only_predicted == found.alignment.only_recorded == ()
    assert found.alignment.first_difference is None
    assert found.alignment.num_freed_elsewhere == 0
    recorded, predicted = found.recorded, found.predicted
    assert predicted.live_bytes == pytest.approx(recorded.live_bytes, rel=0.003)
    assert predicted.allocated_bytes == pytest.approx(recorded.allocated_bytes, rel=0.001)
    assert predicted.reserved_bytes == pytest.approx(recorded.reserved_bytes, rel=0.0075)
