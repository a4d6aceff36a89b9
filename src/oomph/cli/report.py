"""a watched run: out of memory or not, how busy, and why not busier"""

from __future__ import annotations

import argparse

DESCRIPTION = """\
What happened in a run that `oomph watch` has kept: did it run out of memory, how full
and how busy its GPUs were, when they stood still, and why, with what that rests on. A
run that still goes on is told as far as it is."""

EXAMPLES = """\
examples:
  oomph report last
  oomph report 20261116-0612 --html report.html
  oomph report ./runs/20261116-061203-7f3a --json

RUN is an id of oomph runs, the beginning or the end of one, a directory, or last.

exit codes: 0 here it is; 2 there is no such run; 4 a run that cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", help="which run: an id, a part of one, last")
    parser.add_argument("--html", metavar="REPORT.HTML", help="write a page that draws the run")


def run(options: argparse.Namespace) -> int:
    from oomph import verbs

    if options.html:
        from oomph.showing.html_page import check_page

        check_page("report", options.html)
    watched = verbs.load_run(options.name)
    report = verbs.report(watched)
    if options.json:
        from oomph.records.stored import as_json

        print(as_json(report))
    else:
        from oomph.showing.report import print_report

        print_report(report, watched)
    if options.html:  # last: the answer is never lost to a file
        from oomph.showing.report_page import write_report_page

        write_report_page(report, watched, options.html)
    return 0
