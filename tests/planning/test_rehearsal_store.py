"""What was rehearsed for plans is kept, comes back the same, and only while it is true."""

from __future__ import annotations

import gzip
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from predicting.test_footprint import footprint

from oomph.planning import rehearsal_store
from oomph.planning.rehearsal_store import RehearsalStore
from oomph.planning.rehearsals import Rehearsed
from oomph.predicting.combinations import pass_settings_of, step_of
from oomph.predicting.demand import UnlimitedPeaks
from oomph.predicting.footprint import Footprint
from oomph.records.prediction import Moment
from oomph.records.workload import Variant
from planning.test_choices import BERT

HOW = Variant(micro_batch=2, accumulation=2)
HALF = Variant(micro_batch=2, accumulation=2, precision="fp16")
CAPABILITY = (8, 0)


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "train.py"
    path.write_text("workload = None")
    return path, "workload"


def store(place: tuple[Path, str]) -> RehearsalStore:
    return RehearsalStore(place, CAPABILITY)


def rehearsed(*files: Path) -> Rehearsed:
    found = footprint("adamw", HOW)
    return Rehearsed(
        possible=BERT,
        batch_size=8,
        clips_gradients=True,
        costs=[(100, 0.5), (200, 0.25)],
        torch_version="2.13.0",
        notes=("dropout is on",),
        files=tuple(map(str, files)),
        pass_footprints={pass_settings_of(HOW): found},
        steps={step_of(HOW): found},
        not_affine={pass_settings_of(Variant(micro_batch=1))},
        failed={
            pass_settings_of(HALF): "it knows no fp16",
            step_of(HALF): "nor does its optimizer",
        },
        exact={HOW: found},
        replays={"one": 1 << 40},
        unlimited_peaks={
            "one": UnlimitedPeaks(
                allocated_bytes=1,
                reserved_bytes=2,
                allocated_with_outputs_bytes=2,
                reserved_with_outputs_bytes=3,
                by_category={"parameters": 1},
                by_module={"layer": 1},
                peak_at=Moment(step=2, phase="backward", op="mm", module="layer"),
            )
        },
    )


def test_all_that_is_known_comes_back(place: tuple[Path, str]) -> None:
    known = rehearsed(place[0])
    store(place).keep(known)
    found = store(place).find()
    assert found is not None
    footprints = ("pass_footprints", "steps", "exact")
    for field in fields(Rehearsed):
        if field.name not in (*footprints, "files"):
            assert getattr(found, field.name) == getattr(known, field.name), field.name
    for name in footprints:
        before, after = getattr(known, name), getattr(found, name)
        assert before.keys() == after.keys()
        for key in before:
            assert_same(before[key], after[key])
    assert RehearsalStore(place, (7, 0)).find() is None
    assert store((place[0], "other")).find() is None


def assert_same(one: Footprint, two: Footprint) -> None:
    for field in fields(Footprint):
        before, after = getattr(one, field.name), getattr(two, field.name)
        if isinstance(before, np.ndarray):
            np.testing.assert_array_equal(before, after)
        else:
            assert before == after, field.name


def test_a_file_that_changed_or_went_is_forgotten(place: tuple[Path, str], tmp_path: Path) -> None:
    imported = tmp_path / "layers.py"
    imported.write_text("width = 1")
    store(place).keep(rehearsed(imported))
    assert store(place).find() is not None
    imported.write_text("width = 2")
    assert store(place).find() is None
    imported.unlink()
    assert store(place).find() is None


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half of a file", b"\x00" * 100])
def test_what_cannot_be_read_is_made_anew(place: tuple[Path, str], content: bytes) -> None:
    store(place).keep(rehearsed(place[0]))
    rehearsal_store._STORE.write(f"{store(place)._name()}.npz", content)
    assert store(place).find() is None


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"hashes": [], "replays": {}, "weighed": {}}', b"\x00" * 100]
)
def test_replays_that_cannot_be_read_are_made_anew(place: tuple[Path, str], content: bytes) -> None:
    store(place).keep(rehearsed(place[0]))
    name = f"{store(place)._name()}.json.gz"
    rehearsal_store._STORE.write(name, gzip.compress(content) if content[:1] in b"[{" else content)
    found = store(place).find()
    assert found is not None
    assert (found.replays, found.unlimited_peaks) == ({}, {})
    assert found.pass_footprints


def test_what_is_replayed_later_is_kept_beside(place: tuple[Path, str]) -> None:
    known = rehearsed(place[0])
    store(place).keep(known)
    known.replays["two"] = 2
    store(place).keep_replays(known)
    found = store(place).find()
    assert found is not None
    assert found.replays["two"] == 2


def test_replays_of_other_rehearsals_are_not_taken_for_these(place: tuple[Path, str]) -> None:
    store(place).keep(rehearsed(place[0]))
    kept, name = rehearsal_store._STORE, f"{store(place)._name()}.json.gz"
    content = kept.read_json(name)
    kept.write_json(name, {**content, "hashes": ["0", *content["hashes"]]})
    found = store(place).find()
    assert found is not None
    assert found.replays == {}
