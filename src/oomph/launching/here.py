"""A training and its GPUs -> torchrun on this machine, watched to its end.

The same runs on a desk, inside a scheduler's job, and on each machine of several.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from oomph.errors import UsageError
from oomph.launching.failures import forget_failures, read_failure
from oomph.launching.taking import Taken, taking
from oomph.launching.torchrun import Command, Nodes, environment_of, launch_options, script_words
from oomph.monitoring.command import Watched, watch
from oomph.monitoring.startup import hooked
from oomph.records.launch import RankFailure, Training
from oomph.records.workload import Variant
from oomph.sensing.host import num_cpus
from oomph.tricks.expandable_segments import ALLOCATOR_VARIABLES

JOB = "OOMPH_JOB"  # the directory of a job that a scheduler started
_STATEMENT = "from oomph.launching.in_ranks import watch_this_process; watch_this_process()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What to start on this machine."""

    training: Training
    num_processes: int
    variant: Variant | None = None  # of the plan, if there is one
    gpus: tuple[str, ...] | None = ()  # their names; (): free ones; None: train on the CPU
    num_nodes: int = 1
    meeting: str | None = None  # host:port, with several machines
    rendezvous: str | None = None  # the name under which they meet
    max_restarts: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError where several machines could not find each other."""
        host = (self.meeting or "").rpartition(":")[0]
        if self.num_nodes > 1 and not host:
            raise UsageError(
                f"{self.num_nodes} machines need a host to meet at, and --meet is"
                f" {self.meeting or ''!r}",
                because="with localhost instead, each machine would train alone",
                attempt="--meet FIRST-HOST:29500, the same on every machine",
            )


@dataclass(frozen=True, slots=True)
class Launched:
    """A training that ran to its end."""

    watched: Watched
    failure: RankFailure | None  # which rank failed first, if one did


def launch(here: Here, *, alerts: bool = True) -> Launched:
    """Take the GPUs, run the training and watch it. Raises OomphError before anything starts."""
    job = os.environ.get(JOB)
    directory = None if not job else _part(Path(job))
    with _gpus(here) as taken, hooked("torch", _STATEMENT) as hooks:
        command = command_of(here, taken)
        environment = {**hooks, **command.environment}
        environment.pop(JOB, None)  # a launch inside this one is none of the job's
        if directory is not None:
            forget_failures(directory)
        watched = watch(
            command.arguments,
            alerts=alerts,
            environment=environment,
            directory=directory,
            typed=command_of(here, taken, as_typed=True).arguments,
        )
    # Ended by a signal: whoever sent it is the cause, whatever the ranks wrote while they went.
    has_failed = watched.ended.signal is None and watched.ended.exit_code != 0
    return Launched(watched, read_failure(watched.directory) if has_failed else None)


def command_of(here: Here, taken: Taken | None, *, as_typed: bool = False) -> Command:
    """Return what is started; as_typed: what a person would type for the same."""
    environment = _merged(environment_of(here.variant, _threads(here)), os.environ)
    environment["M"] = str(here.num_processes)
    if taken is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(taken.names)
    elif here.gpus is None:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    own = here.training.own_script
    if own is not None:
        words = ("bash", own, *here.training.arguments)
    else:
        starter = ("torchrun",) if as_typed else _starter()
        words = (*starter, *_torchrun_options(here), *training_words(here.training))
    return Command(environment=environment, arguments=words)


def training_words(training: Training) -> list[str]:
    """Return the words after torchrun's options."""
    if training.module is not None:
        return ["--module", training.module, *training.arguments]
    return script_words(training.script or "", training.arguments)


def in_words(here: Here) -> str:
    """Return the command for --dry-run, without taking a GPU."""
    command = command_of(here, None, as_typed=True)
    settings = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    if here.gpus == ():
        settings.append(f"CUDA_VISIBLE_DEVICES=<{here.num_processes} free GPUs>")
    elif here.gpus:
        settings.append(f"CUDA_VISIBLE_DEVICES={','.join(here.gpus)}")
    lines = [*settings, shlex.join(command.arguments)]
    return " \\\n  ".join(lines)


@contextlib.contextmanager
def _gpus(here: Here) -> Iterator[Taken | None]:
    if here.gpus is None:
        yield None
        return
    with taking(here.num_processes, here.gpus) as taken:
        yield taken


def _torchrun_options(here: Here) -> list[str]:
    nodes = Nodes(num_nodes=here.num_nodes, num_gpus_each=here.num_processes)
    options = launch_options(nodes, here.meeting)
    if here.rendezvous is not None and here.num_nodes > 1:
        options.append(f"--rdzv-id={here.rendezvous}")
    if here.max_restarts:
        options.append(f"--max-restarts={here.max_restarts}")
    return options


def _starter() -> tuple[str, ...]:
    """Return this Python's torchrun, with failures written down; else the one on PATH."""
    if importlib.util.find_spec("torch") is not None:
        # By its path: with -m, a torch.py or a types.py in the working directory would come first.
        return (sys.executable, str(Path(__file__).with_name("agent.py")))
    if found := shutil.which("torchrun"):
        return (found,)
    raise UsageError(
        "there is no torchrun here",
        because=f"{sys.executable} has no torch, and PATH has no torchrun",
        attempt="running oomph from the environment that trains",
    )


def _threads(here: Here) -> int:
    """Return an equal share of the CPUs for each process."""
    return max(1, (num_cpus() or 1) // here.num_processes)


_GROWING = re.compile(r"(^|,)\s*expandable_segments:\w+")


def _merged(planned: dict[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the planned variables, with what the user has set besides them."""
    merged = dict(planned)
    if "OMP_NUM_THREADS" in given:
        merged["OMP_NUM_THREADS"] = given["OMP_NUM_THREADS"]
    own = next(filter(None, map(given.get, ALLOCATOR_VARIABLES)), "")
    others = _GROWING.sub("", own).strip(",")
    for name in ALLOCATOR_VARIABLES:
        if name in planned and others:
            merged[name] = f"{others},{planned[name]}"
    return merged


def _part(job: Path) -> Path:
    """Return where this machine of a job writes: the first one as the run, others as parts."""
    node = os.environ.get("SLURM_NODEID", "0")
    return job if node in ("", "0") else _made(job / f"rank-{node}")


def _made(directory: Path) -> Path:
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory
