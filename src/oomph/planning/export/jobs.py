"""Variant -> a job script for Slurm or Grid Engine that requests the planned GPUs.

Nothing is submitted. What a scheduler is told stands in comments, where nothing can be quoted:
names with anything but plain characters are refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Literal

from oomph.errors import UsageError
from oomph.planning.export.nodes import spread
from oomph.planning.export.torchrun import environment_of, launch_options, script_words
from oomph.records.workload import Variant

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
    """For sbatch. time and memory (of a machine) as Slurm takes them: "12:00:00", "64G"."""
    nodes = spread(variant.num_gpus, gpus_per_node)
    directives = {
        "job-name": name,
        "nodes": str(nodes.num_nodes),
        "ntasks-per-node": "1",  # torchrun starts the others
        "gres": f"gpu:{nodes.num_gpus_each}",
        "cpus-per-task": str(cpus_per_gpu * nodes.num_gpus_each),
        "time": time,
        "mem": memory,
        "partition": partition,
    }
    head = [f"#SBATCH --{key}={_plain(key, value)}" for key, value in directives.items() if value]
    words = _quoted(script_words(script, arguments))
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
    """For qsub. gpu_resource, parallel_environment and queue are named by the site.

    gpus_counted: what `qconf -sc` says of the resource, JOB or YES: with YES Grid Engine
    multiplies the number by the slots, and a job that asks for too many waits for ever.
    """
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
        "#$ -V",  # qsub hands the environment over only if it is told to
        "#$ -w e",  # refuse at once what could never run
        *(f"#$ -l {_plain('gpu_resource', k)}={_plain(k, v)}" for k, v in resources.items() if v),
        *([f"#$ -q {_plain('queue', queue)}"] if queue else []),
    ]
    if parallel_environment:
        head.append(f"#$ -pe {_plain('parallel_environment', parallel_environment)} {slots}")
    words = _quoted(script_words(script, arguments))
    options = shlex.join(launch_options(spread(variant.num_gpus, None), None))
    run = [_WHICH_GPUS.format(num_gpus=variant.num_gpus), f"exec torchrun {options} {words}"]
    return _script(head, variant, max(1, slots // variant.num_gpus), run)


def _script(head: list[str], variant: Variant, threads: int, run: list[str]) -> str:
    exports = [
        f"export {name}={shlex.quote(value)}"
        for name, value in environment_of(variant, threads).items()
    ]
    what = (
        f"# {variant.micro_batch} examples at a time x {variant.accumulation} times"
        f" x {variant.num_gpus} GPUs = {variant.batch_size} for each step of the optimizer"
    )
    return "\n".join(["#!/bin/bash", *head, what, "set -euo pipefail", *exports, *run]) + "\n"


def _quoted(words: Sequence[str]) -> str:
    return shlex.join(words)


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


# A fallback such as localhost would make every machine a world of its own, and hang.
_MEETING = [
    'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
    "first=${hosts%%$'\\n'*}",
    ': "${first:?no host in SLURM_JOB_NODELIST}"',
    "port=$((20000 + SLURM_JOB_ID % 20000))  # two jobs that share a machine do not meet",
]

# Grid Engine counts GPUs, but most releases do not say which ones a job has: without this two jobs
# would both take the first. Other people's jobs are seen by their processes, one's own by a lock.
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
    echo "of {num_gpus} GPUs only ${{#chosen[@]}} are idle on $(hostname)" >&2
    exit 1
  fi
  export CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${{chosen[*]}}")"
fi"""
