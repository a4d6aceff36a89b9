"""the runs that were watched"""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Every run that `oomph watch` has kept, the newest first: when, how long, how it ended.
They are directories under $OOMPH_RUNS (else $XDG_STATE_HOME/oomph/runs), and may be
deleted as such."""

EXAMPLES = """\
examples:
  oomph runs
  oomph runs --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--last", type=int, metavar="N", help="only the newest N")


def run(options: argparse.Namespace) -> int:
    from oomph import verbs

    kept = verbs.runs(options.last)
    if options.json:
        from oomph.records.stored import as_json

        print(as_json({"runs": kept}))
    else:
        from oomph.showing.runs import print_runs

        print_runs(kept)
    return 0
