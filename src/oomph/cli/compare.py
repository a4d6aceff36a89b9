"""two watched runs: what changed"""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Hold one run against another: time of a step, samples a second, waiting for data, peak
memory, kernel-active time, and which findings came and went. What makes the two hard
to compare is said first."""

EXAMPLES = """\
examples:
  oomph compare 7f3a last
  oomph compare 20261115 20261116 --json

RUN is an id of oomph runs, the beginning or the end of one, a directory, or last.

exit codes: 0 here it is; 2 there is no such run; 4 a run that cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="RUN", help="the run to compare with")
    parser.add_argument("after", metavar="RUN", help="the run that is held against it")


def run(options: argparse.Namespace) -> int:
    from oomph import verbs

    found = verbs.compare(options.before, options.after)
    if options.json:
        from oomph.records.stored import as_json

        print(as_json(found))
    else:
        from oomph.showing.comparison import print_comparison

        print_comparison(found)
    return 0
