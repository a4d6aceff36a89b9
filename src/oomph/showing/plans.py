"""Plans -> what `oomph plan` prints: the answer first, then the table on the four axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oomph.records.plan import Plan, Plans, Rejected, Shortfall
from oomph.showing.columns import Column, fitting, lines
from oomph.showing.terminal import draws_blocks, new_console, print_line, print_prose, text_of
from oomph.units import format_bytes, format_ratio

if TYPE_CHECKING:
    from rich.console import Console

_STABILITY = {"same": "same", "rounding": "rounding", "changes": "CHANGES"}
_STYLES = {"same": "green", "rounding": "", "changes": "bold yellow"}
_BAR_WIDTH = 14
_LEAST_FOR_TRICKS, _ALL_ELSE = 28, 72  # characters


def print_plans(plans: Plans) -> None:
    """The whole answer on the terminal."""
    console = new_console()
    _print_as_is(console, plans)
    if plans.best is None:
        _print_shortfall(console, plans)
    else:
        _print_best(console, plans.best, is_batch_known=_is_batch_known(plans))
        _print_table(console, plans)
        _print_tricks(console, plans.best)
    for caveat in plans.caveats:
        print_prose(console, f"- {caveat}")
    _print_rejected(console, plans.rejected)
    print_prose(console, f"{plans.num_candidates} ways to train were compared.", "dim")
    if plans.seen is not None:
        from oomph.showing.script import print_seen

        print_seen(console, plans.seen)


def _print_as_is(console: Console, plans: Plans) -> None:
    as_is = plans.as_is
    needs = f"{format_bytes(as_is.device_bytes)} of {format_bytes(plans.capacity_bytes)}"
    said = {
        "yes": "fits as it is",
        "no": "does not fit as it is",
        "uncertain": "may or may not fit as it is",
    }[plans.fits_as_is]
    style = {"yes": "bold green", "no": "bold red", "uncertain": "bold yellow"}[plans.fits_as_is]
    print_prose(
        console,
        f"{plans.workload} {said} on {plans.gpu}: {_batch(plans)} needs {needs}{_room(plans)}",
        style,
    )


def _is_batch_known(plans: Plans) -> bool:
    return plans.seen is None or plans.seen.is_batch_known


def _batch(plans: Plans) -> str:
    given = plans.as_is.variant
    if not _is_batch_known(plans):
        return "its own batch (of unknown size)"
    if given.accumulation == 1:
        return f"a batch of {plans.batch_size} at once"
    return f"a batch of {plans.batch_size} as {given.micro_batch} x {given.accumulation}"


def _room(plans: Plans) -> str:
    """What is left where it fits as it is."""
    if plans.fits_as_is != "yes":
        return ""
    left_bytes = plans.capacity_bytes - plans.as_is.high_bytes
    if left_bytes < 0:  # what torch caches is no need: it is given back before memory runs out
        return "; at the worst it fills the GPU, and torch gives back what it has cached"
    grow = plans.largest_micro_batch
    more = f"; micro-batches of up to about {grow} would fit" if grow else ""
    return f", {format_bytes(left_bytes)} free at the worst{more}"


def _print_best(console: Console, best: Plan, *, is_batch_known: bool) -> None:
    sure = "" if best.fits == "yes" else " (uncertain: see the error bar)"
    print_prose(console, f"recommended: {in_words(best, is_batch_known)}{sure}", "bold")
    print_prose(console, best.why, indent=2)


def in_words(plan: Plan, is_batch_known: bool = True) -> str:
    """What a plan sets, in a few words."""
    parts = [_split(plan, is_batch_known)]
    if plan.gpus > 1:
        parts.append(f"{plan.gpus} GPUs")
    return ", ".join([*parts, *_names(plan)])


def _split(plan: Plan, is_batch_known: bool) -> str:
    """A batch whose size nobody knows is not divided."""
    known = f"micro-batch {plan.micro_batch} x {plan.accumulate}"
    return known if is_batch_known else "the script's own batch"


def _names(plan: Plan) -> list[str]:
    """The tricks of a plan, the split of the batch aside."""
    named = {"checkpointing": f"recompute {plan.checkpointing.removeprefix('blocks:')}"}
    return [named.get(t.name, t.name) for t in plan.tricks if t.name != "accumulation"]


# ---- the table -----------------------------------------------------------------------------------


def _print_table(console: Console, plans: Plans) -> None:
    columns = fitting(_columns(console, plans), console.width)
    console.print()
    for line in lines(columns):
        print_line(console, text_of(line))
    console.print()


def _columns(console: Console, plans: Plans) -> list[Column]:
    shown = plans.plans
    capacity, is_known = plans.capacity_bytes, _is_batch_known(plans)
    return [
        Column(heading="", cells=["->" if p.recommended else "" for p in shown], keep=9),
        Column(
            heading="batch",
            cells=[f"{p.micro_batch} x {p.accumulate}" if is_known else "own" for p in shown],
        ),
        Column(
            heading="tricks",
            cells=[_short(", ".join(_names(p)) or "none", console.width) for p in shown],
            align="<",
            keep=6,
        ),
        Column(
            heading="update",
            cells=[_STABILITY[p.stability] for p in shown],
            align="<",
            styles=[_STYLES[p.stability] for p in shown],
            keep=7,
        ),
        Column(
            heading=f"of {format_bytes(capacity)}",
            cells=[bar(console, p, capacity) for p in shown],
            align="<",
            keep=3,
        ),
        Column(heading="memory", cells=[format_bytes(p.prediction.device_bytes) for p in shown]),
        Column(heading="GPUs", cells=[str(p.gpus) for p in shown], keep=5),
        Column(heading="host", cells=_hosts(shown), keep=2),
        Column(heading="step", cells=[_seconds(p.prediction.step_s) for p in shown], keep=4),
        Column(heading="time", cells=[_relative(p.relative_time) for p in shown], keep=8),
    ]


def bar(console: Console, plan: Plan, capacity_bytes: int) -> str:
    """What it takes, what the error bar adds, and what is left, to scale."""
    full, unsure, free = ("█", "▒", "░") if draws_blocks(console) else ("#", "?", ".")
    scale = _BAR_WIDTH / max(capacity_bytes, 1)
    taken = min(round(plan.prediction.device_bytes * scale), _BAR_WIDTH)
    most = min(round(plan.prediction.high_bytes * scale), _BAR_WIDTH)
    return full * taken + unsure * (most - taken) + free * (_BAR_WIDTH - most)


def _hosts(shown: Sequence[Plan]) -> list[str]:
    return [format_bytes(p.prediction.host_bytes) if p.prediction.host_bytes else "" for p in shown]


def _seconds(step_s: float | None) -> str:
    return "" if step_s is None else f"{step_s:.3g} s"


def _relative(ratio: float | None) -> str:
    return "" if not ratio else f"{ratio:.2f} x"


def _short(text: str, width: int) -> str:
    most = max(width - _ALL_ELSE, _LEAST_FOR_TRICKS)
    return text if len(text) <= most else f"{text[: most - 1]}…"


# ---- below it ------------------------------------------------------------------------------------


def _print_tricks(console: Console, best: Plan) -> None:
    if best.tricks:
        print_prose(console, "what to change:", "bold")
    for trick in best.tricks:
        print_prose(console, f"{trick.name}: {trick.what}", indent=2)
        print_prose(console, trick.code, "cyan", indent=4)
        if trick.caveat:
            print_prose(console, trick.caveat, "dim", indent=4)


def _print_rejected(console: Console, rejected: Sequence[Rejected]) -> None:
    """Those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for one in rejected:
        by_reason.setdefault(one.why.replace(f"--allow {one.what}", "--allow"), []).append(one.what)
    for why, names in by_reason.items():
        print_prose(console, f"left out: {', '.join(names)} ({why})", "dim")


def _print_shortfall(console: Console, plans: Plans) -> None:
    short: Shortfall | None = plans.shortfall
    if short is None:
        return
    print_prose(console, "nothing that is allowed fits", "bold red")
    missing = format_bytes(short.missing_bytes)
    share = format_ratio(short.missing_bytes / max(plans.capacity_bytes, 1))
    print_prose(
        console,
        f"the smallest way lacks {missing} ({share} of the GPU); its largest part is"
        f" {short.largest_part}",
        indent=2,
    )
    if short.smallest_gpu:
        print_prose(console, f"it would fit on {short.smallest_gpu}", indent=2)
    if short.num_gpus:
        print_prose(
            console,
            f"or, divided, on about {short.num_gpus} of these GPUs: --max-gpus {short.num_gpus}",
            indent=2,
        )
