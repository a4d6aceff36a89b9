"""The verb check: Workload -> does a trick leave its training as it is?

The workload is rehearsed first: that takes no memory, and tells how much the checks will take.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from oomph.records.check import Checks
    from oomph.records.trace import Trace
    from oomph.records.workload import Workload
    from oomph.tracing.many import Rehearser

# Enough to tell 3 + 5 from 4 + 4. Fewer where a step of a large model takes long.
_EXAMPLES = (8, 5, 3)
_MOST_FLOPS = 1e10  # of a step: in fp64 on one core, a second or two
# Of each parameter at the most: the model in fp64 and its gradient, the model in fp32 and its
# gradient, the gradients of the whole and of two pieces, and a matrix of two of them twice.
_BYTES_A_PARAMETER = 8 + 8 + 4 + 4 + 3 * 8 + 4 * 8
# Of each byte of activations in fp32: twice in fp64, and again as copies of what modules gave.
_BYTES_AN_ACTIVATION_BYTE = 6
_BYTES_OF_TORCH = 512 << 20  # of a process that has it
_AMPERE = (8, 0)


class Need(NamedTuple):
    """What a check with so many examples takes."""

    num_examples: int
    memory_bytes: int


def check(
    workload: Workload | str,
    *,
    only: Collection[str] | None = None,
    examples: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Checks:
    """Run a few examples for real, on the CPU, and tell what tricks do to this training.

    `workload` is a Workload, or the place of one: "train.py:workload". `only` names the checks:
    "accumulation" (is the gradient of the split batch that of the whole, and with which weights?),
    "fp16" and "bf16" (does autocast train this model, as CUDA does it?) and "checkpointing" (do
    blocks that are recomputed give what they gave?). `examples` is the number of examples.
    Everything runs in a child process. A model that does not fit into this machine's memory is
    refused before any of it is taken.
    """
    from oomph.records.check import CHECKS
    from oomph.tracing.child import in_a_child
    from oomph.verbs.predictions import find_place

    wanted = CHECKS if only is None else _known(only)
    place = find_place(workload)
    tell = say or (lambda _: None)
    return in_a_child(lambda: _run(place, wanted, examples, tell))


def _run(
    place: Workload | tuple[Path, str],
    wanted: Collection[str],
    examples: int | None,
    say: Callable[[str], None],
) -> Checks:
    """In the child, which has a child of its own for the rehearsal."""

    from oomph.records.workload import Workload
    from oomph.stability.checking import run_checks
    from oomph.stability.cuda_casts import CudaCasts
    from oomph.tracing import autocast
    from oomph.tracing.loading import load
    from oomph.training.blocks import named_blocks
    from oomph.training.checkpointing import checkpoint_blocks

    workload = place if isinstance(place, Workload) else load(*place)
    say("rehearsing, to know what the checks will take")
    need = _need(workload, examples)
    _refuse_if_too_large(need)
    return run_checks(
        workload,
        "the workload" if isinstance(place, Workload) else ":".join(map(str, place)),
        only=wanted,
        num_examples=need.num_examples,
        named_blocks=named_blocks,
        recompute=checkpoint_blocks,
        casts=CudaCasts(autocast.installed, autocast.guard),
        say=say,
    )


def _known(only: Collection[str]) -> tuple[str, ...]:
    from oomph.errors import UsageError
    from oomph.records.check import CHECKS

    names = (only,) if isinstance(only, str) else tuple(only)
    for name in names:
        if name not in CHECKS:
            raise UsageError(
                f"there is no check {name!r:.40}",
                because=f"the checks are {', '.join(CHECKS)}",
                attempt=f"only={CHECKS[0]!r}",
            )
    return names or CHECKS


# ---- what it will take -------------------------------------------------------------------------


def _need(workload: Workload, examples: int | None) -> Need:
    """By a rehearsal of the step in a child, which takes no memory of the model's size."""
    from oomph.errors import UsageError, UserCodeError
    from oomph.tracing.many import with_rehearser
    from oomph.training import apply

    if examples is not None and examples < _EXAMPLES[-1]:
        raise UsageError(
            f"{examples} examples cannot be split unevenly",
            attempt=f"{_EXAMPLES[-1]} or more; {_EXAMPLES[0]} is the default",
        )
    try:
        return with_rehearser(workload, _AMPERE, apply, lambda one: _rehearsed(one, examples))
    except UserCodeError:
        # Not all that runs can be rehearsed. What really fails will say so when it runs.
        return with_rehearser(workload, _AMPERE, apply, lambda one: _built(one, examples))


def _rehearsed(rehearser: Rehearser, examples: int | None) -> Need:
    from oomph.records.workload import Variant

    for num in _EXAMPLES if examples is None else (examples,):
        trace = rehearser.trace(Variant(micro_batch=num))
        if sum(op.flops for op in trace.ops) <= _MOST_FLOPS:
            break
    parameters = sum(a.size_bytes for a in trace.allocations if a.category == "parameters") // 4
    activations = _most_bytes(trace, ("activations", "temporaries", "inputs"))
    of_activations = activations * _BYTES_AN_ACTIVATION_BYTE
    return Need(num, _BYTES_OF_TORCH + parameters * _BYTES_A_PARAMETER + of_activations)


def _most_bytes(trace: Trace, categories: Collection[str]) -> int:
    """The most that allocations of these categories hold at a time."""
    sizes = [a.size_bytes if a.category in categories else 0 for a in trace.allocations]
    changes = (sizes[e - 1] if e > 0 else -sizes[-e - 1] for e in trace.events)
    return max(itertools.accumulate(changes), default=0)


def _built(rehearser: Rehearser, examples: int | None) -> Need:
    """The parameters alone, which take no memory either."""
    from oomph.training.possible import possible

    num_parameters = rehearser.look(possible).num_parameters
    memory_bytes = _BYTES_OF_TORCH + num_parameters * _BYTES_A_PARAMETER
    return Need(examples or _EXAMPLES[0], memory_bytes)


def _refuse_if_too_large(need: Need) -> None:
    from oomph.errors import UsageError
    from oomph.units import format_bytes

    available = _available_bytes()
    if need.memory_bytes > available:
        raise UsageError(
            "this model is too large to be checked on this machine",
            because=f"running it in fp64 takes about {format_bytes(need.memory_bytes)} of memory,"
            f" and {format_bytes(available)} are available",
            attempt="a smaller configuration of the same model: fewer layers, the same code",
        )


def _available_bytes() -> int:
    """Of this machine, or of the container that this process is in."""
    from pathlib import Path

    import psutil

    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, taken = ((group / name).read_text() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return min(available, int(limit) - int(taken)) if limit.strip().isdecimal() else available
