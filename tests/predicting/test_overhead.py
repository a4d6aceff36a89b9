"""What CUDA takes before torch begins, and what a driver leaves: intervals with their source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting import overhead
from oomph.predicting.overhead import (
    NOTHING,
    Interval,
    context,
    cudnn,
    memory_of,
    nccl,
    together,
    usable_bytes,
)
from oomph.records.gpu_model import GpuModel
from oomph.sensing import catalog
from oomph.units import GIB, MIB

FILE = json.loads(Path(overhead.__file__).with_name("overheads.json").read_text("utf-8"))
LAZY = [reading for reading in FILE["context"] if reading["loading"] == "lazy"]
EAGER = [reading for reading in FILE["context"] if reading["loading"] == "eager"]

models = st.sampled_from(catalog.all_models())
versions = st.none() | st.from_regex(
    r"[0-9]{1,2}\.[0-9]{1,2}(\.[0-9])?(\+cu1[0-3][0-9])?", fullmatch=True
)


def gpu(name: str) -> GpuModel:
    return catalog.find(name).model


def like(reading: dict[str, Any]) -> GpuModel:
    """The GPU of a reading, whether or not the catalogue has it."""
    major, minor = reading["compute_capability"]
    return replace(gpu("a100 80"), num_sms=reading["num_sms"], compute_capability=(major, minor))


def in_order(interval: Interval) -> bool:
    return 0 <= interval.low_bytes <= interval.likely_bytes <= interval.high_bytes


# ---- the context -----------------------------------------------------------------------------


@given(models, versions, versions)
def test_the_bounds_of_a_context_are_around_the_likely_value(
    model: GpuModel, torch: str | None, cuda: str | None
) -> None:
    taken = context(model, torch, cuda)
    assert in_order(taken)
    assert taken.low_bytes > 0
    assert taken.high_bytes < 4 * GIB
    assert taken.because


@given(models, st.text(max_size=20), st.text(max_size=20))
def test_a_version_that_is_none_is_no_crash(model: GpuModel, torch: str, cuda: str) -> None:
    assert in_order(context(model, torch, cuda))


@given(models, versions, st.integers(min_value=0, max_value=2**34))
def test_what_a_machine_has_measured_itself_wins_and_is_exact(
    model: GpuModel, torch: str | None, measured: int
) -> None:
    taken = context(model, torch, measured_bytes=measured)
    assert taken.low_bytes == taken.likely_bytes == taken.high_bytes == measured
    assert "measured" in taken.because


@pytest.mark.parametrize("reading", LAZY, ids=lambda reading: f"{reading['gpu']}-{reading['mib']}")
def test_every_published_reading_with_lazy_loading_is_inside(reading: dict[str, Any]) -> None:
    taken = context(like(reading), "2.6.0")
    assert taken.low_bytes <= reading["mib"] * MIB <= taken.high_bytes


@pytest.mark.parametrize("reading", EAGER, ids=lambda reading: f"{reading['gpu']}-{reading['mib']}")
def test_every_published_reading_with_eager_loading_is_inside(reading: dict[str, Any]) -> None:
    major, minor = reading["cuda"]
    taken = context(like(reading), "1.10.0", f"{major}.{minor}")
    assert taken.low_bytes <= reading["mib"] * MIB <= taken.high_bytes


def test_a_gpu_that_the_line_has_not_seen_is_inside_nine_times_in_ten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside = 0
    for left_out in LAZY:
        rest = [reading for reading in FILE["context"] if reading["gpu"] != left_out["gpu"]]
        monkeypatch.setattr(overhead, "_file", lambda rest=rest: {**FILE, "context": rest})
        overhead._context_line.cache_clear()
        taken = context(like(left_out), "2.6.0")
        inside += taken.low_bytes <= left_out["mib"] * MIB <= taken.high_bytes
    monkeypatch.undo()
    overhead._context_line.cache_clear()
    assert inside >= 0.9 * len(LAZY)


def test_the_interval_of_lazy_loading_is_narrow_enough_to_be_of_use() -> None:
    for model in catalog.all_models():
        taken = context(model, "2.6.0")
        if model.num_sms is not None:
            assert taken.high_bytes < 2 * taken.low_bytes
            assert taken.high_bytes < 0.9 * GIB


@given(models, st.integers(1, 300), st.integers(1, 300))
def test_a_gpu_with_more_sms_has_no_smaller_context(model: GpuModel, one: int, more: int) -> None:
    few, many = sorted((one, more))
    smaller = context(replace(model, num_sms=few), "2.6.0")
    larger = context(replace(model, num_sms=many), "2.6.0")
    assert smaller.likely_bytes <= larger.likely_bytes
    assert smaller.high_bytes <= larger.high_bytes


@pytest.mark.parametrize(
    ("torch", "cuda", "is_lazy"),
    [
        ("2.13.0+cpu", None, True),  # a machine without a GPU predicts for one that has one
        ("2.1.1+cu121", None, True),
        ("2.1.0", None, True),
        ("1.13.1+cu116", None, False),
        ("2.0.0", "11.6", False),
        ("1.12.1+cu116", None, False),
        ("1.12.1", "11.8", False),
        (None, "12.4", True),
        (None, "11.2", False),
    ],
)
def test_kernels_are_loaded_lazily_by_torch_1_13_on_cuda_11_7(
    torch: str | None, cuda: str | None, is_lazy: bool
) -> None:
    taken = context(gpu("v100 16"), torch, cuda)
    assert (taken.high_bytes < 600 * MIB) == is_lazy
    assert (taken.low_bytes < 600 * MIB) == is_lazy


@pytest.mark.parametrize("torch", ["2.0.1", "1.13.1", "2.1.0+cu118"])
def test_with_cuda_11_the_driver_decides_how_kernels_are_loaded(torch: str) -> None:
    taken, lazy = context(gpu("v100 16"), torch), context(gpu("v100 16"), "2.6.0")
    assert (taken.low_bytes, taken.likely_bytes) == (lazy.low_bytes, lazy.likely_bytes)
    assert taken.high_bytes > 1343 * MIB
    assert "drivers" in taken.because


def test_the_kernels_of_cudnn_come_apart_where_all_are_loaded() -> None:
    model = gpu("a100 40")
    assert cudnn(model, "2.6.0") is NOTHING
    unsure, eager = cudnn(model, "2.0.1"), cudnn(model, "1.12.0+cu113")
    assert (unsure.low_bytes, unsure.likely_bytes) == (0, 0)
    assert 0 < eager.likely_bytes < eager.high_bytes == unsure.high_bytes


def test_a_measured_context_shows_how_kernels_are_loaded() -> None:
    model = gpu("a100 40")
    assert cudnn(model, "2.0.1", measured_context_bytes=480 * MIB) is NOTHING
    assert cudnn(model, "2.6.0", measured_context_bytes=1429 * MIB).likely_bytes > 0


def test_intervals_add_up() -> None:
    both = together(Interval(1, 2, 3, "this"), Interval(10, 20, 30, "that"))
    assert both == Interval(11, 22, 33, "this; that")


def test_the_v100_of_the_bert_table_had_a_context_that_is_expected() -> None:
    taken = context(gpu("v100 16"), "1.10.1", "11.2")
    assert taken.low_bytes <= 1343 * MIB <= taken.high_bytes
    assert "before 1.13" in taken.because


def test_without_versions_the_interval_spans_both_kinds_of_loading() -> None:
    model = gpu("a100 80")
    unknown, lazy, eager = (
        context(model, None),
        context(model, "2.6.0"),
        context(model, "1.10.2", "11.3"),
    )
    assert unknown.low_bytes == lazy.low_bytes
    assert unknown.likely_bytes == lazy.likely_bytes
    assert unknown.high_bytes == eager.high_bytes


def test_without_the_number_of_sms_the_interval_is_wide_and_says_so() -> None:
    model = gpu("h100 80")
    known = context(model, "2.6.0")
    unknown = context(replace(model, num_sms=None), "2.6.0")
    assert unknown.low_bytes < known.low_bytes
    assert known.high_bytes < unknown.high_bytes
    assert "SMs are not known" in unknown.because
    nothing = context(replace(model, num_sms=None, compute_capability=None), "2.6.0")
    assert nothing.low_bytes < unknown.low_bytes


# ---- NCCL ------------------------------------------------------------------------------------


def test_no_process_group_takes_nothing_and_each_takes_the_same() -> None:
    none, one, three = nccl(0), nccl(), nccl(3)
    assert (none.low_bytes, none.high_bytes) == (0, 0)
    assert (one.low_bytes, one.high_bytes) == (544 * MIB, 1485 * MIB)
    assert three.likely_bytes == 3 * one.likely_bytes
    assert nccl(2, measured_bytes=5).likely_bytes == 5


# ---- what a driver leaves --------------------------------------------------------------------


@given(models)
def test_a_driver_leaves_nine_tenths_of_the_nameplate_and_never_more_than_all(
    model: GpuModel,
) -> None:
    left = usable_bytes(model)
    assert in_order(left)
    assert 0.9 * model.memory_bytes < left.low_bytes
    assert left.high_bytes <= model.memory_bytes


@pytest.mark.parametrize("model", catalog.all_models(), ids=lambda model: model.name)
def test_the_memory_of_every_gpu_of_the_catalogue_is_known(model: GpuModel) -> None:
    assert memory_of(model.name) is not None


@pytest.mark.parametrize(
    "reading", FILE["usable"], ids=lambda reading: f"{reading['gpu']}-{reading['bytes']}"
)
def test_every_published_total_is_inside(reading: dict[str, Any]) -> None:
    model = gpu(reading["gpu"])
    total: int = reading["bytes"]
    left = usable_bytes(model)
    assert left.low_bytes <= total <= left.high_bytes
    unmeasured = usable_bytes(replace(model, measured_bytes=None))
    assert unmeasured.low_bytes <= total <= unmeasured.high_bytes


def test_what_the_catalogue_has_measured_is_the_likely_value() -> None:
    model = gpu("rtx 3060 12gb")
    assert usable_bytes(model).likely_bytes == model.measured_bytes == 12_622_168_064


def test_ecc_in_gddr_costs_a_sixteenth_and_on_rtx_cards_it_may_be_on() -> None:
    geforce, datacentre, workstation = map(usable_bytes, (gpu("rtx 4080"), gpu("t4"), gpu("a4000")))
    assert datacentre.high_bytes < geforce.low_bytes  # all three have 16 GB
    assert workstation.low_bytes == datacentre.low_bytes
    assert workstation.likely_bytes == geforce.likely_bytes


def test_a_gpu_that_nobody_knows_gets_the_widest_interval() -> None:
    left = usable_bytes(replace(gpu("t4"), name="t5000"))
    for name in ("t4", "rtx 4080", "a4000"):
        known = usable_bytes(gpu(name))
        assert left.low_bytes <= known.low_bytes
        assert known.high_bytes <= left.high_bytes
    assert "any memory" in left.because


# ---- the file --------------------------------------------------------------------------------


def test_every_reading_has_a_source() -> None:
    for readings in (FILE["context"], FILE["context_left_out"], FILE["usable"], FILE["nccl"]):
        assert all(reading["source"] for reading in readings)


@pytest.mark.parametrize("reading", FILE["context"], ids=lambda reading: str(reading["gpu"]))
def test_the_readings_describe_gpus_as_the_catalogue_does(reading: dict[str, Any]) -> None:
    model = next((m for m in catalog.all_models() if m.name == reading["gpu"]), None)
    if model is not None:
        assert model.num_sms in (None, reading["num_sms"])
        assert [*(model.compute_capability or ())] == reading["compute_capability"]
