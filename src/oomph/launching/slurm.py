"""A training -> a job of Slurm: its script, and what sbatch, squeue and scancel say.

`slurm_script` is an export: a script without oomph. `Slurm` submits jobs that run `oomph launch`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from oomph.errors import UsageError
from oomph.launching.asking import answers, ask, refused
from oomph.launching.job_body import OUTPUT, as_clock, body, launch_words, told
from oomph.launching.job_script import job_script, plain
from oomph.launching.torchrun import (
    environment_of,
    launch_options,
    script_words,
    split_of,
    spread,
)
from oomph.records.launch import Request, Training, Via
from oomph.records.workload import Variant
from oomph.units import MIB

# A fallback such as localhost would make every machine a separate world, and hang.
_MEETING = [
    'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
    "first=${hosts%%$'\\n'*}",
    ': "${first:?no host in SLURM_JOB_NODELIST}"',
    "port=$((20000 + SLURM_JOB_ID % 20000))  # two jobs that share a machine do not meet",
]


def slurm_script(
    variant: Variant,
    script: str = "train.py",
    arguments: Sequence[str] = (),
    *,
    name: str = "train",
    time: str | None = None,
    memory: str | None = None,
    partition: str | None = None,
    gpus_per_node: int | None = None,
    cpus_per_gpu: int = 4,
) -> str:
    """Return a script for sbatch. time and memory (per machine) are Slurm's: "12:00:00", "64G"."""
    nodes = spread(variant, gpus_per_node)
    directives = {
        "job-name": name,
        "nodes": str(nodes.num_nodes),
        "ntasks-per-node": "1",  # torchrun starts the other processes
        "gres": f"gpu:{nodes.num_gpus_each}",
        "cpus-per-task": str(cpus_per_gpu * nodes.num_gpus_each),
        "time": time,
        "mem": memory,
        "partition": partition,
    }
    head = [f"#SBATCH --{key}={plain(key, value)}" for key, value in directives.items() if value]
    words = shlex.join(script_words(script, arguments))
    if nodes.num_nodes == 1:
        run = [f"exec torchrun {shlex.join(launch_options(nodes, None))} {words}"]
    else:
        options = shlex.join(launch_options(nodes, None)[:-1])
        run = [
            *_MEETING,
            (
                f'exec srun torchrun {options} --rdzv-id="$SLURM_JOB_ID"'
                f' --rdzv-endpoint="$first:$port" {words}'
            ),
        ]
    return job_script(head, split_of(variant), environment_of(variant, cpus_per_gpu), run)


# ---- jobs that run `oomph launch` ----------------------------------------------------------------

CPUS_PER_GPU = 4  # judgement: a main process and some loader workers


class Slurm:
    """Slurm, by its commands."""

    via: Via = "slurm"
    directive = "#SBATCH"

    def is_here(self) -> bool:
        return answers("sinfo", "--noheader")

    def script(
        self,
        training: Training,
        request: Request,
        variant: Variant | None,
        directory: Path,
        own: Sequence[str] = (),
    ) -> str:
        """Return the job's script; `own` are directives of the user's own script."""
        cpus_per_gpu = request.cpus_per_gpu or CPUS_PER_GPU
        directives: dict[str, str | None] = {
            "job-name": request.name,
            "nodes": str(request.num_nodes),
            "ntasks-per-node": "1",  # oomph launch starts the other processes
            "gres": f"{request.gpu_resource}:{request.gpus_each}",
            "cpus-per-task": str(cpus_per_gpu * request.gpus_each),
            "time": None if request.time_s is None else as_clock(request.time_s),
            "mem": None if request.memory_bytes is None else f"{-(-request.memory_bytes // MIB)}M",
            "partition": request.queue,
            "output": str(directory / OUTPUT),
        }
        head = [f"#SBATCH --{key}={plain(key, text)}" for key, text in directives.items() if text]
        head += [f"#SBATCH {_plain_option(option)}" for option in request.options]
        if request.num_nodes == 1:
            start = [launch_words(training, request)]
        else:
            meeting = f'--nodes {request.num_nodes} --meet "$first:$port" --meet-as "$SLURM_JOB_ID"'
            start = [
                *_MEETING,
                'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # else srun gives each task one',
                f"srun {launch_words(training, request, meeting=meeting)}",
            ]
        exports = environment_of(variant, cpus_per_gpu)
        what = told(training, request, variant)
        return job_script([*head, *own], what, exports, body(directory, start))

    def preflight(self, script: Path, request: Request) -> None:
        """Raise UsageError for a job that could never run."""
        most = self.most_gpus(request)
        if most is not None and request.gpus_each > most:
            raise UsageError(
                f"no machine here has {request.gpus_each} GPUs",
                because=f"sinfo lists at most {most} of {request.gpu_resource!r} on one",
                attempt=f"oomph plan --gpus-per-node {most}" if most else "sinfo -o '%N %G'",
            )
        answer = ask("sbatch", "--test-only", str(script))
        if answer.exit_code:
            raise refused(answer, "Slurm", "--dry-run, to read what was asked")

    def most_gpus(self, request: Request) -> int | None:
        """Return the most GPUs of a machine; None if Slurm does not say."""
        words = ["sinfo", "--noheader", "--format=%G"]
        if request.queue is not None:
            words.append(f"--partition={request.queue}")
        answer = ask(*words)
        if answer.exit_code or not answer.printed.strip():
            return None
        # "gpu:4", "gpu:a100:8(S:0-1),shard:32", "(null)"
        kind = re.escape(request.gpu_resource.partition(":")[0])
        found = re.findall(rf"(?:^|,){kind}:(?:[^:,()]+:)*(\d+)", answer.printed, re.MULTILINE)
        return max(map(int, found), default=0)

    def submit(self, script: Path) -> str:
        """Hand the script to sbatch; return the job's number."""
        answer = ask("sbatch", "--parsable", str(script))
        if answer.exit_code:
            raise refused(answer, "Slurm", "--dry-run, to read what was asked")
        return answer.printed.strip().split(";")[0]

    def says(self, number: str) -> str | None:
        """Return the job's state in Slurm's words; None if Slurm has forgotten it."""
        answer = ask("squeue", "--noheader", f"--jobs={number}", "--format=%T %r")
        state = " ".join(answer.printed.split()).removesuffix(" None")
        if not answer.exit_code and state:
            return state
        answer = ask("scontrol", "show", "job", number)
        found = re.search(r"JobState=(\S+)", answer.printed)
        return None if answer.exit_code or found is None else found[1]

    def is_waiting(self, says: str) -> bool:
        return says.startswith(("PENDING", "REQUEUED", "SPECIAL_EXIT"))

    def is_running(self, says: str) -> bool:
        return says.startswith(
            ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STAGE", "STOPPED", "SIGNALING")
        )

    def cancel(self, number: str) -> None:
        answer = ask("scancel", number)
        if answer.exit_code:
            raise refused(answer, "Slurm", f"scancel {number}")


def _plain_option(option: str) -> str:
    if not re.fullmatch(r"--?[A-Za-z][\w-]*([= ][\w.:@+%/,=\[\]-]+)?", option):
        raise UsageError(
            f"--option {option!r:.80} cannot stand in a job script",
            because="schedulers read it from a comment, where nothing can be quoted",
            attempt="--option=--account=nlp",
        )
    return option
