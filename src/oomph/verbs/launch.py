"""The verb launch: a training -> its processes here, or a scheduler's job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomph.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomph.launching.here import Here
    from oomph.launching.here import Launched as Launched
    from oomph.records.launch import Training

_EXAMPLE = "oomph launch --nproc 2 -- train.py --epochs 3"


def training_of(
    words: Sequence[str], *, module: str | None = None, own_script: str | None = None
) -> Training:
    """Return what is to run, from the words after `--`. Raises UsageError."""
    from oomph.records.launch import Training

    if module is not None and own_script is not None:
        raise UsageError("-m and --script were both given", attempt=_EXAMPLE)
    if module is not None or own_script is not None:
        return Training(module=module, own_script=own_script, arguments=tuple(words))
    if not words:
        raise UsageError("there is no script to start", attempt=_EXAMPLE)
    script, *arguments = words
    _refuse_a_command(script, arguments)
    return Training(script=script, arguments=tuple(arguments))


def _refuse_a_command(script: str, arguments: Sequence[str]) -> None:
    """Raise UsageError for `python train.py` or `torchrun train.py` in place of the script."""
    import re
    import shlex

    name = script.rpartition("/")[2]
    if re.fullmatch(r"python[\d.]*|torchrun|accelerate|deepspeed", name):
        scripts = [word for word in arguments if word.endswith(".py")]
        rest = arguments[arguments.index(scripts[0]) :] if scripts else ["train.py"]
        raise UsageError(
            f"{name} is a program, and oomph launch starts a script by torchrun itself",
            because="torchrun would read the program as Python",
            attempt=f"oomph launch ... -- {shlex.join(rest)}",
        )


def here(
    training: Training,
    *,
    plan: str | None = None,
    num_processes: int | None = None,
    gpus: str | None = None,
    num_nodes: int | None = None,
    meeting: str | None = None,
    rendezvous: str | None = None,
    max_restarts: int = 0,
) -> Here:
    """Return what to start on this machine. Raises OomphError."""
    from oomph.exporting.planned import load_plan
    from oomph.launching.here import Here
    from oomph.launching.torchrun import spread

    if plan is not None and num_processes is not None:
        raise UsageError(
            "a plan and --nproc were both given",
            because="the plan says how many processes keep its batch size",
            attempt="one of the two",
        )
    variant = None if plan is None else load_plan(plan).variant
    names = _names(gpus)
    if variant is not None:
        nodes = spread(variant)
        num_processes, planned_nodes = nodes.num_gpus_each, nodes.num_nodes
    else:
        planned_nodes = num_nodes or 1
    num_processes = num_processes or (len(names) if names else None)
    if num_processes is None:
        raise UsageError(
            "it is not known how many processes to start",
            because="neither a plan nor --nproc was given",
            attempt=_EXAMPLE,
        )
    if names and len(names) != num_processes:
        raise UsageError(
            f"--gpus names {len(names)} GPUs for {num_processes} processes",
            because="each process has a GPU of its own",
            attempt=f"naming {num_processes}",
        )
    return Here(
        training=training,
        num_processes=num_processes,
        variant=variant,
        gpus=names,
        num_nodes=planned_nodes if num_nodes is None else num_nodes,
        meeting=meeting,
        rendezvous=rendezvous,
        max_restarts=max_restarts,
    )


def _names(gpus: str | None) -> tuple[str, ...] | None:
    if gpus == "none":
        return None
    names = tuple(filter(None, (name.strip() for name in (gpus or "").split(","))))
    if len(set(names)) < len(names):
        raise UsageError("--gpus names a GPU twice", attempt="naming each once")
    return names


def in_words(here: Here) -> str:
    """Return the command that would run."""
    from oomph.launching import here as on_this_machine

    return on_this_machine.in_words(here)


def launch(here: Here, *, alerts: bool = True) -> Launched:
    """Start the training on this machine and watch it to its end."""
    from oomph.launching import here as on_this_machine

    return on_this_machine.launch(here, alerts=alerts)
