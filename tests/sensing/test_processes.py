"""The process list is read rightly in every form that drivers have, or is called unreadable."""

from __future__ import annotations

import struct

import pytest
from conftest import OnMachine
from hypothesis import given
from hypothesis import strategies as st
from nvml.machine import GIB, Gpu, NvmlMachine, Proc

from oomph.records.machine import Process
from oomph.sensing.backends import Backend, ListedProcess, Memory, Refusal
from oomph.sensing.backends.nvml import INSUFFICIENT_SIZE, NO_PERMISSION, decode
from oomph.sensing.backends.session import with_backend
from oomph.sensing.devices import Problems, read_processes

PIDS = (4100, 4200, 4300)


def busy_gpu() -> Gpu:
    return Gpu(processes=[Proc(pid, used_bytes=(i + 1) * GIB) for i, pid in enumerate(PIDS)])


def read() -> tuple[Process, ...] | str:
    """The processes of the first GPU, or why they cannot be read."""

    def work(backend: Backend) -> tuple[Process, ...] | str:
        gpu, problems = backend.gpu(0), Problems()
        assert not isinstance(gpu, Refusal)
        found = read_processes(gpu, Memory(80 * GIB, 0, "nvml-v2"), problems)
        return str(problems.in_words()) if found is None else found

    return with_backend(work)


def pids(listed: tuple[Process | ListedProcess, ...] | str) -> dict[int, int | None]:
    assert not isinstance(listed, str), listed
    return {process.pid: process.used_bytes for process in listed}


EXPECTED = {4100: 1 * GIB, 4200: 2 * GIB, 4300: 3 * GIB}


@pytest.mark.parametrize("clear", [False, True], ids=["", "buffer cleared first"])
@pytest.mark.parametrize("padding", [True, False], ids=["", "padding left alone"])
@pytest.mark.parametrize("stride", [16, 24, 32])
def test_the_size_of_an_entry_is_found_out(
    on_machine: OnMachine, stride: int, padding: bool, clear: bool
) -> None:
    on_machine([busy_gpu()], process_stride=stride, process_padding=padding, process_clear=clear)
    assert pids(read()) == EXPECTED


@pytest.mark.parametrize("stride", [16, 24, 32])
@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 400])
def test_any_number_of_processes_is_listed(on_machine: OnMachine, stride: int, count: int) -> None:
    many = [Proc(1000 + i, used_bytes=i * 2**20) for i in range(count)]
    on_machine([Gpu(processes=many)], process_stride=stride)
    assert pids(read()) == {process.pid: process.used_bytes for process in many}


def test_one_call_reads_a_list_that_is_not_huge(on_machine: OnMachine) -> None:
    machine = on_machine([busy_gpu()])
    read()
    assert len(machine.calls("*RunningProcesses*")) == 2  # compute and graphics


@pytest.mark.parametrize(
    "missing",
    [["*RunningProcesses_v3"], ["*RunningProcesses_v3", "*RunningProcesses_v2"]],
    ids=["no v3", "neither v3 nor v2"],
)
def test_an_older_driver_is_asked_by_its_older_function(
    on_machine: OnMachine, missing: list[str]
) -> None:
    on_machine([busy_gpu()], missing=missing)
    assert pids(read()) == EXPECTED


def test_a_driver_without_any_process_list_is_not_an_idle_gpu(on_machine: OnMachine) -> None:
    on_machine([busy_gpu()], missing=["nvmlDeviceGetComputeRunningProcesses*"])
    assert isinstance(read(), str)


def test_a_list_that_grows_while_it_is_read_is_read_again(on_machine: OnMachine) -> None:
    machine = on_machine([busy_gpu()])
    machine.error("nvmlDeviceGetComputeRunningProcesses_v3", INSUFFICIENT_SIZE, times=3)
    assert pids(read()) == EXPECTED


def test_a_list_that_keeps_growing_is_a_lost_race_and_not_an_idle_gpu(
    on_machine: OnMachine,
) -> None:
    machine = on_machine([busy_gpu()])
    machine.error("nvmlDeviceGetComputeRunningProcesses_v3", INSUFFICIENT_SIZE)
    refusal = read()
    assert isinstance(refusal, str)
    assert "race" in refusal


def test_a_list_that_one_may_not_see_is_not_an_idle_gpu(on_machine: OnMachine) -> None:
    machine = on_machine([busy_gpu()])
    machine.error("nvmlDeviceGetComputeRunningProcesses_v3", NO_PERMISSION)
    refusal = read()
    assert isinstance(refusal, str)
    assert "not allowed" in refusal


def test_a_graphics_list_that_one_may_not_see_hides_somebody(on_machine: OnMachine) -> None:
    machine = on_machine([busy_gpu()])
    machine.error("nvmlDeviceGetGraphicsRunningProcesses_v3", NO_PERMISSION)
    assert isinstance(read(), str)


def test_memory_that_the_driver_does_not_tell_is_unknown(on_machine: OnMachine) -> None:
    on_machine([Gpu(processes=[Proc(4100, used_bytes=None), Proc(4200, used_bytes=GIB)])])
    assert pids(read()) == {4100: None, 4200: GIB}


def test_a_process_that_computes_and_draws_is_listed_once(on_machine: OnMachine) -> None:
    on_machine([Gpu(processes=[Proc(4100, kind="CG"), Proc(4200, kind="G")])])
    listed = read()
    assert not isinstance(listed, str)
    assert {(p.pid, p.kind) for p in listed} == {(4100, "compute"), (4200, "graphics")}


entries = st.lists(
    st.tuples(
        st.integers(min_value=1, max_value=1 << 22),
        st.one_of(st.just(2**64 - 1), st.integers(min_value=0, max_value=80 * GIB)),
    ),
    unique_by=lambda entry: entry[0],
    max_size=40,
)


@given(entries=entries, stride=st.sampled_from([16, 24, 32]))
def test_whatever_a_driver_lists_is_decoded_or_refused_never_invented(
    entries: list[tuple[int, int]], stride: int
) -> None:
    # Instance ids as drivers write them: none.
    tail = {16: b"", 24: b"\xff" * 8, 32: b"\xff" * 8 + b"\0" * 8}[stride]
    written = b"".join(struct.pack("=I4xQ", *entry) + tail for entry in entries)
    raw = written.ljust(max(40, len(entries)) * 32, b"\xa5")
    decoded = decode(raw, len(entries), "compute", 80 * GIB)
    assert decoded is not None
    assert pids(decoded) == {
        pid: None if memory == 2**64 - 1 else memory for pid, memory in entries
    }


def test_entries_that_make_no_sense_in_any_form_are_called_unreadable() -> None:
    raw = struct.pack("=I4xQ", 2**31, 5) * 8
    assert decode(raw, 3, "compute", 80 * GIB) is None


def test_an_entry_above_the_cards_memory_loses_its_figure_and_not_the_list(
    on_machine: OnMachine,
) -> None:
    machine = on_machine([Gpu(processes=[Proc(4100, GIB), Proc(4200, 81 * GIB)])])
    assert pids(read()) == {4100: GIB, 4200: None}
    machine.gpus[0].processes[1].used_bytes = 10 * GIB
    machine.write()
    assert pids(read()) == {4100: GIB, 4200: 10 * GIB}


def test_the_machine_can_gain_and_lose_processes_while_we_watch(on_machine: OnMachine) -> None:
    machine: NvmlMachine = on_machine([busy_gpu()])
    assert len(pids(read())) == 3
    machine.gpus[0].processes.pop()
    machine.write()
    assert len(pids(read())) == 2
