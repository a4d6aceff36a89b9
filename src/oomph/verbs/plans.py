"""The verb plan: Workload -> every way to train it -> Plans."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from oomph.planning.planned import Planned
    from oomph.records.check import Checks
    from oomph.records.plan import Plan, Plans, Preference, Stability
    from oomph.records.script import Script
    from oomph.records.workload import Keeps, Workload
    from oomph.verbs.plan_search import Drawn
    from oomph.verbs.rehearsals import Asked, Rehearsed, Rehearser
    from oomph.verbs.targets import Target

    Say = Callable[[str], None]

_MOST_GPUS = 1024
_MOST_TIB = 100  # of a GPU's memory: the largest of 2025 has 288 GB


def plan(
    workload: Workload | Script | str,
    *,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    max_gpus: int = 1,
    batch_size: int | None = None,
    allow: Sequence[str] = (),
    forbid: Sequence[str] = (),
    target_memory: float = 1.0,
    prefer: Preference = "balance",
    checks: Checks | Path | str | None = None,
    keeps: Keeps | None = None,
    unprotected: bool = False,
    fresh: bool = False,
    say: Say | None = None,
) -> Plans:
    """The ways to train a workload that fit on a GPU, the best first, and what each costs.

    The batch is kept: micro-batch x accumulation x GPUs is it, in every plan. What changes
    training is considered only where `allow` names it; `forbid` names tricks to leave out.
    `target_memory` is the share of the GPU that may be used. `say` is told what goes on.
    `checks` are those of oomph.check, or their file: what they prove of a trick counts, and not
    what is assumed of models in general. `keeps="outputs"` plans for a loop that keeps what the
    model returned until the next step, "nothing" for one that does not.
    A script (its path, or a Script with its arguments) is rehearsed as it is, in a sandbox;
    `unprotected` lets it run where there can be none, `fresh` rehearses it again though the
    answers are kept.
    """
    from oomph.records.workload import check_keeps
    from oomph.verbs.rehearsals import Asked

    asked = Asked(
        batch_size=batch_size,
        max_gpus=max_gpus,
        allow=frozenset(allow),
        forbid=frozenset(forbid),
        prefer=prefer,
        target_ratio=target_memory,
        checked=checked_tricks(checks),
        keeps=check_keeps(keeps),
    )
    drawn = plan_and_draw(
        workload,
        asked,
        gpu=gpu,
        gpu_memory=gpu_memory,
        say=say,
        draws=False,
        unprotected=unprotected,
        fresh=fresh,
    )
    return drawn.plans


def checked_tricks(checks: Checks | Path | str | None) -> Mapping[str, Stability]:
    """What checks say of tricks, by their names. Raises Unreadable."""
    from oomph.records.check import Checks, stability_of_check
    from oomph.records.stored import from_json_file

    if checks is None:
        return {}
    if not isinstance(checks, Checks):
        checks = from_json_file(Checks, checks, what="check")
    return stability_of_check(checks)


def plan_and_draw(
    workload: Workload | Script | str,
    asked: Asked,
    *,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    say: Say | None = None,
    draws: bool = True,
    unprotected: bool = False,
    fresh: bool = False,
) -> Drawn:
    """The plans, with the timelines of their memory if they are to be drawn."""
    _check(asked)
    from oomph.records.script import Script
    from oomph.tracing import traces
    from oomph.tracing.many import with_rehearser
    from oomph.training import apply
    from oomph.verbs import kept_rehearsals
    from oomph.verbs.plan_search import Search
    from oomph.verbs.predictions import as_script, find_place
    from oomph.verbs.rehearsals import Unrehearsed
    from oomph.verbs.targets import find_target

    target = find_target(gpu, gpu_memory)
    _check_memory(target)
    script = as_script(workload)
    if script is not None:
        from oomph.verbs.predictions import refuse_keeps
        from oomph.verbs.script_plans import plan_script

        refuse_keeps(asked.keeps)
        return plan_script(
            script,
            asked,
            target,
            say or (lambda _: None),
            draws=draws,
            is_unprotected=unprotected,
            is_fresh=fresh,
        )
    assert not isinstance(workload, Script)  # noqa: S101 - as_script has taken those
    place = find_place(workload)
    capability = traces.kind_of(target.capability)
    name = workload if isinstance(workload, str) else "workload"
    say, keeps = say or (lambda _: None), asked.keeps
    if not isinstance(place, tuple):
        search = Search(asked, target, name, say, draws=draws)
        return with_rehearser(place, capability, apply, search.run, keeps=keeps)[0]
    recall = functools.partial(kept_rehearsals.find_whole, place, capability, keeps)
    search = Search(asked, target, name, say, draws=draws, recall=recall)
    entry = (*place, keeps)
    known = kept_rehearsals.find(entry, capability)
    if known is not None:
        num_known = len(known.replays) + len(known.weighed)
        try:
            drawn = search.answer(known)
        except Unrehearsed:
            pass
        else:
            if len(known.replays) + len(known.weighed) > num_known:
                kept_rehearsals.keep_replays(entry, capability, known)
            return drawn

    def run(rehearser: Rehearser) -> tuple[Drawn, Rehearsed]:
        found = search.run(rehearser, known)
        anew = search.figures.rehearsed_anew
        kept_rehearsals.keep_whole(place, capability, keeps, rehearser, anew)
        return found

    drawn, rehearsed = with_rehearser(place, capability, apply, run, keeps=keeps)
    kept_rehearsals.keep(entry, capability, rehearsed)
    return drawn


def load_plan(path: Path | str) -> Planned:
    """A plan that was saved with -o or plan.save(). Raises Unreadable."""
    from oomph.planning.planned import load_plan as load

    return load(path)


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write one plan as plan.json."""
    from oomph.planning.planned import Planned

    Planned.of(plan).save(path)


def as_answer(plans: Plans) -> dict[str, Any]:
    """What `oomph plan --json` prints."""
    from oomph.planning.answer_json import as_answer as in_json

    return in_json(plans)


def trick_names() -> tuple[str, ...]:
    """The names that allow and forbid take."""
    from oomph.planning.tricks import NAMES

    return NAMES


def _check_memory(target: Target) -> None:
    """Whether a GPU could have so much, where it was given."""
    from oomph.errors import UsageError
    from oomph.units import MIB, TIB, format_bytes

    if target.memory_bytes is not None and not MIB <= target.memory_bytes <= _MOST_TIB * TIB:
        raise UsageError(
            f"no GPU has a memory of {format_bytes(target.memory_bytes)}",
            because="a size without a unit is in bytes",
            attempt="--gpu-memory 12GiB",
        )


def _check(asked: Asked) -> None:
    """Before anything is rehearsed."""
    from oomph.errors import UsageError
    from oomph.planning.choices import check_names

    check_names(sorted(asked.allow), "allow")
    check_names(sorted(asked.forbid), "forbid")

    if asked.batch_size is not None and asked.batch_size < 1:
        raise UsageError(f"a batch of {asked.batch_size} cannot be trained with", attempt="64")
    if not 1 <= asked.max_gpus <= _MOST_GPUS:
        raise UsageError(
            f"plans for {asked.max_gpus} GPUs cannot be made", attempt=f"1 to {_MOST_GPUS}"
        )
    if not 0 < asked.target_ratio <= 1:
        raise UsageError(
            f"{asked.target_ratio:.0%} of a GPU cannot be filled", attempt="--target-memory 90%"
        )
    both = sorted(asked.allow & asked.forbid)
    if both:
        raise UsageError(f"{both[0]} is both allowed and forbidden", attempt="one of the two")
