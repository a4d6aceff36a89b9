"""Large language models: predictions beside published runs, by source and by what was measured.

Unseen when they were first predicted: tiny-llama and phi-1.5 at batch 1 of litgpt (0.1 %, but for
one upper bound), seven of nine rows of the ultrascale playbook (-1.4 to -10 %). All others had
been read in a list before. What was changed after a first prediction, each time for a line of the
framework's own code: the copies that nanotron makes to send (ultrascale, now -5.5 to +0.5 %), the
fp16 copy of old bitsandbytes (four-bit runs of litgpt, from -8 %), and fp32 for what is not
quantised (QLoRA of Phi-3, from -43 %).
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from accuracy import bars
from accuracy.llm_rows import LLM_ROWS
from accuracy.llm_sources import UNBUILT, LlmRow, LlmSource
from accuracy.segmentation import SEGMENTATION_ROWS
from oomph.predicting.overhead import Interval
from oomph.predicting.prediction import Card
from oomph.predicting.residuals import Kind, Residual
from oomph.records.prediction import Prediction
from oomph.units import MIB

_MUCH = 0.05  # an underestimate that hurts
_NOTHING = Interval(0, 0, 0, "not in the figure")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmScored:
    """A row, and what was predicted for it."""

    row: LlmRow
    prediction: Prediction | None  # None: only the time was asked for
    step_s: float | None
    kind: Kind | None = None  # None: its bar is open, and nothing is learnt for others

    @property
    def predicted_bytes(self) -> int:
        assert self.prediction is not None
        kind = self.row.source.kind
        if kind == "allocated":
            return self.prediction.allocated_bytes
        return self.prediction.device_bytes if kind == "device" else self.prediction.reserved_bytes

    @property
    def bar(self) -> tuple[int, int]:
        """As wide as that of the device's bytes, around what was measured here."""
        whole = self.prediction
        assert whole is not None
        shift = self.predicted_bytes - whole.device_bytes
        return whole.low_bytes + shift, whole.high_bytes + shift

    @property
    def error_ratio(self) -> float | None:
        measured = self.row.measured_mib
        return None if measured is None else self.predicted_bytes / (measured * MIB) - 1

    @property
    def is_inside(self) -> bool | None:
        """Within the bar and the figure's rounding; an upper bound has no lower end."""
        measured = self.row.measured_mib
        if measured is None:
            return None
        low, high = self.bar
        least, most = measured - self.row.rounding_mib, measured + self.row.rounding_mib
        return least * MIB <= high and (self.row.is_upper_bound or low <= most * MIB)

    @property
    def residual(self) -> Residual | None:
        """Return how far the measurement lies outside what is predicted by name."""
        row, whole = self.row, self.prediction
        if row.measured_mib is None or whole is None or self.kind is None:
            return None
        measured = bars.Measured(
            measured_mib=row.measured_mib,
            rounding_mib=row.rounding_mib,
            shift_bytes=self.predicted_bytes - whole.device_bytes,
            is_upper_bound=row.is_upper_bound,
        )
        return bars.residual_of(whole, self.kind, row.source.name, row.what, measured)

    @property
    def time_ratio(self) -> float | None:
        measured = self.row.step_s
        return self.step_s / measured if self.step_s and measured else None


# ---- predicting ------------------------------------------------------------------------------


def score_all(rows: Sequence[LlmRow]) -> Iterator[LlmScored]:
    """Each in a child; rows with the same trace once."""
    from oomph.rehearsing.child import in_a_child

    known: dict[str, tuple[Prediction | None, float | None, Kind | None]] = {}
    for row in rows:
        began = time.perf_counter()
        name = f"{row.source.name} {row.same_as or row.what}"
        if name not in known:
            known[name] = in_a_child(lambda row=row: _predict(row))  # type: ignore[misc]
        prediction, step_s, kind = known[name]
        took_s = time.perf_counter() - began
        print(f"{row.source.name}: {row.what}: {took_s:.1f} s", file=sys.stderr)
        yield LlmScored(row=row, prediction=prediction, step_s=step_s, kind=kind)


def _predict(row: LlmRow) -> tuple[Prediction | None, float | None, Kind | None]:
    from oomph.predicting.overhead import context, usable_bytes
    from oomph.predicting.prediction import assemble
    from oomph.predicting.speed import estimate
    from oomph.rehearsing.rehearse import prepare, rehearse
    from oomph.sensing.target import multiprocessors_of
    from oomph.verbs.gpus import find_gpu

    model = find_gpu(row.gpu).model
    assert model.compute_capability is not None
    prepare(model.compute_capability)
    trace = rehearse(row.workload(), row.variant, model.compute_capability)
    took = estimate(trace.ops, model, num_micro_steps=row.accumulation)
    step_s = None if took is None else took.step_s
    kind = bars.kind_of_trace(trace, max(row.num_ranks, row.variant.num_gpus))
    if row.source.kind == "time":
        return None, step_s, kind
    inside = context(model, row.source.torch_version) if row.source.kind == "device" else _NOTHING
    card = Card(
        name=row.gpu,
        usable=usable_bytes(model),
        context=inside,
        tf32=model.tf32,
        multiprocessors=multiprocessors_of(model),
    )
    variant = row.variant
    if row.num_ranks > 1:  # for the bar: several GPUs have a wider one
        variant = replace(variant, num_gpus=row.num_ranks)
    return assemble(trace, variant, card, time=took), step_s, kind


# ---- tables ----------------------------------------------------------------------------------


def table(scored: Sequence[LlmScored]) -> Iterator[str]:
    """The rows of one source."""
    yield "| run | measured MiB | predicted | error % | low - high | inside? | time | remarks |"
    yield "|---|--:|--:|--:|--:|---|--:|---|"
    for each in scored:
        yield f"| {' | '.join([each.row.what, *_memory_cells(each), *_other_cells(each)])} |"


def _memory_cells(each: LlmScored) -> list[str]:
    measured, error = each.row.measured_mib, each.error_ratio
    if measured is None or error is None:
        return ["-"] * 5
    low, high = each.bar
    return [
        f"{measured:.0f}",
        f"{each.predicted_bytes / MIB:.0f}",
        f"{100 * error:+.1f}",
        f"{low / MIB:.0f} - {high / MIB:.0f}",
        "yes" if each.is_inside else "no",
    ]


def _other_cells(each: LlmScored) -> list[str]:
    ratio, row = each.time_ratio, each.row
    bound = "upper bound: lengths unknown" if row.is_upper_bound else ""
    remarks = [remark for remark in (bound, row.remark) if remark]
    return ["-" if ratio is None else f"{ratio:.2f}", "; ".join(remarks)]


def grouped(scored: Sequence[LlmScored]) -> list[tuple[str, LlmSource, list[LlmScored]]]:
    """By source; rows of unknown lengths apart."""
    groups: dict[tuple[str, bool], list[LlmScored]] = {}
    for each in scored:
        groups.setdefault((each.row.source.name, each.row.is_upper_bound), []).append(each)
    return [
        (f"{name}{', at most' if is_bound else ''}", rows[0].row.source, rows)
        for (name, is_bound), rows in groups.items()
    ]


def summary(scored: Sequence[LlmScored]) -> Iterator[str]:
    """A line per source for memory, and one for time."""
    groups = grouped(scored)
    yield "| source | what was measured | rows | median error | p95 | in the bar | under by > 5 % |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for title, source, rows in groups:
        errors = [each.error_ratio for each in rows if each.error_ratio is not None]
        if errors:
            yield _memory_line(title, source, rows, errors)
    yield ""
    verdicts = [each.prediction.fits for each in scored if each.prediction is not None]
    yield f"False alarms: {verdicts.count('no')} of {len(verdicts)}."
    yield ""
    yield "| source | runs with a time | predicted / measured, median | Kendall's tau |"
    yield "|---|--:|--:|--:|"
    for title, _, rows in groups:
        ratios = [each.time_ratio for each in rows if each.time_ratio is not None]
        if ratios:
            yield f"| {title} | {len(ratios)} | {median(ratios):.2f} | {_tau(rows)} |"


def _memory_line(
    title: str, source: LlmSource, rows: Sequence[LlmScored], errors: Sequence[float]
) -> str:
    from accuracy.__main__ import percentile

    sizes = [abs(error) for error in errors]
    inside = sum(each.is_inside is True for each in rows)
    name = f"[{title}](https://github.com/{source.reference.partition('@')[0]})"
    return (
        f"| {name} | {source.metric} | {len(errors)} | {100 * median(sizes):.1f} % "
        f"| {100 * percentile(sizes, 0.95):.1f} % | {inside} of {len(errors)} "
        f"| {sum(error < -_MUCH for error in errors)} |"
    )


def _tau(rows: Sequence[LlmScored]) -> str:
    times = [(each.row.step_s, each.step_s) for each in rows]
    known = [(a, b) for a, b in times if a and b]
    pairs = [(a, b) for a, b in itertools.combinations(known, 2) if a[0] != b[0]]
    if not pairs:
        return "-"
    agreeing = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    return f"{(2 * agreeing - len(pairs)) / len(pairs):.2f}"


def unbuilt() -> Iterator[str]:
    """The rows that are not held against a prediction, and why."""
    yield "| source | rows | what | why not |"
    yield "|---|--:|---|---|"
    for each in UNBUILT:
        yield f"| {each.source.name} | {each.num_rows} | {each.what} | {each.because} |"


def scored(only: str) -> list[LlmScored]:
    """Predict the rows with these words in their source or name."""
    rows = (*LLM_ROWS, *SEGMENTATION_ROWS)
    return list(score_all([row for row in rows if only in f"{row.source.name} {row.what}"]))


def report(scored: Sequence[LlmScored], *, is_whole: bool) -> list[str]:
    """Print all tables; the lines of the summary."""
    for title, source, group in grouped(scored):
        print(f"### {title}\n\n{source.metric}; {source.reference}\n")
        print("\n".join(table(group)) + "\n")
    if is_whole:
        print("### Not built\n\n" + "\n".join(unbuilt()) + "\n")
    return ["", *summary(scored)] if scored else []
