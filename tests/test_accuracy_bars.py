"""How far a published run lies outside its prediction is measured from what is known by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from predicting.test_scaling import trace_of

from accuracy import bars
from accuracy.bars import Measured, left_out, residual_of
from oomph.predicting.overhead import Interval
from oomph.predicting.prediction import Card, assemble
from oomph.predicting.residuals import Kind, Residual, published_residuals
from oomph.records.prediction import Prediction
from oomph.records.workload import Variant
from oomph.units import GIB, MIB

KIND: Kind = "transformer"


@pytest.fixture
def prediction() -> Prediction:
    """Of 4000 MiB reserved and a context of 100 to 300 MiB."""
    card = Card(
        name="a card",
        usable=Interval(16 * GIB, 16 * GIB, 16 * GIB, "as given"),
        context=Interval(100 * MIB, 200 * MIB, 300 * MIB, "published"),
    )
    return assemble(trace_of([4000 * MIB], [1, -1], 2), Variant(micro_batch=2), card)


@pytest.mark.parametrize(
    ("measured", "outside_mib"),
    [
        (Measured(measured_mib=4200), 0),
        (Measured(measured_mib=4340), 0),  # 40 MiB beyond the context's high end
        (Measured(measured_mib=4440), 100),
        (Measured(measured_mib=4440, rounding_mib=60), 40),
        (Measured(measured_mib=3960), -100),
        (Measured(measured_mib=3960, is_upper_bound=True), 0),
        (Measured(measured_mib=4240, shift_bytes=-200 * MIB), 100),
    ],
)
def test_a_measurement_is_as_far_outside_as_no_named_unknown_explains(
    prediction: Prediction, measured: Measured, outside_mib: int
) -> None:
    found = residual_of(prediction, KIND, "a source", "a run", measured)
    assert found.outside_ratio == pytest.approx(outside_mib / 4000)


def test_a_source_is_left_out_of_the_width_that_covers_it() -> None:
    found = [
        Residual(kind=KIND, source=source, what="a run", outside_ratio=ratio)
        for source, ratio in (("a", 0.01), ("b", 0.02), ("c", 0.05))
    ]
    assert left_out(found, KIND) == [True, True, False]


def test_what_is_written_has_each_run_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "FILE", tmp_path / "residuals.json")
    known = published_residuals()
    bars.write(known, {each.source: f"where {each.source} stands" for each in known})
    groups = json.loads(bars.FILE.read_text("utf-8"))["sources"]
    assert sum(len(group["runs"]) for group in groups) == len(known)
    assert all(group["reference"] == f"where {group['source']} stands" for group in groups)
