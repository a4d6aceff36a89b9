"""Graphs in text: to scale, in the width that there is, the newest at the right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.showing.graph import AXIS_CELLS, Graph, beside, graph_lines
from oomph.showing.terminal import ASCII, UNICODE, ansi, width_of


def drawn(ratios: Sequence[float | None], width: int = 12, height: int = 2) -> list[str]:
    graph = Graph("busy", ratios, "last 7 s")
    return [
        ansi(line, colours=False).rstrip() for line in graph_lines(graph, width, height, UNICODE)
    ]


def test_heights_are_to_scale_and_the_newest_is_at_the_right() -> None:
    assert drawn([0.25, 0.5, 0.75, 1.0]) == [
        "busy 100%",
        "100%      ▄█",
        "  0%    ▄███",
    ]


def test_zero_is_a_line_at_the_foot_and_unknown_a_gap() -> None:
    assert drawn([1.0, None, 0.0])[1:] == ["100%     █", "  0%     █ ▁"]


def test_what_is_older_than_the_graph_is_wide_is_not_shown() -> None:
    assert drawn([1.0] * 50 + [0.0] * 7)[1:] == ["100%", "  0% ▁▁▁▁▁▁▁"]


def test_a_graph_without_values_says_that_they_are_unknown() -> None:
    assert drawn([]) == ["busy ?", "100%", "  0%"]


@given(
    st.lists(st.none() | st.floats(-1, 2), max_size=60),
    st.integers(AXIS_CELLS + 1, 80),
    st.integers(1, 12),
    st.sampled_from([UNICODE, ASCII]),
)
def test_a_graph_is_never_wider_or_higher_than_its_place(
    ratios: list[float | None], width: int, height: int, glyphs: object
) -> None:
    assert glyphs in (UNICODE, ASCII)
    found = graph_lines(Graph("kernel-active", ratios, "last 5 min"), width, height, UNICODE)
    assert len(found) == height + 1
    assert {width_of(line) for line in found} == {width}


def test_graphs_stand_side_by_side() -> None:
    left = graph_lines(Graph("a", [0.5], "s"), 10, 2, ASCII)
    right = graph_lines(Graph("b", [1.0], "s"), 10, 2, ASCII)
    both = [ansi(line, colours=False) for line in beside([left, right], 3)]
    assert both[0].split() == ["a", "50%", "s", "b", "100%", "s"]
    assert {len(line) for line in both} == {23}


def test_blocks_of_unequal_height_cannot_stand_side_by_side() -> None:
    with pytest.raises(ValueError, match="zip"):
        beside([[[("a", "")]], []], 1)
