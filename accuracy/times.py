"""`python -m accuracy.times`: predicted step times beside published ones.

Rows are rehearsed once and stored; another estimator is scored in seconds. "before" is the
estimator of commit efa8f84, from times_before.json, which `--write-before` made there.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from accuracy import collectives
from accuracy.time_rows import UNBUILT, Part, TimeRow, read_rows
from accuracy.time_traces import ops_of, rehearse_missing
from oomph.predicting.links import links_among
from oomph.predicting.speed import estimate
from oomph.records.trace import Op, Phase
from oomph.verbs.gpus import find_gpu

# Rows of each source on one GPU unless all are asked for; and of how many of them those on several
# GPUs are scored, too.
_SEED, _NUM_DRAWN, _NUM_WITH_SEVERAL = 2026, 30, 8
_BLOCK = "times"
_BEFORE = Path(__file__).with_name("times_before.json")

_PHASES: dict[Part, tuple[Phase, ...]] = {
    "forward": ("input", "forward"),
    "loss": ("forward",),
    "backward": ("backward",),
    "forward+backward": ("zero_grad", "input", "forward", "backward"),
    "optimizer": ("step",),
}


@dataclass(frozen=True, slots=True)
class Range:  # in this order in times_before.json
    """A predicted time, and the range that is printed with it."""

    step_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeScored:
    """A row, and what is predicted for it now and was before."""

    row: TimeRow
    now: Range | None
    before: Range | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """What a group of rows says of an estimator."""

    num_rows: int
    ratio: float  # predicted / measured, median
    error: float  # distance of that ratio from 1, median
    error_p90: float
    inside: float  # share of measurements within the printed range
    width: float  # upper end of the range / lower end, median


# ---- predicting ------------------------------------------------------------------------------


def score(row: TimeRow, before: dict[str, list[float]]) -> TimeScored:
    model = find_gpu(row.gpu).model
    ops = ops_of(row, model)
    if isinstance(ops, str):
        return TimeScored(row=row, now=None, before=None, problem=ops)
    found = estimate(
        of_part(ops, row.part),
        model,
        matmul_precision="tf32" if row.precision == "tf32" else "fp32",
        links=links_among(model, row.num_gpus),
    )
    then = before.get(row.name)
    return TimeScored(
        row=row,
        now=Range(found.step_s, found.low_s, found.high_s) if found else None,
        before=Range(*then) if then else None,
        problem="" if found else f"a rate or the link of {row.gpu} is unknown",
    )


def of_part(ops: Sequence[Op], part: Part) -> Sequence[Op]:
    """Return the ops of a part; the loss is what follows the model's last module."""
    if part == "step":
        return ops
    chosen = [op for op in ops if op.phase in _PHASES[part]]
    if part not in ("forward", "loss"):
        return chosen
    in_model = [place for place, op in enumerate(chosen) if op.module]
    end = in_model[-1] + 1 if in_model else len(chosen)
    return chosen[:end] if part == "forward" else chosen[end:]


def score_all(rows: Sequence[TimeRow]) -> list[TimeScored]:
    began = time.perf_counter()
    before = before_figures()
    rehearse_missing([(row, find_gpu(row.gpu).model) for row in rows])
    scored = [score(row, before) for row in rows]
    took_s = time.perf_counter() - began
    print(f"{len(rows)} published times: {took_s:.0f} s", file=sys.stderr)
    return scored


def before_figures() -> dict[str, list[float]]:
    """Return the predicted seconds of the estimator before, and its range, by name."""
    found: dict[str, list[float]] = json.loads(_BEFORE.read_text("utf-8"))
    return found


def drawn(rows: Sequence[TimeRow]) -> list[TimeRow]:
    """Return some rows of each source, the same each time.

    Rows on several GPUs are those of the same runs as some of the rows on one GPU.
    """
    found: list[TimeRow] = []
    for name in dict.fromkeys(row.source.name for row in rows):
        of_source = [row for row in rows if row.source.name == name]
        alone = [row for row in of_source if row.num_gpus == 1]
        chosen = random.Random(_SEED)  # noqa: S311 - a sample, no secret
        alone = chosen.sample(alone, min(len(alone), _NUM_DRAWN))
        several = [row for row in of_source if row.num_gpus > 1]
        runs = {row.on_one_gpu for row in several}
        kept = [row.name for row in alone if row.name in runs][:_NUM_WITH_SEVERAL]
        found += [*alone, *(row for row in several if row.on_one_gpu in kept)]
    return found


def chosen_rows(*, is_whole: bool) -> list[TimeRow]:
    rows = read_rows()
    return rows if is_whole else drawn(rows)


def write_docs(scored: Sequence[TimeScored]) -> None:
    """Write the summary into its own block of docs/accuracy.md."""
    from docs.generate import replace_block

    document = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
    lines = "\n".join(summary(scored))
    document.write_text(replace_block(document.read_text("utf-8"), _BLOCK, lines), "utf-8")


def write_before(scored: Sequence[TimeScored]) -> None:
    """Keep the figures of these rows; those of the others stay as they are."""
    names = {row.name for row in read_rows()}
    found = {name: tuple(said) for name, said in before_figures().items() if name in names}
    for row in scored:
        if row.now is not None:
            found[row.row.name] = (row.now.step_s, row.now.low_s, row.now.high_s)
    for each in collectives.read_collectives():
        if each.predicted_s is not None:
            found[each.name] = (each.predicted_s,) * 3
    lines = [
        f'"{name}": [{", ".join(f"{figure:.4g}" for figure in figures)}]'
        for name, figures in found.items()
    ]
    _BEFORE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


# ---- tables ----------------------------------------------------------------------------------

Key = Callable[[TimeRow], tuple[str, ...]]


def _in_sample(row: TimeRow) -> str:
    return "blind" if row.is_held_out else "in sample"


def by_source(row: TimeRow) -> tuple[str, ...]:
    return row.source.name, _in_sample(row)


def by_gpu(row: TimeRow) -> tuple[str, ...]:
    return row.source.name, row.gpu, row.precision


def by_model(row: TimeRow) -> tuple[str, ...]:
    return row.source.name, row.model, row.precision


def grouped(
    scored: Sequence[TimeScored], key: Key
) -> list[tuple[tuple[str, ...], list[TimeScored]]]:
    groups: dict[tuple[str, ...], list[TimeScored]] = {}
    for each in scored:
        groups.setdefault(key(each.row), []).append(each)
    return list(groups.items())


def errors_of(pairs: Iterable[tuple[TimeRow, Range | None]]) -> Errors | None:
    from accuracy.__main__ import percentile

    known = [(row, said) for row, said in pairs if said is not None]
    if not known:
        return None
    ratios = [said.step_s / row.measured_s for row, said in known]
    sizes = [abs(ratio - 1) for ratio in ratios]
    inside = sum(said.low_s <= row.measured_s <= said.high_s for row, said in known)
    return Errors(
        num_rows=len(known),
        ratio=median(ratios),
        error=median(sizes),
        error_p90=percentile(sizes, 0.9),
        inside=inside / len(known),
        width=median(said.high_s / said.low_s for _, said in known),
    )


def table(scored: Sequence[TimeScored], key: Key, columns: Sequence[str]) -> Iterator[str]:
    """A line per group; "before -> now" where there is a figure from before."""
    figures = ("rows", "ratio", "median error", "p90", "in the range", "range")
    yield f"| {' | '.join([*columns, *figures])} |"
    yield f"|{'---|' * len(columns)}{'--:|' * len(figures)}"
    for title, group in grouped(scored, key):
        now = errors_of((each.row, each.now) for each in group)
        before = errors_of((each.row, each.before) for each in group)
        if now is not None:
            yield f"| {' | '.join([*title, *_cells(now, before)])} |"


def _cells(now: Errors, before: Errors | None) -> list[str]:
    then = _figures(before) if before else [""] * len(_figures(now))
    both = zip(then, _figures(now), strict=True)
    return [f"{now.num_rows}", *(f"{old} -> {new}" if old else new for old, new in both)]


def _figures(errors: Errors) -> list[str]:
    return [
        f"{errors.ratio:.2f}",
        f"{100 * errors.error:.0f} %",
        f"{100 * errors.error_p90:.0f} %",
        f"{100 * errors.inside:.0f} %",
        f"{errors.width:.1f} x",
    ]


def row_lines(scored: Sequence[TimeScored]) -> Iterator[str]:
    yield "| source | run | precision | torch | measured ms | predicted | ratio | range |"
    yield "|---|---|---|---|--:|--:|--:|--:|"
    for each in scored:
        row, now = each.row, each.now
        cells = [each.problem, "", ""]
        if now is not None:
            low, high = now.low_s / row.measured_s, now.high_s / row.measured_s
            ratio = now.step_s / row.measured_s
            cells = [f"{1000 * now.step_s:.2f}", f"{ratio:.2f}", f"{low:.2f} - {high:.2f}"]
        heads = [row.source.name, row.what, row.precision, row.torch_version]
        yield f"| {' | '.join([*heads, f'{1000 * row.measured_s:.2f}', *cells])} |"


def efficiency_table(scored: Sequence[TimeScored]) -> Iterator[str]:
    """Data parallel: the time of one GPU over that of several with as many examples each."""
    alone = {each.row.on_one_gpu: each for each in scored if each.row.num_gpus == 1}
    yield "| source | GPU | GPUs | rows | efficiency measured | predicted | off by, median |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    several = [each for each in scored if each.row.num_gpus > 1 and each.now is not None]
    for title, group in grouped(several, lambda row: (row.source.name, row.gpu, f"{row.num_gpus}")):
        pairs = [
            (one.row.measured_s / each.row.measured_s, one.now.step_s / each.now.step_s)
            for each in group
            if (one := alone.get(each.row.on_one_gpu)) and one.now and each.now
        ]
        if pairs:
            measured, predicted = (median(column) for column in zip(*pairs, strict=True))
            off = median(abs(one - other) for one, other in pairs)
            figures = [f"{len(pairs)}", f"{measured:.0%}", f"{predicted:.0%}", f"{off:.0%}"]
            yield f"| {' | '.join([*title, *figures])} |"


def summary(scored: Sequence[TimeScored]) -> Iterator[str]:
    """A line per source, for docs/accuracy.md."""
    alone = [each for each in scored if each.row.num_gpus == 1]
    yield "Step times on one GPU, predicted / measured (before -> now):"
    yield ""
    yield from table(alone, by_source, ("source", "seen"))
    for seen, rows in grouped(alone, lambda row: (_in_sample(row),)):
        now = errors_of((each.row, each.now) for each in rows)
        if now is not None:
            yield ""
            yield (
                f"All {seen[0]}: median error {100 * now.error:.0f} %, p90 "
                f"{100 * now.error_p90:.0f} %, {100 * now.inside:.0f} % in the range."
            )


def report(scored: Sequence[TimeScored]) -> Iterator[str]:
    """All tables."""
    alone = [each for each in scored if each.row.num_gpus == 1]
    several = [each for each in scored if each.row.num_gpus > 1]
    yield "### Step times, one GPU\n"
    yield from table(alone, by_source, ("source", ""))
    yield "\n### Step times, one GPU, by GPU and precision\n"
    yield from table(alone, by_gpu, ("source", "GPU", "precision"))
    if several:
        yield "\n### Step times, data parallel\n"
        yield from table(several, by_source, ("source", ""))
        yield "\n### Efficiency, data parallel\n"
        yield from efficiency_table(scored)
    yield "\n### Collectives\n"
    yield from collectives.table(before_figures())
    yield "\n### Published, not predicted\n"
    yield "| source | times | what | why |"
    yield "|---|--:|---|---|"
    yield from (f"| {name} | {num} | {what} | {why} |" for name, num, what, why in UNBUILT)
    unscored = [each for each in scored if each.now is None]
    if unscored:
        yield "\n### Could not be predicted\n"
        yield from (
            f"- {each.row.source.name}: {each.row.what}: {each.problem}" for each in unscored
        )


# ---- the command -----------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m accuracy.times", description=__doc__)
    parser.add_argument("--all", action="store_true", help="not only a sample of each source")
    parser.add_argument("--in-sample", action="store_true", help="without held-out sources")
    parser.add_argument(
        "--only", default="", help="rows with this in source, GPU, model or precision"
    )
    parser.add_argument("--models", action="store_true", help="by model, too")
    parser.add_argument("--rows", action="store_true", help="every row, too")
    parser.add_argument("--one-gpu", action="store_true", help="without data parallel rows")
    parser.add_argument(
        "--docs", action="store_true", help="write the summary into docs/accuracy.md"
    )
    parser.add_argument("--write-before", action="store_true", help="keep today's figures")
    options = parser.parse_args()
    if options.docs and (options.only or options.in_sample):
        parser.error("--docs wants all rows")
    is_whole = options.all or options.only or options.write_before or options.docs
    rows = chosen_rows(is_whole=is_whole)
    rows = [row for row in rows if options.only in f"{row.source.name} {row.what} {row.precision}"]
    rows = [row for row in rows if not (options.in_sample and row.is_held_out)]
    rows = [row for row in rows if not (options.one_gpu and row.num_gpus > 1)]
    scored = score_all(rows)
    if options.rows:
        print("\n".join(row_lines(scored)) + "\n")
    print("\n".join(report(scored)))
    if options.models:
        alone = [each for each in scored if each.row.num_gpus == 1]
        print("\n### By model\n")
        print("\n".join(table(alone, by_model, ("source", "model", "precision"))))
    if options.write_before:
        write_before(scored)
    if options.docs:
        write_docs(scored)


if __name__ == "__main__":
    main()
