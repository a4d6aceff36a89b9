"""Workload -> does every block that is recomputed in backward give what it gave in forward?

A step is run as it is, and once more with all blocks recomputed, from one state and seed: the
gradient and the buffers afterwards must be the same. Where they are
not, every block is tried by itself. How blocks are found and recomputed is given: it is what
training would use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oomph.records.check import SAME_IN_FP32, SAME_IN_FP64, CheckpointingCheck, Finding
from oomph.records.workload import Workload
from oomph.stability.examples import Examples
from oomph.stability.randomness import outside_state
from oomph.stability.trial import Ran, Trial, widest

NamedBlocks = Callable[[Any], Sequence[tuple[str, Any]]]
Recompute = Callable[[Any, str], None]  # (model, "blocks:3")
_MOST_BLOCKS = 48  # that are tried one by one


@dataclass(frozen=True)
class _Step:
    """One step, and the state of the generators that are not torch's after it."""

    ran: Ran
    outside: tuple[Any, ...]


def check_checkpointing(
    workload: Workload, examples: Examples, named_blocks: NamedBlocks, recompute: Recompute
) -> CheckpointingCheck:
    """Run with and without recomputation, and compare. Raises what the user's code raises."""
    tried, plain, limits = widest(workload, lambda trial: _step(trial, examples))
    names = [name for name, _ in named_blocks(tried.model)]
    if not names:
        return CheckpointingCheck(
            verdict="skipped", conclusion="the model has no repeated blocks to recompute"
        )
    limits = (*limits, *examples.notes)
    tries = _Tries(workload, examples, recompute, plain, wide=tried.wide)
    if tries.found("none") is not None:
        return _not_repeatable(len(names), limits)
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
    """Steps with these or those blocks recomputed, each on a model of its own.

    What a model keeps beside its buffers would go over from one step to the next.
    """

    def __init__(
        self,
        workload: Workload,
        examples: Examples,
        recompute: Recompute,
        plain: _Step,
        *,
        wide: bool,
    ) -> None:
        self._workload, self._examples, self._plain = workload, examples, plain
        self._recompute, self._wide = recompute, wide
        self.error: float | None = None  # of the gradient, in the last try

    def _trial(self, which: str) -> Trial:
        trial = Trial(self._workload, wide=self._wide)
        if which != "none":
            self._recompute(trial.model, which)
        return trial

    def found(self, which: str) -> Finding | None:
        """What is different if these blocks are recomputed; None: nothing."""
        trial = self._trial(which)
        self.error = None
        try:
            step = _step(trial, self._examples)
        except Exception as error:  # noqa: BLE001 - whatever the recomputation makes of the model
            return _raised(error)
        exact = self._plain.ran.gradient
        self.error = float((step.ran.gradient - exact).norm() / exact.norm())
        return _difference(self._plain, step, SAME_IN_FP64 if self._wide else SAME_IN_FP32)


def _step(trial: Trial, examples: Examples) -> _Step:
    ran = trial.run(examples.whole)
    return _Step(ran, outside_state())


def _difference(one: _Step, other: _Step, same: float) -> Finding | None:
    """The first thing in which two steps differ by more than `same`."""
    moved = [
        name
        for name, value in one.ran.buffers.items()
        if not _is_close(value, other.ran.buffers.get(name), same)
    ]
    if moved:
        return Finding(
            what=f"its buffer {moved[0].rpartition('.')[2]} is updated a second time",
            module=moved[0].rpartition(".")[0],
            op=None,
            do="update it outside of forward, or not while it is recomputed; or leave this block"
            " out",
        )
    gradient, again = one.ran.gradient, other.ran.gradient
    if _is_close(gradient, again, same):
        return None
    if one.outside != other.outside:
        return Finding(
            what="random numbers of Python or numpy are drawn anew when it is recomputed",
            module="",
            op=None,
            do="draw them with torch (torch.rand), whose generators are put back",
        )
    return Finding(
        what="what is recomputed is not what was computed: it depends on state that forward"
        " changes, or changes its own input in place",
        module="",
        op=None,
        do="give it what it needs as an argument; clone before a change in place; or leave this"
        " block out",
    )


def _is_close(one: Any, other: Any, same: float) -> bool:
    if other is None or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    size = float(one.double().norm()) or 1.0
    return float((one.double() - other.double()).norm()) <= same * size


def _raised(error: Exception) -> Finding:
    told = " ".join(str(error).split())[:200]
    return Finding(
        what=f"{type(error).__name__}: {told}",
        module="",
        op=None,
        do="let it do the same each time: no branch on state that forward changes; or leave this"
        " block out",
    )


def _broken(
    tries: _Tries, names: Sequence[str], whole: Finding, limits: tuple[str, ...]
) -> CheckpointingCheck:
    """Which of the blocks it is."""
    error = tries.error
    broken = {
        name: found
        for number, name in enumerate(names[:_MOST_BLOCKS])
        if (found := tries.found(f"blocks:{number}")) is not None
    }
    findings = [_in_block(name, found) for name, found in broken.items()]
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


def _in_block(name: str, found: Finding) -> Finding:
    """A finding that names its module, or else its block."""
    return Finding(what=found.what, module=found.module or name, op=found.op, do=found.do)


def _not_repeatable(num_blocks: int, limits: tuple[str, ...]) -> CheckpointingCheck:
    return CheckpointingCheck(
        verdict="uncertain",
        conclusion="two runs of the same batch from the same seed differ without recomputation,"
        " too",
        findings=(
            Finding(
                what="something draws from a generator that no seed reaches, or keeps state"
                " outside of the model",
                module="",
                op=None,
                do="seed it from torch, or make it a buffer",
            ),
        ),
        confidence="low",
        limits=limits,
        num_blocks=num_blocks,
    )
