"""Looks for the live view, against the C-level NVML."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import OnMachine
from nvml.machine import GIB, Gpu, Mig, Proc

from oomph.records.machine import Look
from oomph.records.run import GpuSpan
from oomph.records.run_spans import merge_gpu_spans
from oomph.sensing.live import LiveLooks

Start = Callable[[], LiveLooks]


@pytest.fixture
def looking() -> Iterator[Start]:
    started: list[LiveLooks] = []

    def start() -> LiveLooks:
        announced = threading.Event()
        looks = LiveLooks(announced.set)
        started.append(looks)
        looks.start()
        announced.wait()
        return looks

    yield start
    for looks in started:
        looks.stop()


def until(looks: LiveLooks, is_so: Callable[[Look], bool]) -> Look:
    """The first look that is so."""
    while True:
        look = looks.take(even_without_spans=False)
        if look is not None and is_so(look):
            return look
        time.sleep(0.1)


def a_span(length_s: float, busy_ratio: float | None) -> GpuSpan:
    unknown: dict[str, Any] = dict.fromkeys(
        (
            *("used_bytes", "most_used_bytes", "run_bytes", "others_bytes", "num_others"),
            *("busy_ratio", "least_busy_ratio", "most_busy_ratio", "power_w", "temperature_c"),
            "throttled_ratio",
        )
    )
    figures = {**unknown, "busy_ratio": busy_ratio}
    return GpuSpan(gpu=0, began_s=10.0, ended_s=10.0 + length_s, **figures)


def test_the_first_look_has_everything_at_once(on_machine: OnMachine, looking: Start) -> None:
    on_machine([Gpu(util=40, processes=[Proc(os.getpid(), 3 * GIB)]), Gpu()])
    first = looking().first
    assert first is not None
    gpu = first.machine.gpus[0]
    assert (gpu.busy_ratio, gpu.used_bytes) == (0.4, 3 * GIB)
    assert [job.pid for job in first.jobs] == [os.getpid()]


def test_later_looks_are_of_the_time_since(on_machine: OnMachine, looking: Start) -> None:
    machine = on_machine([Gpu(util=40)])
    looks = looking()
    machine.gpus[0].util = 80
    machine.gpus[0].processes = [Proc(os.getpid(), 3 * GIB)]
    machine.write()
    look = until(looks, lambda look: look.machine.gpus[0].busy_ratio == 0.8)
    assert look.machine.driver_version == machine.driver
    look = until(looks, lambda look: bool(look.machine.gpus[0].processes))
    assert [job.pid for job in look.jobs] == [os.getpid()]


def test_where_no_span_has_ended_busy_is_unknown_and_not_that_of_before(
    on_machine: OnMachine, looking: Start
) -> None:
    on_machine([Gpu(util=40)])
    looks = looking()
    until(looks, lambda look: look.machine.gpus[0].busy_ratio == 0.4)
    assert looks.take(even_without_spans=False) is None
    look = looks.take(even_without_spans=True)
    assert look is not None
    assert look.machine.gpus[0].busy_ratio is None


def test_sm_activity_comes_with_the_gpus_that_have_it(
    on_machine: OnMachine, looking: Start
) -> None:
    machine = on_machine([Gpu(architecture=9, sm_active=37), Gpu()])
    look = until(looking(), lambda look: bool(look.sm_active_ratios))
    assert look.sm_active_ratios == {machine.uuid(0): 0.37}


def test_a_gpu_that_is_cut_into_slices_keeps_its_own_memory_in_later_looks(
    on_machine: OnMachine, looking: Start
) -> None:
    mine = Mig(processes=[Proc(os.getpid(), 3 * GIB)])
    on_machine([Gpu(total_bytes=40 * GIB, migs=[mine, Mig()])])
    looks = looking()
    assert looks.first is not None
    whole = looks.first.machine.gpus[0]
    (later,) = until(looks, lambda look: bool(look.machine.gpus[0].used_bytes)).machine.gpus
    assert later.mig_enabled
    assert (later.used_bytes, later.total_bytes) == (whole.used_bytes, 40 * GIB)
    assert [process.pid for process in later.processes or ()] == [os.getpid()]
    assert [len(part.processes or ()) for part in later.slices] == [1, 0]
    assert [part.index for part in later.slices] == [0, 1]


def test_what_cuda_shows_is_told_by_uuid_in_its_order(
    on_machine: OnMachine, looking: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = on_machine([Gpu(), Gpu(), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    first = looking().first
    assert first is not None
    assert first.visible == (machine.uuid(2), machine.uuid(0))


def test_a_gpu_that_is_lost_from_the_start_keeps_its_place(
    on_machine: OnMachine, looking: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = on_machine([Gpu(), Gpu(lost=True)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    first = looking().first
    assert first is not None
    assert first.visible == ("", machine.uuid(0))


def test_what_cuda_shows_stays_when_a_gpu_is_lost(
    on_machine: OnMachine, looking: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = on_machine([Gpu(), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    looks = looking()
    machine.gpus[0].lost = True
    machine.write()
    look = until(looks, lambda look: look.machine.gpus[0].problem is not None)
    assert look.visible == (machine.uuid(1), machine.uuid(0))


def test_a_machine_without_a_driver_has_a_first_look_that_says_so(
    on_machine: OnMachine, looking: Start
) -> None:
    on_machine([Gpu()]).unload_driver()
    first = looking().first
    assert first is not None
    assert not first.machine.is_readable


def test_a_mean_goes_by_the_length_of_the_spans_that_know_it() -> None:
    spans = [a_span(1.0, 1.0), a_span(3.0, 0.0), a_span(5.0, None)]
    assert merge_gpu_spans(spans).busy_ratio == 0.25
    assert merge_gpu_spans(spans[2:]).busy_ratio is None


def test_later_looks_have_each_processs_share_the_power_cap_and_the_host(
    on_machine: OnMachine, looking: Start
) -> None:
    own = os.getpid()
    on_machine([Gpu(util=40, processes=[Proc(own, 3 * GIB, sm_util=37)], power_limit_mw=250_000)])
    looks = looking()
    assert looks.first is not None
    assert looks.first.host is not None
    assert looks.first.host.num_cpus == os.cpu_count()

    def is_whole(look: Look) -> bool:
        (process,) = look.machine.gpus[0].processes or (None,)
        return process is not None and None not in (process.sm_ratio, process.cpu_cores)

    look = until(looks, is_whole)
    (process,) = look.machine.gpus[0].processes or ()
    assert process.sm_ratio == 0.37
    assert look.machine.gpus[0].power_limit_w == 250
    assert look.host is not None
    assert look.host.used_bytes


def test_a_process_that_computes_nothing_has_a_share_of_zero_and_a_slice_an_unknown_one(
    on_machine: OnMachine, looking: Start
) -> None:
    on_machine([Gpu(processes=[Proc(os.getpid(), GIB)]), Gpu(migs=[Mig(processes=[Proc(1, GIB)])])])
    looks = looking()

    def shares(look: Look) -> list[float | None]:
        return [one.sm_ratio for gpu in look.machine.gpus for one in gpu.processes or ()]

    look = until(looks, lambda look: shares(look)[:1] == [0.0])
    assert shares(look) == [0.0, None]
