"""Calibrations are kept whole, one for each GPU, driver, torch and CUDA."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from oomph.errors import Unreadable
from oomph.records.gpu_model import Calibration
from oomph.sensing import calibration
from oomph.units import MIB

A100 = Calibration(
    gpu_name="NVIDIA A100-SXM4-80GB",
    driver_version="550.54.15",
    torch_version="2.13.0+cpu",
    cuda_version="12.4",
    context_bytes=420 * MIB,
    context_with_libraries_bytes=520 * MIB,
    total_bytes=85_095_874_560,
    matmul_flops={"bfloat16": 2.6e14},
    bandwidth_bytes_per_s=1.7e12,
    measured_by="process",
    measured_at=1_700_000_000.0,
)


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def test_nothing_is_kept_at_first() -> None:
    assert calibration.read_all() == ()


def test_what_is_kept_comes_back_as_it_was() -> None:
    calibration.save(A100)
    assert calibration.read_all() == (A100,)


@pytest.mark.parametrize("field", ["gpu_name", "driver_version", "torch_version", "cuda_version"])
def test_another_gpu_driver_torch_or_cuda_is_another_entry(field: str) -> None:
    other = replace(A100, measured_at=1_800_000_000.0, **{field: "another"})  # type: ignore[arg-type]
    calibration.save(other)
    calibration.save(A100)
    assert calibration.read_all() == (A100, other)


def test_measuring_again_replaces_the_entry() -> None:
    again = replace(A100, context_bytes=430 * MIB)
    calibration.save(A100)
    calibration.save(again)
    assert calibration.read_all() == (again,)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calibration.save(A100)
    before = calibration.path().read_bytes()

    def full(self: Path, *_: object) -> None:
        assert self.read_bytes()  # the new file has been written beside the old one
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        calibration.save(replace(A100, context_bytes=1))
    assert calibration.path().read_bytes() == before
    assert list(calibration.path().parent.iterdir()) == [calibration.path()]


def entry(**changes: object) -> str:
    calibration.save(A100)
    stored = json.loads(calibration.path().read_text())
    stored["calibrations"][0].update(changes)
    return json.dumps(stored)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema": 1}',
        '{"schema": 99, "calibrations": []}',
        '{"schema": 1, "calibrations": [{}]}',
        '{"schema": 1, "calibrations": 3}',
        "\x00" * 100,
    ],
)
def test_a_file_that_cannot_be_read_is_one_error_that_names_it(content: str) -> None:
    calibration.path().parent.mkdir(parents=True)
    calibration.path().write_text(content)
    with pytest.raises(Unreadable) as raised:
        calibration.read_all()
    assert str(calibration.path()) in raised.value.what
    assert raised.value.exit_code == 4
    assert calibration.forget()
    assert calibration.read_all() == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"context_bytes": -1},
        {"context_bytes": "420 MiB"},
        {"total_bytes": True},
        {"matmul_flops": {"float32": 0}},
        {"matmul_flops": [1]},
        {"bandwidth_bytes_per_s": float("nan")},
        {"measured_by": "guess"},
        {"measured_at": None},
        {"gpu_name": 3},
        {"surplus": 1},
    ],
)
def test_an_entry_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    calibration.path().write_text(entry(**changes))
    with pytest.raises(Unreadable, match="cannot be read"):
        calibration.read_all()


def test_forgetting_says_whether_there_was_anything() -> None:
    assert not calibration.forget()
    calibration.save(A100)
    assert calibration.forget()
    assert calibration.read_all() == ()
