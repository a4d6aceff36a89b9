"""The verb notebook: a record -> the page that a notebook shows in its place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomph.records.plan import Plan, Plans
    from oomph.records.prediction import Prediction
    from oomph.records.report import Report


def is_in_notebook() -> bool:
    """Return whether this process is a notebook's kernel, which draws what a cell returns."""
    return "ipykernel" in sys.modules


def draw_in_notebooks() -> None:
    """Let notebooks draw Plans, a Plan, a Prediction and a Report. Free where none is drawn."""
    from oomph.records.notebook import html_of
    from oomph.records.plan import Plan, Plans
    from oomph.records.prediction import Prediction
    from oomph.records.report import Report

    html_of.register(Plans, _plans)
    html_of.register(Plan, _plan)
    html_of.register(Prediction, _prediction)
    html_of.register(Report, _report)


def _plans(plans: Plans) -> str:
    from oomph.showing.html_page import inline
    from oomph.showing.plan import plans_page
    from oomph.verbs.planned import export_of

    timelines = plans.timelines or (None,) * len(plans)
    return inline(plans_page(plans, timelines, [export_of(plan, "code") for plan in plans]))


def _plan(plan: Plan) -> str:
    from oomph.showing.html_page import inline
    from oomph.showing.plan import plan_page
    from oomph.verbs.planned import export_of

    return inline(plan_page(plan, export_of(plan, "code")))


def _prediction(prediction: Prediction) -> str:
    from oomph.showing.predict import print_prediction
    from oomph.showing.terminal import as_html

    return as_html(lambda console: print_prediction(prediction, console=console))


def _report(report: Report) -> str:
    """Return the page of its run; where the run is gone, the report in words."""
    from oomph.errors import OomphError
    from oomph.showing.html_page import inline
    from oomph.showing.report import print_report_on, report_page
    from oomph.showing.terminal import as_html
    from oomph.verbs.watch import load_run

    try:
        run = load_run(report.run)
    except OomphError:
        return as_html(lambda console: print_report_on(console, report, None))
    return inline(report_page(report, run))
