"""Footprints survive being written."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest

from oomph.predicting.footprint import OF_ALLOCATIONS, OF_EVENTS, from_bytes, to_bytes
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
        assert (after.names, after.host_bytes) == (before.names, before.host_bytes)
        for column in (*OF_ALLOCATIONS, "event", *OF_EVENTS, "op"):
            assert np.array_equal(getattr(after, column), getattr(before, column))
            assert getattr(after, column).dtype == np.int64


def test_sizes_of_every_width_are_kept_as_they_are() -> None:
    whole = footprint("adamw", MANY)
    for most in (2**7, 2**15, 2**31, 2**40):
        sizes = whole.fixed_bytes.copy()
        sizes[:2] = most, -most - 1
        read, _ = from_bytes(to_bytes({"one": replace(whole, fixed_bytes=sizes)}, {}))
        assert np.array_equal(read["one"].fixed_bytes, sizes)


def test_a_file_with_a_column_that_is_too_short_is_refused() -> None:
    whole = footprint("adamw", MANY)
    content = to_bytes({"one": whole}, {})
    with np.load(io.BytesIO(content)) as arrays:
        cut = {name: arrays[name] for name in arrays.files}
    cut["int8"] = cut["int8"][:-1]
    written = io.BytesIO()
    np.savez(written, **cut)
    with pytest.raises(ValueError, match="int8"):
        from_bytes(written.getvalue())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04nonsense", b"cos\nsystem\n(S'true'\ntR."])
def test_anything_else_is_refused_and_not_run(content: bytes) -> None:
    with pytest.raises((ValueError, KeyError)):
        from_bytes(content)
