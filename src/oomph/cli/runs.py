"""`oomph runs`: the runs that were watched."""

from __future__ import annotations

import argparse

from oomph.cli.arguments import positive, print_json

DESCRIPTION = """\
List the runs that `oomph watch` recorded, newest first: when, how long, how they
ended. Each is a directory in $OOMPH_RUNS (default: $XDG_STATE_HOME/oomph/runs); delete
it to forget the run."""

EXAMPLES = """\
examples:
  oomph runs
  oomph runs --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--last", type=positive, metavar="N", help="only the newest N runs")


def run(options: argparse.Namespace) -> int:
    from oomph.verbs.watch import runs

    found = runs(options.last)
    if options.json:
        print_json({"runs": found})
    else:
        from oomph.showing.runs import print_runs

        print_runs(found)
    return 0
