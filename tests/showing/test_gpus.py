"""The table of `oomph gpus`, as a person sees it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.records.machine import Device, Machine, Process
from oomph.sensing.emulated import emulated_machine
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
    assert "memory unknown" in text
    assert "kernel-active    ?" in text
    assert "not allowed" in text


def test_memory_taken_with_no_process_in_sight_is_not_shown_as_nobodys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(Machine(gpus=(replace(EIGHT.gpus[3], used_bytes=40 * GIB),)), capsys)
    assert "nobody" not in text
    assert "another container?" in text


def test_a_machine_that_could_not_be_read_does_not_claim_to_have_no_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shown(Machine(gpus=(), problem="no driver"), capsys) == "no driver\n"


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
    assert max(len(line) for line in lines if "A100" in line or "python" in line) <= columns


@given(
    used=st.integers(min_value=0, max_value=100 * GIB),
    mine=st.integers(min_value=0, max_value=100 * GIB),
    width=st.integers(min_value=1, max_value=60),
)
def test_the_bar_always_has_its_width(used: int, mine: int, width: int) -> None:
    gpu: Device = EIGHT.gpus[0]
    assert gpu.processes
    process = replace(gpu.processes[0], used_bytes=mine)
    cells = gpus._cells(replace(gpu, used_bytes=used, processes=(process,)), width)
    assert sum(cells.values()) == width
    assert min(cells.values()) >= 0
