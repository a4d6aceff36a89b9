"""Seen -> what a rehearsal found out about a script, and which values it had to invent."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oomph.records.script import Invented, Seen
from oomph.showing.terminal import new_console, print_prose
from oomph.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from oomph.records.script import ScriptChanges

_MOST_LINES = 8  # of invented values
_ASSUMED = "assumed: the {} of the model's input, since no DataLoader says it"


def print_seen(console: Console, seen: Seen) -> None:
    """Print what the rehearsal found out about the script."""
    for line in _lines(seen):
        print_prose(console, f"seen: {line}", "dim")
    for invented in seen.invented[:_MOST_LINES]:
        print_prose(console, f"invented: {_in_words(invented)}", "dim")
    left = len(seen.invented) - _MOST_LINES
    if left > 0:
        print_prose(console, f"invented: at {left} more lines (--json has all)", "dim")


def _lines(seen: Seen) -> list[str]:
    found = [_model(seen), _batch(seen), _precision(seen)]
    if seen.loader is not None:
        found.append(_loader(seen))
    if seen.kept_bytes:
        kept = format_bytes(seen.kept_bytes)
        found.append(f"the loop keeps {kept} of the model's outputs until the next step")
    if seen.longest_sequence is not None:
        found.append(
            f"the longest sequence of {seen.num_batches} batches is {seen.longest_sequence};"
            " a longer one takes more"
        )
    return found


def _model(seen: Seen) -> str:
    size = f"{_many(seen.num_parameters)} parameters, {format_bytes(seen.parameter_bytes)}"
    frozen = seen.num_parameters - seen.num_trainable
    trained = f", {_many(frozen)} of them frozen" if frozen else ""
    optimizer = seen.optimizer or "no optimizer of torch's kind"
    kind = " (fused)" if seen.is_fused else " (foreach)" if seen.is_foreach else ""
    rate = f", learning rate {seen.learning_rate:g}" if seen.learning_rate is not None else ""
    more = f" and {seen.num_optimizers - 1} more" if seen.num_optimizers > 1 else ""
    return f"{seen.model or 'no model'} ({size}{trained}), {optimizer}{kind}{more}{rate}"


def _many(count: int) -> str:
    """Return the count in millions, unless that would show 0.0M for more than 0."""
    return f"{count / 1e6:,.1f}M" if count >= 50_000 else f"{count:,}"


def _batch(seen: Seen) -> str:
    if not seen.is_batch_known:
        times = f", {seen.accumulation} backwards a step" if (seen.accumulation or 1) > 1 else ""
        return f"the batch size is unknown: {seen.batch_doubt}{times}"
    assert seen.micro_batch is not None  # noqa: S101 - it is known
    if not seen.has_stepped:
        return f"batches of {seen.micro_batch}; no optimizer step was seen"
    accumulation = seen.accumulation or 1
    whole = f" = {seen.micro_batch * accumulation}" if accumulation > 1 else ""
    says = "from the DataLoader" if seen.batch_from == "loader" else _ASSUMED
    return (
        f"micro-batch {seen.micro_batch} ({says.format(seen.batch_from)})"
        f" x {accumulation}{whole} for one optimizer step"
    )


def _precision(seen: Seen) -> str:
    facts = {
        "loss scaling": seen.uses_grad_scaler,
        "gradients are clipped": seen.clips_gradients,
        "activations are recomputed by the script": seen.checkpointing == "by the script",
        "compiled (rehearsed uncompiled)": seen.uses_compile,
    }
    return ", ".join([seen.precision, *(words for words, is_so in facts.items() if is_so)])


def _loader(seen: Seen) -> str:
    loader = seen.loader
    assert loader is not None  # noqa: S101 - the caller has looked
    batch = f"batches of {loader.batch_size}" if loader.batch_size else "batches of its own making"
    pinned = ", pinned" if loader.pin_memory else ""
    place = f"the DataLoader at {_short(loader.place)}"
    return f"{batch} from {place}, {loader.num_workers} workers{pinned}"


def _in_words(invented: Invented) -> str:
    times = f" {invented.count} times" if invented.count > 1 else ""
    what = f"({invented.what}{times})"
    return f"{_place(invented)} read a value that only real training would produce {what}"


def _place(invented: Invented) -> str:
    """Return the place of an invented value. Line 0: a library read it in its own thread."""
    return f"{_short(invented.file)}:{invented.line}" if invented.line else invented.file


def _short(path: str) -> str:
    """Return the path as the user would write it from here."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def print_changes(changes: ScriptChanges, given: Sequence[str]) -> None:
    """Print whether the changes are whole, what else to change, then the diff, byte for byte."""
    console = new_console()
    for line in verdict_on(changes, given):
        print_prose(console, line)
    for line in changes.by_hand:
        print_prose(console, f"by hand: {line}")
    for line in changes.tried:
        print_prose(console, line, "dim")
    if changes.arguments != tuple(given):
        arguments = shlex.join(changes.arguments)
        print_prose(console, f"start it with these arguments: {arguments}")
    if changes.diff:
        sys.stdout.write(changes.diff)
    elif not changes.by_hand and not changes.changes_anything(tuple(given)):
        print_prose(console, "The script needs no change.")


def verdict_on(changes: ScriptChanges, given: Sequence[str]) -> list[str]:
    """Return what the changes are worth, as far as they were rehearsed: the answer first."""
    patched = changes.patched
    if patched is None:
        return []
    if patched.device_bytes is None:
        return [f"The script with these changes could not be rehearsed: {patched.error}"]
    needs, planned = format_bytes(patched.device_bytes), format_bytes(patched.planned_bytes)
    fits = {"yes": "fits", "no": "does not fit", "uncertain": "may or may not fit", None: ""}
    if not changes.is_whole:
        part = "These changes are only a part of the plan: with them alone the script needs"
        if not changes.changes_anything(tuple(given)):
            part = "The plan is left for you to make by hand: as it is, the script needs"
        said = [f"{part} {needs} and {fits[patched.fits]}; the plan needs {planned}."]
        if patched.differences:
            said.append(f"It would train otherwise: {'; '.join(patched.differences)}.")
        return said
    if patched.differences:
        found = "; ".join(patched.differences)
        return [f"The patched script is not as planned ({needs}, planned {planned}): {found}."]
    if needs == planned:
        return [f"The patched script needs {needs}, as planned."]
    less_bytes = patched.planned_bytes - patched.device_bytes
    if less_bytes > 0:
        return [f"The patched script needs {needs}, {format_bytes(less_bytes)} less than planned."]
    return [f"The patched script needs {needs}, as planned ({planned}) but for details."]
