"""Explanation -> what `oomph explain` prints: the verdict first, the next command last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomph.records.explanation import Explanation, Holder, Remedy
from oomph.showing.terminal import (
    Column,
    new_console,
    print_command,
    print_line,
    print_prose,
    print_table,
    printable,
)
from oomph.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"full": "bold", "unknown": "bold yellow"}
_HELPS = {True: ("yes", "green"), False: ("no", "red"), None: ("?", "")}
_HEADINGS = {"category": "what it was", "line": "your lines", "module": "modules"}
_MOST_OTHERS = 5


def print_explanation(found: Explanation) -> None:
    """Print an explanation in its fixed order."""
    console = new_console()
    rank = found.message.rank if found.message else None
    who = "" if rank is None else f"rank {rank}: "
    end = "" if found.confidence == "measured" else f" [{found.confidence}]"
    style = _STYLES.get(found.verdict, "bold red")
    print_prose(console, f"{who}{found.sentence}{end}", style)
    for reason in found.reasons:
        print_prose(console, reason, indent=2)
    if found.message is not None and found.message.where is not None:
        print_prose(console, f"at {found.message.where}", indent=2)
    _print_budget(console, found)
    for kind in ("category", "line", "module"):
        _print_holders(console, [one for one in found.holders if one.kind == kind], kind)
    _print_growth(console, found)
    _print_remedies(console, found)
    for caveat in found.caveats:
        print_prose(console, f"note: {caveat}", "dim")
    _print_others(console, found)
    for at, line in enumerate(found.record_better):
        print_prose(console, f"{'for more next time: ' if at == 0 else '  '}{line}", "dim")
    if found.next_command is not None:
        print_command(console, found.next_command)


def _heading(console: Console, text: str) -> None:
    console.print()
    print_line(console, [(text, "bold")])


def _print_budget(console: Console, found: Explanation) -> None:
    if not found.budget:
        return
    device = "" if found.device is None else f" of GPU {found.device}"
    _heading(console, f"memory{device}")
    sizes = [
        "?" if one.size_bytes is None else format_bytes(one.size_bytes) for one in found.budget
    ]
    columns = [
        Column("", [one.name for one in found.budget], align="<"),
        Column("", sizes),
        Column("", [one.note for one in found.budget], keep=1, align="<"),
    ]
    print_table_body(console, columns)


def print_table_body(console: Console, columns: list[Column]) -> None:
    """Print a table without its empty headings."""
    from oomph.showing.terminal import fitting, lines

    for line in lines(fitting(columns, console.width))[1:]:
        print_line(console, line)


def _print_holders(console: Console, holders: list[Holder], kind: str) -> None:
    if not holders:
        return
    _heading(console, f"who held it: {_HEADINGS[kind]}")
    columns = [
        Column("", [format_bytes(one.size_bytes) for one in holders]),
        Column("", [f"{one.num_blocks:,} blocks" for one in holders], keep=1),
        Column("", [printable(one.name) for one in holders], align="<"),
    ]
    print_table_body(console, columns)


def _print_growth(console: Console, found: Explanation) -> None:
    if not found.growth:
        return
    _heading(console, "what grew")
    growth = found.growth
    per_step = [
        "" if one.per_step_bytes is None else format_bytes(one.per_step_bytes) for one in growth
    ]
    since = ["" if one.since_step is None else f"step {one.since_step}" for one in growth]
    columns = [
        Column("grown", [format_bytes(one.grown_bytes) for one in growth]),
        Column("per step", per_step, keep=3),
        Column("since", since, keep=2),
        Column("blocks", [f"{one.num_blocks:,}" for one in growth], keep=1),
        Column("from", [printable(one.name) for one in growth], align="<"),
    ]
    print_table(console, columns)


def _print_remedies(console: Console, found: Explanation) -> None:
    if not found.remedies:
        return
    _heading(console, "what would have avoided it")
    if found.gate is not None:
        gate = found.gate
        exact = f"replay reproduced {gate.num_exact:,} of {gate.num_recorded:,} recorded"
        print_prose(console, f"{exact} allocations at their addresses", "dim")
        if gate.problem is not None:
            print_prose(console, f"so no what-if is shown: {gate.problem}", "yellow")
    remedies = found.remedies
    columns = [
        Column("", [one.name for one in remedies], align="<"),
        Column("needs", [_needs(one) for one in remedies], keep=3),
        Column("helps", [[_HELPS[one.helps]] for one in remedies], align="<"),
        Column("cost", [one.cost for one in remedies], keep=2, align="<"),
        Column("by", [one.source for one in remedies], keep=1, align="<"),
    ]
    print_table(console, columns)


def _needs(remedy: Remedy) -> str:
    return "" if remedy.needed_bytes is None else format_bytes(remedy.needed_bytes)


def _print_others(console: Console, found: Explanation) -> None:
    for other in found.others[:_MOST_OTHERS]:
        rank = "" if other.rank is None else f"rank {other.rank}, "
        line = "" if other.line is None else f"{rank}line {other.line}: "
        print_prose(console, f"also: {line}{other.text[:160]}", "dim")
    if len(found.others) > _MOST_OTHERS:
        print_prose(console, f"and {len(found.others) - _MOST_OTHERS} more", "dim")
