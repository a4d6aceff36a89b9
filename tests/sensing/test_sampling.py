"""The sampler against the C-level NVML: bursts, spikes, what is lost and what hangs."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from conftest import OnMachine
from nvml.machine import GIB, NA, Gpu, Mig, NvmlMachine, Proc

from oomph.records.run import Event, GpuSpan
from oomph.sensing import sampling
from oomph.sensing.backends import BusySamples, ListedProcess
from oomph.sensing.backends.nvml import NvmlMeter
from oomph.sensing.sampling import Sampler
from oomph.sensing.watched import Occupants, Shares

DRIVER_NOT_LOADED, NOT_SUPPORTED, NO_PERMISSION = 9, 3, 4
HALF_AN_HOUR_US = 1_800_000_000  # until the test takes it back


class Watching:
    """A sampler that runs, and everything that was taken from it."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.spans: list[GpuSpan] = []
        self.events: list[Event] = []
        sampler.start()

    def take(self) -> None:
        taken = self.sampler.take()
        self.spans += taken.spans
        self.events += taken.events

    def until(self, is_so: Callable[[], bool]) -> None:
        """Take once a second, as the diary does, until something has happened."""
        while True:
            self.take()
            if is_so():
                return
            time.sleep(0.3)

    def spans_of(self, gpu: int = 0) -> list[GpuSpan]:
        return [span for span in self.spans if span.gpu == gpu]

    def until_spans(self, count: int, gpu: int = 0) -> list[GpuSpan]:
        self.until(lambda: len(self.spans_of(gpu)) >= count)
        return self.spans_of(gpu)

    def kinds(self) -> list[tuple[str, int | None]]:
        return [(event.kind, event.gpu) for event in self.events]

    def stop(self, *pids: int) -> None:
        self.sampler.stop(frozenset(pids), timeout_s=20)
        self.take()


@pytest.fixture
def watching() -> Iterator[Callable[..., Watching]]:
    started: list[Watching] = []

    def start(which: sampling.Which = "visible", *, watches_processes: bool = False) -> Watching:
        started.append(Watching(Sampler(which, watches_processes=watches_processes)))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def mean_busy(spans: list[GpuSpan]) -> float:
    known = [span for span in spans if span.busy_ratio is not None]
    busy_s = sum((span.busy_ratio or 0.0) * (span.ended_s - span.began_s) for span in known)
    return busy_s / sum(span.ended_s - span.began_s for span in known)


def test_bursts_of_a_tenth_of_a_second_are_seen_with_their_true_share(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    machine = on_machine([Gpu()], epoch_ns=time.monotonic_ns())
    machine.series(0, "util", [100] + [0] * 9, step_ms=100)
    seen = watching()
    seen.until_spans(10)
    spans = seen.spans_of()[:10]  # as many whole periods as spans
    assert mean_busy(spans) == pytest.approx(0.10, abs=0.015)
    assert max(span.most_busy_ratio or 0 for span in spans) > 0.3
    assert min(span.least_busy_ratio or 0 for span in spans) == 0
    assert seen.sampler.gpus()[0].busy_source == "buffered"


def test_spans_follow_each_other_without_a_gap(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    on_machine([Gpu(util=50)])
    seen = watching()
    spans = seen.until_spans(4)
    for before, after in itertools.pairwise(spans):
        assert after.began_s == before.ended_s
        assert after.busy_ratio == 0.5


def test_who_asks_every_five_seconds_has_the_figures_of_each_second_all_the_same(
    on_machine: OnMachine,
) -> None:
    machine = on_machine([Gpu()], epoch_ns=time.monotonic_ns())
    machine.series(0, "util", [100] * 20 + [0] * 20, step_ms=100)  # two seconds each
    seen = Watching(Sampler(look_s=1.0))
    seen.until_spans(6)  # the first few are asked for each second
    machine.clear_calls()
    spans = seen.until_spans(20)[5:]
    seen.stop()
    for before, after in itertools.pairwise(spans):
        assert after.began_s == before.ended_s
    assert {span.busy_ratio for span in spans} >= {0.0, 1.0}
    assert mean_busy(spans) == pytest.approx(0.5, abs=0.15)
    assert any(span.used_bytes is not None for span in spans)
    looks = machine.calls("nvmlDeviceGetMemoryInfo_v2")
    assert len(machine.calls("nvmlDeviceGetSamples")) <= len(looks) // sampling.LOOKS_PER_TURN + 2
    assert seen.sampler.gpus()[0].looks_apart_s == 1.0


def test_a_driver_without_a_sample_buffer_is_polled_and_labelled_so(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    machine = on_machine([Gpu(util=40)])
    machine.error("nvmlDeviceGetSamples", NOT_SUPPORTED)
    seen = watching()
    spans = seen.until_spans(2)
    assert spans[-1].busy_ratio == 0.4
    assert seen.sampler.gpus()[0].busy_source == "polled"


@pytest.mark.parametrize("watches_processes", [False, True])
def test_at_most_ten_calls_a_second_are_made_for_a_gpu(
    on_machine: OnMachine, watching: Callable[..., Watching], watches_processes: bool
) -> None:
    machine = on_machine([Gpu(), Gpu(architecture=9, sm_active=30)])
    seen = watching(watches_processes=watches_processes)
    seen.until_spans(1, gpu=1)
    machine.clear_calls()
    began_s = seen.spans_of(1)[-1].ended_s
    seen.until_spans(len(seen.spans_of(1)) + 4, gpu=1)
    calls = machine.calls()
    counts = Counter(call.gpu for call in calls)
    turns = Counter(call.gpu for call in calls if call.function == "nvmlDeviceGetSamples")
    duration_s = seen.sampler.clock() - began_s
    # Looks at both ends of the stretch may be counted with it.
    for gpu in (0, 1):
        assert counts[gpu] <= 10 * (duration_s + 1)
        assert counts[gpu] >= 8 * (turns[gpu] - 1) > 0


def test_power_is_the_mean_by_the_energy_counter_not_a_moment(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    machine = on_machine([Gpu(power_mw=9_000)], epoch_ns=time.monotonic_ns())
    machine.rate(0, "energy_mj", per_second=250_000)
    machine.rate(0, "pcie_rx_bytes", per_second=1_000_000)
    spans = watching().until_spans(3)
    for span in spans[1:]:
        assert span.power_w == pytest.approx(250, rel=0.05)
    assert sum(span.received_bytes or 0 for span in spans) > 1_000_000


def test_a_card_without_an_energy_counter_tells_the_power_of_a_moment(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    on_machine([Gpu(energy_mj=NA, power_mw=80_000)])
    assert watching().until_spans(1)[0].power_w == 80.0


@pytest.mark.parametrize(("power_mw", "power_w"), [(80_000, 80.0), (NA, None)])
def test_an_energy_counter_that_stands_still_is_no_power_of_zero(
    on_machine: OnMachine,
    watching: Callable[..., Watching],
    power_mw: Any,
    power_w: float | None,
) -> None:
    on_machine([Gpu(energy_mj=7_000_000, power_mw=power_mw)])
    assert {span.power_w for span in watching().until_spans(2)} == {power_w}


def test_what_goes_over_pcie_is_counted_both_ways_beside_what_the_link_carries(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    machine = on_machine(
        [Gpu(max_pcie_generation=4, max_pcie_width=16)], epoch_ns=time.monotonic_ns()
    )
    machine.rate(0, "pcie_tx_bytes", per_second=2_000_000)
    machine.rate(0, "pcie_rx_bytes", per_second=1_000_000)
    watched = watching()
    spans = watched.until_spans(3)[1:]
    received = sum(span.received_bytes or 0 for span in spans)
    assert sum(span.sent_bytes or 0 for span in spans) == pytest.approx(2 * received, rel=0.1)
    assert received > 1_000_000
    assert watched.sampler.gpus()[0].link_bytes_per_s == pytest.approx(31.5e9, rel=0.01)


def test_the_last_span_does_not_end_before_it_begins(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's newest sample can lie ahead of our clock, and the end come right after."""
    on_machine([Gpu()])
    times = [0.0]
    sampler = Sampler(clock=lambda: times[-1])
    sampler.open()
    sampler.look(ends_turn=False)
    fetched = iter([BusySamples([(1.3, 50)], 1.3), BusySamples([], None)])
    monkeypatch.setattr(NvmlMeter, "busy_samples", lambda _: next(fetched))
    for now_s in (1.0, 1.1):
        times.append(now_s)
        sampler.look(ends_turn=True)
    spans = sampler.take().spans
    assert [span.began_s for span in spans] == [0.0, 1.3]
    assert all(span.began_s <= span.ended_s for span in spans)


def test_gpm_tells_how_many_multiprocessors_worked_on_hopper_and_not_before(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    on_machine([Gpu(architecture=9, sm_active=37, dram_active=62), Gpu(sm_active=37)])
    seen = watching()
    seen.until(lambda: any(span.sm_active_ratio for span in seen.spans))
    hopper = [span for span in seen.spans_of(0) if span.sm_active_ratio is not None]
    assert (hopper[-1].sm_active_ratio, hopper[-1].memory_active_ratio) == (0.37, 0.62)
    assert all(span.sm_active_ratio is None for span in seen.spans_of(1))


@pytest.mark.parametrize(
    ("reasons", "causes"),
    [(0x0, ()), (0x1, ()), (0x4, ("power",)), (0x48, ("heat",)), (0x8, ("hardware",))],
)
def test_clocks_that_are_held_down_are_told_with_their_cause(
    on_machine: OnMachine,
    watching: Callable[..., Watching],
    reasons: int,
    causes: tuple[str, ...],
) -> None:
    on_machine([Gpu(event_reasons=reasons)])
    span = watching().until_spans(1)[0]
    assert span.throttled_by == causes
    assert span.throttled_ratio == float(bool(causes))


def test_memory_is_told_by_whose_it_is_and_a_neighbour_is_announced_once(
    on_machine: OnMachine, watching: Callable[..., Watching], start_process: Callable[..., int]
) -> None:
    stranger = start_process(start_new_session=True, env={})
    machine = on_machine([Gpu(processes=[Proc(os.getpid(), 5 * GIB)])])
    seen = watching()
    assert seen.until_spans(1)[0].run_bytes == 5 * GIB
    # Only a process that is not of this one's tree is a neighbour: pid 1 is not.
    machine.gpus[0].processes += [Proc(1, 2 * GIB), Proc(stranger, GIB)]
    machine.write()
    seen.until(lambda: any(span.num_others for span in seen.spans))
    seen.until_spans(len(seen.spans_of()) + 2)
    last = seen.spans[-1]
    assert (last.run_bytes, last.others_bytes, last.num_others) == (6 * GIB, 2 * GIB, 1)
    assert seen.kinds() == [("neighbour", 0)]
    assert seen.sampler.gpus()[0].is_used


def test_a_spike_between_two_looks_is_missed_by_polling_and_known_to_accounting(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    mine = Proc(os.getpid(), 20 * GIB, peak_bytes=76 * GIB)
    on_machine([Gpu(processes=[mine], accounting_mode=1), Gpu()])
    seen = watching()
    seen.until_spans(2)
    seen.stop()
    assert {span.most_used_bytes for span in seen.spans_of(0)} == {20 * GIB}
    peaks = seen.sampler.peaks()
    assert [(p.source, p.gpu, p.pid, p.used_bytes) for p in peaks] == [
        ("accounting", 0, os.getpid(), 76 * GIB)
    ]


def test_accounting_knows_a_process_that_has_ended_and_nobody_elses(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    ended, foreign = Proc(4001, kind="-", peak_bytes=9 * GIB), Proc(4002, kind="-", peak_bytes=GIB)
    on_machine([Gpu(processes=[ended, foreign], accounting_mode=1)])
    seen = watching()
    seen.until_spans(1)
    seen.stop(4001)
    assert [(p.pid, p.used_bytes) for p in seen.sampler.peaks()] == [(4001, 9 * GIB)]


def test_without_accounting_there_is_no_exact_peak(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    on_machine([Gpu(processes=[Proc(os.getpid(), 20 * GIB, peak_bytes=76 * GIB)])])
    seen = watching()
    seen.until_spans(1)
    seen.stop()
    assert seen.sampler.peaks() == ()


# ---- trouble -------------------------------------------------------------------------------------


def test_a_gpu_that_falls_off_the_bus_is_lost_and_the_others_go_on(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    machine = on_machine([Gpu(), Gpu()])
    seen = watching()
    seen.until_spans(1, gpu=1)
    machine.gpus[0].lost = True
    machine.write()
    seen.until(lambda: ("lost", 0) in seen.kinds())
    before = len(seen.spans_of(0))
    seen.until_spans(len(seen.spans_of(1)) + 2, gpu=1)
    assert len(seen.spans_of(0)) == before
    assert "lost" in (seen.sampler.machine().gpus[0].problem or "")
    machine.gpus[0].lost = False
    machine.write()
    seen.until(lambda: ("back", 0) in seen.kinds())
    seen.until_spans(before + 1, gpu=0)
    assert seen.kinds() == [("lost", 0), ("back", 0)]
    lost_s, back_s = (event.at_s for event in seen.events)
    assert back_s - lost_s >= sampling.RETRY_S


def test_a_gpu_that_is_lost_from_the_start_is_watched_once_it_is_back(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    machine = on_machine([Gpu(), Gpu(lost=True)])
    seen = watching("all")
    seen.until(lambda: ("lost", 1) in seen.kinds())
    machine.gpus[1].lost = False
    machine.write()
    seen.until_spans(1, gpu=1)
    assert seen.kinds() == [("lost", 1), ("back", 1)]


def test_a_driver_that_is_reloaded_is_told_and_watched_again(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    machine = on_machine([Gpu(), Gpu()])
    seen = watching()
    seen.until_spans(1, gpu=1)
    machine.unload_driver()
    seen.until(lambda: ("lost", None) in seen.kinds())
    before = len(seen.spans)
    machine.write()
    seen.until(lambda: ("back", None) in seen.kinds())
    seen.until(lambda: len(seen.spans) > before + 1)
    assert seen.kinds() == [("lost", None), ("back", None)]
    assert [gpu.total_bytes for gpu in seen.sampler.gpus()] == [80 * GIB] * 2


def test_nvml_that_hangs_keeps_nobody_waiting_and_loses_no_sample(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    machine = on_machine([Gpu(util=30)], epoch_ns=time.monotonic_ns())
    seen = watching()
    seen.until_spans(1)
    machine.latency(HALF_AN_HOUR_US, "nvmlDeviceGetMemoryInfo_v2", times=1)
    seen.until(lambda: seen.kinds() == [("lost", None)])  # or it hung with NVML
    assert "the driver has not answered for " in (seen.sampler.machine().problem or "")
    machine.clear_latencies()
    seen.until(lambda: seen.kinds() == [("lost", None), ("back", None)])
    lost_s, back_s = (event.at_s for event in seen.events)
    assert back_s - lost_s > sampling.HANGS_S
    seen.until_spans(len(seen.spans_of()) + 1)
    # The driver's buffer has what happened meanwhile: nothing of it is missing.
    spans = seen.spans_of()
    assert [span.began_s for span in spans[1:]] == [span.ended_s for span in spans[:-1]]
    assert mean_busy(spans) == pytest.approx(0.3)


def test_a_sampler_can_be_stopped_while_nvml_hangs(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    machine = on_machine([Gpu()])
    seen = watching()
    seen.until_spans(1)
    machine.clear_calls()
    machine.latency(HALF_AN_HOUR_US, "nvmlDeviceGetMemoryInfo_v2", times=1)
    seen.until(lambda: bool(machine.calls("nvmlDeviceGetMemoryInfo_v2")))
    seen.sampler.stop(timeout_s=0.1)  # returns, and the test goes on
    machine.clear_latencies()


def test_a_machine_without_a_driver_says_so_and_yields_nothing(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    machine = on_machine([Gpu()])
    machine.unload_driver()
    seen = watching()
    seen.sampler.is_ready.wait()
    assert "driver is not loaded" in (seen.sampler.problem or "")
    assert not seen.sampler.machine().is_readable
    seen.take()
    assert (seen.spans, seen.events, seen.sampler.gpus()) == ([], [], ())


def test_what_a_gpu_does_not_tell_is_none_and_no_loss(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    machine = on_machine(
        [Gpu(util=NA, temperature=NA, power_mw=NA, energy_mj=NA, event_reasons=NA)]
    )
    machine.error("nvmlDeviceGetComputeRunningProcesses*", NO_PERMISSION)
    machine.error("nvmlDeviceGetMemoryInfo*", NO_PERMISSION)
    seen = watching()
    span = seen.until_spans(2)[-1]
    told = (span.used_bytes, span.busy_ratio, span.power_w, span.temperature_c, span.num_others)
    assert told == (None,) * 5
    assert (span.throttled_ratio, span.run_bytes) == (None, None)
    assert seen.kinds() == []


def test_a_mig_slice_has_memory_and_processes_but_no_kernel_active_time(
    on_machine: OnMachine, watching: Callable[..., Watching]
) -> None:
    on_machine([Gpu(migs=[Mig(processes=[Proc(os.getpid(), 3 * GIB)])])])
    seen = watching("all")
    span = seen.until_spans(1)[0]
    assert (span.used_bytes, span.run_bytes, span.busy_ratio) == (3 * GIB, 3 * GIB, None)
    assert seen.sampler.gpus()[0].busy_source is None
    (gpu,) = seen.sampler.machine().gpus
    assert gpu.mig_enabled
    assert [part.used_bytes for part in gpu.slices] == [3 * GIB]


def test_only_the_gpus_that_cuda_shows_are_watched(
    on_machine: OnMachine,
    watching: Callable[..., Watching],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine: NvmlMachine = on_machine([Gpu(), Gpu(used_bytes=GIB), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    seen = watching()
    assert seen.until_spans(1)[0].used_bytes == GIB
    (gpu,) = seen.sampler.gpus()
    assert (gpu.index, gpu.cuda_index, gpu.uuid) == (1, 0, machine.uuid(1))


def test_a_process_that_has_ended_keeps_its_owner_while_the_driver_lists_it() -> None:
    occupants = Occupants()
    with subprocess.Popen(["sleep", "60"]) as process:
        occupants.update((ListedProcess(process.pid, 2 * GIB, "compute"),), ())
        (alive,) = occupants.processes or ()
        process.kill()
    occupants.update((ListedProcess(process.pid, GIB, "compute"),), ())
    assert alive.owner != "unknown"
    assert occupants.processes == (replace(alive, used_bytes=GIB),)
    assert occupants.shares != Shares()
