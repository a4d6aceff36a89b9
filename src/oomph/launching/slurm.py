"""Variant -> a script for Slurm's sbatch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from oomph.launching.job_script import job_script, plain
from oomph.launching.torchrun import (
    environment_of,
    launch_options,
    script_words,
    split_of,
    spread,
)
from oomph.records.workload import Variant

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
