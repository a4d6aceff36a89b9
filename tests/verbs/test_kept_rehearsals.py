"""What was rehearsed for plans is kept, comes back the same, and only while it is true."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from planning.test_choices import BERT
from predicting.test_footprint import footprint

from oomph.predicting.footprint import Footprint
from oomph.predicting.ways import family_of, step_of
from oomph.predicting.weighing import Weighed
from oomph.records.prediction import Moment
from oomph.records.workload import Variant
from oomph.verbs import kept_rehearsals
from oomph.verbs.rehearsals import Rehearsed

HOW = Variant(micro_batch=2, accumulation=2)
HALF = Variant(micro_batch=2, accumulation=2, precision="fp16")
CAPABILITY = (8, 0)


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "train.py"
    path.write_text("workload = None")
    return path, "workload"


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
        families={family_of(HOW): found},
        steps={step_of(HOW): found},
        not_affine={family_of(Variant(micro_batch=1))},
        failed={family_of(HALF): "it knows no fp16", step_of(HALF): "nor does its optimizer"},
        exact={HOW: found},
        replays={"one": 1 << 40},
        weighed={
            "one": Weighed(
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
    kept_rehearsals.keep(place, CAPABILITY, known)
    found = kept_rehearsals.find(place, CAPABILITY)
    assert found is not None
    footprints = ("families", "steps", "exact")
    for field in fields(Rehearsed):
        if field.name not in (*footprints, "files"):
            assert getattr(found, field.name) == getattr(known, field.name), field.name
    for name in footprints:
        before, after = getattr(known, name), getattr(found, name)
        assert before.keys() == after.keys()
        for key in before:
            assert_same(before[key], after[key])
    assert kept_rehearsals.find(place, (7, 0)) is None
    assert kept_rehearsals.find((place[0], "other"), CAPABILITY) is None


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
    kept_rehearsals.keep(place, CAPABILITY, rehearsed(imported))
    assert kept_rehearsals.find(place, CAPABILITY) is not None
    imported.write_text("width = 2")
    assert kept_rehearsals.find(place, CAPABILITY) is None
    imported.unlink()
    assert kept_rehearsals.find(place, CAPABILITY) is None


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half of a file", b"\x00" * 100])
def test_what_cannot_be_read_is_made_anew(place: tuple[Path, str], content: bytes) -> None:
    kept_rehearsals.keep(place, CAPABILITY, rehearsed(place[0]))
    kept_rehearsals._path(place, CAPABILITY).write_bytes(content)
    assert kept_rehearsals.find(place, CAPABILITY) is None


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"hashes": [], "replays": {}, "weighed": {}}', b"\x00" * 100]
)
def test_replays_that_cannot_be_read_are_made_anew(place: tuple[Path, str], content: bytes) -> None:
    kept_rehearsals.keep(place, CAPABILITY, rehearsed(place[0]))
    beside = kept_rehearsals._path(place, CAPABILITY).with_suffix(".json")
    beside.write_bytes(content)
    found = kept_rehearsals.find(place, CAPABILITY)
    assert found is not None
    assert (found.replays, found.weighed) == ({}, {})
    assert found.families


def test_what_is_replayed_later_is_kept_beside(place: tuple[Path, str]) -> None:
    known = rehearsed(place[0])
    kept_rehearsals.keep(place, CAPABILITY, known)
    known.replays["two"] = 2
    kept_rehearsals.keep_replays(place, CAPABILITY, known)
    found = kept_rehearsals.find(place, CAPABILITY)
    assert found is not None
    assert found.replays["two"] == 2


def test_replays_of_other_rehearsals_are_not_taken_for_these(place: tuple[Path, str]) -> None:
    kept_rehearsals.keep(place, CAPABILITY, rehearsed(place[0]))
    beside = kept_rehearsals._path(place, CAPABILITY).with_suffix(".json")
    of_others = beside.read_bytes().replace(b'"hashes": ["', b'"hashes": ["0')
    beside.write_bytes(of_others)
    found = kept_rehearsals.find(place, CAPABILITY)
    assert found is not None
    assert found.replays == {}
