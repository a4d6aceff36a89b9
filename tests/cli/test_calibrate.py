"""`oomph calibrate`, as typed, and what `oomph predict` makes of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import OnMachine
from nvml.machine import GIB, MIB, Gpu, Proc
from sensing import stand_in_torch
from sensing.test_kept_calibrations import A100

import oomph
from cli.test_predict import TRAIN
from oomph.cli import main
from oomph.records.gpu_model import Calibration
from oomph.sensing import calibration

HERE = replace(A100, torch_version=str(torch.__version__))


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_machine: OnMachine
) -> Callable[..., int]:
    """`oomph calibrate` on a test machine, with a torch that says what the test says."""

    def run(*arguments: str, gpus: tuple[Gpu, ...] = (Gpu(),), **said: object) -> int:
        on_machine(gpus)
        directory = stand_in_torch.write(tmp_path / "packages", **said)
        with monkeypatch.context() as patched:
            source = Path(oomph.__file__).parents[1]
            patched.setenv("PYTHONPATH", os.pathsep.join(map(str, (directory, source))))
            return main(["calibrate", *arguments])

    return run


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("user") / "train.py"
    path.write_text(TRAIN)
    return f"{path}:workload"


def test_each_figure_stands_beside_what_would_be_assumed(
    calibrated: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrated() == 0
    told = capsys.readouterr().out
    assert told.startswith("NVIDIA A100-SXM4-80GB\n")
    assert re.search(r"with libraries +520\.0 MiB +\d+\.\d MiB +\d+\.\d MiB to ", told)
    assert re.search(r"bf16 TFLOP/s +260\.0 +\d+\.\d", told)
    assert "oomph predict --gpu a100-80gb uses this" in told


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_no_line_is_wider_than_the_terminal(
    calibrated: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert calibrated() == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= columns
    assert "520.0 MiB" in told


def test_json_has_the_record_and_what_it_replaces(
    calibrated: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrated("--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["calibrations"]
    assert told["calibration"]["context_with_libraries_bytes"] == 520 * MIB
    assert told["assumed"]["gpu"] == "a100-80gb"
    low, high = (told["assumed"][f"context_{end}_bytes"] for end in ("low", "high"))
    assert low < told["assumed"]["context_bytes"] < high


def test_what_was_measured_is_shown_and_forgotten(
    calibrated: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--show"]) == 1
    assert "nothing is stored" in capsys.readouterr().out
    assert calibrated("--memory-only") == 0
    printed = capsys.readouterr().out
    assert "rates were not measured" in printed
    assert main(["calibrate", "--show"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["calibrate", "--forget"]) == 0
    assert "deleted" in capsys.readouterr().out
    assert main(["calibrate", "--forget"]) == 0
    assert "nothing was stored" in capsys.readouterr().out
    assert main(["calibrate", "--show", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["calibrations"] == []


def test_a_gpu_that_the_catalogue_does_not_know_is_measured_and_said_to_be_unused(
    calibrated: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrated(gpus=(Gpu(name="NVIDIA Unheard-of 9000"),)) == 0
    assert "the catalogue has no such GPU" in capsys.readouterr().out


def test_a_neighbour_in_the_way_is_exit_4_and_nothing_is_kept(
    calibrated: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrated(gpus=(Gpu(processes=[Proc(4100, GIB)]),), listed="hidden") == 4
    assert "cannot be separated from what others take" in capsys.readouterr().err
    assert calibration.read_all() == ()


def test_a_broken_file_is_exit_4_before_anything_is_measured(
    calibrated: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    calibration.path().parent.mkdir(parents=True)
    calibration.path().write_text("junk")
    assert calibrated(fails="it was measured") == 4
    told = capsys.readouterr().err
    assert str(calibration.path()) in told
    assert "try: oomph calibrate --forget" in told
    assert calibration.path().read_text() == "junk"


def test_flags_that_contradict_each_other_are_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--show", "--forget"]) == 2
    assert "--show and --forget cannot be combined" in capsys.readouterr().err


# ---- what predict makes of it ------------------------------------------------------------------


def test_a_measured_context_and_card_leave_nothing_unknown_of_them(train: str) -> None:
    calibration.save(HERE)
    told = oomph.predict(train, gpu="a100-80gb")
    assert told.device_bytes - told.reserved_bytes == 520 * MIB
    assert told.capacity_bytes == HERE.total_bytes
    assert not [each for each in told.unknowns if "context" in each.what or "card" in each.what]
    assert any("measured here on 2023-11-1" in note for note in told.notes)


def test_measured_rates_change_the_time_and_memory_alone_does_not(train: str) -> None:
    before = oomph.predict(train, gpu="a100-80gb")
    calibration.save(replace(HERE, matmul_flops={}, bandwidth_bytes_per_s=None))
    memory_only = oomph.predict(train, gpu="a100-80gb")
    calibration.save(replace(HERE, matmul_flops={"float32": 1e9}))
    with_rates = oomph.predict(train, gpu="a100-80gb")
    assert (before.step_from, memory_only.step_from) == ("datasheet", "datasheet")
    assert memory_only.step_s == before.step_s
    assert with_rates.step_from == "calibration"
    assert (with_rates.step_s or 0) > 100 * (before.step_s or 0)


def test_a_plan_says_where_its_times_come_from_as_a_prediction_does(train: str) -> None:
    calibration.save(replace(HERE, matmul_flops={"float32": 1e9}))
    plans = oomph.plan(train, gpu="a100-80gb")
    assert plans.as_is.step_from == "calibration"
    assert {plan.prediction.step_from for plan in plans} == {"calibration"}
    assert any("measured here on 2023-11-1" in caveat for caveat in plans.caveats)


def context_that_leaves(train: str, room_bytes: int) -> Calibration:
    """A card whose context leaves so much beside what the workload surely takes."""
    taken = oomph.predict(train, gpu="a100-80gb").reserved_bytes
    return replace(HERE, context_with_libraries_bytes=HERE.total_bytes - taken - room_bytes)


@pytest.mark.parametrize(
    ("room_bytes", "fits"), [(GIB, "yes"), (MIB, "uncertain"), (-64 * MIB, "no")]
)
def test_a_measurement_can_change_the_verdict(train: str, room_bytes: int, fits: str) -> None:
    calibration.save(context_that_leaves(train, room_bytes))
    assert oomph.predict(train, gpu="a100-80gb").fits == fits


def test_memory_that_is_given_wins_over_what_was_measured(train: str) -> None:
    calibration.save(HERE)
    assert oomph.predict(train, gpu="a100-80gb", gpu_memory="40GiB").capacity_bytes == 40 * GIB


def test_another_torch_is_not_used_and_that_is_said(train: str) -> None:
    before = oomph.predict(train, gpu="a100-80gb")
    calibration.save(replace(HERE, torch_version="2.4.1+cu121"))
    told = oomph.predict(train, gpu="a100-80gb")
    assert told.device_bytes == before.device_bytes
    assert any("is of torch 2.4.1+cu121" in note and "not used" in note for note in told.notes)


@pytest.mark.parametrize("gpu", ["a100-40gb", "h100"])
def test_another_gpu_is_predicted_as_before(train: str, gpu: str) -> None:
    before = oomph.predict(train, gpu=gpu)
    calibration.save(HERE)
    assert oomph.predict(train, gpu=gpu) == before


def test_the_newest_of_two_drivers_is_taken(train: str) -> None:
    newer = replace(HERE, driver_version="560.35", context_with_libraries_bytes=600 * MIB)
    calibration.save(replace(newer, measured_at=HERE.measured_at + 1))
    calibration.save(HERE)
    told = oomph.predict(train, gpu="a100-80gb")
    assert told.device_bytes - told.reserved_bytes == 600 * MIB


def test_a_broken_file_is_a_note_and_no_crash(train: str) -> None:
    calibration.path().parent.mkdir(parents=True)
    calibration.path().write_text("junk")
    told = oomph.predict(train, gpu="a100-80gb")
    assert any(str(calibration.path()) in note for note in told.notes)
    assert told.fits == "yes"
