"""Footprints survive being written."""

from __future__ import annotations

import numpy as np
import pytest

from oomph.predicting.footprint_file import from_bytes, to_bytes
from predicting.test_footprint import MANY, footprint


def test_footprints_survive_being_written() -> None:
    written = {"one": footprint("adamw", MANY), "two": footprint("sgd", MANY)}
    content = to_bytes(written, {"batch_size": 8})
    read, facts = from_bytes(content)
    assert facts == {"batch_size": 8}
    assert list(read) == ["one", "two"]
    for name, before in written.items():
        after = read[name]
        assert after.kernels == before.kernels
        for column in ("fixed_bytes", "grown_bytes", "event", "phase", "op", "born"):
            assert np.array_equal(getattr(after, column), getattr(before, column))
            assert getattr(after, column).dtype == np.int64


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04nonsense", b"cos\nsystem\n(S'true'\ntR."])
def test_anything_else_is_refused_and_not_run(content: bytes) -> None:
    with pytest.raises((ValueError, KeyError)):
        from_bytes(content)
