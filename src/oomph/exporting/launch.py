"""Variant -> the command or job script that starts the planned processes.

It runs on one or several machines, with torchrun, Slurm or Grid Engine. Nothing is submitted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks.expandable_segments import ALLOCATOR_VARIABLES, SEGMENTS

MEETING = "FIRST-HOST:29500"  # where machines meet, for the user to fill in


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Machines with the same number of GPUs each."""

    num_nodes: int
    num_gpus_each: int


def spread(variant: Variant, gpus_per_node: int | None = None) -> Nodes:
    """Use one machine if all GPUs fit on it, else as many machines as the GPUs fill evenly.

    A machine has as many as the plan says, unless the caller says otherwise.
    """
    num_gpus = variant.num_gpus
    gpus_per_node = variant.gpus_per_node if gpus_per_node is None else gpus_per_node
    if 0 < num_gpus <= gpus_per_node:
        return Nodes(num_nodes=1, num_gpus_each=num_gpus)
    if gpus_per_node < 1 or num_gpus % gpus_per_node:
        raise UsageError(
            f"{num_gpus} GPUs cannot be spread over machines of {gpus_per_node}",
            because="every machine must have equally many, or the batch would change",
            attempt="a plan whose number of GPUs is a multiple of a machine's",
        )
    return Nodes(num_nodes=num_gpus // gpus_per_node, num_gpus_each=gpus_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command and the environment it needs."""

    environment: Mapping[str, str]
    arguments: tuple[str, ...]

    @property
    def shell(self) -> str:
        """Return the command as one line for a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.arguments)])

    def __str__(self) -> str:
        return self.shell


def torchrun_command(
    variant: Variant,
    script: str,
    arguments: Sequence[str] = (),
    *,
    gpus_per_node: int | None = None,
    endpoint: str | None = None,
    threads_per_gpu: int = 1,
) -> Command:
    """Return the torchrun command for the planned processes.

    endpoint is the first machine's host:port. threads_per_gpu defaults to torchrun's own value;
    more threads help an optimizer on the host.
    """
    nodes = spread(variant, gpus_per_node)
    if nodes.num_nodes > 1 and endpoint is None:
        raise UsageError(
            f"{nodes.num_nodes} machines need a place to meet",
            because="each of them runs torchrun, and they must find each other",
            attempt=f'endpoint="{MEETING}"',
        )
    start = ["torchrun", *launch_options(nodes, endpoint)]
    return Command(
        environment=environment_of(variant, threads_per_gpu),
        arguments=(*start, *script_words(script, arguments)),
    )


def launch_options(nodes: Nodes, endpoint: str | None) -> list[str]:
    """Return torchrun's own options. On a single machine torchrun picks a free port itself."""
    each = f"--nproc-per-node={nodes.num_gpus_each}"
    if nodes.num_nodes == 1:
        return ["--standalone", each]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    return [f"--nnodes={nodes.num_nodes}", each, *meeting]


def environment_of(variant: Variant, threads_per_gpu: int) -> dict[str, str]:
    """Return the variables that must be set before the first process starts."""
    segments = dict.fromkeys(ALLOCATOR_VARIABLES, SEGMENTS) if variant.expandable_segments else {}
    return {
        **segments,
        "OMP_NUM_THREADS": str(threads_per_gpu),
        # Without this, a restarted torchrun reads the addresses of the previous run and hangs
        # (https://github.com/pytorch/pytorch/issues/135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def script_words(script: str, arguments: Sequence[str]) -> list[str]:
    """Return the script and its arguments; a name with a leading dash must not become an option."""
    words = [script, *arguments]
    if not script or any("\0" in word for word in words):
        raise UsageError(
            "the script's name or an argument cannot be a word of a command line",
            because="it is empty, or has a zero byte in it",
            attempt='to_torchrun("train.py")',
        )
    return [f"./{script}" if script.startswith("-") else script, *arguments]


# ---- job scripts for Slurm and Grid Engine -------------------------------------------------------
# Scheduler options are written as comments, where nothing can be quoted, so names with anything but
# plain characters are refused.

_PLAIN = re.compile(r"[A-Za-z0-9_.:@+%/][A-Za-z0-9_.:@+%/-]*")


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
    head = [f"#SBATCH --{key}={_plain(key, value)}" for key, value in directives.items() if value]
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
    return _script(head, variant, cpus_per_gpu, run)


def sge_script(
    variant: Variant,
    script: str = "train.py",
    arguments: Sequence[str] = (),
    *,
    name: str = "train",
    time: str | None = None,
    memory: str | None = None,
    queue: str | None = None,
    gpu_resource: str = "gpu",
    parallel_environment: str | None = None,
    slots: int = 1,
    gpus_counted: Literal["per job", "per slot"] = "per job",
) -> str:
    """Return a script for qsub. The site names gpu_resource, parallel_environment and queue.

    gpus_counted: what `qconf -sc` says about the resource, JOB or YES. With YES, Grid Engine
    multiplies the number by the slots, and a job that asks for too many GPUs waits forever.
    """
    nodes = spread(variant)
    if nodes.num_nodes > 1:
        raise UsageError(
            f"{variant.num_gpus} GPUs are {nodes.num_nodes} machines of {nodes.num_gpus_each}",
            because="oomph writes scripts for Grid Engine on one machine",
            attempt=f"--export slurm, torchrun, or --gpus-per-node {variant.num_gpus} if one"
            " machine has them",
        )
    requested = variant.num_gpus
    if gpus_counted == "per slot":
        requested = _per_slot(variant.num_gpus, slots)
    if slots > 1 and parallel_environment is None:
        raise UsageError(
            f"{slots} slots need a parallel environment",
            because="Grid Engine gives a job one slot without it",
            attempt='parallel_environment="smp" (qconf -spl lists them)',
        )
    resources = {gpu_resource: str(requested), "h_rt": time, "h_vmem": memory}
    head = [
        f"#$ -N {_plain('name', name)}",
        "#$ -S /bin/bash",
        "#$ -cwd",
        "#$ -V",  # without it qsub does not pass the environment on
        "#$ -w e",  # reject at once what could never run
        *(f"#$ -l {_plain('gpu_resource', k)}={_plain(k, v)}" for k, v in resources.items() if v),
        *([f"#$ -q {_plain('queue', queue)}"] if queue else []),
    ]
    if parallel_environment:
        head.append(f"#$ -pe {_plain('parallel_environment', parallel_environment)} {slots}")
    words = shlex.join(script_words(script, arguments))
    options = shlex.join(launch_options(nodes, None))
    run = [_WHICH_GPUS.format(num_gpus=variant.num_gpus), f"exec torchrun {options} {words}"]
    return _script(head, variant, max(1, slots // variant.num_gpus), run)


def _script(head: list[str], variant: Variant, threads: int, run: list[str]) -> str:
    exports = [
        f"export {name}={shlex.quote(value)}"
        for name, value in environment_of(variant, threads).items()
    ]
    what = f"# {split_of(variant)}"
    return "\n".join(["#!/bin/bash", *head, what, "set -euo pipefail", *exports, *run]) + "\n"


def split_of(variant: Variant) -> str:
    """Return how a batch is split, for a comment in a script."""
    return (
        f"{variant.micro_batch} examples at a time x {variant.accumulation} times x"
        f" {variant.num_gpus} GPUs = {variant.batch_size} for each step of the optimizer"
    )


def _plain(what: str, value: str) -> str:
    if not _PLAIN.fullmatch(value):
        raise UsageError(
            f"{what}={value!r:.80} cannot stand in a job script",
            because="schedulers read it from a comment, where nothing can be quoted",
            attempt="letters, digits and _ . : @ + % / -",
        )
    return value


def _per_slot(num_gpus: int, slots: int) -> int:
    if slots < 1 or num_gpus % slots:
        raise UsageError(
            f"{num_gpus} GPUs cannot be requested over {slots} slots",
            because="each slot asks for equally many",
            attempt=f"slots={num_gpus}",
        )
    return num_gpus // slots


# A fallback such as localhost would make every machine a separate world, and hang.
_MEETING = [
    'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
    "first=${hosts%%$'\\n'*}",
    ': "${first:?no host in SLURM_JOB_NODELIST}"',
    "port=$((20000 + SLURM_JOB_ID % 20000))  # two jobs that share a machine do not meet",
]

# Grid Engine counts GPUs, but most releases do not say which ones a job has: without this, two jobs
# would both take the first. Other users' jobs are detected by their processes, one's own by a lock.
_WHICH_GPUS = """\
if [ -n "${{SGE_HGR_gpu:-}}" ]; then
  export CUDA_VISIBLE_DEVICES="${{SGE_HGR_gpu// /,}}"
elif [ -z "${{CUDA_VISIBLE_DEVICES:-}}" ]; then
  # This Grid Engine does not say which GPUs: take idle ones, and hold a lock on each.
  chosen=()
  for gpu in $(nvidia-smi --query-gpu=uuid --format=csv,noheader); do
    [ "${{#chosen[@]}}" -lt {num_gpus} ] || break
    busy=$(nvidia-smi --id="$gpu" --query-compute-apps=pid --format=csv,noheader)
    [ -z "$busy" ] || continue
    exec {{lock}}>>"/tmp/gpu-$(id -u)-$gpu.lock"  # held until the job ends
    flock --nonblock "$lock" || continue
    chosen+=("$gpu")
  done
  if [ "${{#chosen[@]}}" -lt {num_gpus} ]; then
    echo "only ${{#chosen[@]}} of the {num_gpus} GPUs needed are idle on $(hostname)" >&2
    exit 1
  fi
  export CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${{chosen[*]}}")"
fi"""
