"""What keys do to the view."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.showing.live_view import View, keys_in, pressed


def after(*keys: str) -> View | None:
    view: View | None = View()
    for key in keys:
        assert view is not None
        view = pressed(view, key, page=10)
    return view


def test_f_goes_round_all_mine_visible() -> None:
    filters = [(after(*"f" * count) or View()).filter for count in range(4)]
    assert filters == ["all", "mine", "visible", "all"]


def test_s_goes_round_the_orders() -> None:
    sorts = [(after(*"s" * count) or View()).sort for count in range(5)]
    assert sorts == ["GPU", "memory", "user", "newest", "GPU"]


def test_q_quits_also_from_help_and_pause() -> None:
    assert after("q") is None
    assert after("?", " ", "q") is None


def test_escape_leaves_help_but_does_not_quit_nor_open_it() -> None:
    assert after("?", "escape") == View()
    assert after("escape") == View()


@pytest.mark.parametrize(
    ("keys", "scroll"),
    [(["down"], 1), (["j", "k", "k"], 0), (["page down", "up"], 9), (["page up"], 0)],
)
def test_scrolling_goes_by_lines_and_pages_and_never_above_the_top(
    keys: list[str], scroll: int
) -> None:
    assert (after(*keys) or View()).scroll == scroll


def test_home_undoes_end() -> None:
    assert after("end", "home") == View()


def test_an_unknown_sequence_is_one_key_and_its_letters_are_none() -> None:
    assert keys_in(b"\x1b[1;5qf") == ["\x1b[1;5q", "f"]
    assert keys_in(b"\x1bOA\x1b[5~\x1b") == ["up", "page up", "escape"]


@given(st.binary(max_size=40))
def test_whatever_is_typed_is_understood_or_ignored(raw: bytes) -> None:
    view: View | None = View()
    for key in keys_in(raw):
        if view is not None:
            view = pressed(view, key, page=5)
            assert view is None or view.scroll >= 0
