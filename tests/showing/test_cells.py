"""Lines of the terminal: never wider than it, in cells and not in characters."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from oomph.showing.terminal import (
    UNICODE,
    Column,
    ansi,
    cut,
    fit,
    lines,
    num_cells,
    sparkline,
    wrap,
)

TEXT = st.text(st.sampled_from("ab 訓練é\u0301🙂-"), max_size=30)


@given(TEXT, st.integers(0, 40))
def test_a_text_that_is_cut_is_never_too_wide_and_says_that_it_is_cut(
    text: str, width: int
) -> None:
    shown = cut(text, width)
    assert num_cells(shown) <= width
    assert shown == text if num_cells(text) <= width else width == 0 or shown.endswith("…")


@given(st.lists(st.tuples(TEXT, st.sampled_from(["", "bold", "dim red"])), max_size=6), st.data())
def test_a_line_fits_whatever_it_is_made_of(
    line: list[tuple[str, str]], data: st.DataObject
) -> None:
    width = data.draw(st.integers(0, 60))
    shown = ansi(fit(line, width), colours=False)
    whole = "".join(text for text, _ in line)
    assert num_cells(shown) <= width
    assert shown == whole if num_cells(whole) <= width else width == 0 or shown.endswith("…")


def test_without_colours_nothing_is_written_but_the_text() -> None:
    line = [("8 GPUs", "bold"), (" free", "dim")]
    assert ansi(line, colours=False) == "8 GPUs free"
    assert re.sub(r"\x1b\[[0-9;]*m", "", ansi(line, colours=True)) == "8 GPUs free"
    assert ansi(line, colours=True).endswith("\x1b[0m")


@given(st.lists(st.none() | st.floats(0, 1)), st.integers(0, 50))
def test_a_sparkline_has_its_width(ratios: list[float | None], width: int) -> None:
    assert len(sparkline(ratios, width, UNICODE.levels)) == width


def test_a_sparkline_shows_the_newest_at_its_right_and_unknown_as_a_gap() -> None:
    assert sparkline([1.0, 0.0, None, 1.0], 3, UNICODE.levels) == "▁ █"


def test_prose_is_broken_between_words() -> None:
    assert list(wrap("the driver has not answered", 12)) == ["the driver", "has not", "answered"]


def test_a_table_lines_up_by_cells_and_not_by_characters() -> None:
    table = lines([Column("user", ["訓練", "bob"], align="<"), Column("GiB", ["1.0", "20.0"])])
    assert {num_cells(ansi(line, colours=False)) for line in table} == {len("user  20.0")}


def test_a_cell_may_be_a_styled_line() -> None:
    bar = [("##", "green"), ("..", "dim")]
    _, row = lines([Column("memory", [bar], align="<"), Column("GPUs", ["1"])])
    assert row[:2] == bar
    assert ansi(row, colours=False) == "##..       1"
