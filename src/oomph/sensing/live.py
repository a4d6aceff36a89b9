"""Machine, spans -> Look: everything one frame of the live view shows.

The first look reads everything once. Later looks are built from the sampler's spans since then, so
kernel-active time is a mean of the driver's own samples, without gaps. Both run on their own
threads: taking a look never waits for NVML.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from oomph.records.machine import Ancestor, Device, Job, Look, Machine, Process
from oomph.records.run import GpuSpan
from oomph.records.run_spans import merge_gpu_spans
from oomph.sensing.devices import read_machine
from oomph.sensing.host import HostMeter, ProcessCpu
from oomph.sensing.mapping import only_visible
from oomph.sensing.ownership import (
    RUN_DIRECTORY,
    RUN_TOKEN,
    ancestors_of,
    environment_of,
    pids_are_the_hosts,
    words_of,
)
from oomph.sensing.sampling import Sampler

# ---- processes on the GPUs -> Jobs: who launched them, and which worker each one is ----
# The launcher is the nearest ancestor with a launcher's command line, which every user may read.
# Rank and run come from the environment, which is read for this user's own processes only. A
# process keeps its job while it lives, so its /proc files are read once.
# Limits: Linux; a rank that a script sets after its start cannot be seen from outside.

# By program name, or by the module after `python -m`.
_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate",
    "accelerate-launch": "accelerate",
    "accelerate.commands.launch": "accelerate",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
    "raylet": "ray",
}
_RAY_WORKER = "ray::"  # ray gives its worker processes names that start with this
_SPAWNED = "multiprocessing.spawn"  # part of the code that Python passes to a spawned child
_TORCHRUN_WAS_HERE = "TORCHELASTIC_RUN_ID"
_MOST_COMMAND = 200  # characters of an ancestor's command line
_TAKE_A_WORD = {"-W", "-X"}  # Python options that take a second word


class Jobs:
    """Find the job of each process, once per process on a GPU."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float | None], Job] = {}

    def of(self, processes: Iterable[Process]) -> tuple[Job, ...]:
        """Return the jobs of the processes, as far as they can be seen."""
        if pids_are_the_hosts():  # the PIDs would lead to unrelated processes
            return ()
        found = {(p.pid, p.started_at): p for p in processes if p.started_at is not None}
        self._known = {
            key: self._known[key] if key in self._known else find_job(process)
            for key, process in found.items()
        }
        return tuple(self._known.values())


def find_job(process: Process) -> Job:
    """Find the job of a process."""
    is_mine = process.owner in ("this-run", "mine")
    environment = environment_of(process.pid) if is_mine else {}
    chain = [(ancestor, words_of(ancestor)) for ancestor in ancestors_of(process.pid)]
    launcher, launcher_pid = _launcher(words_of(process.pid), chain)
    if launcher is None and _TORCHRUN_WAS_HERE in environment:
        launcher = "torchrun"  # torchrun has ended, or detached its workers
    return Job(
        pid=process.pid,
        parent_pid=chain[0][0] if chain else None,
        launcher=launcher,
        launcher_pid=launcher_pid,
        ancestors=tuple(
            Ancestor(pid, " ".join(words)[:_MOST_COMMAND] or None) for pid, words in chain
        ),
        run_id=_run_id(environment),
        rank=number_in(environment, "RANK"),
        local_rank=number_in(environment, "LOCAL_RANK"),
        world_size=number_in(environment, "WORLD_SIZE"),
    )


def _run_id(environment: Mapping[str, str]) -> str | None:
    """Return the run's id as in `oomph runs` (the name of its directory), else the bare token."""
    directory = environment.get(RUN_DIRECTORY, "").rstrip("/")
    return directory.rpartition("/")[2] or environment.get(RUN_TOKEN)


def _launcher(
    below: Sequence[str], chain: Iterable[tuple[int, Sequence[str]]]
) -> tuple[str | None, int | None]:
    """Return the nearest launcher in the chain above a command line, and its PID."""
    for ancestor, words in chain:
        launcher = launcher_of(words)
        if launcher:
            return launcher, ancestor
        if any(_SPAWNED in word for word in below):
            return "multiprocessing", ancestor
        below = words
    return None, None


def launcher_of(words: Sequence[str]) -> str | None:
    """Return the launcher that a command line starts.

    >>> launcher_of(["/usr/bin/python3", "-u", "/opt/bin/torchrun", "--nproc-per-node=4", "a.py"])
    'torchrun'
    >>> launcher_of(["python", "-m", "torch.distributed.run", "a.py"])
    'torchrun'
    >>> launcher_of(["python", "train.py", "torchrun"])
    """
    program = _program(words)
    if program == "accelerate" and "launch" not in words:
        return None  # `accelerate config` starts no workers
    if program.startswith(_RAY_WORKER):
        return "ray"
    return _LAUNCHERS.get(program)


def _program(words: Sequence[str]) -> str:
    """Return the program: the script or module for Python, else the command."""
    rest = iter(words)
    command = next(rest, "")
    if not os.path.basename(command).startswith(("python", "pypy")):  # noqa: PTH119 - not a path yet
        return _name(command)
    for word in rest:
        if word == "-m":
            return next(rest, "")
        if word in _TAKE_A_WORD:
            next(rest, "")
        elif not word.startswith("-"):
            return _name(word)
    return ""


def _name(command: str) -> str:
    is_title = command.startswith(_RAY_WORKER)
    return command if is_title else os.path.basename(command)  # noqa: PTH119


def number_in(environment: Mapping[str, str], name: str) -> int | None:
    """Return the number that a launcher has put into the environment, such as a rank."""
    value = environment.get(name, "")
    return int(value) if value.isdecimal() and len(value) < 9 else None


# ---- Machine -> Look ----


class Seeing:
    """A Machine -> a Look; caches what does not change between looks."""

    def __init__(self) -> None:
        self._jobs = Jobs()
        self._visible: tuple[str, ...] | None = None
        self._known_uuids: set[str] = set()

    def look(self, machine: Machine) -> Look:
        devices = (part for gpu in machine.gpus for part in gpu.slices or (gpu,))
        processes = (process for device in devices for process in device.processes or ())
        return Look(
            at=time.time(),
            machine=machine,
            jobs=() if machine.emulated else self._jobs.of(processes),
            visible=self._shown(machine),
        )

    def _shown(self, machine: Machine) -> tuple[str, ...] | None:
        """Return the GPUs CUDA_VISIBLE_DEVICES shows; look them up again when a new GPU appears."""
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            return None
        uuids = {gpu.uuid for gpu in machine.gpus if gpu.uuid}
        if self._visible is None or not uuids <= self._known_uuids:
            shown = only_visible(machine).gpus
            self._visible = tuple(device.uuid or "" for device in shown)
            self._known_uuids = uuids
        return self._visible


class NewFigures:
    """What each process takes of its GPU and of the CPUs, and how busy each GPU was."""

    def __init__(
        self,
        busy: Mapping[str, float | None],
        of_gpus: Mapping[str, Mapping[int, float]],
        cores: Mapping[int, float],
    ) -> None:
        self._busy, self._of_gpus, self._cores = busy, of_gpus, cores

    def put_on(self, gpu: Device) -> Device:
        """Return the GPU with these figures; one copy of each record, since a look is frequent."""
        uuid = gpu.uuid or ""
        shares, processes = self._of_gpus.get(uuid), gpu.processes
        if processes:
            cores, unused = self._cores, None if shares is None else 0.0
            processes = tuple(
                replace(
                    one, sm_ratio=(shares or {}).get(one.pid, unused), cpu_cores=cores.get(one.pid)
                )
                for one in processes
            )
        slices = tuple(map(self.put_on, gpu.slices))
        return replace(gpu, busy_ratio=self._busy.get(uuid), processes=processes, slices=slices)


_STOP_S = 0.3  # do not wait longer for a hung sampler
_HOST_EVERY_S = 1.5
# A picture a second shows the mean of these; a run that is recorded wants the peak, and asks more.
_LOOK_S = 0.5


class LiveLooks:
    """Look at this machine repeatedly."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._sampler = Sampler(
            "all",
            look_s=_LOOK_S,
            looks_per_turn=round(1 / _LOOK_S),
            watches_cut_gpus=True,
            watches_processes=True,
        )
        self._seeing = Seeing()
        self._host_meter, self._cpu = HostMeter(), ProcessCpu()
        self._host, self._cores = self._host_meter.look(), dict[int, float]()
        self._asked_s = time.monotonic()
        self._notes: list[str] = []
        self.first: Look | None = None  # None until the driver has answered
        self._error: BaseException | None = None
        self._first_thread = threading.Thread(
            target=self._look_first, name="oomph-first-look", daemon=True
        )

    def start(self) -> None:
        self._first_thread.start()

    def stop(self) -> None:
        self._sampler.stop(timeout_s=_STOP_S)
        self._cpu.close()

    def _look_first(self) -> None:
        try:
            machine = read_machine(with_power_limit=True)  # so that columns stay as they are
            first = replace(self._seeing.look(machine), host=self._host)
            if first.machine.gpus:
                self._sampler.start()
            self.first = first
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = error
        self._on_first()

    def _ask_host(self, machine: Machine) -> None:
        """Ask for the CPUs and the memory, of the machine and of the visible processes.

        Not at every look of a second: the files of /proc cost more than the rest of it.
        """
        now_s = time.monotonic()
        if now_s - self._asked_s < _HOST_EVERY_S:
            return
        self._asked_s = now_s
        self._host = self._host_meter.look()
        if not pids_are_the_hosts():  # else the PIDs would lead to unrelated processes
            listed = (process.pid for gpu in machine.gpus for process in gpu.processes or ())
            self._cores = self._cpu.cores(listed, now_s)

    def take(self, *, even_without_spans: bool) -> Look | None:
        """Return the next look; None if there are no new spans, unless `even_without_spans`."""
        if self._error is not None:
            raise self._error
        if self.first is None:
            return None
        taken = self._sampler.take()
        self._notes += [event.text for event in taken.events if event.kind == "warning"]
        if not taken.spans and not even_without_spans:
            return None
        uuids = [gpu.uuid for gpu in self._sampler.gpus()]
        by_uuid: dict[str, list[GpuSpan]] = {}
        for span in taken.spans:
            by_uuid.setdefault(uuids[span.gpu] or "", []).append(span)
        since = {uuid: merge_gpu_spans(spans) for uuid, spans in by_uuid.items()}
        busy = {uuid: span.busy_ratio for uuid, span in since.items()}
        sm_active = {uuid: span.sm_active_ratio for uuid, span in since.items()}
        machine = self._sampler.machine()
        self._ask_host(machine)
        # Busy is the mean over all spans, not only the last.
        figures = NewFigures(busy, self._sampler.process_shares(), self._cores)
        machine = replace(
            machine,
            gpus=tuple(map(figures.put_on, machine.gpus)),
            driver_version=self.first.machine.driver_version,
        )
        return replace(
            self._seeing.look(machine),
            host=self._host,
            sm_active_ratios={
                uuid: ratio for uuid, ratio in sm_active.items() if ratio is not None
            },
            notes=tuple(dict.fromkeys(self._notes)),
        )
