"""`python -m accuracy.recipes`: published training recipes beside oomph's answers.

Each recipe is asked of `oomph.predict`: does it fit, and how much does it take? And of
`oomph.plan`: given its model, its card and its batch, is the plan at least as good? A plan is if it
fits for certain, on no more GPUs, with no more changes of training than the recipe, and is not
slower than the recipe, neither as oomph predicts the recipe nor as it was published, by more than
the range of a predicted time. Where a recipe ran out of memory and its author says what made it
fit, the plan starts from the settings that failed, and is held against the fix.

With --answers FILE, answers are kept in that file, and only new questions are asked; with --known
none are. Delete the file after a change of oomph: it does not know what it depends on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from accuracy.recipe_rows import LEFT_OUT, NUM_COLLECTED, SOURCES, WHY, Recipe, read_rows
from accuracy.recipe_workloads import Built
from oomph.errors import OomphError
from oomph.units import GIB

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
_BLOCK = "recipes"
_PLACE = Path(__file__).with_name("recipe_workloads.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What oomph says to the settings of a recipe."""

    fits: str
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    low_bytes: int
    high_bytes: int
    capacity_bytes: int
    step_s: float | None
    step_high_s: float | None
    error: str = ""  # why there is no answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan that oomph recommends."""

    fits: str  # "no": there is no plan
    what: str
    num_changes: int
    num_gpus: int
    device_bytes: int
    step_s: float | None
    step_low_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A recipe, oomph's answers, and the row that made it fit."""

    row: Recipe
    predicted: Predicted | None  # None: it cannot be asked
    planned: Planned | None
    fix: Recipe | None = None
    fix_predicted: Predicted | None = None

    @property
    def verdict(self) -> str | None:
        """Return "right", "uncertain" or "wrong"; None if it cannot be asked.

        Where only the greatest length is known, a recipe may fit although its greatest would not.
        """
        said = self.predicted
        if said is None or said.error:
            return None
        is_open = self.row.lengths == "at most" and self.row.outcome == "fits"
        if said.fits == "uncertain" or (is_open and said.fits == "no"):
            return "uncertain"
        return "right" if (said.fits == "yes") == (self.row.outcome == "fits") else "wrong"

    @property
    def error_ratio(self) -> float | None:
        measured, said = self.row.memory_bytes, self.predicted
        if measured is None or said is None or said.error:
            return None
        is_allocated = self.row.metric == "max_allocated"
        return (said.allocated_bytes if is_allocated else said.device_bytes) / measured - 1

    @property
    def plan_fails(self) -> tuple[str, ...] | None:
        """Return in what the plan is worse than the recipe; None if there is nothing to compare."""
        if self.planned is None:
            return None
        best = self.row if self.fix is None else self.fix
        if self.planned.fits != "yes":
            return (f"no plan fits for certain: {self.planned.what}",)
        found = []
        if self.planned.num_changes > len(self.row.allow):
            found.append(f"{self.planned.num_changes} changes of training")
        if self.planned.num_gpus > best.num_gpus:
            found.append(f"{self.planned.num_gpus} GPUs instead of {best.num_gpus}")
        return (*found, *self._slower(best))

    def _slower(self, best: Recipe) -> Iterator[str]:
        planned, said = self.planned, self.fix_predicted if self.fix else self.predicted
        assert planned is not None
        if planned.step_s is None or planned.step_low_s is None:
            return
        ours, least = (s / self.row.batch_size for s in (planned.step_s, planned.step_low_s))
        if said is not None and said.step_high_s is not None:
            theirs = said.step_high_s / best.batch_size
            if ours > theirs:
                yield f"{1000 * ours:.1f} ms an example instead of at most {1000 * theirs:.1f}"
        if best.example_s is not None and least > best.example_s:
            yield (
                f"at least {1000 * least:.1f} ms an example, published {1000 * best.example_s:.1f}"
            )


# ---- asking ----------------------------------------------------------------------------------


class Answers:
    """oomph's answers, kept in a file so that a run can be stopped and continued."""

    def __init__(self, path: Path | None, *, asks: bool = True) -> None:
        self.path, self.asks = path, asks
        self.known: dict[str, Any] = {}
        if path is not None and path.exists():
            self.known = json.loads(path.read_text("utf-8"))

    def predicted(self, row: Recipe) -> Predicted | None:
        if row.not_posed:
            return None
        answer = self._answer(f"predict {row.id}", lambda: asdict(_predict(row)))
        return None if answer is None else Predicted(**answer)

    def planned(self, row: Recipe, fix: Recipe | None) -> Planned | None:
        max_gpus = row.num_gpus if fix is None else max(row.num_gpus, fix.num_gpus)
        allow = " ".join(sorted(row.allow))
        question = f"plan {row.built_plainly.name} {row.gpu} {max_gpus} {allow}"
        answer = self._answer(question, lambda: asdict(_plan(row, max_gpus)))
        return None if answer is None else Planned(**answer)

    def _answer(self, question: str, ask: Callable[[], Any]) -> Any:
        """Return the answer; None if it is not known and nothing is asked."""
        if question not in self.known and self.asks:
            began = time.perf_counter()
            self.known[question] = ask()
            print(f"{question}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
            if self.path is not None:
                self.path.write_text(json.dumps(self.known, indent=1), "utf-8")
        return self.known.get(question)


@contextlib.contextmanager
def _store_of(built: Built) -> Iterator[str]:
    """Give each model a store of its own: one store has room for few models' plans."""
    before = os.environ.get("XDG_CACHE_HOME")
    base = Path(before) if before else Path.home() / ".cache"
    os.environ["XDG_CACHE_HOME"] = str(base / "oomph-recipes" / built.model)
    try:
        yield f"{_PLACE}:{built.name}"
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


def _predict(row: Recipe) -> Predicted:
    import oomph

    variant = row.variant
    try:
        with _store_of(row.built) as place:
            said = oomph.predict(
                place,
                gpu=row.gpu,
                micro_batch=variant.micro_batch,
                precision=variant.precision,
                checkpointing=variant.checkpointing,
                optimizer=variant.optimizer,
                num_gpus=variant.num_gpus,
                sharding=variant.sharding if variant.num_gpus > 1 else None,
            )
    except OomphError as error:
        return Predicted(**dict.fromkeys(_BYTES, 0), **_NO_TIME, fits="", error=str(error))
    figures = {name: getattr(said, name) for name in (*_BYTES, *_NO_TIME)}
    return Predicted(fits=said.fits, **figures)


_BYTES = (
    "allocated_bytes",
    "reserved_bytes",
    "device_bytes",
    "low_bytes",
    "high_bytes",
    "capacity_bytes",
)
_NO_TIME: dict[str, Any] = {"step_s": None, "step_high_s": None}


def _plan(row: Recipe, max_gpus: int) -> Planned:
    import oomph

    try:
        with _store_of(row.built) as place:
            place = place.replace(row.built.name, row.built_plainly.name)
            plans = oomph.plan(place, gpu=row.gpu, max_gpus=max_gpus, allow=tuple(row.allow))
    except OomphError as error:
        return _no_plan(str(error))
    if plans.best is None:
        short = plans.shortfall
        missing = "" if short is None else f"{short.missing_bytes / GIB:.1f} GiB are missing"
        return _no_plan(missing)
    best = plans.best
    return Planned(
        fits=best.fits,
        what=str(best),
        num_changes=sum(trick.stability == "changes" for trick in best.tricks),
        num_gpus=best.gpus,
        device_bytes=best.prediction.device_bytes,
        step_s=best.prediction.step_s,
        step_low_s=best.prediction.step_low_s,
    )


def _no_plan(why: str) -> Planned:
    return Planned(
        fits="no",
        what=why,
        num_changes=0,
        num_gpus=0,
        device_bytes=0,
        step_s=None,
        step_low_s=None,
    )


def score_all(
    rows: Sequence[Recipe], answers: Answers, *, with_plans: bool = True
) -> Iterator[Scored]:
    """Ask about each row. Its fix is looked up among all rows."""
    every = {row.id: row for row in read_rows()}
    for row in rows:
        fix = every.get(row.fixed_by)
        predicted = answers.predicted(row)
        is_compared = with_plans and (row.outcome == "fits" or row.fixed_by)
        yield Scored(
            row=row,
            predicted=predicted,
            planned=answers.planned(row, fix) if is_compared else None,
            fix=fix,
            fix_predicted=answers.predicted(fix) if fix and is_compared else None,
        )


# ---- tables ----------------------------------------------------------------------------------


def table(scored: Sequence[Scored]) -> Iterator[str]:
    """The rows of one source."""
    yield "| recipe | outcome | oomph | measured GB | predicted | error % | low - high | plan |"
    yield "|---|---|---|--:|--:|--:|--:|---|"
    for each in scored:
        cells = [_what(each.row), each.row.outcome, *_memory_cells(each)]
        yield f"| {' | '.join([*cells, _plan_cell(each)])} |"


def _what(row: Recipe) -> str:
    gpus = "" if row.num_gpus == 1 else f"{row.num_gpus} x "
    tricks = [row.precision, row.checkpointing, row.optimizer, row.sharding]
    said = [trick for trick in tricks if trick not in ("fp32", "none", "as-is")]
    words = ", ".join([row.model, row.tuning, *said])
    return f"{row.id}: {words}, {row.micro_batch} x {row.size} on {gpus}{row.gpu}"


def _memory_cells(each: Scored) -> list[str]:
    said, error = each.predicted, each.error_ratio
    if said is None or said.error:
        why = (
            said.error if said else f"not asked: {each.row.not_posed}" if each.row.not_posed else ""
        )
        return [why, "", "", "", ""]
    is_allocated = each.row.metric == "max_allocated"
    shown = said.allocated_bytes if is_allocated else said.device_bytes
    measured = "" if each.row.memory_bytes is None else f"{each.row.memory_bytes / 1e9:.2f}"
    ratio = "" if error is None else f"{100 * error:+.1f}"
    bar = f"{said.low_bytes / 1e9:.2f} - {said.high_bytes / 1e9:.2f}"
    return [f"{said.fits} ({each.verdict})", measured, f"{shown / 1e9:.2f}", ratio, bar]


def _plan_cell(each: Scored) -> str:
    fails = each.plan_fails
    if each.planned is None or fails is None:
        return ""
    return f"WORSE: {'; '.join(fails)} ({each.planned.what})" if fails else each.planned.what


def summary(scored: Sequence[Scored]) -> Iterator[str]:
    """A line per source, and one for all."""
    yield (
        "| source | recipes | fits or not: right | uncertain | wrong | memory figures"
        " | median error | plans | at least as good |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for source, reference in SOURCES.items():
        rows = [each for each in scored if each.row.source == source]
        if rows:
            yield _summary_line(f"{source} ({reference})", rows)
    yield _summary_line("all", scored)


def _summary_line(title: str, rows: Sequence[Scored]) -> str:
    verdicts = [each.verdict for each in rows]
    errors = [abs(each.error_ratio) for each in rows if each.error_ratio is not None]
    compared = [each.plan_fails for each in rows if each.plan_fails is not None]
    cells = [
        title,
        len(rows),
        *(verdicts.count(word) for word in ("right", "uncertain", "wrong")),
        len(errors),
        f"{100 * median(errors):.1f} %" if errors else "",
        len(compared),
        sum(not fails for fails in compared),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def disagreements(scored: Sequence[Scored]) -> Iterator[str]:
    """A line for each answer that a recipe contradicts."""
    for each in scored:
        said = each.predicted
        if said is not None and said.error:
            yield f"- {_what(each.row)}: no prediction: {said.error}"
        if each.verdict == "wrong" and said is not None:
            took = f"{said.device_bytes / GIB:.1f} of {said.capacity_bytes / GIB:.1f} GiB"
            why = WHY.get(each.row.id, "not known why")
            yield f"- {_what(each.row)}: {each.row.outcome}, predicted {took}; {why}"
        if each.plan_fails and each.planned is not None:
            fails = "; ".join(each.plan_fails)
            yield f"- {_what(each.row)}: plan {each.planned.what}: {fails}"


def report(scored: Sequence[Scored]) -> Iterator[str]:
    for title, is_blind in (("looked at", False), ("blind", True)):
        rows = [each for each in scored if each.row.is_blind == is_blind]
        if rows:
            yield from (f"Recipes that were {title}:", "", *summary(rows), "")
    compared = [each for each in scored if each.row.outcome == "fits" or each.row.fixed_by]
    asked = [each for each in compared if each.planned is not None]
    pairs = sum(bool(each.row.fixed_by) for each in asked)
    yield (
        f"Plans were asked for {len(asked)} of {len(compared)} recipes,"
        f" {pairs} of them for what had run out of memory."
    )
    yield ""
    yield from disagreements(scored)


def left_out() -> Iterator[str]:
    yield f"| of {NUM_COLLECTED} recipes left out | rows | why |"
    yield "|---|--:|---|"
    for source, number, why in LEFT_OUT:
        yield f"| {source} | {number} | {why} |"


# ---- the command -----------------------------------------------------------------------------


def chosen(rows: Sequence[Recipe], only: Sequence[str], half: str) -> list[Recipe]:
    """Return the rows whose name or source begins with one of these words, of one half or both."""
    wanted = {"both": (True, False), "seen": (False,), "blind": (True,)}[half]
    return [
        row
        for row in rows
        if row.is_blind in wanted
        and (not only or row.id.startswith(tuple(only)) or row.source in only)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m accuracy.recipes", description=__doc__)
    parser.add_argument("only", nargs="*", help="the first letters of rows, or sources")
    parser.add_argument("--half", choices=("both", "seen", "blind"), default="both")
    parser.add_argument("--predict-only", action="store_true", help="no plans")
    parser.add_argument("--answers", type=Path, help="keep answers in this file")
    parser.add_argument("--known", action="store_true", help="ask nothing: only kept answers")
    parser.add_argument("--docs", action="store_true", help="write the summary into planning.md")
    options = parser.parse_args()
    if options.docs and (options.only or options.half != "both" or options.predict_only):
        parser.error("--docs wants all rows")
    rows = chosen(read_rows(), options.only, options.half)
    answers = Answers(options.answers, asks=not options.known)
    scored = list(score_all(rows, answers, with_plans=not options.predict_only))
    by_source: Mapping[str, list[Scored]] = {
        source: [each for each in scored if each.row.source == source] for source in SOURCES
    }
    for source, of_source in by_source.items():
        if of_source:
            print(f"### {source}\n\n{SOURCES[source]}\n")
            print("\n".join(table(of_source)) + "\n")
    print("\n".join([*left_out(), ""]))
    lines = list(report(scored))
    print("\n".join(lines))
    if options.docs:
        from docs.generate import replace_block

        text = DOCUMENT.read_text("utf-8")
        DOCUMENT.write_text(replace_block(text, _BLOCK, "\n".join(lines)), "utf-8")


if __name__ == "__main__":
    main()
