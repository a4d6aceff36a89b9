"""Scored rows -> how far the truth lies outside what is predicted by name, and who is covered.

`python -m accuracy --bars` writes the residuals that the error bars of oomph are made from
(predicting/residuals.json). Every full run prints the coverage: of each source by the width that
the other sources give.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from oomph.predicting import residuals
from oomph.predicting.residuals import (
    AROUND_ANY_BYTES,
    COVERAGE_RATIO,
    KINDS,
    Kind,
    Residual,
    kind_of,
    width_from,
)
from oomph.records.prediction import Prediction
from oomph.records.trace import Trace
from oomph.units import MIB

FILE = Path(residuals.__file__).with_name("residuals.json")
_DIGITS = 5  # of a ratio: 0.001 %

# The bars before they came from residuals, for comparison: below, above, above on several GPUs.
_JUDGED_BELOW, _JUDGED_ABOVE, _JUDGED_ABOVE_OF_SEVERAL = 0.10, 0.05, 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was published of one run, as the bytes that a prediction has."""

    measured_mib: float
    rounding_mib: float = 0.0
    shift_bytes: int = 0  # from the device's bytes to what was measured: allocated or reserved
    is_upper_bound: bool = False  # predicted for the greatest length that may have occurred


def residual_of(
    prediction: Prediction, kind: Kind, source: str, what: str, measured: Measured
) -> Residual:
    """Return how far a measurement lies outside the prediction's named unknowns."""
    # Without the bar of what no rule knows, which is what is sought here.
    unseen = prediction.unknowns[0]
    low = prediction.low_bytes - unseen.low_bytes + measured.shift_bytes - AROUND_ANY_BYTES
    high = prediction.high_bytes - unseen.high_bytes + measured.shift_bytes + AROUND_ANY_BYTES
    least = (measured.measured_mib - measured.rounding_mib) * MIB
    most = (measured.measured_mib + measured.rounding_mib) * MIB
    outside = 0.0
    if least > high:
        outside = least - high
    elif most < low and not measured.is_upper_bound:
        outside = most - low
    ratio = round(outside / prediction.reserved_bytes, _DIGITS)
    return Residual(kind=kind, source=source, what=what, outside_ratio=ratio)


def kind_of_trace(trace: Trace, num_gpus: int) -> Kind | None:
    """Return the kind; None while cuDNN measures, because the bar then reaches the card's end."""
    return None if trace.measures_convolutions else kind_of(trace.ops, num_gpus)


def write(found: Sequence[Residual], references: dict[str, str]) -> None:
    """Write the residuals, by kind and source."""
    groups: dict[tuple[Kind, str], dict[str, float]] = {}
    for each in found:
        groups.setdefault((each.kind, each.source), {})[each.what] = each.outside_ratio
    written = {
        "made_by": "python -m accuracy --bars",
        "sources": [
            {"kind": kind, "source": source, "reference": references[source], "runs": runs}
            for (kind, source), runs in groups.items()
        ],
    }
    FILE.write_text(json.dumps(written, indent=1) + "\n", "utf-8")


# ---- coverage --------------------------------------------------------------------------------


def coverage(found: Sequence[Residual]) -> Iterator[str]:
    """Yield a table: how many runs the bars cover, each by the width of the other sources."""
    yield ("| kind | runs | sources | width | left out, inside | judged before: width | inside |")
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for kind in KINDS:
        own = [each for each in found if each.kind == kind]
        if not own:
            continue
        above = _JUDGED_ABOVE if kind != KINDS[-1] else _JUDGED_ABOVE_OF_SEVERAL
        judged = sum(-_JUDGED_BELOW <= each.outside_ratio <= above for each in own)
        yield (
            f"| {kind} | {len(own)} | {len({each.source for each in own})} "
            f"| {width_from(found, kind).ratio:.1%} | {_inside(left_out(found, kind))} "
            f"| -{_JUDGED_BELOW:.0%} / +{above:.0%} | {judged} of {len(own)} |"
        )
    yield ""
    yield f"Widths cover {COVERAGE_RATIO:.0%}, beside the named unknowns and 40 MiB either way."
    yield from (
        f"- {kind}: {width_from(found, kind).because}"
        for kind in KINDS
        if any(each.kind == kind for each in found)
    )


def left_out(found: Sequence[Residual], kind: Kind) -> list[bool]:
    """Return of each run whether the width from all other sources covers it."""
    covered: list[bool] = []
    for source in dict.fromkeys(each.source for each in found if each.kind == kind):
        others = [each for each in found if each.source != source]
        ratio = width_from(others, kind).ratio
        covered += [
            abs(each.outside_ratio) <= ratio
            for each in found
            if each.kind == kind and each.source == source
        ]
    return covered


def _inside(covered: Iterable[bool]) -> str:
    each = list(covered)
    return f"{sum(each)} of {len(each)}"
