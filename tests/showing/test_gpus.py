"""The table of `oomph gpus`, as a person sees it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from oomph.records.machine import Machine, Process
from oomph.sensing.devices import emulated_machine
from oomph.showing import gpus
from oomph.units import GIB

EIGHT = emulated_machine("8xa100-80gb", now=0)


def shown(machine: Machine, capsys: pytest.CaptureFixture[str]) -> str:
    gpus.print_machine(machine, now=0)
    return capsys.readouterr().out


def with_process(**changes: object) -> Machine:
    gpu = EIGHT.gpus[0]
    assert gpu.processes
    process: Process = replace(gpu.processes[0], **changes)  # type: ignore[arg-type]
    return Machine(gpus=(replace(gpu, processes=(process,)),))


def test_every_gpu_and_everybody_on_it_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(EIGHT, capsys)
    assert text.count("A100 SXM4 80GB") == 8
    assert text.count("nobody") == 2
    assert "alice" in text
    assert "python finetune.py --lora-rank 16" in text
    assert "emulated" in text


def test_a_gpu_nobody_could_look_at_is_not_shown_as_nobodys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu = replace(
        EIGHT.gpus[3], processes=None, used_bytes=None, busy_ratio=None, problem="not allowed"
    )
    text = shown(Machine(gpus=(gpu,)), capsys)
    assert "nobody" not in text
    assert "could not be read" in text
    assert "unknown" in text
    assert "free: " not in text
    assert "not allowed" in text


def test_memory_taken_with_no_process_in_sight_is_not_shown_as_nobodys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(Machine(gpus=(replace(EIGHT.gpus[3], used_bytes=40 * GIB),)), capsys)
    assert "no process visible" in text
    assert "free: " not in text


def test_a_machine_that_could_not_be_read_does_not_claim_to_have_no_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shown(Machine(gpus=(), problem="no driver"), capsys) == "no driver\n"


def test_the_figures_line_up_and_the_free_ones_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(EIGHT, capsys).splitlines()
    ends = {line.index("%") for line in lines if "SXM4" in line}
    assert len(ends) == 1
    assert "free: 3, 5" in lines


def test_slices_are_told_apart_by_their_profile(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = EIGHT.gpus[3]
    parts = tuple(
        replace(gpu, index=i, name=f"NVIDIA A100 MIG {i + 1}g.10gb", is_slice=True) for i in (0, 3)
    )
    text = shown(Machine(gpus=(replace(gpu, mig_enabled=True, slices=parts),)), capsys)
    assert re.search(r"^ *3\.0  MIG 1g\.10gb ", text, re.MULTILINE)
    assert re.search(r"^ *3\.3  MIG 4g\.10gb ", text, re.MULTILINE)


def test_the_name_of_a_gpu_cannot_write_to_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu = replace(EIGHT.gpus[0], name="A100 \x1b[2J", problem="bad \x1b[2J")
    assert "\x1b" not in shown(Machine(gpus=(gpu,), problem="worse \x1b[2J"), capsys)


def test_in_a_file_nothing_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    command = "python train.py " + "x" * 500
    assert command in shown(with_process(command=command), capsys)


def test_a_command_line_cannot_write_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(with_process(command="python \x1b[2J\r\n[red]evil[/red] \x9b5A"), capsys)
    assert "\x1b" not in text
    assert "\x9b" not in text
    assert "python ?[2J??[red]evil[/red] ?5A" in text


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 99, 100, 200])
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown(EIGHT, capsys)).splitlines()
    assert max(len(line) for line in lines) <= columns
    if columns >= 30:
        assert any("71%" in line or "56/79" in line for line in lines)  # always there
