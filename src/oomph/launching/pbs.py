"""A training -> a job script for PBS (OpenPBS, PBS Pro). It is printed, and not submitted.

No daemon of PBS could be run for a test, so what is here comes from its manual: qsub(1B),
pbs_resources(7B) of OpenPBS 23.
"""

from __future__ import annotations

from oomph.errors import UsageError
from oomph.launching.job_body import as_clock, launch_words, told
from oomph.launching.job_script import job_script, plain
from oomph.launching.torchrun import environment_of
from oomph.records.launch import Request, Training
from oomph.records.workload import Variant
from oomph.units import MIB

CPUS_PER_GPU = 4  # judgement: a main process and some loader workers


def pbs_script(training: Training, request: Request, variant: Variant | None) -> str:
    """Return a script for qsub, on one machine. Raises UsageError."""
    if request.num_nodes > 1:
        raise UsageError(
            f"{request.num_gpus} GPUs are {request.num_nodes} machines of {request.gpus_each}",
            because="oomph writes jobs of PBS on one machine",
            attempt=f"--via slurm, or a plan with --gpus-per-node {request.num_gpus}"
            " if one machine has them",
        )
    cpus_per_gpu = request.cpus_per_gpu or CPUS_PER_GPU
    resource = "ngpus" if request.gpu_resource == "gpu" else request.gpu_resource
    chunk = {
        "select": "1",
        "ncpus": str(cpus_per_gpu * request.gpus_each),
        resource: str(request.gpus_each),
    }
    if request.memory_bytes is not None:
        chunk["mem"] = f"{-(-request.memory_bytes // MIB)}mb"
    head = [
        f"#PBS -N {plain('name', request.name)}",
        "#PBS -l " + ":".join(f"{plain('-l', key)}={plain(key, chunk[key])}" for key in chunk),
        *([f"#PBS -l walltime={as_clock(request.time_s)}"] if request.time_s is not None else []),
        *([f"#PBS -q {plain('queue', request.queue)}"] if request.queue else []),
        "#PBS -j oe",
        "#PBS -V",
        *(f"#PBS {option}" for option in request.options),
    ]
    run = ['cd "$PBS_O_WORKDIR"', f"exec {launch_words(training, request)}"]
    exports = environment_of(variant, cpus_per_gpu)
    return job_script(head, told(training, request, variant), exports, run)
