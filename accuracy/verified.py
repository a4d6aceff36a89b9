"""Files of `oomph verify --zoo` -> what was measured, beside the predictions of then and of today.

python -m accuracy --verified                    the files in accuracy/verified
python -m accuracy --verified oomph-verify.json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from oomph.errors import OomphError
from oomph.records.verification import Verification, Verified
from oomph.units import format_bytes, format_time
from oomph.verbs.verify import load_verification
from oomph.verifying.judging import predicted_of
from oomph.verifying.verifier import predict_zoo_model, target_of_site

_DIRECTORY = Path(__file__).parent / "verified"
_HEAD = (
    "| model | measured: reserved | device | step | error then | error now | outcome now |\n"
    "|---|--:|--:|--:|--:|--:|---|"
)


def kept_files() -> list[Path]:
    """Return the verifications that are part of the repository."""
    return sorted(_DIRECTORY.glob("*.json"))


def report(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the lines of a table per file. Raises Unreadable."""
    if not paths:
        yield "There is no verification on a real GPU yet."
    for path in paths:
        yield from _table(path.stem, load_verification(path))


def _table(title: str, found: Verification) -> Iterator[str]:
    yield from (f"### verified: {title}", "")
    if found.site is None or found.kind != "zoo":
        yield from ("Not the zoo, or nothing was measured: its models cannot be rebuilt.", "")
        return
    site = found.site
    yield f"{site.gpu_name}, driver {site.driver_version or 'none'}, torch {site.torch_version}"
    yield from ("", _HEAD)
    now = [today(each, found) for each in found.verified]
    for then, each in zip(found.verified, now, strict=True):
        yield _row(then, each)
    judged = [each for each in now if each.outcome != "not measured"]
    errors = [abs(each.worst_error_ratio or 0.0) for each in judged]
    right = sum(each.outcome == "right" for each in judged)
    known = f"; median error {100 * median(errors):.1f} %" if errors else ""
    yield from ("", f"{right} of {len(judged)} right today{known}.", "")


def today(then: Verified, of: Verification) -> Verified:
    """Return a model of the zoo with today's prediction in place of the one of then."""
    if of.site is None:
        return then
    target = target_of_site(of.site)
    try:
        foreseen = predict_zoo_model(then.name, of.scale, target)
    except KeyError:  # the zoo has no such model any more
        return replace(then, predicted=None)
    if isinstance(foreseen, OomphError):
        return replace(then, predicted=None, problem=foreseen.in_one_line())
    return replace(then, predicted=predicted_of(*foreseen, target))


def _row(then: Verified, now: Verified) -> str:
    measured = now.measured
    reserved = device = step = "-"
    if measured is not None:
        reserved = _bytes(measured.reserved_bytes)
        device = _bytes(measured.device_bytes)
        step = "-" if measured.step_s is None else format_time(measured.step_s)
    cells = (now.name, reserved, device, step, _error(then), _error(now), now.outcome)
    return f"| {' | '.join(cells)} |"


def _bytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_bytes(size_bytes)


def _error(each: Verified) -> str:
    error = each.worst_error_ratio
    return "-" if error is None else f"{100 * error:+.1f} %"
