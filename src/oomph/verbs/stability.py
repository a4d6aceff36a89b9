"""The verb stability: Workload -> which batch sizes train as well, with which learning rate?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from oomph.records.stability_study import StabilityStudy
    from oomph.records.workload import Workload
    from oomph.training.branched_runs import Bench, Job

_MOST_EXAMPLES = 2_000_000
_SHARE_OF_RUNS = 0.85  # of the time; the rest is for evaluating and the range test


def study_stability(
    workload: Workload | str,
    *,
    batch_sizes: Collection[int] | None = None,
    minutes: float = 10.0,
    num_examples: int | None = None,
    num_seeds: int = 2,
    seed: int = 0,
    out: str = "stability.json",
    say: Callable[[str], None] | None = None,
) -> StabilityStudy:
    """Train short runs with several batch sizes, and say which of them train as well as yours.

    `workload` is a Workload whose `batch(n)` draws n examples of your data, or where to find one:
    "train.py:workload". `batch_sizes` default to a quarter, half and twice its own. Each run sees
    the same number of examples: `num_examples`, or what `minutes` allow. Finished runs are kept in
    `out` until the study is done, and the next call resumes it.
    """
    from oomph.errors import UsageError
    from oomph.rehearsing.traces import load, split
    from oomph.stability.study_judging import judged
    from oomph.store import check_writable
    from oomph.training.branched_runs import Bench, examples_within, jobs

    say = say or (lambda _: None)
    check_writable(out)
    if not minutes > 0 or num_seeds < 1:
        raise UsageError("a study needs time and a seed", attempt="minutes=10, num_seeds=2")
    place = split(workload) if isinstance(workload, str) else None
    made: Workload = load(*place) if place else workload  # type: ignore[assignment]
    own = made.batch_size
    sizes = sorted({*(batch_sizes or (max(own // 4, 1), max(own // 2, 1), own * 2)), own})
    bench = Bench(made, seed)
    todo = list(jobs(sizes, own, range(seed, seed + num_seeds)))
    called = workload if isinstance(workload, str) else "the workload"
    progress = _Progress(out, _digest(place, called, sizes, num_seeds, seed, num_examples, minutes))
    if not progress.num_examples:
        say(f"timing steps with {len(sizes)} batch sizes, on {bench.device}")
        seconds = 60 * minutes * _SHARE_OF_RUNS
        progress.num_examples = num_examples or examples_within(
            seconds, todo, bench.step_s, most=_MOST_EXAMPLES
        )
    _run_all(bench, todo, progress, say)
    study = judged(
        progress.runs,
        workload=called,
        batch_size=own,
        num_examples=progress.num_examples,
        device=bench.device,
        diverging_rate=progress.diverging_rate,
    )
    progress.finish(study)
    return study


def _run_all(
    bench: Bench, todo: Sequence[Job], progress: _Progress, say: Callable[[str], None]
) -> None:
    if not progress.has_range:
        say("raising the learning rate until the loss rises")
        progress.diverging_rate, progress.has_range = bench.diverging_rate(), True
        progress.save()
    for number, job in enumerate(todo, 1):
        if any(
            (r.batch_size, r.rule, r.seed) == (job.batch_size, job.rule, job.seed)
            for r in progress.runs
        ):
            continue
        say(
            f"run {number} of {len(todo)}: batch {job.batch_size}, learning rate {job.rule}, seed"
            f" {job.seed}, {progress.num_examples} examples"
        )
        progress.runs = (*progress.runs, bench.run(job, progress.num_examples))
        progress.save()


class _Progress:
    """The finished runs, on disk."""

    def __init__(self, out: str, asked: str) -> None:
        from pathlib import Path

        from oomph.errors import Unreadable
        from oomph.records.stability_study import StudyRun, UnfinishedStudy
        from oomph.records.stored import from_json_file

        self._path, self._asked = Path(f"{out}.part"), asked
        self._out = out
        self.num_examples, self.has_range = 0, False
        self.diverging_rate: float | None = None
        self.runs: tuple[StudyRun, ...] = ()
        if not self._path.exists():
            return
        try:
            kept = from_json_file(UnfinishedStudy, self._path, what="an unfinished study")
        except Unreadable:  # of another version: begun again
            return
        if kept.asked == asked:
            self.num_examples, self.runs = kept.num_examples, kept.runs
            self.diverging_rate, self.has_range = kept.diverging_rate, kept.has_range

    def save(self) -> None:
        from oomph.records.stability_study import UnfinishedStudy
        from oomph.records.stored import as_json
        from oomph.store import write_whole

        kept = UnfinishedStudy(
            asked=self._asked,
            num_examples=self.num_examples,
            runs=self.runs,
            diverging_rate=self.diverging_rate,
            has_range=self.has_range,
        )
        write_whole(self._path, as_json(kept))

    def finish(self, study: StabilityStudy) -> None:
        from oomph.records.stored import as_json
        from oomph.store import write_whole

        write_whole(self._out, as_json(study))
        self._path.unlink(missing_ok=True)


def _digest(place: tuple[object, str] | None, *decided_by: object) -> str:
    """Return what must be the same for a study to be resumed, the user's file included."""
    from pathlib import Path

    from oomph.store import digest

    text = Path(str(place[0])).read_text() if place else ""
    return digest(text, *map(str, decided_by))
