"""A run is followed step by step: recorded first, timed then, and described."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from conftest import OnMachine
from hypothesis import given
from hypothesis import strategies as st
from nvml.machine import GIB, MIB, Gpu, Proc
from torch import nn

from oomph.errors import Unreadable
from oomph.pretending.emulated import EmulatedGpu
from oomph.records.verification import Measured, Measurement, OnGpu, Recorded, Site
from oomph.records.workload import Variant
from oomph.rehearsing.self_test import tiny_workload
from oomph.sensing.held import held
from oomph.verifying import measuring
from oomph.verifying.children import driver_nodes, measure_apart, with_device_bytes
from oomph.verifying.measuring import Follower, measure_workload, recorded_of

EMULATED = OnGpu(emulated_bytes=GIB)
VARIANT = Variant(micro_batch=4)


# ---- a history -> the requests ---------------------------------------------------------------


def alloc(address: int, size: int, at_us: int, line: int = 1) -> dict[str, Any]:
    frames = [
        {"filename": torch.__file__, "line": 5, "name": "f"},
        {"filename": "/home/bob/train.py", "line": line, "name": "g"},
    ]
    action = {"action": "alloc", "addr": address, "size": size, "time_us": at_us}
    return {**action, "frames": frames}


def free(address: int, at_us: int) -> list[dict[str, Any]]:
    return [
        {"action": action, "addr": address, "size": 1, "time_us": at_us}
        for action in ("free_requested", "free_completed")
    ]


def mark(at_us: int) -> dict[str, Any]:
    return {"action": "snapshot", "addr": 0, "size": 0, "time_us": at_us}


def test_requests_and_frees_are_numbered_and_the_line_is_the_users() -> None:
    events = [alloc(1, 10, 1, 7), mark(2), alloc(2, 20, 3), *free(1, 4), alloc(1, 30, 5), mark(6)]
    found = recorded_of(events, [(2, True), (6, True)])
    assert found.sizes == (10, 20, 30)
    assert found.lines[0] == "train.py:7"
    assert found.events == (1, 2, -1, 3)
    assert found.marks == (1, 4)
    assert found.is_whole


def test_of_steps_that_the_loss_scaler_skipped_only_what_stays_counts() -> None:
    events = [
        *(mark(1), alloc(1, 10, 2), alloc(8, 80, 2), mark(3)),
        *(alloc(2, 20, 4), *free(1, 5), mark(6)),
    ]
    found = recorded_of(events, [(1, True), (3, False), (6, True)])
    assert found.sizes == (80, 20)
    assert found.events == (1, 2)  # the block that the skipped step dropped is not freed, either
    assert found.marks == (0, 2)


def test_a_snapshot_that_the_script_takes_is_no_mark() -> None:
    events = [mark(10), alloc(1, 10, 20), mark(25), alloc(2, 20, 30), mark(40), alloc(3, 5, 50)]
    found = recorded_of(events, [(10, True), (40, True)])
    assert found.sizes == (10, 20)
    assert found.marks == (0, 2)


def test_a_history_that_lost_its_marks_is_not_whole() -> None:
    assert not recorded_of([alloc(1, 10, 1)], [(0, True), (2, True)]).is_whole


@given(
    st.lists(st.sampled_from(["alloc", "free", "mark", "skip"]), max_size=40),
    st.randoms(use_true_random=False),
)
def test_whatever_was_skipped_only_live_blocks_are_freed(what: list[str], random: Random) -> None:
    events, marks, live = [mark(0)], [(0, True)], list[int]()
    for at, action in enumerate(what, 1):
        if action == "alloc":
            live.append(at)
            events.append(alloc(at, at, at))
        elif action == "free" and live:
            events += free(live.pop(random.randrange(len(live))), at)
        elif action in ("mark", "skip"):
            events.append(mark(at))
            marks.append((at, action == "mark"))
    found = recorded_of(events, marks)
    held: set[int] = set()
    for event in found.events:
        assert (event > 0) == (abs(event) not in held)
        held ^= {abs(event)}
    assert len(found.sizes) == sum(event > 0 for event in found.events)
    assert len(found.marks) == sum(is_made for _, is_made in marks)
    assert found.marks == tuple(sorted(found.marks))


# ---- following a run -------------------------------------------------------------------------


def trained(follower: Follower, most: int = 100) -> int:
    """Train until the follower has enough; return the number of steps."""
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follower.built()
    for step in range(most):
        optimizer.zero_grad()
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        follower.stepped()
        if follower.is_done:
            return step + 1
    return most


def test_on_a_gpu_some_steps_are_timed_after_those_that_are_recorded() -> None:
    with EmulatedGpu(GIB, None, None):
        follower = Follower(OnGpu(uuid="GPU-1"))  # as if it were real
        follower.begin()
        num_steps = trained(follower)
        found = follower.answer()
    assert found.measured.num_timed == 20
    assert num_steps == found.measured.num_steps == 2 + 1 + 20
    assert found.measured.step_s is not None
    assert found.measured.step_s > 0
    assert len(found.recorded.marks) == 3


def test_a_batch_is_made_once_for_all_steps_that_are_timed() -> None:
    made: list[int] = []
    workload = tiny_workload()

    def batch(num_examples: int) -> Any:
        made.append(num_examples)
        return workload.batch(num_examples)

    variant = Variant(micro_batch=4, accumulation=2)
    measure_workload(replace(workload, batch=batch), variant, EMULATED)
    assert made == [4] * (2 * 2 + 1)  # two recorded steps of two, and one more


@pytest.fixture
def scaled_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Measurement]:
    """A run in fp16 whose loss scaler begins with this scale."""

    def run(scale: float) -> Measurement:
        scaler = torch.amp.GradScaler
        monkeypatch.setattr(measuring, "_scaler", lambda: scaler("cuda", init_scale=scale))
        return measure_workload(tiny_workload(), Variant(micro_batch=4, precision="fp16"), EMULATED)

    return run


def test_steps_that_a_loss_scaler_skips_are_counted_and_left_out(
    scaled_by: Callable[[float], Measurement],
) -> None:
    plain, skipping = scaled_by(1.0), scaled_by(2.0**28)
    assert "the loss scaler skipped" not in plain.measured.notes[0]
    assert "the loss scaler skipped" in skipping.measured.notes[0]
    assert skipping.measured.num_steps == plain.measured.num_steps
    assert len(skipping.recorded.marks) == 3
    assert sorted(skipping.recorded.sizes) == sorted(plain.recorded.sizes)


def test_a_run_of_skipped_steps_alone_is_not_compared_request_by_request(
    scaled_by: Callable[[float], Measurement],
) -> None:
    found = scaled_by(2.0**126)
    assert found.measured.num_steps == 0
    assert not found.recorded.is_whole
    assert "the loss scaler skipped 12 of the first steps" in found.measured.notes[0]


def test_on_an_emulated_gpu_no_time_is_known() -> None:
    found = measure_workload(tiny_workload(), VARIANT, EMULATED)
    assert found.measured.step_s is None
    assert found.measured.num_steps == 3
    assert found.site.is_emulated
    assert found.site.num_sms is None
    assert not found.measured.ran_out
    assert (found.measured.allocated_bytes or 0) <= (found.measured.reserved_bytes or 0)


def test_running_out_of_memory_is_an_answer() -> None:
    small = OnGpu(emulated_bytes=4 * MIB)
    assert measure_workload(tiny_workload(), VARIANT, small).measured.ran_out


def test_a_run_leaves_this_process_as_it_was() -> None:
    before = torch.optim.Optimizer.__init__
    measure_apart(tiny_workload(), VARIANT, EMULATED)
    assert torch.optim.Optimizer.__init__ is before
    assert not torch.cuda.is_available()


def test_a_torch_without_cuda_is_one_clear_error() -> None:
    with pytest.raises(Unreadable, match="cannot use a GPU"):
        measure_apart(tiny_workload(), VARIANT, OnGpu())


# ---- what the driver says --------------------------------------------------------------------


def measurement(reserved_bytes: int = 2 * GIB) -> Measurement:
    """A run whose allocator has given a GiB back since its peak."""
    site = Site(
        gpu_name="A100",
        is_emulated=False,
        total_bytes=80 * GIB,
        compute_capability=(8, 0),
        num_sms=108,
        driver_version="550",
        torch_version="2",
        cuda_version="12",
        cudnn_version="9",
        python_version="3",
        oomph_version="0",
        allocator="",
    )
    measured = Measured(
        allocated_bytes=GIB,
        reserved_bytes=reserved_bytes + GIB,
        device_bytes=None,
        step_s=0.1,
        num_steps=3,
        num_timed=1,
    )
    recorded = Recorded(sizes=(), lines=(), events=(), marks=())
    return Measurement(
        site=site, measured=measured, recorded=recorded, reserved_bytes=reserved_bytes
    )


@pytest.fixture
def after(on_machine: OnMachine) -> Callable[[list[Proc], list[Proc]], Measured]:
    """The figures of a run: who was on the GPU before it, and who is at its end."""

    def run(before: list[Proc], now: list[Proc]) -> Measured:
        def gpu(processes: list[Proc]) -> Gpu:
            used = sum(each.used_bytes or 0 for each in processes)
            return Gpu(used_bytes=used, processes=processes)

        machine = on_machine([gpu(before)])
        uuid = machine.uuid(0)
        earlier = held(uuid)
        machine.gpus[0].processes = now
        machine.gpus[0].used_bytes = gpu(now).used_bytes
        machine.write()
        return with_device_bytes(measurement(), OnGpu(uuid=uuid), earlier, os.getpid()).measured

    return run


def test_the_drivers_figure_is_moved_to_the_allocators_peak(
    after: Callable[[list[Proc], list[Proc]], Measured],
) -> None:
    found = after([], [Proc(os.getpid(), 2 * GIB + 500 * MIB)])
    assert found.device_bytes == 3 * GIB + 500 * MIB
    assert found.notes == ()


def test_another_process_is_named_but_does_not_count(
    after: Callable[[list[Proc], list[Proc]], Measured],
) -> None:
    other = Proc(os.getppid(), 7 * GIB)
    found = after([other], [other, Proc(os.getpid(), 2 * GIB + 500 * MIB)])
    assert found.device_bytes == 3 * GIB + 500 * MIB
    assert "1 other processes are on this GPU: the step time may be theirs" in found.notes[0]


def test_with_others_and_a_driver_that_hides_figures_the_device_is_unknown(
    after: Callable[[list[Proc], list[Proc]], Measured],
) -> None:
    other = Proc(os.getppid(), None)
    found = after([other], [other, Proc(os.getpid(), None)])
    assert found.device_bytes is None
    assert "the device's memory is not compared" in found.notes[0]


def test_the_nodes_of_the_driver_are_found_by_name(tmp_path: Path) -> None:
    assert driver_nodes(tmp_path) == ()
    (tmp_path / "nvidia-file").touch()  # not a device
    (tmp_path / "nvidia0").symlink_to("/dev/null")
    (tmp_path / "nvidia-caps").mkdir()
    (tmp_path / "nvidia-caps" / "nvidia-cap1").symlink_to("/dev/zero")
    (tmp_path / "sda").symlink_to("/dev/null")
    assert driver_nodes(tmp_path) == ("nvidia-caps/nvidia-cap1", "nvidia0")


# ---- on a real GPU ---------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_real_gpu_is_measured_with_times_and_the_drivers_figure() -> None:
    from oomph.verifying.verifier import gpu_here

    found = measure_apart(tiny_workload(), VARIANT, gpu_here(None).gpu)
    assert found.measured.num_timed >= 5
    assert found.measured.step_s is not None
    assert found.recorded.is_whole
    assert len(found.recorded.marks) == 3
    assert (found.measured.device_bytes or 0) > (found.measured.reserved_bytes or 0)
