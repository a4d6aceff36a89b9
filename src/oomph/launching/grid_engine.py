"""Variant -> a script for Grid Engine's qsub."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal

from oomph.errors import UsageError
from oomph.launching.job_script import job_script, plain
from oomph.launching.torchrun import (
    environment_of,
    launch_options,
    script_words,
    split_of,
    spread,
)
from oomph.records.workload import Variant

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
        f"#$ -N {plain('name', name)}",
        "#$ -S /bin/bash",
        "#$ -cwd",
        "#$ -V",  # without it qsub does not pass the environment on
        "#$ -w e",  # reject at once what could never run
        *(f"#$ -l {plain('gpu_resource', k)}={plain(k, v)}" for k, v in resources.items() if v),
        *([f"#$ -q {plain('queue', queue)}"] if queue else []),
    ]
    if parallel_environment:
        head.append(f"#$ -pe {plain('parallel_environment', parallel_environment)} {slots}")
    words = shlex.join(script_words(script, arguments))
    options = shlex.join(launch_options(nodes, None))
    run = [_WHICH_GPUS.format(num_gpus=variant.num_gpus), f"exec torchrun {options} {words}"]
    threads = max(1, slots // variant.num_gpus)
    return job_script(head, split_of(variant), environment_of(variant, threads), run)


def _per_slot(num_gpus: int, slots: int) -> int:
    if slots < 1 or num_gpus % slots:
        raise UsageError(
            f"{num_gpus} GPUs cannot be requested over {slots} slots",
            because="each slot asks for equally many",
            attempt=f"slots={num_gpus}",
        )
    return num_gpus // slots
