"""`python -m accuracy`: predictions beside published measurements, row by row."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from accuracy import bars, perceptrons, times, timm_benchmark, verified
from accuracy.rows import ROWS, XMEM, Row, Source
from oomph.errors import OomphError
from oomph.predicting.overhead import Interval
from oomph.predicting.prediction import Card
from oomph.predicting.residuals import Kind, Residual
from oomph.records.prediction import Prediction
from oomph.units import MIB

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
_BLOCK = "accuracy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A row and what was predicted for it."""

    row: Row
    prediction: Prediction | None  # None: it could not be rehearsed
    remarks: tuple[str, ...]
    kind: Kind | None = None  # None: its bar is open, and nothing is learnt for others

    @property
    def residual(self) -> Residual | None:
        """Return how far the measurement lies outside what is predicted by name."""
        measured = self.row.measured_mib
        if measured is None or self.prediction is None or self.kind is None:
            return None
        figures = bars.Measured(measured_mib=measured)
        name = self.row.source.name
        return bars.residual_of(self.prediction, self.kind, name, self.row.what, figures)

    @property
    def error_ratio(self) -> float | None:
        measured = self.row.measured_mib
        if measured is None or self.prediction is None:
            return None
        return self.prediction.device_bytes / (measured * MIB) - 1

    @property
    def is_inside(self) -> bool | None:
        measured = self.row.measured_mib
        if measured is None or self.prediction is None:
            return None
        return self.prediction.low_bytes <= measured * MIB <= self.prediction.high_bytes


# ---- predicting ------------------------------------------------------------------------------


def score(row: Row) -> Scored:
    """Rehearse a row in a child, for torch is patched on the way."""
    from oomph.rehearsing.child import in_a_child

    remarks = [row.remark] if row.remark else []
    try:
        prediction, limited_bytes, kind = in_a_child(lambda: _predict(row))
        if row.source is XMEM:
            late, _, _ = in_a_child(lambda: _predict(row, zero_grad_late=True))
            remarks.append(f"{_mib(late.device_bytes)} with zero_grad after the forward pass")
    except OomphError as error:
        return Scored(row=row, prediction=None, remarks=(*remarks, str(error)))
    if prediction.fits == "no" and limited_bytes < prediction.device_bytes:
        remarks.append(f"{_mib(limited_bytes)} where the allocator meets the end of the card")
    return Scored(row=row, prediction=prediction, remarks=tuple(remarks), kind=kind)


def _predict(row: Row, *, zero_grad_late: bool = False) -> tuple[Prediction, int, Kind | None]:
    """The prediction, what NVML would show at most where the card ends, and the kind of model."""
    from accuracy.workloads import variant_of, workload_of
    from oomph.predicting.demand import replay_trace
    from oomph.predicting.prediction import assemble
    from oomph.predicting.reductions import sized_on
    from oomph.predicting.speed import estimate
    from oomph.rehearsing.rehearse import prepare, rehearse
    from oomph.verbs.gpus import find_gpu

    capability = find_gpu(row.source.gpu).model.compute_capability
    assert capability is not None
    prepare(capability)
    variant = variant_of(row)
    workload = workload_of(row, zero_grad_late=zero_grad_late)
    trace, card = rehearse(workload, variant, capability), card_of(row.source)
    limit_bytes = card.usable.likely_bytes - card.context.likely_bytes
    limited = replay_trace(sized_on(trace, card.multiprocessors), limit_bytes=limit_bytes)
    limited_bytes = limited.peak_reserved_bytes + card.context.likely_bytes
    model = find_gpu(row.source.gpu).model
    time = estimate(trace.ops, model, num_micro_steps=row.accumulation)
    kind = bars.kind_of_trace(trace, variant.num_gpus)
    return assemble(trace, variant, card, time=time), limited_bytes, kind


def card_of(source: Source) -> Card:
    """The GPU of a source, with as much of the context as its figures have."""
    from oomph.predicting.overhead import context, cudnn, usable_bytes
    from oomph.sensing.target import multiprocessors_of
    from oomph.verbs.gpus import find_gpu

    model, version = find_gpu(source.gpu).model, source.torch_version
    usable, whole = usable_bytes(model), context(model, version)
    of_cudnn, told = cudnn(model, version), whole
    if source.context_mib is not None:
        inside = source.context_mib * MIB
        told = Interval(inside, inside, inside, "as the source says")
        if inside:
            of_cudnn = cudnn(model, version, measured_context_bytes=inside)
        else:  # it is there, but not in the figures
            usable = Interval(
                usable.low_bytes - whole.high_bytes,
                usable.likely_bytes - whole.likely_bytes,
                usable.high_bytes - whole.low_bytes,
                "less the context",
            )
    return Card(
        name=source.gpu,
        usable=usable,
        context=told,
        cudnn=of_cudnn,
        tf32=model.tf32,
        multiprocessors=multiprocessors_of(model),
    )


# ---- tables ----------------------------------------------------------------------------------


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f}"


def table(scored: Sequence[Scored]) -> Iterator[str]:
    """The rows of one source."""
    yield "| run | measured MiB | predicted | error % | low - high | inside? | remarks |"
    yield "|---|--:|--:|--:|--:|---|---|"
    for each in scored:
        prediction, measured = each.prediction, each.row.measured_mib
        cells = ["-", "-", "-", "-"]
        if prediction is not None:
            error, inside = each.error_ratio, each.is_inside
            bar = f"{_mib(prediction.low_bytes)} - {_mib(prediction.high_bytes)}"
            verdict = f"fits: {prediction.fits}" if inside is None else "yes" if inside else "no"
            shown = "-" if error is None else f"{100 * error:+.2f}"
            cells = [_mib(prediction.device_bytes), shown, bar, verdict]
        told = "out of memory" if measured is None else str(measured)
        yield f"| {' | '.join([each.row.what, told, *cells, '; '.join(each.remarks)])} |"


def summary(groups: Sequence[tuple[str, Source, Sequence[Scored]]]) -> Iterator[str]:
    """A line per source and kind of model."""
    yield "| source | what was measured | rows | median absolute error | p95 | within the bar |"
    yield "|---|---|--:|--:|--:|--:|"
    for title, source, scored in groups:
        errors = [abs(each.error_ratio) for each in scored if each.error_ratio is not None]
        if not errors:
            continue
        inside = sum(each.is_inside is True for each in scored)
        name = f"[{title}](https://github.com/{source.reference.partition('@')[0]})"
        yield (
            f"| {name} | {source.metric} | {len(errors)} | {100 * median(errors):.1f} % "
            f"| {100 * percentile(errors, 0.95):.1f} % | {inside} of {len(errors)} |"
        )
    everything = [each for _, _, scored in groups for each in scored]
    yield ""
    yield _verdicts(everything)
    yield _order(everything)


def _verdicts(scored: Sequence[Scored]) -> str:
    """Return how often oomph says "does not fit", for runs that ran out of memory and others."""
    said: dict[bool, list[bool]] = {True: [], False: []}
    for each in scored:
        if each.prediction is not None:
            said[each.row.measured_mib is None].append(each.prediction.fits == "no")
    return (
        f"OOMs predicted: {sum(said[True])} of {len(said[True])}. "
        f"False alarms: {sum(said[False])} of {len(said[False])}."
    )


def _order(scored: Sequence[Scored]) -> str:
    """Return how well the order by time is predicted: Kendall's tau over all pairs of runs."""
    times = [
        (each.row.step_s, each.prediction.step_s)
        for each in scored
        if each.row.step_s and each.prediction and each.prediction.step_s
    ]
    pairs = list(itertools.combinations(times, 2))
    agreeing = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    tau = (2 * agreeing - len(pairs)) / max(len(pairs), 1)
    return f"Order by time: Kendall's tau {tau:.2f} over {len(times)} runs with a published time."


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many are not above: of fewer than 20 the largest, for 0.95."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def grouped(scored: Sequence[Scored]) -> list[tuple[str, Source, list[Scored]]]:
    groups: dict[tuple[str, Source], list[Scored]] = {}
    for each in scored:
        kind = "transformers" if each.row.model.startswith(("bert", "gpt")) else "CNNs"
        kind = "perceptrons" if each.row.widths else kind
        groups.setdefault((f"{each.row.source.name}, {kind}", each.row.source), []).append(each)
    return [(title, source, rows) for (title, source), rows in groups.items()]


# ---- the command -----------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m accuracy", description=__doc__)
    parser.add_argument(
        "--docs", action="store_true", help="write the summary into docs/accuracy.md"
    )
    parser.add_argument("--times", action="store_true", help="only the step times")
    parser.add_argument("--only", default="", help="only rows with this in their source or name")
    parser.add_argument(
        "--verified",
        nargs="*",
        metavar="FILE",
        type=Path,
        help="only files of oomph verify --zoo (default: those in accuracy/verified)",
    )
    parser.add_argument("--bars", action="store_true", help="write the residuals of error bars")
    options = parser.parse_args()
    if options.verified is not None:
        print("\n".join(verified.report(options.verified or verified.kept_files())))
        return
    if (options.docs or options.bars) and (options.only or options.times):
        parser.error("--docs and --bars want all rows")
    if options.times:
        print("\n".join(times.report(times.score_all(times.chosen_rows(is_whole=False)))))
        return

    from accuracy import cnn, gpt, llm

    cnn.check_parameters()
    gpt.check_parameters()
    published = (*ROWS, *perceptrons.rows())
    scored = list(
        _score_all([row for row in published if options.only in f"{row.source.name} {row.what}"])
    )
    groups = grouped(scored)
    for title, source, rows in groups:
        print(f"### {title}\n\n{source.metric}; {source.gpu}; {source.reference}\n")
        print("\n".join(table(rows)) + "\n")
    llm_scored = llm.scored(options.only)
    found = [*summary(groups), *llm.report(llm_scored, is_whole=not options.only)]
    outside = [residual for each in scored if (residual := each.residual)]
    outside += [residual for each in llm_scored if (residual := each.residual)]
    found += ["", *bars.coverage(outside)]
    if options.bars:
        references = {row.source.name: row.source.reference for row in published}
        references |= {each.row.source.name: each.row.source.reference for each in llm_scored}
        bars.write(outside, references)
    if options.only in timm_benchmark.TIMM.name:
        found += ["", f"{timm_benchmark.TIMM.name}, {timm_benchmark.TIMM.metric}:", ""]
        found += timm_benchmark.told()
    if not options.only:
        scored_times = times.score_all(times.chosen_rows(is_whole=options.docs))
        print("\n".join(times.report(scored_times)) + "\n")
    lines = "\n".join(found)
    print(lines)
    if options.docs:
        _write(lines)
        times.write_docs(scored_times)
    print("\n".join(verified.report(verified.kept_files())))


def _score_all(rows: Sequence[Row]) -> Iterator[Scored]:
    for number, row in enumerate(rows, 1):
        began = time.perf_counter()
        yield score(row)
        took_s = time.perf_counter() - began
        print(
            f"{number}/{len(rows)} {row.source.name}: {row.what}: {took_s:.1f} s", file=sys.stderr
        )


def _write(lines: str) -> None:
    from docs.generate import replace_block

    try:
        DOCUMENT.write_text(replace_block(DOCUMENT.read_text("utf-8"), _BLOCK, lines), "utf-8")
    except LookupError as error:
        print(f"docs/accuracy.md is as it was: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
