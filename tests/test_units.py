"""Sizes and times, as people write and read them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.errors import UsageError
from oomph.units import GIB, format_bytes, format_duration, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("24G", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("512", 512),
        ("0", 0),
        ("2TiB", 2**41),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "nan", "inf", "1e400", "12 parsecs", "1,5GiB"]
)
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_bytes(text)
    assert refused.value.attempt == "24GiB"


@given(st.text(max_size=30))
def test_no_text_makes_the_parser_raise_anything_else(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_bytes(text) >= 0


@given(st.integers(min_value=0, max_value=2**60))
def test_a_written_size_reads_back_within_its_last_figure(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.06)


@given(st.floats(min_value=-1e9, max_value=1e9))
def test_a_duration_is_never_negative_and_has_at_most_two_units(seconds: float) -> None:
    written = format_duration(seconds)
    assert not written.startswith("-")
    assert len(written.split()) in (2, 4)
