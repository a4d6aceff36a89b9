"""The verbs that conclude: report, compare. What a run is, `load_run` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomph.records.report import Comparison, Report
    from oomph.records.run import Run
    from oomph.records.run_summary import RunSummary


def report(run: Run | RunSummary | str = "last") -> Report:
    """What happened in a run, and why its GPUs were not busy.

    oomph.report()                        # of the newest run
    oomph.report("20261116-061203-7f3a")  # an id of oomph.runs(), a part of one, or a directory
    oomph.report(oomph.runs()[1])

    Raises OomphError where there is no such run. Any run gives a report, also one that still goes
    on, or whose watcher was killed.
    """
    from oomph.explaining.diagnose import diagnose

    return diagnose(_loaded(run))


def compare(before: Run | RunSummary | str, after: Run | RunSummary | str) -> Comparison:
    """What changed from one run to another. Raises OomphError."""
    from oomph.explaining.compare import compare as compare_reports

    return compare_reports(report(before), report(after))


def _loaded(run: Run | RunSummary | str) -> Run:
    from oomph.records.run_summary import RunSummary
    from oomph.verbs.watching import load_run

    if isinstance(run, RunSummary):
        return load_run(run.path)
    return load_run(run) if isinstance(run, str) else run
