"""Prediction -> what `oomph predict` prints: the verdict first, then the peak drawn to scale."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from oomph.records.prediction import Prediction
from oomph.records.workload import Variant
from oomph.showing.terminal import draws_blocks, new_console, print_line, print_prose, text_of
from oomph.units import format_bytes, format_rate, format_ratio

if TYPE_CHECKING:
    from rich.console import Console

    from oomph.records.script import Seen

_STYLES = {"yes": "bold green", "no": "bold red", "uncertain": "bold yellow"}
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "white")
_BLOCKS = "█▓▒▞▚▤▥▦▧"  # told apart without colours, too
_ASCII = "#%@*+=oxc"
_BAR_WIDTH = 60
_MOST_MODULES = 5
_WORTH = {
    "datasheet": "an estimate from the datasheet: trust the order of plans, not the figure",
    "calibration": "an estimate from rates measured here: trust the order of plans, not the figure",
    "measured step": "held to the step that was measured",
}


def print_prediction(prediction: Prediction) -> None:
    """The whole prediction on the terminal."""
    console = new_console()
    print_prose(console, _verdict(prediction), _STYLES[prediction.fits])
    if prediction.doubt:
        print_prose(console, f"do not trust this: {prediction.doubt}", "bold red")
    print_prose(console, _figures(prediction))
    if prediction.outputs_bytes:
        more = format_bytes(prediction.outputs_bytes)
        print_prose(
            console,
            f"{more} more is needed if your loop keeps `outputs` until the next step:"
            " --keeps outputs includes it",
        )
    _print_parts(console, prediction)
    print_prose(console, _moment(prediction))
    if prediction.host_bytes:
        print_prose(
            console,
            f"on the host {format_bytes(prediction.host_bytes)}, pinned;"
            f" {format_bytes(prediction.bus_bytes)} over the bus a step",
        )
    _print_modules(console, prediction)
    if prediction.step_s is not None:
        print_prose(console, _time(prediction))
    for unknown in prediction.unknowns:
        print_prose(
            console,
            f"unknown: {unknown.what}: {format_bytes(unknown.low_bytes)} to"
            f" {format_bytes(unknown.high_bytes)}; settled by {unknown.settled_by}",
            "dim",
        )
    for note in prediction.notes:
        print_prose(console, f"assumed: {note}", "dim")
    if prediction.seen is not None:
        from oomph.showing.script import print_seen

        print_seen(console, prediction.seen)


def _verdict(prediction: Prediction) -> str:
    variant = prediction.variant
    how = _how(variant, prediction.seen)
    fits = {
        "yes": "fits",
        "no": "does not fit",
        "uncertain": "may or may not fit",
    }[prediction.fits]
    retries = (
        f", with {prediction.num_retries} allocator retries: slow"
        if prediction.num_retries and prediction.fits != "no"
        else ""
    )
    each = f"each of {variant.num_gpus} x " if variant.num_gpus > 1 else ""
    return f"{fits} on {each}{prediction.gpu}: {how}{retries}"


def _how(variant: Variant, seen: Seen | None) -> str:
    """How it is trained: all that is not as it was given."""
    said = {
        f"recomputed: {variant.checkpointing}": variant.checkpointing != "none",
        f"optimizer {variant.optimizer}": variant.optimizer != "as-is",
        "fused attention": variant.attention == "sdpa",
        "loss in pieces": variant.loss == "chunked",
        "optimizer in backward": variant.optimizer_in_backward,
        "activations offloaded": variant.offload_activations,
        "optimizer offloaded": variant.offload_optimizer,
        f"adapters: {variant.adapters}": variant.adapters != "none",
        "expandable segments": variant.expandable_segments,
        variant.sharding: variant.num_gpus > 1,
    }
    split = f"micro-batch {variant.micro_batch} x {variant.accumulation}"
    if seen is not None and not seen.is_batch_known:
        split = "the script's own batch"
    parts = [split, variant.precision]
    return ", ".join([*parts, *(words for words, is_so in said.items() if is_so)])


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


def _print_parts(console: Console, prediction: Prediction) -> None:
    """What the peak is made of, as a bar and as a list."""
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
    glyphs = _BLOCKS if draws_blocks(console) else _ASCII
    free = "░" if draws_blocks(console) else "."
    edges = [0, *(round(width * end / whole) for end in itertools.accumulate(parts.values()))]
    pieces = [
        (glyphs[i % len(glyphs)] * (after - before), _COLOURS[i % len(_COLOURS)])
        for i, (before, after) in enumerate(itertools.pairwise(edges))
    ]
    print_line(console, text_of([*pieces, (free * (width - edges[-1]), "dim")]))
    for i, (part, size_bytes) in enumerate(parts.items()):
        mark = (f"  {glyphs[i % len(glyphs)]} ", _COLOURS[i % len(_COLOURS)])
        print_line(console, text_of([mark, (f"{part:<18} {format_bytes(size_bytes):>9}", "")]))


def _time(prediction: Prediction) -> str:
    low, high = prediction.step_low_s, prediction.step_high_s
    bounds = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
    rate = prediction.samples_per_s
    samples = "" if rate is None else f", {format_rate(rate)} samples a second"
    worth = _WORTH[prediction.step_from or "datasheet"]
    return f"time: about {prediction.step_s:.3g} s a step{bounds}{samples}; {worth}"


def _moment(prediction: Prediction) -> str:
    moment = prediction.peak_at
    where = f" of {moment.module}" if moment.module else ""
    return f"peak: step {moment.step}, {moment.phase}, in {moment.op}{where}"


def _print_modules(console: Console, prediction: Prediction) -> None:
    largest = list(prediction.by_module.items())[:_MOST_MODULES]
    if largest:
        told = ", ".join(f"{name or 'the model itself'} {format_bytes(n)}" for name, n in largest)
        print_prose(console, f"largest at the peak: {told}")
