"""`oomph compare`: two watched runs -> what changed."""

from __future__ import annotations

import argparse

from oomph.cli.arguments import print_json

DESCRIPTION = """\
Compare two runs: step time, samples per second, time waiting for data, peak memory,
kernel-active time, and findings that are new or gone. Differences that make the runs
hard to compare come first."""

EXAMPLES = """\
examples:
  oomph compare 7f3a last
  oomph compare 20261115 20261116 --json

RUN is an id from oomph runs (its beginning or end is enough), a directory, or last.

exit codes: 0 the comparison; 2 there is no such run; 4 a run cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="RUN", help="the earlier run")
    parser.add_argument("after", metavar="RUN", help="the later run")


def run(options: argparse.Namespace) -> int:
    from oomph.verbs.report import compare

    found = compare(options.before, options.after)
    if options.json:
        print_json(found)
    else:
        from oomph.showing.compare import print_comparison

        print_comparison(found)
    return 0
