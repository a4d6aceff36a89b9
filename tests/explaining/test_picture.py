"""What the page of `oomph explain` draws is what was recorded, in few figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from snapshots.written import Writer, training, write

from oomph.explaining import picture as picture_module
from oomph.explaining.holdings import allocations_of
from oomph.explaining.snapshot import draw_snapshot
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.records.picture import Picture
from oomph.showing.explain import write_explanation_page
from oomph.snapshots.loading import load
from oomph.units import MIB

SETTINGS = [AllocatorSettings(), AllocatorSettings(expandable_segments=True)]


def drawn(tmp_path: Path, writer: Writer) -> Picture:
    path = write(tmp_path / "one.pickle", writer.snapshot())
    _, picture = draw_snapshot(load(path), source="x", draws=True)
    assert picture is not None
    return picture


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_timeline_keeps_every_column_exact_and_its_peak(
    tmp_path: Path, settings: AllocatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_module, "_NUM_COLUMNS", 800)
    writer = training(steps=12, layers=12, settings=settings)
    picture = drawn(tmp_path, writer)
    assert len(picture.events) <= 800 < picture.num_events
    totals = [sum(sizes) for sizes in zip(*picture.live_bytes, strict=True)]
    assert max(totals) == writer.peak_requested_bytes
    assert max(picture.reserved_bytes) <= writer.peak_reserved_bytes
    assert all(t <= r for t, r in zip(totals, picture.reserved_bytes, strict=True))


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_layout_fills_what_was_reserved_at_that_moment(
    tmp_path: Path, settings: AllocatorSettings
) -> None:
    writer = training(layers=8, free_bytes=500 * MIB, settings=settings)
    picture = drawn(tmp_path, writer)
    pieces = [piece for segment in picture.segments for piece in segment]
    assert sum(piece.size_bytes for piece in pieces) == writer.reserved_bytes
    holes = [piece.size_bytes for piece in pieces if piece.category is None]
    assert picture.largest_hole_bytes == max(holes)
    assert picture.requested_bytes is not None
    assert picture.largest_hole_bytes < picture.requested_bytes


def test_the_trees_hold_what_is_live(tmp_path: Path) -> None:
    writer = training(layers=8, free_bytes=500 * MIB)
    picture = drawn(tmp_path, writer)
    live = sum(one.size_bytes for one in allocations_of(writer.trace, []) if one.death is None)
    for tree in (picture.by_category, picture.by_stack):
        held = sum(one.size_bytes for one in tree)
        assert 0.98 * live <= held <= live
        for one in tree:
            assert sum(part.size_bytes for part in one.parts) <= one.size_bytes


def test_the_page_of_a_long_recording_is_small(tmp_path: Path) -> None:
    path = write(tmp_path / "one.pickle", training(steps=80, layers=24).snapshot())
    explanation, picture = draw_snapshot(load(path), source="x", draws=True)
    assert picture is not None
    assert picture.num_events > 20_000
    write_explanation_page(explanation, picture, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 1_000_000
