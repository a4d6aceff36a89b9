"""A file is written whole or not at all, and a result is found only while it holds."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from oomph.errors import UsageError
from oomph.store import (
    Store,
    are_unchanged,
    as_they_are,
    check_writable,
    digest,
    surroundings,
    write_whole,
)


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


# ---- results of earlier work ---------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Store("tests", most_entries=2)


def test_a_result_comes_back_and_the_oldest_go_first(store: Store) -> None:
    for number, name in enumerate(("one", "two", "three")):
        store.write_json(name, {"number": number})
        os.utime(store.directory / name, (number, number))
    assert store.read_json("three") == {"number": 2}
    assert store.read("one") is None
    assert len(list(store.directory.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"\x1f\x8b\x08junk", gzip.compress(b"{", mtime=0)])
def test_a_broken_result_is_none(store: Store, content: bytes) -> None:
    store.write("one", content)
    assert store.read_json("one") is None


def test_what_is_too_large_is_neither_written_nor_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("one", b"1234")
    monkeypatch.setattr("oomph.store._LARGEST_ENTRY_BYTES", 3)
    store.write("two", b"1234")
    assert store.read("one") is None
    assert not (store.directory / "two").exists()


def test_files_that_changed_or_went_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("width = 1")
    entry = as_they_are([str(file), str(file)])
    assert are_unchanged(entry)
    file.write_text("width = 2")
    assert not are_unchanged(entry)
    file.unlink()
    assert not are_unchanged(entry)
    assert not are_unchanged(as_they_are([str(file)]))
    assert not are_unchanged({})


def test_what_decides_a_result_includes_the_code_of_oomph() -> None:
    own_code = surroundings()[0]
    assert len(own_code) > 50
    assert digest(own_code, "a") != digest(own_code[1:], "a") != digest(own_code[1:], "b")
