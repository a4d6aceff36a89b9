"""The verb plan: Workload or Script -> every variant of it that fits -> Plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from oomph.planning.changes import Effort
    from oomph.records.check import Checks
    from oomph.records.plan import PlanOptions, Plans, Preference, Stability
    from oomph.records.script import Script
    from oomph.records.workload import Keeps, Workload

    Say = Callable[[str], None]


def plan(
    workload: Workload | Script | str,
    *,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    max_gpus: int = 1,
    gpus_per_node: int = 8,
    batch_size: int | None = None,
    allow: Sequence[str] = (),
    forbid: Sequence[str] = (),
    target_memory: float = 1.0,
    host_memory: int | str | None = None,
    prefer: Preference = "balance",
    checks: Checks | Path | str | None = None,
    keeps: Keeps | None = None,
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    time_limit: float | str | None = None,
    unprotected: bool = False,
    fresh: bool = False,
    say: Say | None = None,
) -> Plans:
    """Return the training variants of a workload that fit on a GPU, best first, with their costs.

    Every plan keeps your batch size: micro-batch x accumulation x GPUs stays the same. More than
    `gpus_per_node` GPUs are several machines. A trick that changes training is considered only if
    `allow` names it; `forbid` names tricks to leave out.
    `target_memory` is the share of the GPU that may be used. `host_memory` limits what offload may
    take of the host (default: what is free, for a GPU of this machine). `say` gets the progress.
    `checks` is the result of oomph.check, or its file: what it proved about a trick replaces what
    is assumed for models in general. `keeps="outputs"` plans for a loop that keeps what the model
    returned until the next step, "nothing" for one that does not. `lora_rank` (16) and
    `lora_targets` ("all-linear" or "attention") are those of adapters, where `allow` names them.
    After `time_limit` (seconds, or "60s") the best plan so far is taken; `cut` has what is left.

    A script (its path, or a Script with its arguments) is rehearsed unchanged, in a sandbox;
    `unprotected` runs it even if no sandbox is possible, `fresh` uses no earlier rehearsals.
    """
    from oomph.records.plan import PlanOptions
    from oomph.records.workload import check_keeps, check_lora
    from oomph.units import seconds_of
    from oomph.verbs.notebook import draw_in_notebooks, is_in_notebook

    draw_in_notebooks()
    options = PlanOptions(
        batch_size=batch_size,
        max_gpus=max_gpus,
        gpus_per_node=gpus_per_node,
        allow=frozenset(allow),
        forbid=frozenset(forbid),
        prefer=prefer,
        target_ratio=target_memory,
        checked=checked_tricks(checks),
        keeps=check_keeps(keeps),
        time_limit_s=seconds_of(time_limit),
        **check_lora(lora_rank, lora_targets),
    )
    return plan_with_options(
        workload,
        options,
        gpu=gpu,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        say=say,
        draws=is_in_notebook(),
        unprotected=unprotected,
        fresh=fresh,
    )


def plan_with_options(
    workload: Workload | Script | str,
    options: PlanOptions,
    *,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    say: Say | None = None,
    draws: bool = False,
    effort: Effort = "edits",
    unprotected: bool = False,
    fresh: bool = False,
) -> Plans:
    """Return the plans, with timelines if drawn; a script's with what `effort` finds to change."""
    from oomph.planning import plans
    from oomph.planning.predictions import refuse_keeps, what_to_train
    from oomph.progress import silent
    from oomph.records.script import Script
    from oomph.sensing.target import find_target

    target, tell = find_target(gpu, gpu_memory, host_memory), say or silent
    plans.check_options(options)
    trained = what_to_train(workload)
    if isinstance(trained, Script):
        refuse_keeps(options.keeps)
        ways = {"draws": draws, "is_unprotected": unprotected, "is_fresh": fresh}
        return plans.plan_script(trained, options, target, tell, effort=effort, **ways)
    name = workload if isinstance(workload, str) else "workload"
    return plans.plan_workload(trained, name, options, target, tell, draws=draws)


def checked_tricks(checks: Checks | Path | str | None) -> Mapping[str, Stability]:
    """Return the results of checks, by trick name. Raises Unreadable."""
    from oomph.records.check import Checks, stability_of_check
    from oomph.records.stored import from_json_file

    if checks is not None and not isinstance(checks, Checks):
        checks = from_json_file(Checks, checks, what="check")
    return {} if checks is None else stability_of_check(checks)
