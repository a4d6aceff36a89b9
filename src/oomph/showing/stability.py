"""StabilityStudy -> what `oomph stability` prints: the answer, a table, a plot, how sure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomph.showing.terminal import (
    Column,
    glyphs_for,
    new_console,
    print_line,
    print_prose,
    print_table,
)

if TYPE_CHECKING:
    from rich.console import Console

    from oomph.records.stability_study import StabilityStudy, StudyCell

_BAR = 32  # cells at most


def print_study(study: StabilityStudy, out: str) -> None:
    """Print a study."""
    console = new_console()
    for sentence in answers(study):
        print_prose(console, sentence, "bold")
    print_prose(console, "")
    _print_table(console, study)
    _print_plot(console, study)
    for note in _notes(study):
        print_prose(console, note, "dim")
    print_prose(console, f"confidence {study.confidence}: {'; '.join(study.limits)}", "dim")
    print_prose(console, f"written to {out}", "dim")


def answers(study: StabilityStudy) -> list[str]:
    """Return what the study recommends, in sentences."""
    own, smallest, largest = study.batch_size, study.smallest, study.largest
    if smallest is None or largest is None:
        loud = f"Your batch of {own} does not train calmly at its own learning rate."
        return [f"{loud} Try a smaller learning rate first."]
    tried = {cell.batch_size for cell in study.cells}
    found = []
    if smallest.batch_size < own:
        found.append(
            f"A batch of {smallest.batch_size} trains as well as your {own}, at learning rate"
            f" {smallest.learning_rate:.3g}."
        )
    elif min(tried) < own:
        found.append(f"No smaller batch that was tried trains as well as your {own}.")
    if largest.batch_size > own:
        found.append(
            f"A batch of {largest.batch_size} still makes as much of each example, at learning"
            f" rate {largest.learning_rate:.3g}."
        )
    elif max(tried) > own:
        found.append("No larger batch that was tried makes as much of each example.")
    return found or ["Only your own batch size was tried."]


def _print_table(console: Console, study: StabilityStudy) -> None:
    cells = study.cells
    print_table(
        console,
        [
            Column("batch", [str(cell.batch_size) for cell in cells]),
            Column("learning rate", [f"{cell.learning_rate:.3g}" for cell in cells]),
            Column("", [_RULES[cell.rule] for cell in cells], keep=2, align="<"),
            Column("steps", [str(cell.num_steps) for cell in cells], keep=1),
            Column("loss", [_loss(cell) for cell in cells]),
            Column("seeds differ", [f"{cell.spread:.2g}" for cell in cells], keep=0),
            Column("oscillation", [_way(cell) for cell in cells], keep=3),
            Column("as well", ["yes" if cell.trains_as_well else "no" for cell in cells], keep=4),
        ],
    )
    print_prose(
        console,
        f"loss on the same examples, after {study.num_examples} examples, from"
        f" {study.start_loss:.4g}; oscillation: the way of the loss up and down over what it won",
        "dim",
    )


_RULES = {"as-is": "yours", "kept": "yours, kept", "scaled": "by rule"}


def _loss(cell: StudyCell) -> str:
    return "diverged" if cell.loss is None else f"{cell.loss:.4g}"


def _way(cell: StudyCell) -> str:
    return "no progress" if cell.oscillation is None else f"{cell.oscillation:.1f}"


def _print_plot(console: Console, study: StabilityStudy) -> None:
    """Draw the losses as bars; a full bar is the loss at the start."""
    losses = [cell.loss for cell in study.cells if cell.loss is not None]
    most = max([study.start_loss, *losses])
    least = min([0.0, *losses])
    width = max(min(_BAR, console.width - 28), 4)
    block = glyphs_for(console.encoding).bar["mine"]
    print_prose(console, "")
    for cell in study.cells:
        size = 1.0 if cell.loss is None else (cell.loss - least) / ((most - least) or 1.0)
        bar = block * max(round(size * width), 1)
        name = f"{cell.batch_size:>6} {_RULES[cell.rule]:<12}"
        style = "green" if cell.trains_as_well else "red"
        print_line(console, [(name, ""), (bar, style), (f" {_loss(cell)}", "")])
    print_prose(console, "")


def _notes(study: StabilityStudy) -> list[str]:
    notes = []
    if study.diverging_rate is not None:
        notes.append(
            f"With a batch of {study.batch_size}, the loss rises from a learning rate of"
            f" {study.diverging_rate:.2g} on: stay at a third of that, or below."
        )
    if study.noise_scale is not None:
        notes.append(
            f"The noise scale of the gradient was about {study.noise_scale:.2g} examples"
            " (to a factor of 2 to 3)."
        )
    notes.append(f"{study.num_seeds} seeds, on {study.device}.")
    return notes
