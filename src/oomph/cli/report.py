"""`oomph report`: a watched run -> out of memory or not, how busy, why not busier."""

from __future__ import annotations

import argparse

from oomph.cli.arguments import print_json

DESCRIPTION = """\
Explain a run that `oomph watch` recorded: whether it ran out of memory, how full and
how busy its GPUs were, when they were idle and why, with the evidence. A run that is
still going on is reported up to now."""

EXAMPLES = """\
examples:
  oomph report last
  oomph report 20261116-0612 --html report.html
  oomph report ./runs/20261116-061203-7f3a --json

RUN is an id from oomph runs (its beginning or end is enough), a directory, or last.

exit codes: 0 the report; 2 there is no such run; 4 a run cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", help="the run: its id, part of its id, or last")
    parser.add_argument("--html", metavar="REPORT.HTML", help="write a page with charts of the run")


def run(options: argparse.Namespace) -> int:
    from oomph.verbs.report import report
    from oomph.verbs.watch import load_run

    if options.html:
        from oomph.showing.html_page import check_page

        check_page("report", options.html)
    watched = load_run(options.name)
    found = report(watched)
    if options.json:
        print_json(found)
    else:
        from oomph.showing.report import print_report

        print_report(found, watched)
    if options.html:  # last: the answer is never lost to a file
        from oomph.showing.report import write_report_page

        write_report_page(found, watched, options.html)
        if not options.json:
            from oomph.showing.terminal import print_written

            print_written([options.html])
    return 0
