"""Workload -> the checks that are asked for, one after the other, in a process of their own.

Everything is run for real, on the CPU, with a few examples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

from oomph.records.check import CHECKS, Checks
from oomph.records.check import LowPrecision as Dtype
from oomph.records.workload import Workload
from oomph.stability.cuda_casts import CudaCasts
from oomph.stability.equivalence import check_accumulation
from oomph.stability.examples import Examples, take, with_values
from oomph.stability.precision import check_precision
from oomph.stability.recomputation import NamedBlocks, Recompute, check_checkpointing
from oomph.stability.trial import Trial

_DTYPES: tuple[Dtype, ...] = ("fp16", "bf16")


def run_checks(
    workload: Workload,
    called: str,
    *,
    only: Collection[str] = CHECKS,
    num_examples: int,
    named_blocks: NamedBlocks,
    recompute: Recompute,
    casts: CudaCasts,
    say: Callable[[str], None],
) -> Checks:
    """All of `only`. Raises what the user's code raises. Patches torch."""
    import torch

    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")  # the user's code warns for as many runs as there are
        examples = _that_work(workload, take(workload.batch, num_examples))
        found: dict[str, Any] = dict.fromkeys(CHECKS)
        if "accumulation" in only:
            say("checking accumulation")
            found["accumulation"] = check_accumulation(workload, examples)
        if "checkpointing" in only:
            say("checking checkpointing")
            found["checkpointing"] = check_checkpointing(
                workload, examples, named_blocks, recompute
            )
        dtypes = tuple(dtype for dtype in _DTYPES if dtype in only)
        if dtypes:  # last, because it patches torch
            say(f"checking {' and '.join(dtypes)}")
            checks = check_precision(workload, examples, casts, dtypes)
            found |= {check.dtype: check for check in checks}
    return Checks(workload=called, num_examples=examples.num, **found)


def _that_work(workload: Workload, examples: Examples) -> Examples:
    """With made-up values if examples are all alike, as far as the model takes them."""
    for integers in (True, False):
        filled = with_values(examples, integers=integers)
        if filled is examples:
            return examples
        try:
            Trial(workload, wide=False).run(filled.whole)
        except (RuntimeError, ValueError, IndexError):  # 1 is no class or token of this model
            continue
        return filled
    return examples
