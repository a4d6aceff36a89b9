"""The verbs that conclude: report, compare. What a run is, `load_run` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomph.records.report import Comparison, Report
    from oomph.records.run import Run


def report(run: Run | str) -> Report:
    """What happened in a run, and why its GPUs were not busy; a run, or what `load_run` takes.

    Raises OomphError where there is no such run. Any run gives a report, also one that still goes
    on, or whose watcher was killed.
    """
    from oomph.explaining.diagnose import diagnose

    return diagnose(_loaded(run))


def compare(before: Run | str, after: Run | str) -> Comparison:
    """What changed from one run to another. Raises OomphError."""
    from oomph.explaining.compare import compare as compare_reports

    return compare_reports(report(before), report(after))


def _loaded(run: Run | str) -> Run:
    from oomph.verbs.watching import load_run

    return load_run(run) if isinstance(run, str) else run
