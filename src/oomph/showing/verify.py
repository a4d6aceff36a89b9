"""Verification -> what `oomph verify` prints: the answer, the figures, the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from oomph.records.alignment import Unmatched
from oomph.records.verification import (
    Figure,
    FirstDifference,
    Located,
    Measured,
    Outcome,
    Predicted,
    Site,
    Verification,
    Verified,
)
from oomph.records.verification import Sequence as Compared
from oomph.showing.terminal import Column, new_console, print_prose, print_table
from oomph.units import format_bytes, format_time

if TYPE_CHECKING:
    from rich.console import Console

_STYLES: dict[Outcome, str] = {"right": "green", "wrong": "bold red", "not measured": "yellow"}
_SHOWN_RATIO = 0.0005  # below, an error is 0.0%
_MOST_BLOCKS = 3  # of one side, in a sentence
_FIGURES: tuple[Figure, ...] = ("allocated", "reserved", "device")


def print_verification(found: Verification, path: str | None) -> None:
    """Print a verification; `path` is the file that it was written to."""
    console = new_console()
    style = {True: "bold green", False: "bold red", None: "bold yellow"}[found.is_right]
    print_prose(console, _answer(found), style)
    if found.was_interrupted:
        print_prose(
            console,
            f"Interrupted: {len(found.verified)} of {found.num_asked} models were verified.",
            "yellow",
        )
    times = _times(found)
    if times:
        print_prose(console, times)
    if found.kind == "zoo":
        _print_zoo(console, found)
    else:
        for each in found.verified:
            _print_one(console, each)
    for note in dict.fromkeys((*found.notes, *_notes(found.verified))):
        print_prose(console, f"note: {note}", "dim")
    if found.site is not None:
        print_prose(console, _software(found.site), "dim")
    for line in _next(found, path):
        print_prose(console, line)


# ---- the answer ----------------------------------------------------------------------------------


def _answer(found: Verification) -> str:
    where = "this GPU" if found.site is None else found.site.gpu_name
    if found.is_right is None:
        return f"Nothing could be measured on {where}."
    worst = _worst(found.verified)
    if found.kind != "zoo":
        return f"{_verdict(found.verified[0], where)}{worst}"
    num_measured, num_right = found.num_measured, found.num_right
    if found.is_right:
        head = f"oomph is right on {where}: {num_right} of {num_measured} models are within"
        return f"{head} their error bars{worst}"
    wrong = [each.name for each in found.verified if each.outcome == "wrong"]
    head = f"oomph is wrong on {where} for {len(wrong)} of {num_measured} models"
    return f"{head} ({', '.join(wrong)}){worst}"


def _verdict(each: Verified, where: str) -> str:
    predicted, measured = each.predicted, each.measured
    is_right = each.outcome == "right"
    head = f"oomph is {'right' if is_right else 'wrong'} on {where}: {each.name}"
    if predicted is None or measured is None:
        return f"oomph cannot be judged on {where}: {each.name} was not measured"
    said = {"yes": "that it fits", "no": "that it does not fit", "uncertain": "that it may not fit"}
    if measured.ran_out:
        return f"{head} ran out of memory, and oomph said {said[predicted.fits]}"
    if predicted.fits == "no":
        return f"{head} fits, and oomph said {said['no']}"
    if is_right:
        return f"{head} is within the error bar"
    return f"{head} is outside the error bar ({', '.join(each.outside)})"


def _worst(verified: Sequence[Verified]) -> str:
    errors = [
        (abs(error), each.name, figure, error)
        for each in verified
        for figure in _FIGURES
        if (error := each.error_ratio(figure)) is not None
    ]
    if not errors:
        return "."
    _, name, figure, error = max(errors)
    if abs(error) < _SHOWN_RATIO:
        return "; largest error below 0.1%." if error else "; no error."
    of = f"{name}, {figure}" if len(verified) > 1 else figure
    return f"; largest error {_percent(error)} ({of})."


def _times(found: Verification) -> str:
    judged = [each for each in found.verified if each.is_time_in_range is not None]
    if not judged or found.kind != "zoo":
        return ""
    inside = sum(each.is_time_in_range is True for each in judged)
    errors = [abs(error) for each in judged if (error := _time_error(each)) is not None]
    return (
        f"Step times: {inside} of {len(judged)} in the predicted range; median error"
        f" {median(errors):.0%}. They do not count in the answer."
    )


def _time_error(each: Verified) -> float | None:
    if each.predicted is None or each.measured is None:
        return None
    predicted_s, measured_s = each.predicted.step_s, each.measured.step_s
    return predicted_s / measured_s - 1 if predicted_s and measured_s else None


# ---- the zoo: a row per model --------------------------------------------------------------------


def _print_zoo(console: Console, found: Verification) -> None:
    rows = found.verified
    columns = [
        Column("model", [each.name for each in rows], align="<"),
        Column("", [[(each.outcome, _STYLES[each.outcome])] for each in rows], align="<"),
        *(
            Column(figure, [_figure(each, figure) for each in rows], keep=keep)
            for figure, keep in (("allocated", 4), ("reserved", 5), ("device", 3))
        ),
        Column("step", [_step(each) for each in rows], keep=2),
        Column("error", [_worst_of(each) for each in rows], keep=7),
        Column("requests", [_matched(each) for each in rows], keep=6),
    ]
    print_table(console, columns)
    print_prose(
        console,
        "Measured figures, each with the error of its prediction. error: the largest of the memory."
        " requests: the share of requests to the allocator that prediction and GPU have in common,"
        " in order.",
        "dim",
    )
    for each in rows:
        if each.problem is not None:
            print_prose(console, f"{each.name}: {each.problem}", "yellow")
    different = [each for each in rows if _difference(each)]
    for each in [each for each in different if each.outcome == "wrong"] or different[:1]:
        print_prose(console, f"{each.name}: {_difference(each)}")


def _figure(each: Verified, figure: str) -> str:
    if each.measured is not None and each.measured.ran_out:
        return "out of memory" if figure == "reserved" else ""
    for name, predicted, measured in each.pairs():
        if name == figure:
            return f"{format_bytes(measured)} {_percent(predicted / max(measured, 1) - 1)}"
    return ""


def _worst_of(each: Verified) -> str:
    error = each.worst_error_ratio
    return "" if error is None else _percent(error)


def _step(each: Verified) -> str:
    if each.measured is None or each.measured.step_s is None:
        return ""
    error = _time_error(each)
    return f"{format_time(each.measured.step_s)} {'' if error is None else f'{error:+.0%}'}".strip()


def _matched(each: Verified) -> str:
    return "" if each.sequence is None else _share(each.sequence.matched_ratio)


def _percent(ratio: float) -> str:
    """
    >>> _percent(0.00423), _percent(-0.12), _percent(-0.0000001)
    ('+0.4%', '-12.0%', '0.0%')
    """
    return f"{ratio:+.1%}" if abs(ratio) >= _SHOWN_RATIO else "0.0%"


def _share(ratio: float) -> str:
    """Never round up to all of them.

    >>> _share(1.0), _share(0.99999), _share(0.5)
    ('100%', '99.9%', '50.0%')
    """
    return "100%" if ratio == 1 else f"{int(ratio * 1000) / 10:.1f}%"


# ---- one model: a row per figure -----------------------------------------------------------------


def _print_one(console: Console, each: Verified) -> None:
    if each.predicted is not None and each.measured is not None:
        names, *cells = zip(*_rows(each, each.predicted, each.measured), strict=True)
        headings = (("predicted", 3), ("error bar", 1), ("measured", None), ("error", 2))
        print_table(
            console,
            [
                Column("", names, align="<"),
                *(
                    Column(heading, column, keep=keep)
                    for (heading, keep), column in zip(headings, cells, strict=True)
                ),
            ],
        )
    if each.problem is not None:
        print_prose(console, each.problem, "yellow")
    if each.predicted is not None and each.predicted.doubt:
        print_prose(console, f"oomph doubted its prediction: {each.predicted.doubt}", "yellow")
    if each.sequence is not None:
        _print_sequence(console, each.sequence)
    difference = _difference(each)
    if difference:
        print_prose(console, difference)
    for assumed in each.assumed:
        print_prose(console, f"oomph assumed: {assumed}", "dim")


def _rows(
    each: Verified, predicted: Predicted, measured: Measured
) -> Iterator[tuple[str, str, str, str, str]]:
    for figure in _FIGURES:
        low, high = predicted.bar(figure)
        value = getattr(measured, f"{figure}_bytes")
        error = each.error_ratio(figure)
        yield (
            figure,
            format_bytes(getattr(predicted, f"{figure}_bytes")),
            f"{format_bytes(low)} to {format_bytes(high)}",
            _of_memory(value, ran_out=measured.ran_out),
            "" if error is None else _percent(error),
        )
    low_s, high_s, error = predicted.step_low_s, predicted.step_high_s, _time_error(each)
    yield (
        "step",
        "unknown" if predicted.step_s is None else format_time(predicted.step_s),
        "" if low_s is None or high_s is None else f"{format_time(low_s)} to {format_time(high_s)}",
        "unknown" if measured.step_s is None else format_time(measured.step_s),
        "" if error is None else _percent(error),
    )


def _of_memory(size_bytes: int | None, *, ran_out: bool) -> str:
    if size_bytes is None:
        return "unknown"
    return f"over {format_bytes(size_bytes)}" if ran_out else format_bytes(size_bytes)


def _print_sequence(console: Console, sequence: Compared) -> None:
    num_explained = sum(each.num_blocks for each in sequence.explained)
    whole = sequence.num_recorded - num_explained
    print_prose(
        console,
        f"Requests to the allocator: {sequence.num_matched:,} of {whole:,} on the GPU match the"
        f" prediction's {sequence.num_predicted:,} in order ({_share(sequence.matched_ratio)}).",
    )
    for title, blocks in (
        ("in the error bar", sequence.explained),
        ("only predicted", sequence.only_predicted),
        ("only on the GPU", sequence.only_recorded),
    ):
        if blocks:
            print_prose(console, f"{title}: {_listed(blocks)}", "dim")


def _listed(blocks: Sequence[Unmatched]) -> str:
    shown = [
        f"{each.num_blocks} x {format_bytes(each.size_bytes)}"
        + (f" ({each.label})" if each.label else "")
        for each in blocks[:_MOST_BLOCKS]
    ]
    more = sum(each.num_blocks for each in blocks[_MOST_BLOCKS:])
    return ", ".join(shown) + (f", and {more} more" if more else "")


def _difference(each: Verified) -> str:
    first = None if each.sequence is None else each.sequence.first_difference
    return "" if first is None else f"First difference, {first.when}: {_parted(first)}."


def _parted(first: FirstDifference) -> str:
    at = f" at {first.recorded_at}" if first.recorded_at else ""
    after = f", after {_place(first.after)}" if first.after is not None else ""
    if first.predicted is None:
        return f"the GPU requests {_exact(first.recorded_bytes)}{at} that oomph does not{after}"
    predicted = f"{_exact(first.predicted.size_bytes)} for {_place(first.predicted)}"
    if first.recorded_bytes is None:
        return f"oomph predicts {predicted}, and the GPU does not request it{after}"
    return f"oomph predicts {predicted}; the GPU requests {_exact(first.recorded_bytes)}{at}{after}"


def _place(located: Located) -> str:
    module = f" in {located.module}" if located.module else ""
    phase = {"step": "optimizer step", "build": ""}.get(located.phase, located.phase)
    return f"{located.op}{module}" + (f" ({phase})" if phase else "")


def _exact(size_bytes: int | None) -> str:
    """Format a size that is compared with another: its bytes count.

    >>> _exact(1000), _exact(3 << 20)
    ('1,000 B', '3.0 MiB (3,145,728 B)')
    """
    if size_bytes is None:
        return "nothing"
    bare = f"{size_bytes:,} B"
    return bare if size_bytes < 1024 else f"{format_bytes(size_bytes)} ({bare})"


# ---- below the figures ---------------------------------------------------------------------------


def _notes(verified: Sequence[Verified]) -> Iterator[str]:
    for each in verified:
        if each.measured is not None:
            yield from each.measured.notes


def _software(site: Site) -> str:
    major, minor = site.compute_capability
    parts = [
        f"{site.gpu_name} ({format_bytes(site.total_bytes)}, compute capability {major}.{minor})",
        *(f"{site.num_sms} SMs" for _ in range(site.num_sms is not None)),
        *(f"driver {site.driver_version}" for _ in range(site.driver_version is not None)),
        f"torch {site.torch_version}",
        *(f"CUDA {site.cuda_version}" for _ in range(site.cuda_version is not None)),
        *(f"cuDNN {site.cudnn_version}" for _ in range(site.cudnn_version is not None)),
    ]
    return ", ".join(parts)


def _next(found: Verification, path: str | None) -> Iterator[str]:
    if path is not None:
        yield f"Written to {path}: figures and versions, no paths, names or code of yours."
    is_real = found.site is not None and not found.site.is_emulated
    if found.is_right is False and is_real:
        file = path or "the file that -o FILE writes"
        yield f"Next: attach {file} to an issue of oomph, so that the prediction can be corrected."
    elif found.is_right and found.kind == "zoo":
        yield "Next: oomph verify train.py:workload, or train.py -- ARGUMENTS, for your own model."
    elif found.is_right and is_real:
        yield "Next: oomph plan, which searches settings with these predictions."
    if found.site is not None and found.site.is_emulated:
        yield "This was an emulated GPU: it says nothing about a real one."
