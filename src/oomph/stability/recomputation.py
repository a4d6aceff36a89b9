"""Workload -> whether every block that is recomputed in backward gives what it gave in forward.

A step runs normally, and again with all blocks recomputed, from the same state and seed: gradients
and final buffers must match. If they do not, each block is tried by itself. Blocks are found and
recomputed as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from oomph.records.check import CheckpointingCheck, Finding
from oomph.records.workload import Workload
from oomph.stability.coupling import apart
from oomph.stability.examples import Examples
from oomph.stability.randomness import outside_state
from oomph.stability.trial import NOT_REPEATABLE, Ran, Trial, one_line, widest
from oomph.tricks.blocks import named_blocks
from oomph.tricks.checkpointing import checkpoint_blocks

_MOST_BLOCKS = 48  # judgement: tried one by one; the largest models have about 100


@dataclass(frozen=True)
class _Step:
    """One step, and the state of the generators outside torch after it."""

    ran: Ran
    outside: tuple[Any, ...]


def check_checkpointing(workload: Workload, examples: Examples) -> CheckpointingCheck:
    """Compare runs with and without recomputation. Raises what the user's code raises."""
    tried, plain, limits = widest(workload, lambda trial: _step(trial, examples))
    names = [name for name, _ in named_blocks(tried.model)]
    if not names:
        return CheckpointingCheck(
            verdict="skipped", conclusion="the model has no repeated blocks to recompute"
        )
    limits = (*limits, *examples.notes)
    tries = _Tries(workload, examples, plain, wide=tried.wide)
    if tries.found("none") is not None:
        return CheckpointingCheck(
            verdict="uncertain",
            conclusion="two runs of the same batch from the same seed differ, even without"
            " recomputation",
            findings=(NOT_REPEATABLE,),
            confidence="low",
            limits=limits,
            num_blocks=len(names),
        )
    found = tries.found("blocks")
    if found is None:
        return CheckpointingCheck(
            verdict="passes",
            conclusion=f"all {len(names)} blocks give the same when they are recomputed:"
            " gradients, buffers and random numbers",
            limits=limits,
            confidence="fair" if limits else "high",
            num_blocks=len(names),
            gradient_error_ratio=tries.error,
        )
    return _broken(tries, names, found, limits)


class _Tries:
    """Steps with some blocks recomputed, each on a new model.

    State that a model keeps outside its buffers would carry over from one step to the next.
    """

    def __init__(self, workload: Workload, examples: Examples, plain: _Step, *, wide: bool) -> None:
        self._workload, self._examples, self._plain = workload, examples, plain
        self._wide = wide
        self.error: float | None = None  # of the gradient, in the last try

    def found(self, which: str) -> Finding | None:
        """Return what differs if these blocks are recomputed; None if nothing does."""
        trial = Trial(self._workload, wide=self._wide)
        if which != "none":
            checkpoint_blocks(trial.model, which)
        self.error = None
        try:
            step = _step(trial, self._examples)
        except Exception as error:  # noqa: BLE001 - recomputation may cause any error in the model
            return Finding(
                what=f"{type(error).__name__}: {one_line(error, 200)}",
                module="",
                do="let it do the same each time: no branch on state that forward changes; or"
                " leave this block out",
            )
        self.error = apart(self._plain.ran.gradient, step.ran.gradient)
        return _difference(self._plain, step, trial.tolerance)


def _step(trial: Trial, examples: Examples) -> _Step:
    return _Step(trial.run(examples.whole), outside_state())


def _difference(one: _Step, other: _Step, same: float) -> Finding | None:
    """Return the first difference between two steps that exceeds `same`."""
    for name, value in one.ran.buffers.items():
        if not _is_close(value, other.ran.buffers.get(name), same):
            module, _, buffer = name.rpartition(".")
            return Finding(
                what=f"its buffer {buffer} is updated a second time",
                module=module,
                do="update it outside of forward, or not while it is recomputed; or leave this"
                " block out",
            )
    if _is_close(one.ran.gradient, other.ran.gradient, same):
        return None
    if one.outside != other.outside:
        return Finding(
            what="random numbers of Python or numpy are drawn again when it is recomputed",
            module="",
            do="draw them with torch (torch.rand), whose generators are put back",
        )
    return Finding(
        what="recomputing gives another result: it depends on state that forward"
        " changes, or changes its own input in place",
        module="",
        do="give it what it needs as an argument; clone before a change in place; or leave this"
        " block out",
    )


def _is_close(one: torch.Tensor, other: torch.Tensor | None, same: float) -> bool:
    if other is None or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    size = float(one.double().norm()) or 1.0
    return float((one.double() - other.double()).norm()) <= same * size


def _broken(
    tries: _Tries, names: Sequence[str], whole: Finding, limits: tuple[str, ...]
) -> CheckpointingCheck:
    """Find out which blocks are broken."""
    error = tries.error
    broken = {
        name: found
        for number, name in enumerate(names[:_MOST_BLOCKS])
        if (found := tries.found(f"blocks:{number}")) is not None
    }
    # A finding names its module, or else its block.
    findings = [replace(found, module=found.module or name) for name, found in broken.items()]
    if len(names) > _MOST_BLOCKS:
        limits = (*limits, f"of {len(names)} blocks the first {_MOST_BLOCKS} were tried alone")
    where = ", ".join(list(broken)[:3]) or "their combination"
    return CheckpointingCheck(
        verdict="fails",
        conclusion=f"recomputation changes training: {where}: {(findings or [whole])[0].what}",
        findings=tuple(findings[:5]) or (whole,),
        confidence="fair" if limits else "high",
        limits=limits,
        num_blocks=len(names),
        broken_blocks=tuple(broken),
        gradient_error_ratio=error,
    )
