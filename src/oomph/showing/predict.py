"""Prediction -> what `oomph predict` prints: the verdict first, then the peak drawn to scale."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from oomph.records.prediction import Prediction
from oomph.records.workload import Variant, recomputed_blocks
from oomph.showing.terminal import (
    glyphs_for,
    new_console,
    print_command,
    print_line,
    print_prose,
)
from oomph.units import format_bytes, format_rate, format_ratio, format_time

if TYPE_CHECKING:
    from rich.console import Console

    from oomph.records.script import Seen

FITS = {  # words, style
    "yes": ("fits", "bold green"),
    "no": ("does not fit", "bold red"),
    "uncertain": ("may or may not fit", "bold yellow"),
}
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "white")
_BAR_WIDTH = 60
_MOST_MODULES = 5
_WORTH = {
    "datasheet": "estimated from the datasheet; good for comparing plans",
    "calibration": "estimated from rates measured here; good for comparing plans",
    "measured step": "scaled to the step you measured",
}


def print_prediction(
    prediction: Prediction,
    *,
    explains: bool = False,
    then: str | None = None,
    console: Console | None = None,
) -> None:
    """Print the prediction; with the sources of its error bar if it `explains`; `then` is next."""
    console = console or new_console()
    print_prose(console, _verdict(prediction), FITS[prediction.fits][1])
    if prediction.doubt:
        print_prose(console, f"Do not trust this: {prediction.doubt}", "bold red")
    print_prose(console, _figures(prediction))
    for said in _about_figures(prediction):
        print_prose(console, said)
    _print_parts(console, prediction)
    print_prose(console, _moment(prediction))
    if prediction.host_bytes:
        print_prose(
            console,
            f"on the host {format_bytes(prediction.host_bytes)};"
            f" {format_bytes(prediction.bus_bytes)} over the bus a step",
        )
    _print_modules(console, prediction)
    if prediction.step_s is not None:
        print_prose(console, _time(prediction))
    if explains:
        _print_unknowns(console, prediction)
    elif prediction.unknowns:
        print_prose(console, _error_bar(prediction), "dim")
    for note in prediction.notes:
        print_prose(console, f"assumed: {note}", "dim")
    if prediction.seen is not None:
        from oomph.showing.script import print_seen

        print_seen(console, prediction.seen)
    if then is not None:
        print_command(console, then)


def _print_unknowns(console: Console, prediction: Prediction) -> None:
    for unknown in prediction.unknowns:
        print_prose(
            console,
            f"error bar: {unknown.what}: {format_bytes(unknown.low_bytes)} to"
            f" {format_bytes(unknown.high_bytes)}; measure it with {unknown.settled_by}",
            "dim",
        )


def _error_bar(prediction: Prediction) -> str:
    """Return the error bar in one line: its ends, and what it is for."""
    below = format_bytes(prediction.device_bytes - prediction.low_bytes)
    above = format_bytes(prediction.high_bytes - prediction.device_bytes)
    names = ", ".join(unknown.what.partition(" (")[0] for unknown in prediction.unknowns)
    return f"error bar: -{below} / +{above}: {names}; --explain has sources, and how to narrow it"


def _verdict(prediction: Prediction) -> str:
    variant = prediction.variant
    settings = _in_words(variant, prediction.seen)
    retries = ""
    if prediction.num_retries and prediction.fits != "no":
        retries = f", with {prediction.num_retries} allocator retries: slow"
    each = f"each of {variant.num_gpus} x " if variant.num_gpus > 1 else ""
    return f"{FITS[prediction.fits][0]} on {each}{prediction.gpu}: {settings}{retries}"


def _in_words(variant: Variant, seen: Seen | None) -> str:
    """Return the training variant: everything that differs from what was given."""
    from oomph.tricks.trick import to_put_on

    split = f"micro-batch {variant.micro_batch} x {variant.accumulation}"
    if seen is not None and not seen.is_batch_known:
        split = "the script's own batch"
    names = named_tricks((trick.name for trick in to_put_on(variant)), variant)
    return ", ".join(dict.fromkeys([split, variant.precision, *names]))


def named_tricks(names: Iterable[str], variant: Variant, num_blocks: int = 0) -> list[str]:
    """Return the tricks of a variant as a few words each, without the split of the batch.

    `num_blocks` is the number of blocks that the model has, if that is known.
    """
    named = {"checkpointing": _recomputed(variant.checkpointing, num_blocks)}
    return [named.get(name, name) for name in names if name != "accumulation"]


def _recomputed(checkpointing: str, num_blocks: int) -> str:
    """Return which blocks are recomputed.

    >>> _recomputed("blocks", 3), _recomputed("blocks", 0), _recomputed("blocks:0,2", 3)
    ('recompute 3 of 3 blocks', 'recompute all blocks', 'recompute 2 of 3 blocks')
    >>> _recomputed("every-2", 0), _recomputed("selective", 3), _recomputed("blocks:1", 0)
    ('recompute 1 block in 2', 'recompute what is cheap', 'recompute 1 block')
    """
    if checkpointing == "selective":
        return "recompute what is cheap"
    if num_blocks and checkpointing != "none":
        is_listed = checkpointing.startswith("blocks:")
        num = checkpointing.count(",") + 1
        num = num if is_listed else len(recomputed_blocks(checkpointing, num_blocks))
        return f"recompute {num} of {num_blocks} blocks"
    if checkpointing.startswith("every-"):
        return f"recompute 1 block in {checkpointing.removeprefix('every-')}"
    if checkpointing.startswith("blocks:"):
        num = checkpointing.count(",") + 1
        return f"recompute {num} block{'s' * (num > 1)}"
    return "recompute all blocks"


def _figures(prediction: Prediction) -> str:
    device, capacity = prediction.device_bytes, prediction.capacity_bytes
    share = f" ({format_ratio(device / capacity)})" if capacity else ""
    on = "on each device" if prediction.variant.num_gpus > 1 else "on the device"
    return (
        f"{on} {format_bytes(device)} ({format_bytes(prediction.low_bytes)} to"
        f" {format_bytes(prediction.high_bytes)}) of {format_bytes(capacity)}{share};"
        f" torch reserves {format_bytes(prediction.reserved_bytes)}, allocates"
        f" {format_bytes(prediction.allocated_bytes)}"
    )


def _about_figures(prediction: Prediction) -> Iterator[str]:
    """Yield what the figures alone would leave to be misread."""
    if prediction.fits == "yes" and prediction.high_bytes > prediction.capacity_bytes:
        yield "At worst it fills the GPU: torch then frees its cache, and the step still fits."
    if prediction.outputs_bytes:
        more = format_bytes(prediction.outputs_bytes)
        yield (
            f"Your loop needs {more} more if it keeps `outputs` until the next step;"
            " --keeps outputs includes it."
        )


def _print_parts(console: Console, prediction: Prediction) -> None:
    """Print what the peak is made of, as a bar and as a list."""
    live = sum(prediction.by_category.values())
    cache = max(prediction.reserved_bytes - live, 0)
    context = prediction.device_bytes - prediction.reserved_bytes
    parts: dict[str, int] = {
        **{str(category): size for category, size in prediction.by_category.items()},
        "allocator's cache": cache,
        "CUDA context" if prediction.variant.num_gpus == 1 else "CUDA and NCCL": context,
    }
    whole = max(prediction.capacity_bytes, prediction.device_bytes)
    width = min(_BAR_WIDTH, console.width)
    glyphs = glyphs_for(console.encoding)
    edges = [0, *(round(width * end / whole) for end in itertools.accumulate(parts.values()))]
    marks = [
        (glyphs.parts[i % len(glyphs.parts)], _COLOURS[i % len(_COLOURS)])
        for i in range(len(parts))
    ]
    pieces = [
        (glyph * (after - before), colour)
        for (glyph, colour), (before, after) in zip(marks, itertools.pairwise(edges), strict=True)
    ]
    print_line(console, [*pieces, (glyphs.bar["free"] * (width - edges[-1]), "dim")])
    for (glyph, colour), (part, size_bytes) in zip(marks, parts.items(), strict=True):
        figure = f"{part:<18} {format_bytes(size_bytes):>9}"
        print_line(console, [(f"  {glyph} ", colour), (figure, "")])


def _time(prediction: Prediction) -> str:
    low, high = prediction.step_low_s, prediction.step_high_s
    unknown = low is None or high is None
    bounds = "" if unknown else f" ({format_time(low or 0.0)} to {format_time(high or 0.0)})"
    rate = prediction.samples_per_s
    samples = "" if rate is None else f", {format_rate(rate)} samples a second"
    worth = _WORTH[prediction.step_from or "datasheet"]
    step = format_time(prediction.step_s or 0.0)
    return f"time: about {step} a step{bounds}{samples}; {worth}"


def _moment(prediction: Prediction) -> str:
    moment = prediction.peak_at
    where = f" of {moment.module}" if moment.module else ""
    phase = "optimizer step" if moment.phase == "step" else moment.phase
    return f"peak: step {moment.step}, {phase}, in {moment.op}{where}"


def _print_modules(console: Console, prediction: Prediction) -> None:
    largest = list(prediction.by_module.items())[:_MOST_MODULES]
    if largest:
        parts = ", ".join(f"{name or 'the model itself'} {format_bytes(n)}" for name, n in largest)
        print_prose(console, f"largest at the peak: {parts}")
