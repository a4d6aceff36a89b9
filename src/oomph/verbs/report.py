"""The verbs report and compare. `load_run` defines which names a run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomph.records.report import Comparison, Report
    from oomph.records.run import Run, RunSummary


def report(run: Run | RunSummary | str = "last") -> Report:
    """Return what happened in a run, and why its GPUs were not busy.

    oomph.report()                        # of the newest run
    oomph.report("20261116-061203-7f3a")  # an id of oomph.runs(), a part of one, or a directory
    oomph.report(oomph.runs()[1])

    Raises OomphError if there is no such run. Any run gives a report, also one that is still
    going, or whose watcher was killed.
    """
    from oomph.explaining.diagnose import diagnose
    from oomph.verbs.notebook import draw_in_notebooks

    draw_in_notebooks()
    return diagnose(_loaded(run))


def compare(before: Run | RunSummary | str, after: Run | RunSummary | str) -> Comparison:
    """Return what changed from one run to another. Raises OomphError."""
    from oomph.explaining.compare import compare as compare_reports

    return compare_reports(report(before), report(after))


def _loaded(run: Run | RunSummary | str) -> Run:
    from oomph.records.run import RunSummary
    from oomph.verbs.watch import load_run

    if isinstance(run, RunSummary):
        return load_run(run.path)
    return load_run(run) if isinstance(run, str) else run
