"""The verb explain, where it is known what was trained: an explanation -> the same with plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomph.records.explanation import Explanation
    from oomph.records.script import Script


def with_plans(
    found: Explanation,
    trained: str | Script,
    *,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Explanation:
    """Return an explanation with the plans of the script or workload that ran out of memory.

    It is planned for the memory that the process had, unless `gpu` or `gpu_memory` says otherwise.
    """
    import shlex

    from oomph.errors import UsageError
    from oomph.explaining.planned_remedies import with_plans as joined
    from oomph.units import MIB
    from oomph.verbs.plan import plan

    if gpu_memory is None and found.gpu_bytes is not None:
        gpu_memory = f"{found.gpu_bytes // MIB}MiB"
    if gpu is None and gpu_memory is None:
        raise UsageError(
            "it is not known how much memory the GPU has",
            because=f"{found.source} does not say",
            attempt="--gpu rtx4090, or --gpu-memory 24GiB",
        )
    plans = plan(trained, gpu=gpu, gpu_memory=gpu_memory, say=say)
    words = ["oomph", "plan", trained if isinstance(trained, str) else str(trained.path)]
    words += [] if gpu is None else ["--gpu", gpu]
    words += [] if gpu_memory is None else ["--gpu-memory", gpu_memory]
    words += ["-o", "plan.json"] if isinstance(trained, str) else ["--diff"]
    if not isinstance(trained, str) and trained.arguments:
        words += ["--", *trained.arguments]
    return joined(found, plans, shlex.join(words))
