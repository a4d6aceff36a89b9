"""A training -> a job of Grid Engine: its script, and what qsub, qconf, qstat and qdel say.

`sge_script` is an export: a script without oomph. `GridEngine` submits jobs that run `oomph
launch`. Three things go wrong in silence there, and are caught before: `-N gpu=4` only names the
job, a resource that is counted per slot is multiplied by the slots, and a request that no machine
can meet waits for ever.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from oomph.errors import UsageError
from oomph.launching.asking import answers, ask, last_line, refused
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

# Grid Engine counts GPUs, but most releases do not say which ones a job has: without this, two jobs
# would both take the first. Those that run are detected by their processes, those that start by a
# lock.
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
    lock_file="${{OOMPH_LOCKS:-/tmp}}/gpu-$gpu.lock"  # the one that oomph launch locks, too
    [ -e "$lock_file" ] || (umask 022; set -o noclobber; : > "$lock_file") 2>/dev/null || true
    exec {{lock}}< "$lock_file"  # held until the job ends
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


# ---- jobs that run `oomph launch` ----------------------------------------------------------------

_MOST_HOSTS = 64  # that are asked for their GPUs; judgement: each is a call of qconf


class GridEngine:
    """Grid Engine, by its commands."""

    via: Via = "sge"
    directive = "#$"

    def is_here(self) -> bool:
        return answers("qconf", "-sh")

    def script(
        self,
        training: Training,
        request: Request,
        variant: Variant | None,
        directory: Path,
        own: Sequence[str] = (),
    ) -> str:
        """Return the job's script; `own` are directives of the user's own script."""
        if request.num_nodes > 1:
            raise UsageError(
                f"{request.num_gpus} GPUs are {request.num_nodes} machines of {request.gpus_each}",
                because="oomph starts jobs of Grid Engine on one machine",
                attempt="--via slurm, or a plan with --gpus-per-node"
                f" {request.num_gpus} if one machine has them",
            )
        slots = (request.cpus_per_gpu or 0) * request.gpus_each or 1
        environment = self._parallel_environment(request) if slots > 1 else None
        gpus = request.gpus_each
        if slots > 1 and self._is_counted_per_slot(request.gpu_resource):
            gpus = _per_slot(gpus, slots)
        memory_bytes = None if request.memory_bytes is None else -(-request.memory_bytes // slots)
        resources = {
            request.gpu_resource: str(gpus),
            "h_rt": None if request.time_s is None else as_clock(request.time_s),
            # Not h_vmem: CUDA reserves far more addresses than memory, and would be killed.
            "mem_free": None if memory_bytes is None else f"{-(-memory_bytes // MIB)}M",
        }
        head = [
            f"#$ -N {plain('name', request.name)}",
            "#$ -S /bin/bash",
            "#$ -V",  # without it qsub does not pass the environment on
            "#$ -w e",  # reject at once what could never run
            "#$ -notify",  # SIGUSR2 before SIGKILL, so that qdel leaves an exit code
            f"#$ -j y -o {plain('output', str(directory / OUTPUT))}",
            *(f"#$ -l {plain('-l', k)}={plain(k, v)}" for k, v in resources.items() if v),
            *([f"#$ -q {plain('queue', request.queue)}"] if request.queue else []),
            *([f"#$ -pe {plain('--pe', environment)} {slots}"] if environment else []),
            *(f"#$ {option}" for option in request.options),
        ]
        threads = max(1, slots // request.gpus_each)
        start = [launch_words(training, request)]
        what = told(training, request, variant)
        exports = environment_of(variant, threads)
        if path := os.environ.get("LD_LIBRARY_PATH"):
            exports["LD_LIBRARY_PATH"] = path  # which qsub -V leaves out
        return job_script([*head, *own], what, exports, body(directory, start))

    def preflight(self, script: Path, request: Request) -> None:
        """Raise UsageError for a job that could never run: it would wait for ever."""
        most = self.most_gpus(request.gpu_resource)
        if most is not None and request.gpus_each > most:
            raise UsageError(
                f"no machine here has {request.gpus_each} GPUs",
                because=f"qconf lists at most {most} of {request.gpu_resource!r} on one",
                attempt=f"oomph plan --gpus-per-node {most}"
                if most
                else "qconf -sc, --gpu-resource",
            )
        answer = ask("qsub", "-w", "v", str(script))
        if answer.exit_code or "found suitable queue" not in answer.printed + answer.complained:
            raise refused(answer, "Grid Engine", "--dry-run, to read what was asked")

    def most_gpus(self, resource: str) -> int | None:
        """Return the most GPUs of a machine; None if there are too many machines to ask."""
        hosts = ask("qconf", "-sel").printed.split()
        if not hosts or len(hosts) > _MOST_HOSTS:
            return None
        return max(self._gpus_of(host, resource) for host in hosts)

    def _gpus_of(self, host: str, resource: str) -> int:
        text = ask("qconf", "-se", host).printed.replace("\\\n", "")
        values = re.search(r"^complex_values\s+(.*)$", text, re.MULTILINE)
        found = re.search(rf"(?:^|[\s,]){re.escape(resource)}=(\d+)", values[1] if values else "")
        return int(found[1]) if found else 0

    def _is_counted_per_slot(self, resource: str) -> bool:
        """Return whether qconf -sc says YES for the resource; JOB is per job."""
        for row in self._complexes():
            if resource in row[:2]:
                return row[5] == "YES"
        raise UsageError(
            f"Grid Engine knows no resource {resource!r:.60}",
            because="qconf -sc does not list it",
            attempt="--gpu-resource, as the site calls its GPUs",
        )

    def _complexes(self) -> Iterator[list[str]]:
        for line in ask("qconf", "-sc").printed.splitlines():
            row = line.split()
            if len(row) >= 6 and not row[0].startswith("#"):
                yield row

    def _parallel_environment(self, request: Request) -> str:
        """Return the one that was asked for, or the one that keeps a job on one machine."""
        if request.parallel_environment is not None:
            return request.parallel_environment
        known = ask("qconf", "-spl").printed.split()
        within = [name for name in known if self._is_within_a_machine(name)]
        if len(within) == 1 or "smp" in within:
            return "smp" if "smp" in within else within[0]
        raise UsageError(
            "several CPUs need a parallel environment",
            because=f"those on one machine are: {', '.join(within) or 'none'}",
            attempt="--pe NAME, or without --cpus-per-gpu",
        )

    def _is_within_a_machine(self, name: str) -> bool:
        said = ask("qconf", "-sp", name).printed
        return re.search(r"^allocation_rule\s+\$pe_slots\s*$", said, re.MULTILINE) is not None

    def submit(self, script: Path) -> str:
        """Hand the script to qsub; return the job's number."""
        answer = ask("qsub", "-terse", str(script))
        number = last_line(answer.printed.splitlines()).strip()
        if answer.exit_code or not number.isdecimal():
            raise refused(answer, "Grid Engine", "--dry-run, to read what was asked")
        return number

    def says(self, number: str) -> str | None:
        """Return the job's state in qstat's letters; None if Grid Engine has forgotten it."""
        for line in ask("qstat", "-u", "*").printed.splitlines():
            row = line.split()
            if len(row) > 4 and row[0] == number:
                return row[4]
        return None

    def is_waiting(self, says: str) -> bool:
        return "q" in says or "w" in says

    def is_running(self, says: str) -> bool:
        return not self.is_waiting(says)

    def cancel(self, number: str) -> None:
        answer = ask("qdel", number)
        if answer.exit_code:
            raise refused(answer, "Grid Engine", f"qdel {number}")
