"""Workload -> the checks requested: does a trick leave its training unchanged?

Everything really runs, on the CPU, with a few examples. It patches torch, so use a separate
process. The workload is rehearsed first, which takes no memory and shows what the checks will need.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from oomph.errors import UsageError, UserCodeError
from oomph.records.check import CHECKS, Checks, LowPrecision
from oomph.records.generation import DEFAULT_CAPABILITY
from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.traces import Rehearser, load, with_rehearser
from oomph.stability.equivalence import check_accumulation
from oomph.stability.examples import Examples, take, with_values
from oomph.stability.precision import check_precision
from oomph.stability.recomputation import check_checkpointing
from oomph.stability.trial import Trial
from oomph.units import format_bytes

# Judgement: enough to tell 3 + 5 from 4 + 4. Fewer if a step of a large model takes long.
_EXAMPLES = (8, 5, 3)
_MOST_FLOPS = 1e10  # judgement: per step; in fp64 on one core, a second or two
# At most, per parameter: the model in fp64 and its gradient, the model in fp32 and its gradient,
# the gradients of the whole batch and of two pieces, and a matrix of two of them, twice.
_BYTES_A_PARAMETER = 8 + 8 + 4 + 4 + 3 * 8 + 4 * 8
# Per byte of activations in fp32: twice as much in fp64, and again in copies of module outputs.
_BYTES_AN_ACTIVATION_BYTE = 6
_BYTES_OF_TORCH = 512 << 20  # judgement: a process that has imported it takes about 400 MiB


def check_workload(
    place: Workload | tuple[Path, str],
    *,
    only: Collection[str],
    num_examples: int | None,
    say: Callable[[str], None],
) -> Checks:
    """Run the checks in `only`. Raises what the user's code raises. Patches torch.

    place: a workload, or its file and name. num_examples: None for as many as run quickly.
    """
    workload = place if isinstance(place, Workload) else load(*place)
    say("rehearsing, to know what the checks will take")
    need = _need(workload, num_examples)
    _refuse_if_too_large(need.memory_bytes)
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")  # the user's code would warn in every run
        examples = _usable_examples(workload, take(workload.batch, need.num_examples))
        found = _found(workload, examples, only, say)
    called = "the workload" if isinstance(place, Workload) else ":".join(map(str, place))
    return Checks(workload=called, num_examples=examples.num, **found)


def _found(
    workload: Workload, examples: Examples, only: Collection[str], say: Callable[[str], None]
) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(CHECKS)
    if "accumulation" in only:
        say("checking accumulation")
        found["accumulation"] = check_accumulation(workload, examples)
    if "checkpointing" in only:
        say("checking checkpointing")
        found["checkpointing"] = check_checkpointing(workload, examples)
    both: tuple[LowPrecision, ...] = ("fp16", "bf16")
    if dtypes := [dtype for dtype in both if dtype in only]:  # last, because it patches torch
        say(f"checking {' and '.join(dtypes)}")
        found |= {check.dtype: check for check in check_precision(workload, examples, dtypes)}
    return found


def _usable_examples(workload: Workload, examples: Examples) -> Examples:
    """Return the examples, with made-up values if all are alike and the model accepts them."""
    for integers in (True, False):
        filled = with_values(examples, integers=integers)
        if filled is examples:
            return examples
        try:
            Trial(workload, wide=False).run(filled.whole)
        except (RuntimeError, ValueError, IndexError):  # 1 is not a class or token of this model
            continue
        return filled
    return examples


# ---- memory and time needed --------------------------------------------------------------------


class _Need(NamedTuple):
    """What a check with this many examples takes."""

    num_examples: int
    memory_bytes: int


def _need(workload: Workload, examples: int | None) -> _Need:
    """Return the need, from a rehearsal in a child process that takes no memory for the model."""
    if examples is not None and examples < _EXAMPLES[-1]:
        raise UsageError(
            f"{examples} examples cannot be split unevenly",
            attempt=f"{_EXAMPLES[-1]} or more; {_EXAMPLES[0]} is the default",
        )
    try:
        return with_rehearser(workload, DEFAULT_CAPABILITY, lambda one: _rehearsed(one, examples))
    except UserCodeError:
        # Some code runs but cannot be rehearsed. Real failures will show when it runs.
        return with_rehearser(workload, DEFAULT_CAPABILITY, lambda one: _built(one, examples))


def _rehearsed(rehearser: Rehearser, examples: int | None) -> _Need:
    for num in _EXAMPLES if examples is None else (examples,):
        trace = rehearser.trace(Variant(micro_batch=num))
        if sum(op.flops for op in trace.ops) <= _MOST_FLOPS:
            break
    parameters = sum(a.size_bytes for a in trace.allocations if a.category == "parameters") // 4
    of_activations = _most_activation_bytes(trace) * _BYTES_AN_ACTIVATION_BYTE
    return _Need(num, _BYTES_OF_TORCH + parameters * _BYTES_A_PARAMETER + of_activations)


def _most_activation_bytes(trace: Trace) -> int:
    """Return the peak memory of forward's allocations."""
    categories = ("activations", "temporaries", "inputs")
    sizes = [a.size_bytes if a.category in categories else 0 for a in trace.allocations]
    changes = (sizes[e - 1] if e > 0 else -sizes[-e - 1] for e in trace.events)
    return max(itertools.accumulate(changes), default=0)


def _built(rehearser: Rehearser, examples: int | None) -> _Need:
    """Return the need from the number of parameters alone, also without memory for the model."""
    num_parameters = rehearser.look().num_parameters
    memory_bytes = _BYTES_OF_TORCH + num_parameters * _BYTES_A_PARAMETER
    return _Need(examples or _EXAMPLES[0], memory_bytes)


def _refuse_if_too_large(memory_bytes: int) -> None:
    available = _available_bytes()
    if memory_bytes > available:
        raise UsageError(
            "this model is too large to be checked on this machine",
            because=f"running it in fp64 takes about {format_bytes(memory_bytes)} of memory,"
            f" and {format_bytes(available)} are available",
            attempt="a smaller configuration of the same model: fewer layers, the same code",
        )


def _available_bytes() -> int:
    """Return the available memory of this machine or of the container around this process."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, taken = ((group / name).read_text() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return min(available, int(limit) - int(taken)) if limit.strip().isdecimal() else available
