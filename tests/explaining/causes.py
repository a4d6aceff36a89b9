"""Known causes, simulated: what a machine does second by second, and what the report must say.

Each is written from what is known of the cause (how a GPU, a host and a script behave), without a
look at the rules. A training is a row of steps on a time line; the driver's samples of a sixth of
a second, the log of the steps and the spans of the diary are made of it as the real ones are.

`docs/reports.md` has the table of them, written by `python -m docs.generate`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from explaining.kept import keep
from explaining.runs import TOTAL_BYTES, event, gpu, peak, run_of
from oomph.explaining.diagnose import diagnose
from oomph.monitoring.diary_reader import read_run
from oomph.records.report import Report
from oomph.records.run import Ending, Event, GpuSpan, HostSpan, Run, StepSpan
from oomph.units import GIB, MIB

Figure = float | Callable[[float], float]
LINK = 25e9  # bytes a second each way: PCIe 4.0 with 16 lanes, after its overhead
_PER_S = 6  # samples that the driver takes of kernel-active time


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Something between two steps, or within one."""

    at_s: float
    lasts_s: float
    phase: str | None = None  # as the script calls it, if it does
    active: float = 0.0  # kernel-active meanwhile
    in_step: bool = False  # the step's clock runs on
    waits: bool = False  # and it is a wait for data


@dataclass(kw_only=True)
class Training:
    """Steps one after another, and what the GPU does in them."""

    lasts_s: int = 600
    starts_s: float = 5.0
    stops_s: float | None = None  # no further step begins; None: it trains to the end
    step_s: Figure = 0.4
    waits: Figure = 0.0  # share of a step
    active: Figure = 1.0  # share of the step without its wait
    is_even: bool = False  # many short kernels all the time, and not one stretch of them
    then_active: float = 0.0  # after it has stopped
    pauses: Sequence[Pause] = ()
    samples: Figure = 32
    events: list[Event] = field(default_factory=list)
    steps: list[tuple[float, float, float, int]] = field(default_factory=list)  # end, s, wait, n

    def __post_init__(self) -> None:
        self._windows = [0.0] * (self.lasts_s * _PER_S)
        self._train()

    def _train(self) -> None:
        now_s, pauses = self.starts_s, list(self.pauses)
        self.events += [event(0.0, "phase", "start-up", rank=0)]
        self.events += [event(now_s, "phase", "training", rank=0)]
        stops_s = self.lasts_s if self.stops_s is None else self.stops_s
        while True:
            if pauses and now_s >= pauses[0].at_s and not pauses[0].in_step:
                now_s = self._pause(pauses.pop(0), now_s)
                continue
            step_s, extra_s, waited_s = at(self.step_s, now_s), 0.0, 0.0
            if pauses and now_s >= pauses[0].at_s:
                pause = pauses.pop(0)
                extra_s, waited_s = pause.lasts_s, pause.lasts_s * pause.waits
            if now_s + step_s + extra_s > stops_s:
                break
            wait_s = at(self.waits, now_s) * step_s
            self._step(now_s + wait_s + extra_s, step_s - wait_s)
            now_s += step_s + extra_s
            number = int(at(self.samples, now_s))
            self.steps.append((now_s, step_s + extra_s, wait_s + waited_s, number))
        self._fill(now_s, self.lasts_s, self.then_active)

    def _pause(self, pause: Pause, now_s: float) -> float:
        if pause.phase:
            self.events.append(event(now_s, "phase", pause.phase, rank=0))
            self.events.append(event(now_s + pause.lasts_s, "phase", "training", rank=0))
        self._fill(now_s, now_s + pause.lasts_s, pause.active)
        return now_s + pause.lasts_s

    def _step(self, began_s: float, lasts_s: float) -> None:
        active = at(self.active, began_s)
        if self.is_even:
            self._fill(began_s, began_s + lasts_s, active)
        else:
            self._fill(began_s, began_s + lasts_s * active, 1.0)

    def _fill(self, began_s: float, ended_s: float, level: float) -> None:
        first, last = int(began_s * _PER_S), math.ceil(ended_s * _PER_S)
        for window in range(max(first, 0), min(last, len(self._windows))):
            low, high = max(began_s, window / _PER_S), min(ended_s, (window + 1) / _PER_S)
            self._windows[window] += max(high - low, 0.0) * _PER_S * level

    def percents(self, second: int) -> list[float]:
        """As the driver tells them: whole percents."""
        windows = self._windows[second * _PER_S : (second + 1) * _PER_S]
        return [round(min(window, 1.0), 2) for window in windows]

    def step_spans(self, rank: int = 0) -> list[StepSpan]:
        """Of a second each, as the log gathers them."""
        found, held = list[StepSpan](), list[tuple[float, float, float, int]]()
        for step in self.steps:
            held.append(step)
            began_s = held[0][0] - held[0][1]
            if step[0] - began_s >= 0.95:
                found.append(
                    StepSpan(
                        rank=rank,
                        began_s=began_s,
                        ended_s=step[0],
                        num_steps=len(held),
                        num_samples=sum(one[3] for one in held),
                        step_s=sum(one[1] for one in held) / len(held),
                        longest_step_s=max(one[1] for one in held),
                        data_wait_s=sum(one[2] for one in held),
                    )
                )
                held.clear()
        return found


def at(figure: Figure, now_s: float) -> float:
    return figure(now_s) if callable(figure) else figure


def told_at(figures: dict[str, Any], second: float) -> dict[str, Any]:
    return {name: one(second) if callable(one) else one for name, one in figures.items()}


def gpu_spans(training: Training, place: int = 0, **figures: Any) -> Iterator[GpuSpan]:
    """A second each. A figure may be a function of the time."""
    for second in range(training.lasts_s):
        percents = training.percents(second)
        busy = sum(percents) / len(percents)
        told = told_at(figures, second)
        used = int(told.pop("used", 0.9 * TOTAL_BYTES))
        made = GpuSpan(
            gpu=place,
            began_s=float(second),
            ended_s=float(second + 1),
            used_bytes=used,
            most_used_bytes=used,
            run_bytes=used,
            others_bytes=0,
            num_others=0,
            busy_ratio=busy,
            least_busy_ratio=min(percents),
            most_busy_ratio=max(percents),
            power_w=80 + 280 * busy,
            temperature_c=60,
            throttled_ratio=0.0,
            received_bytes=int(0.02 * LINK),
            sent_bytes=int(0.01 * LINK),
        )
        yield replace(made, **told)


def host_spans(lasts_s: int, **figures: Any) -> Iterator[HostSpan]:
    """Of 8 CPUs: a training that keeps one core busy, and two that load data."""
    for second in range(lasts_s):
        told = told_at(figures, second)
        made = HostSpan(
            began_s=float(second),
            ended_s=float(second + 1),
            cpu_cores=2.5,
            busiest_cpu_cores=0.9,
            memory_bytes=20 * GIB,
            num_processes=5,
            others_cpu_cores=0.3,
            stolen_cpu_cores=0.0,
            throttled_ratio=0.0,
            swapped_in_bytes=0,
        )
        yield replace(made, **{name: _whole(name, one) for name, one in told.items()})


def _whole(name: str, figure: Any) -> Any:
    return int(figure) if name.endswith("_bytes") and figure is not None else figure


ENDED_WELL = object()
FULL = int(0.88 * TOTAL_BYTES)  # of a run that uses its memory well


def simulated(
    training: Training,
    *,
    tells: bool = True,
    gpu_figures: dict[str, Any] | None = None,
    host: dict[str, Any] | None = None,
    ending: Any = ENDED_WELL,
    events: Sequence[Event] = (),
    **more: Any,
) -> Run:
    """`tells`: the script says what its steps do, and torch's peak."""
    lasts_s = float(training.lasts_s)
    if ending is ENDED_WELL:
        ending = Ending(at_s=lasts_s, exit_code=0)
    figures = {"used": FULL, **(gpu_figures or {})}
    changes: dict[str, Any] = {
        "gpus": [gpu(link_bytes_per_s=LINK)],
        "step_spans": training.step_spans() if tells else [],
        "peaks": [peak(FULL - GIB, before_steps_bytes=20 * GIB)] if tells else [],
        **more,
    }
    return run_of(
        list(gpu_spans(training, **figures)),
        host_spans=list(host_spans(training.lasts_s, **(host or {}))),
        events=[*(training.events if tells else []), *events],
        ending=ending,
        last_seen_s=lasts_s,
        **changes,
    )


def killed(at_s: float, signal: str = "SIGTERM") -> Ending:
    return Ending(at_s=at_s, exit_code=143, signal=signal)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What is known to be the matter, and what the report has to say and to leave unsaid."""

    name: str
    shows: str  # how it looks from outside
    make: Callable[[], Run]
    verdict: str  # the kind of finding that leads
    silent: tuple[str, ...] = ()  # kinds that would be wrong
    unsaid: tuple[str, ...] = ()  # words that would do harm

    def report(self) -> Report:
        """Through a run directory, as a user gets it."""
        with tempfile.TemporaryDirectory() as directory:
            return diagnose(read_run(keep(self.make(), Path(directory))))


LARGER = ("larger micro-batch", "times as large", "largest micro-batch")
EVALUATE = ("evaluate less often",)
MORE_WORKERS = ("more loader workers",)


def every(period_s: float, lasts_s: float, until_s: float, **more: Any) -> list[Pause]:
    times = range(1, int(until_s / period_s))
    return [Pause(at_s=number * period_s, lasts_s=lasts_s, **more) for number in times]


def two_ranks(slow_step_s: float) -> Run:
    fast, slow = Training(), Training(step_s=slow_step_s)
    return replace(
        simulated(fast),
        gpus=(gpu(0, link_bytes_per_s=LINK), gpu(1, link_bytes_per_s=LINK)),
        gpu_spans=(*gpu_spans(fast, used=FULL), *gpu_spans(slow, 1, used=FULL)),
        step_spans=(*fast.step_spans(), *slow.step_spans(1)),
        peaks=(peak(FULL), peak(FULL, gpu=1, rank=1)),
    )


CAUSES: Sequence[Cause] = (
    # ---- the input, the CPU, the host --------------------------------------------------------
    Cause(
        name="slow data loader, told by the script",
        shows="60 % of each step waits for a batch",
        make=lambda: simulated(Training(step_s=0.5, waits=0.6)),
        verdict="input-bound",
        silent=("launch-bound", "busy", "hang"),
    ),
    Cause(
        name="slow data loader, script tells nothing",
        shows="pauses in each second, one core at its limit",
        make=lambda: simulated(
            Training(step_s=0.9, waits=0.75),
            tells=False,
            host={"cpu_cores": 1.1, "busiest_cpu_cores": 1.0},
        ),
        verdict="input-bound",
        silent=("launch-bound", "busy", "hang"),
    ),
    Cause(
        name="slow loader, all CPUs busy with it",
        shows="50 % of each step waits; 7.8 of 8 CPUs are busy",
        make=lambda: simulated(
            Training(step_s=0.5, waits=0.5), host={"cpu_cores": 7.8, "busiest_cpu_cores": 1.0}
        ),
        verdict="input-bound",
        unsaid=MORE_WORKERS,
    ),
    Cause(
        name="CPU work inside the step",
        shows="GPU works for 0.25 s, then Python for 0.75 s; batches are there in time",
        make=lambda: simulated(
            Training(step_s=1.0, waits=0.01, active=0.25), host={"busiest_cpu_cores": 1.0}
        ),
        verdict="pauses-in-step",
        silent=("launch-bound", "input-bound", "busy"),
        unsaid=(*LARGER, "CUDA graphs"),
    ),
    Cause(
        name="CPU work inside a long step",
        shows="GPU works for 3 s, then Python for 7 s",
        make=lambda: simulated(
            Training(step_s=10.0, waits=0.01, active=0.3), host={"busiest_cpu_cores": 1.0}
        ),
        verdict="pauses-in-step",
        silent=("launch-bound", "input-bound", "busy", "phases", "stalls"),
        unsaid=(*LARGER, *EVALUATE),
    ),
    Cause(
        name="waiting for a disk or the network inside the step",
        shows="the same, and no CPU is busy either",
        make=lambda: simulated(
            Training(step_s=1.0, waits=0.01, active=0.25),
            host={"cpu_cores": 0.3, "busiest_cpu_cores": 0.2},
        ),
        verdict="pauses-in-step",
        silent=("launch-bound", "input-bound", "busy"),
    ),
    Cause(
        name="kernels too small (launch-bound)",
        shows="evenly 20 % active, one core at its limit, no wait for data",
        make=lambda: simulated(
            Training(step_s=0.1, active=0.2, is_even=True), host={"busiest_cpu_cores": 1.0}
        ),
        verdict="launch-bound",
        silent=("pauses-in-step", "input-bound", "busy"),
    ),
    Cause(
        name="other jobs take the CPUs",
        shows="others use 6 of 8 CPUs, 40 % of each step waits for data",
        make=lambda: simulated(
            Training(step_s=0.5, waits=0.4),
            host={"cpu_cores": 1.8, "busiest_cpu_cores": 0.5, "others_cpu_cores": 6.0},
        ),
        verdict="host-contention",
        silent=("busy",),
        unsaid=MORE_WORKERS,
    ),
    Cause(
        name="the hypervisor takes the CPUs",
        shows="4 of 8 CPUs are stolen, 30 % of each step waits for data",
        make=lambda: simulated(
            Training(step_s=0.5, waits=0.3),
            host={"cpu_cores": 3.6, "busiest_cpu_cores": 0.6, "stolen_cpu_cores": 4.0},
        ),
        verdict="host-contention",
        unsaid=MORE_WORKERS,
    ),
    Cause(
        name="CPU limit of the container",
        shows="its control group is held back in 70 % of the periods",
        make=lambda: simulated(
            Training(step_s=0.6, waits=0.5),
            host={"cpu_cores": 2.0, "busiest_cpu_cores": 0.5, "throttled_ratio": 0.7},
        ),
        verdict="cpu-limit",
        silent=("busy",),
        unsaid=MORE_WORKERS,
    ),
    Cause(
        name="the host swaps",
        shows="200 MiB a second come back from swap, the GPU is at 25 %",
        make=lambda: simulated(
            Training(step_s=1.2, waits=0.05, active=0.25),
            host={"cpu_cores": 0.6, "busiest_cpu_cores": 0.3, "swapped_in_bytes": 200 * MIB},
        ),
        verdict="swapping",
        silent=("launch-bound", "busy"),
    ),
    Cause(
        name="garbage collection",
        shows="every 20 s a step takes 2.5 s instead of 0.3 s",
        make=lambda: simulated(
            Training(step_s=0.3, pauses=every(20, 2.2, 600, in_step=True)),
        ),
        verdict="stalls",
        silent=("busy", "hang", "phases"),
        unsaid=EVALUATE,
    ),
    Cause(
        name="loader workers started anew each epoch",
        shows="every 40 s a step waits 6 s for its batch",
        make=lambda: simulated(
            Training(step_s=0.3, pauses=every(40, 6.0, 600, in_step=True, waits=True))
        ),
        verdict="stalls",
        silent=("busy", "hang"),
        unsaid=(*EVALUATE, "gc."),
    ),
    # ---- phases ------------------------------------------------------------------------------
    Cause(
        name="evaluation on the CPU",
        shows="three evaluations of 60 s without a kernel",
        make=lambda: simulated(Training(pauses=every(150, 60, 600, phase="evaluation"))),
        verdict="phases",
        silent=("busy", "hang"),
    ),
    Cause(
        name="checkpoints saved in the loop",
        shows="20 s without a kernel every 100 s; the script does not say what it does",
        make=lambda: simulated(Training(pauses=every(100, 20, 600))),
        verdict="phases",
        silent=("busy", "hang"),
        unsaid=EVALUATE,
    ),
    Cause(
        name="start-up takes most of the run",
        shows="no kernel for 360 of 600 s",
        make=lambda: simulated(Training(starts_s=360)),
        verdict="phases",
        silent=("busy", "hang", "narrow-kernels"),
        unsaid=EVALUATE,
    ),
    # ---- hangs -------------------------------------------------------------------------------
    Cause(
        name="hang, GPU idle",
        shows="the last step ended 600 s before it was killed; 0 % since",
        make=lambda: simulated(Training(lasts_s=1000, stops_s=400), ending=killed(1000)),
        verdict="hang",
        silent=("busy", "phases", "narrow-kernels", "head-room", "input-bound"),
        unsaid=(*EVALUATE, *LARGER),
    ),
    Cause(
        name="hang, ranks spin in NCCL",
        shows="the same at 100 %, with little power",
        make=lambda: simulated(
            Training(lasts_s=1000, stops_s=400, then_active=1.0),
            gpu_figures={"power_w": lambda t: 330.0 if t < 400 else 120.0},
            ending=killed(1000),
        ),
        verdict="hang",
        silent=("busy", "narrow-kernels", "head-room", "phases"),
        unsaid=(*EVALUATE, *LARGER),
    ),
    Cause(
        name="hang that still goes on",
        shows="no step for 300 s, and the run has not ended",
        make=lambda: simulated(
            Training(lasts_s=700, stops_s=400, then_active=1.0),
            gpu_figures={"power_w": lambda t: 330.0 if t < 400 else 120.0},
            ending=None,
        ),
        verdict="hang",
        silent=("busy", "narrow-kernels", "head-room"),
        unsaid=EVALUATE,
    ),
    Cause(
        name="hang, GPU idle, script tells nothing",
        shows="no kernel in the last 600 s, memory is held, killed",
        make=lambda: simulated(
            Training(lasts_s=1000, stops_s=400), tells=False, ending=killed(1000)
        ),
        verdict="hang",
        silent=("busy", "phases", "head-room"),
        unsaid=EVALUATE,
    ),
    Cause(
        name="hang, spinning, script tells nothing",
        shows="100 % without a break, power falls from 330 to 120 W, killed",
        make=lambda: simulated(
            Training(lasts_s=1000, stops_s=400, active=0.97, then_active=1.0),
            tells=False,
            gpu_figures={"power_w": lambda t: 330.0 if t < 400 else 120.0},
            ending=killed(1000),
        ),
        verdict="hang",
        silent=("busy", "narrow-kernels"),
        unsaid=(*EVALUATE, *LARGER),
    ),
    # ---- memory ------------------------------------------------------------------------------
    Cause(
        name="leak on the GPU",
        shows="memory grows from 20 to 50 GiB, a little with each step",
        make=lambda: simulated(
            Training(),
            gpu_figures={"used": lambda t: (20 + 30 * t / 600) * GIB},
            peaks=[peak(50 * GIB, before_steps_bytes=18 * GIB)],
        ),
        verdict="leak",
        silent=("head-room", "busy"),
        unsaid=LARGER,
    ),
    Cause(
        name="fragmentation",
        shows="reserved memory grows from 30 to 60 GiB, tensors never take more than 31",
        make=lambda: simulated(
            Training(),
            gpu_figures={"used": lambda t: (30 + 30 * t / 600) * GIB},
            peaks=[replace(peak(60 * GIB, before_steps_bytes=18 * GIB), allocated_bytes=31 * GIB)],
        ),
        verdict="fragmentation",
        silent=("head-room", "leak", "busy"),
        unsaid=LARGER,
    ),
    Cause(
        name="leak on the host",
        shows="its processes grow from 20 to 60 GiB",
        make=lambda: simulated(
            Training(), host={"memory_bytes": lambda t: (20 + 40 * t / 600) * GIB}
        ),
        verdict="host-leak",
        silent=("leak", "busy"),
        unsaid=MORE_WORKERS,
    ),
    Cause(
        name="spilling into host memory",
        shows="99 % of the memory is taken, PCIe is at 80 % both ways, 100 % active, low power",
        make=lambda: simulated(
            Training(step_s=4.0),
            gpu_figures={
                "used": 0.99 * TOTAL_BYTES,
                "received_bytes": int(0.8 * LINK),
                "sent_bytes": int(0.7 * LINK),
                "power_w": 140.0,
            },
        ),
        verdict="spill",
        silent=("busy", "narrow-kernels", "head-room", "pcie-bound"),
        unsaid=LARGER,
    ),
    Cause(
        name="spilling that begins during the run",
        shows="after 200 s the memory is full, PCIe is at 90 %, and steps take four times as long",
        make=lambda: simulated(
            Training(step_s=lambda now_s: 0.4 if now_s < 200 else 1.6),
            gpu_figures={
                "used": 0.99 * TOTAL_BYTES,
                "received_bytes": lambda now_s: int((0.02 if now_s < 200 else 0.9) * LINK),
                "sent_bytes": lambda now_s: int((0.01 if now_s < 200 else 0.9) * LINK),
            },
        ),
        verdict="spill",
        silent=("busy", "narrow-kernels", "head-room", "pcie-bound"),
        unsaid=(*LARGER, "what grows with each step"),
    ),
    Cause(
        name="transfers over PCIe",
        shows="PCIe is at 85 % one way, memory is half empty",
        make=lambda: simulated(
            Training(active=0.5, waits=0.02),
            gpu_figures={"used": 0.5 * TOTAL_BYTES, "received_bytes": int(0.85 * LINK)},
            peaks=[peak(39 * GIB, before_steps_bytes=20 * GIB)],
        ),
        verdict="pcie-bound",
        silent=("busy", "spill", "launch-bound"),
    ),
    Cause(
        name="out of memory",
        shows="the script says so and ends with 1",
        make=lambda: simulated(
            Training(),
            events=[event(599.0, "out-of-memory", "CUDA out of memory.", rank=0)],
            ending=Ending(at_s=600.0, exit_code=1, out_of_memory="gpu"),
        ),
        verdict="out-of-memory",
        silent=("head-room", "hang"),
        unsaid=LARGER,
    ),
    # ---- the GPU -----------------------------------------------------------------------------
    Cause(
        name="too hot",
        shows="clocks are held down by heat for 40 % of the time",
        make=lambda: simulated(
            Training(),
            gpu_figures={
                "throttled_ratio": lambda t: float(t % 10 < 4),
                "throttled_by": ("heat",),
                "temperature_c": 91,
            },
        ),
        verdict="throttled",
        silent=("busy", "narrow-kernels"),
    ),
    Cause(
        name="power cap",
        shows="clocks are held down by power all the time",
        make=lambda: simulated(
            Training(),
            gpu_figures={"throttled_ratio": 1.0, "throttled_by": ("power",), "power_w": 200.0},
        ),
        verdict="throttled",
        silent=("busy", "narrow-kernels"),
    ),
    Cause(
        name="slowing down",
        shows="a step takes 0.4 s at first and 0.8 s at the end",
        make=lambda: simulated(Training(step_s=lambda t: 0.4 + 0.4 * t / 600)),
        verdict="slowing-down",
        silent=("busy", "hang", "stalls"),
    ),
    Cause(
        name="slowed down by heat",
        shows="steps take longer and longer, clocks are held down in the second half",
        make=lambda: simulated(
            Training(step_s=lambda t: 0.4 if t < 300 else 0.6),
            gpu_figures={
                "throttled_ratio": lambda t: float(t > 300),
                "throttled_by": ("heat",),
            },
        ),
        verdict="throttled",
        silent=("busy",),
        unsaid=("what grows",),
    ),
    Cause(
        name="another user on the GPU",
        shows="a process of somebody else for half of the time; 98 % active",
        make=lambda: simulated(
            Training(active=0.98),
            gpu_figures={
                "num_others": lambda t: int(t > 300),
                "others_bytes": lambda t: 6 * GIB * int(t > 300),
            },
        ),
        verdict="shared-gpu",
        silent=("busy", "narrow-kernels"),
    ),
    Cause(
        name="one slow rank",
        shows="rank 1 takes 0.6 s a step, rank 0 0.4 s",
        make=lambda: two_ranks(0.6),
        verdict="imbalance",
        silent=("busy", "hang"),
    ),
    Cause(
        name="kernels that fill little of the GPU",
        shows="100 % active, 20 % of the multiprocessors",
        make=lambda: simulated(Training(), gpu_figures={"sm_active_ratio": 0.2}),
        verdict="narrow-kernels",
        silent=("busy",),
        unsaid=LARGER,  # the memory is full
    ),
    Cause(
        name="memory bandwidth",
        shows="100 % active, DRAM moves data 85 % of the time",
        make=lambda: simulated(Training(), gpu_figures={"memory_active_ratio": 0.85}),
        verdict="memory-bound",
        silent=("busy", "narrow-kernels"),
    ),
    Cause(
        name="model left on the CPU",
        shows="the GPU is held and never works, all CPUs do",
        make=lambda: simulated(
            Training(starts_s=600.0),
            tells=False,
            gpu_figures={"used": GIB},
            host={"cpu_cores": 7.9, "busiest_cpu_cores": 7.9},
        ),
        verdict="never-busy",
        silent=("busy", "head-room", "hang", "phases"),
        unsaid=LARGER,
    ),
    Cause(
        name="small batch",
        shows="99 % active, 30 of 80 GiB ever used",
        make=lambda: simulated(
            Training(active=0.99),
            gpu_figures={"used": 31 * GIB},
            peaks=[peak(30 * GIB, before_steps_bytes=10 * GIB)],
        ),
        verdict="head-room",
        silent=("leak", "hang"),
    ),
    Cause(
        name="too little seen",
        shows="25 s",
        make=lambda: simulated(Training(lasts_s=25)),
        verdict="too-short",
        silent=("busy", "head-room", "launch-bound", "hang"),
    ),
)


def healthy(**more: Any) -> Run:
    return simulated(Training(active=0.98), **more)


# Nearly the same as a cause, and no cause: nothing of it may be said.
NEAR_MISSES: Sequence[Cause] = (
    Cause(
        name="full and healthy",
        shows="98 % active, 88 % of the memory",
        make=healthy,
        verdict="busy",
        silent=("hang", "leak", "slowing-down", "stalls", "phases", "head-room"),
    ),
    Cause(
        name="memory that grows at first",
        shows="it grows for 60 s and then stays",
        make=lambda: healthy(
            gpu_figures={"used": lambda t: (30 + 0.6 * min(t, 60)) * GIB},
        ),
        verdict="busy",
        silent=("leak", "fragmentation"),
    ),
    Cause(
        name="batches of different length",
        shows="memory goes up and down, its high-water mark rises ever more slowly",
        make=lambda: healthy(
            gpu_figures={"used": lambda t: (40 + 5 * math.log1p(t) + 4 * math.sin(t * 1.7)) * GIB},
        ),
        verdict="busy",
        silent=("leak", "fragmentation"),
    ),
    Cause(
        name="data cached in host memory",
        shows="host memory grows by 30 GiB in the first third and stays",
        make=lambda: healthy(host={"memory_bytes": lambda t: (20 + min(t, 200) * 0.15) * GIB}),
        verdict="busy",
        silent=("host-leak",),
    ),
    Cause(
        name="model exported at the end",
        shows="no step in the last 200 s, exit 0",
        make=lambda: simulated(Training(lasts_s=4000, stops_s=3850)),
        verdict="busy",
        silent=("hang",),
    ),
    Cause(
        name="killed in a long evaluation",
        shows="no step for 400 s, in a phase that the script calls evaluation",
        make=lambda: simulated(
            Training(
                lasts_s=1000,
                pauses=[Pause(at_s=600, lasts_s=401, phase="evaluation", active=0.9)],
            ),
            ending=killed(1000),
        ),
        verdict="busy",
        silent=("hang",),
    ),
    Cause(
        name="killed in an evaluation that nobody named",
        shows="no step for 300 s, the GPU works at 70 %",
        make=lambda: simulated(
            Training(lasts_s=1000, stops_s=700, active=0.98, then_active=0.7),
            ending=killed(1000),
        ),
        verdict="unexplained",
        silent=("hang",),
    ),
    Cause(
        name="a notebook that nobody uses",
        shows="no kernel in the last 600 s, memory is held, and it still runs",
        make=lambda: simulated(Training(lasts_s=1000, stops_s=400), tells=False, ending=None),
        verdict="phases",
        silent=("hang",),
    ),
    Cause(
        name="killed after training was told to be over",
        shows="no step and no kernel for 400 s, while it exports",
        make=lambda: simulated(
            Training(lasts_s=1000, stops_s=600),
            events=[event(600.0, "phase", "after training", rank=0)],
            ending=killed(1000),
        ),
        verdict="phases",
        silent=("hang", "busy"),
        unsaid=EVALUATE,
    ),
    Cause(
        name="killed while it trained",
        shows="the last step ended a second before",
        make=lambda: healthy(ending=killed(600, "SIGINT")),
        verdict="busy",
        silent=("hang",),
    ),
    Cause(
        name="long steps",
        shows="90 s a step, killed 80 s after the last one",
        make=lambda: simulated(
            Training(lasts_s=1250, step_s=90.0, active=0.98, stops_s=1170, then_active=1.0),
            ending=killed(1250),
        ),
        verdict="busy",
        silent=("hang", "stalls"),
    ),
    Cause(
        name="halted by Ctrl-Z",
        shows="it stands still for 300 s and is then killed",
        make=lambda: simulated(
            Training(lasts_s=900, stops_s=599, active=0.98),
            events=[event(600.0, "halted", "SIGTSTP")],
            ending=killed(900),
        ),
        verdict="busy",
        silent=("hang", "phases"),
    ),
    Cause(
        name="compiled at the first steps",
        shows="three steps of 20 s, then 0.4 s each",
        make=lambda: simulated(
            Training(lasts_s=4000, active=0.98, step_s=lambda t: 20.0 if t < 60 else 0.4)
        ),
        verdict="busy",
        silent=("slowing-down", "stalls", "hang"),
    ),
    Cause(
        name="steps that vary",
        shows="0.4 s, give or take a tenth",
        make=lambda: simulated(
            Training(active=0.98, step_s=lambda t: 0.4 + 0.04 * math.sin(t / 9))
        ),
        verdict="busy",
        silent=("slowing-down", "stalls"),
    ),
    Cause(
        name="batch doubled on the way",
        shows="steps take twice as long with twice the samples",
        make=lambda: simulated(
            Training(
                active=0.98,
                step_s=lambda t: 0.4 if t < 300 else 0.8,
                samples=lambda t: 32 if t < 300 else 64,
            )
        ),
        verdict="busy",
        silent=("slowing-down",),
    ),
    Cause(
        name="one checkpoint inside a step",
        shows="a single step of 3 s",
        make=lambda: simulated(
            Training(active=0.98, pauses=[Pause(at_s=300, lasts_s=3, in_step=True)])
        ),
        verdict="busy",
        silent=("stalls", "hang", "phases"),
    ),
    Cause(
        name="others on the CPUs, GPU busy",
        shows="others use 5.5 of 8 CPUs, 98 % active",
        make=lambda: healthy(host={"others_cpu_cores": 5.5}),
        verdict="busy",
        silent=("host-contention",),
    ),
    Cause(
        name="CPU limit, GPU busy",
        shows="held back in 30 % of the periods, 98 % active",
        make=lambda: healthy(host={"throttled_ratio": 0.3}),
        verdict="busy",
        silent=("cpu-limit",),
    ),
    Cause(
        name="swapped once",
        shows="300 MiB come back in the first 2 s",
        make=lambda: healthy(host={"swapped_in_bytes": lambda t: 150 * MIB * (t < 2)}),
        verdict="busy",
        silent=("swapping",),
    ),
    Cause(
        name="full memory without a spill",
        shows="99 % of the memory is taken, PCIe is at 2 %",
        make=lambda: healthy(gpu_figures={"used": 0.99 * TOTAL_BYTES}),
        verdict="busy",
        silent=("spill", "head-room"),
    ),
    Cause(
        name="some traffic over PCIe",
        shows="PCIe is at 30 %, 98 % active",
        make=lambda: healthy(gpu_figures={"received_bytes": int(0.3 * LINK)}),
        verdict="busy",
        silent=("pcie-bound", "spill"),
    ),
    Cause(
        name="warm for a moment",
        shows="clocks are held down for 3 % of the time",
        make=lambda: healthy(
            gpu_figures={
                "throttled_ratio": lambda t: float(t % 100 < 3),
                "throttled_by": ("heat",),
            }
        ),
        verdict="busy",
        silent=("throttled",),
    ),
    Cause(
        name="a neighbour for a moment",
        shows="somebody else's process for 3 % of the time",
        make=lambda: healthy(gpu_figures={"num_others": lambda t: int(t < 18)}),
        verdict="busy",
        silent=("shared-gpu",),
    ),
    Cause(
        name="ranks nearly alike",
        shows="0.40 and 0.42 s a step",
        make=lambda: two_ranks(0.42),
        verdict="busy",
        silent=("imbalance",),
    ),
)
