"""Public styles of scripts get whole changes from `--diff`: applied and rehearsed again."""

from __future__ import annotations

import pytest

from accuracy.diffs import STYLES, Style, kept, run, table

_WHOLE = 0.8  # of the styles, at least


def test_most_styles_were_verified_when_the_table_was_made() -> None:
    rows = kept()
    assert [row.style for row in rows] == [style.name for style in STYLES]
    assert sum(row.is_whole for row in rows) >= _WHOLE * len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.script)
def test_a_style_gets_the_changes_of_the_table(style: Style) -> None:
    pytest.importorskip("torch")
    expected = next(row for row in kept() if row.style == style.name)
    row, _ = run(style)
    print(table([row]))
    assert (row.plan, row.answer, row.is_whole) == (
        expected.plan,
        expected.answer,
        expected.is_whole,
    )
