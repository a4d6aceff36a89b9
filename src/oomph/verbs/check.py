"""The verb check: Workload -> does a trick leave its training unchanged?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from oomph.records.check import Checks
    from oomph.records.workload import Workload


def check(
    workload: Workload | str,
    *,
    only: Collection[str] | None = None,
    examples: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Checks:
    """Run a few examples for real, on the CPU, and report what tricks do to this training.

    `workload` is a Workload, or where to find one: "train.py:workload". `only` names the checks:
    "accumulation" (does the split batch give the whole batch's gradient, and with which weights?),
    "fp16" and "bf16" (does autocast train this model, as on CUDA?) and "checkpointing" (do
    recomputed blocks give the same results?). `examples` is the number of examples. Everything runs
    in a child process. A model that does not fit into this machine's memory is refused before any
    memory is used.
    """
    from oomph.errors import UsageError
    from oomph.progress import silent
    from oomph.records.check import CHECKS
    from oomph.rehearsing.child import in_a_child
    from oomph.rehearsing.traces import split

    wanted = (only,) if isinstance(only, str) else tuple(only or CHECKS)
    for name in wanted:
        if name not in CHECKS:
            raise UsageError(
                f"there is no check {name!r:.40}",
                because=f"the checks are {', '.join(CHECKS)}",
                attempt=f"some of them, such as {CHECKS[0]}",
            )
    place = split(workload) if isinstance(workload, str) else workload

    def run() -> Checks:
        from oomph.stability.checking import check_workload  # only the child imports torch

        return check_workload(place, only=wanted, num_examples=examples, say=say or silent)

    return in_a_child(run)
