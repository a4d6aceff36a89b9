"""Training, Request, Job, JobState, RankFailure: what is started, what it asks for, how it went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Via = Literal["slurm", "sge"]  # schedulers that jobs are handed to
PRINTED = ("pbs", "kubernetes", "trainjob")  # for these, the job is only printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What runs: a script or a module for torchrun, or a shell script that starts torchrun."""

    arguments: tuple[str, ...] = ()
    script: str | None = None
    module: str | None = None
    own_script: str | None = None  # the user's own submit_train.sh, which reads the GPUs from $M

    @property
    def name(self) -> str:
        """Return what a person would call it."""
        return self.script or self.module or self.own_script or "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a job asks of a scheduler. None: the site's default."""

    name: str = "train"
    num_nodes: int = 1
    gpus_each: int = 1  # of each node
    cpus_per_gpu: int | None = None
    time_s: float | None = None
    memory_bytes: int | None = None  # of each node
    queue: str | None = None  # Slurm's partition
    options: tuple[str, ...] = ()  # as the scheduler takes them: "--account=nlp"
    gpu_resource: str = "gpu"  # Grid Engine's and Slurm's name for GPUs
    parallel_environment: str | None = None  # Grid Engine's
    image: str | None = None  # Kubernetes'

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_each


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that was handed to a scheduler; job.json beside its run."""

    id: str  # of the run
    directory: str
    via: Via
    number: str | None  # the scheduler's; None: not submitted yet
    command: tuple[str, ...]  # the training's words
    request: Request
    submitted_at: float | None  # seconds since the epoch
    is_cancelled: bool = False  # by oomph launch --cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Where a job is now."""

    job: Job
    state: Literal["waiting", "running", "ended", "killed", "unknown"]
    exit_code: int | None  # written by the job itself
    scheduler_says: str | None  # in its own words: "PENDING (Resources)", "qw"
    has_run: bool = False  # its run is recorded, for `oomph report`


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The rank that failed first, and what ended it."""

    rank: int
    exit_code: int | None = None  # None: unknown, the others were ended before it was seen
    signal: str | None = None  # "SIGKILL"
    error: str | None = None  # "RuntimeError: ...", if Python raised it
    traceback: str | None = None
    is_consequence: bool = False  # it says that another rank went away first


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a person asks of `oomph launch`, as written; None: not given."""

    words: tuple[str, ...] = ()  # after --: the script and its arguments
    module: str | None = None
    own_script: str | None = None
    plan: str | None = None  # the path of plan.json
    num_processes: int | None = None
    num_nodes: int | None = None
    # here
    gpus: str | None = None  # "0,3", or "none"
    meeting: str | None = None
    meeting_name: str | None = None
    max_restarts: int = 0
    # as a job
    via: str | None = None  # "found": the scheduler that answers
    name: str | None = None
    time: str | None = None
    steps: int | None = None
    memory: str | None = None
    cpus_per_gpu: int | None = None
    queue: str | None = None
    options: tuple[str, ...] = ()
    gpu_resource: str = "gpu"
    parallel_environment: str | None = None
    image: str | None = None
