"""Wanted, and its plan -> what is started here, or what is ordered from a scheduler.

What cannot be meant is refused here, before anything starts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from oomph.errors import UsageError
from oomph.launching.here import Here
from oomph.launching.jobs import Order
from oomph.launching.torchrun import Nodes, spread
from oomph.records.launch import Request, Training, Wanted
from oomph.records.plan import Plan
from oomph.units import parse_bytes, parse_duration

_EXAMPLE = "oomph launch --nproc 2 -- train.py --epochs 3"
# Of the estimated time: judgement, for data, evaluation and checkpoints, which no plan knows, and
# for the start.
_MARGIN_RATIO, _START_S = 1.5, 900.0


def training_of(wanted: Wanted) -> Training:
    """Return what is to run. Raises UsageError."""
    if wanted.module is not None and wanted.own_script is not None:
        raise UsageError("-m and --script were both given", attempt=_EXAMPLE)
    if wanted.module is not None or wanted.own_script is not None:
        return Training(module=wanted.module, own_script=wanted.own_script, arguments=wanted.words)
    if not wanted.words:
        raise UsageError("there is no script to start", attempt=_EXAMPLE)
    script, *arguments = wanted.words
    _refuse_a_program(script, arguments)
    return Training(script=script, arguments=tuple(arguments))


def _refuse_a_program(script: str, arguments: Sequence[str]) -> None:
    """Raise UsageError for `python train.py` or `torchrun train.py` in place of the script."""
    name = PurePath(script).name
    if re.fullmatch(r"python[\d.]*|torchrun|accelerate|deepspeed", name):
        scripts = [word for word in arguments if word.endswith(".py")]
        rest = arguments[arguments.index(scripts[0]) :] if scripts else ["train.py"]
        raise UsageError(
            f"{name} is a program, and oomph launch starts a script by torchrun itself",
            because="torchrun would read the program as Python",
            attempt=f"oomph launch ... -- {shlex.join(rest)}",
        )


def nodes_of(wanted: Wanted, plan: Plan | None) -> Nodes:
    """Return how many processes run on how many machines. Raises UsageError."""
    if plan is not None:
        if wanted.num_processes is not None or wanted.num_nodes is not None:
            flag = "--nproc" if wanted.num_processes is not None else "--nodes"
            raise UsageError(
                f"a plan and {flag} were both given",
                because="the plan says how many processes keep its batch size",
                attempt="one of the two",
            )
        return spread(plan.variant)
    if wanted.num_processes is None:
        raise UsageError(
            "it is not known how many processes to start",
            because="neither a plan nor --nproc was given",
            attempt=_EXAMPLE,
        )
    return Nodes(num_nodes=wanted.num_nodes or 1, num_gpus_each=wanted.num_processes)


# ---- here ----------------------------------------------------------------------------------------


def here_of(wanted: Wanted, plan: Plan | None) -> Here:
    """Return what to start on this machine. Raises UsageError."""
    training, names = training_of(wanted), _names(wanted.gpus)
    if plan is None and wanted.num_processes is None and names:
        nodes = Nodes(num_nodes=wanted.num_nodes or 1, num_gpus_each=len(names))
    else:
        nodes = nodes_of(wanted, plan)
    if names and len(names) != nodes.num_gpus_each:
        raise UsageError(
            f"--gpus names {len(names)} GPUs for {nodes.num_gpus_each} processes",
            because="each process has a GPU of its own",
            attempt=f"naming {nodes.num_gpus_each}",
        )
    return Here(
        training=training,
        num_processes=nodes.num_gpus_each,
        variant=None if plan is None else plan.variant,
        gpus=names,
        num_nodes=nodes.num_nodes,
        meeting=wanted.meeting,
        rendezvous=wanted.meeting_name,
        max_restarts=wanted.max_restarts,
    )


def _names(gpus: str | None) -> tuple[str, ...] | None:
    """Return the named GPUs, () if any will do, or None for the CPU."""
    if gpus == "none":
        return None
    names = tuple(filter(None, (name.strip() for name in (gpus or "").split(","))))
    if len(set(names)) < len(names):
        raise UsageError("--gpus names a GPU twice", attempt="naming each once")
    return names


# ---- a job ---------------------------------------------------------------------------------------


def order_of(wanted: Wanted, plan: Plan | None) -> Order:
    """Return what to hand to a scheduler. Raises UsageError."""
    training, nodes = training_of(wanted), nodes_of(wanted, plan)
    request = Request(
        name=wanted.name or _name_of(training),
        num_nodes=nodes.num_nodes,
        gpus_each=nodes.num_gpus_each,
        cpus_per_gpu=wanted.cpus_per_gpu,
        time_s=_time_s(wanted, plan),
        memory_bytes=None if wanted.memory is None else parse_bytes(wanted.memory),
        queue=wanted.queue,
        options=wanted.options,
        gpu_resource=wanted.gpu_resource,
        parallel_environment=wanted.parallel_environment,
        image=wanted.image,
    )
    return Order(
        training=training,
        request=request,
        via=wanted.via or "found",
        variant=None if plan is None else plan.variant,
    )


def _name_of(training: Training) -> str:
    """Return the script's name with plain letters; Grid Engine's names begin with one."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "", PurePath(training.name).stem) or "train"
    return name if name[0].isalpha() else f"job-{name.lstrip('-.')}"


def _time_s(wanted: Wanted, plan: Plan | None) -> float | None:
    if wanted.time is not None and wanted.steps is not None:
        raise UsageError("--time and --steps were both given", attempt="one of the two")
    if wanted.time is not None:
        return parse_duration(wanted.time)
    if wanted.steps is None:
        return None
    step_s = None if plan is None else plan.prediction.step_s
    if step_s is None:
        raise UsageError(
            "--steps needs a plan that estimates the time of a step",
            because="without a plan it is not known" if plan is None else "this one does not",
            attempt="--time 12h",
        )
    return wanted.steps * step_s * _MARGIN_RATIO + _START_S
