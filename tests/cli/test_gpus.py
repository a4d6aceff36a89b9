"""`oomph gpus`, as typed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import OnMachine
from nvml.machine import GIB, Gpu, Mig, NvmlMachine, Proc

from oomph.cli import main


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["gpus", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_every_field_under_its_documented_name(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([Gpu(processes=[Proc(os.getpid(), 2 * GIB)])])
    told = json_of(capsys)
    assert told["problem"] is None
    (gpu,) = told["gpus"]
    documented = {"index", "uuid", "name", "total_bytes", "used_bytes", "busy_ratio"}
    documented |= {"temperature_c", "power_w", "processes", "problem"}
    assert documented <= set(gpu)
    (process,) = gpu["processes"]
    assert {"pid", "owner", "user", "command", "used_bytes"} <= set(process)
    assert (process["pid"], process["owner"]) == (os.getpid(), "this-run")
    assert process["used_bytes"] == 2 * GIB


def test_unknown_is_null_in_json(on_machine: OnMachine, capsys: pytest.CaptureFixture[str]) -> None:
    machine = on_machine([Gpu(processes=[Proc(os.getpid())])])
    machine.error("nvmlDeviceGet*RunningProcesses*", 4)
    (gpu,) = json_of(capsys)["gpus"]
    assert gpu["processes"] is None
    assert gpu["problem"] == "processes: not allowed for this user"


def test_a_machine_without_a_driver_is_exit_4_and_valid_json(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([Gpu()]).unload_driver()
    assert main(["gpus", "--json"]) == 4
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"] == []
    assert "not loaded" in told["problem"]


def test_visible_shows_only_what_cuda_shows_with_its_cuda_index(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine([Gpu(), Gpu(), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    told = json_of(capsys, "--visible")
    assert [(gpu["cuda_index"], gpu["index"]) for gpu in told["gpus"]] == [(0, 2), (1, 0)]
    assert main(["gpus", "--visible"]) == 0
    assert "cuda:1" in capsys.readouterr().out


def test_a_lost_gpu_keeps_its_cuda_index(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine([Gpu(), Gpu(lost=True), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    main(["gpus", "--visible"])
    assert "cuda:1" in capsys.readouterr().out


BUSY = {"processes": [Proc(4100)]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "1\n3\n"),
        (["--count", "1"], "1\n"),
        (["--count", "2", "--format", "csv"], "1,3\n"),
        (["--format", "csv"], "1,3\n"),
    ],
)
def test_free_prints_what_cuda_visible_devices_understands(
    on_machine: OnMachine,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    on_machine([Gpu(processes=[Proc(4100)]), Gpu(), Gpu(processes=[Proc(4200)]), Gpu()])
    assert main(["gpus", "--free", *arguments]) == 0
    assert capsys.readouterr().out == expected


def test_too_few_free_gpus_is_the_answer_no_and_prints_no_list(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([Gpu(processes=[Proc(4100)]), Gpu()])
    assert main(["gpus", "--free", "--count", "2", "--format", "csv"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "1 of 2 wanted GPUs are free" in told.err


def test_a_gpu_that_nobody_could_look_at_makes_the_answer_uncertain(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = on_machine([Gpu()])
    machine.error("nvmlDeviceGet*RunningProcesses*", 4)
    assert main(["gpus", "--free"]) == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert "1 unknown" in told.err


def test_free_on_a_machine_that_cannot_be_read_is_exit_4(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([Gpu()]).unload_driver()
    assert main(["gpus", "--free"]) == 4
    assert capsys.readouterr().out == ""


def test_free_gpus_by_uuid(on_machine: OnMachine, capsys: pytest.CaptureFixture[str]) -> None:
    machine = on_machine([Gpu(), Gpu()])
    assert main(["gpus", "--free", "--format", "uuid"]) == 0
    assert capsys.readouterr().out == f"{machine.uuid(0)},{machine.uuid(1)}\n"


def test_two_slices_for_one_process_are_refused(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([Gpu(migs=[Mig(), Mig()])])
    assert main(["gpus", "--free", "--count", "2"]) == 1
    assert "one slice" in capsys.readouterr().err


def test_the_shell_line_of_the_help_works(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(processes=[Proc(4100)]), Gpu(), Gpu()])
    oomph = f"{sys.executable} -m oomph"
    line = f"CUDA_VISIBLE_DEVICES=$({oomph} gpus --free --count 2 --format csv) printenv"
    assert "CUDA_VISIBLE_DEVICES=1,2" in machine.run(["sh", "-c", line]).stdout.splitlines()


def test_the_catalogue_is_shown_whole_and_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", "--catalog"]) == 0
    assert capsys.readouterr().out.count("\n") > 73
    assert main(["gpus", "--catalog", "v100-16gb"]) == 0
    told = capsys.readouterr().out
    assert "900 GB/s" in told
    assert "gpuhunt: dstackai/gpuhunt" in told


def test_a_name_that_leaves_something_open_says_how_it_was_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["gpus", "--catalog", "a100"]) == 0
    assert "taken as 40 GB" in capsys.readouterr().out


def test_an_unknown_name_is_exit_2_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", "--catalog", "rtx 4095"]) == 2
    assert "rtx4090" in capsys.readouterr().err


def test_the_catalogue_in_json_has_sources(capsys: pytest.CaptureFixture[str]) -> None:
    models = json_of(capsys, "--catalog")["catalog"]
    assert len(models) >= 73
    assert all(model["sources"]["memory_bytes"] for model in models)


def test_an_emulated_machine_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert json_of(capsys, "--emulate", "8xa100-80gb")["emulated"] is True
    assert main(["gpus", "--emulate", "8xa100-80gb"]) == 0
    assert "neither the GPUs nor the processes exist" in capsys.readouterr().out


def test_torch_is_not_needed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    machine = NvmlMachine(tmp_path, [Gpu(), Gpu()])
    code = "import oomph; oomph.print_gpu_utilisation()"
    done = machine.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout.startswith("GPU 0 = cuda:0")
    assert done.stderr == ""


@pytest.mark.parametrize("variable", ["", "-1", "99", "0,0", "GPU-"])
def test_no_visible_gpu_is_the_answer_no_with_the_reason(
    on_machine: OnMachine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    on_machine([Gpu(), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert main(["gpus", "--visible"]) == 1
    assert f"CUDA_VISIBLE_DEVICES is {variable!r}" in capsys.readouterr().out


def test_a_machine_of_lost_gpus_is_exit_4(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([Gpu(lost=True), Gpu(lost=True)])
    assert main(["gpus"]) == 4
    assert capsys.readouterr().out.count("the GPU is lost") == 2


def test_the_answer_no_is_json_too(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([Gpu(processes=[Proc(4100)])])
    assert main(["gpus", "--free", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"] == []
    assert told["problem"] == "0 of 1 wanted GPUs are free"


def test_free_gpus_outside_an_allocation_come_with_a_warning(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine([Gpu(), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert main(["gpus", "--free"]) == 0
    assert "--visible" in capsys.readouterr().err


def test_an_emulated_machine_says_what_its_description_left_open(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["gpus", "--emulate", "2xa100"]) == 0
    assert "taken as 40 GB" in capsys.readouterr().out
