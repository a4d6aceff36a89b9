"""A file is written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.errors import UsageError
from oomph.store import check_writable, write_whole


def test_a_file_is_replaced_as_a_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    place = tmp_path / "plan.json"
    write_whole(place, "one")
    write_whole(str(place), "two")
    assert place.read_text() == "two"
    assert list(tmp_path.iterdir()) == [place]


def test_what_cannot_be_written_keeps_the_old_file(tmp_path: Path) -> None:
    place = tmp_path / "plan.json"
    write_whole(place, "one")
    with pytest.raises(UnicodeEncodeError):
        write_whole(place, "\ud800")
    assert place.read_text() == "one"
    assert list(tmp_path.iterdir()) == [place]


def test_a_place_that_takes_no_file_is_told_before_and_while_writing(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere" / "plan.json"):
        with pytest.raises(UsageError, match="cannot be written"):
            check_writable(place)
        with pytest.raises(UsageError, match="cannot be written"):
            write_whole(place, "text")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    check_writable(tmp_path / "plan.json")
    check_writable("in_the_current_directory.json")
