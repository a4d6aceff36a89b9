"""The user's own submit script -> its directives, kept, and its mistakes, said before they cost.

Directives are what schedulers read from comments: `#SBATCH --time=1:00:00`, `#$ -l h_rt=1:0:0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from oomph.errors import Unreadable, UsageError
from oomph.records.launch import Request

_NAMES_A_JOB = re.compile(r"(?:^|\s)(?:-N|--job-name)[ =]?\s*(gpus?\s*=\s*(\$?\w+))", re.IGNORECASE)
# How a number of GPUs is asked for, in any of the dialects.
_ASKS_FOR_GPUS = (
    r"-l\s+\S*\b{resource}=(\d+)",
    r"--gres=gpu:(?:[^:\s]+:)?(\d+)",
    r"--gpus(?:-per-node)?[= ](?:[^:\s]+:)?(\d+)",
)


def refuse_named_gpus(text: str) -> None:
    """Raise UsageError for `-N gpu=4`, which names the job and asks for nothing."""
    found = _NAMES_A_JOB.search(text)
    if found is not None:
        raise UsageError(
            f"{found[0].strip()!r} only names the job, and asks for no GPU",
            because="-N and --job-name are names; GPUs are a resource",
            attempt=f"-l gpu={found[2]} on Grid Engine, --gres=gpu:{found[2]} on Slurm; oomph"
            " launch writes it itself",
        )


def directives_of(path: str, directive: str, request: Request) -> tuple[str, ...]:
    """Return the directives of a script that agree with the request. Raises OomphError."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        raise Unreadable(f"{path} cannot be read", because=error.strerror) from error
    found = [line.rstrip() for line in _directives(text, directive)]
    for line in found:
        refuse_named_gpus(line)
    refuse_other_gpus(found, request, path)
    return tuple(line for line in found if gpus_in(line, request) is None)


def refuse_other_gpus(lines: Sequence[str], request: Request, where: str) -> None:
    """Raise UsageError for lines that ask for another number of GPUs than the plan."""
    for line in lines:
        number = gpus_in(line, request)
        if number is not None and number != request.gpus_each:
            raise UsageError(
                f"{where} asks for {number} GPUs, and the plan for {request.gpus_each}",
                because=f"of {line.strip()!r:.120}",
                attempt=f"without it: oomph launch asks for {request.gpus_each}",
            )


def gpus_in(line: str, request: Request) -> int | None:
    """Return how many GPUs a directive asks for; None if it says nothing about them."""
    resource = re.escape(request.gpu_resource)
    for pattern in _ASKS_FOR_GPUS:
        if found := re.search(pattern.format(resource=resource), line):
            return int(found[1])
    return None


def _directives(text: str, directive: str) -> Iterator[str]:
    """Yield the directives before the first command, as schedulers read them."""
    for line in text.splitlines():
        if line.startswith(f"{directive} "):
            yield line
        elif line.strip() and not line.startswith("#"):
            return
