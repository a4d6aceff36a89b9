"""whether tricks leave training as it is: accumulation, mixed precision, checkpointing"""

from __future__ import annotations

import argparse
import sys

from oomph.cli.arguments import positive
from oomph.errors import EXIT_NO, EXIT_UNCERTAIN, EXIT_YES

DESCRIPTION = """\
Run a few examples for real, on the CPU and in seconds, and tell whether splitting
the batch, fp16, bf16 and checkpointing leave this training as it is; if not, which
module, op or loss is to blame, and what to do. Nothing is trained. No GPU is needed."""

EXAMPLES = """\
examples:
  oomph check train.py:workload
  oomph check train.py:workload --only accumulation
  oomph check train.py:workload --only bf16,checkpointing --json

train.py has, under that name, an oomph.Workload or a function that returns one. Let
its batch have real values, and its model a small configuration of the same code.

exit codes: 0 all is well; 1 a check fails; 2 a wrong flag, an error in your code, or
a model that is too large for this machine; 3 uncertain."""

_EXITS = {"passes": EXIT_YES, "skipped": EXIT_YES, "fails": EXIT_NO, "uncertain": EXIT_UNCERTAIN}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="FILE:NAME", help="where the workload is")
    parser.add_argument(
        "--only",
        metavar="CHECK,...",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        help="accumulation, fp16, bf16, checkpointing (default: all)",
    )
    parser.add_argument(
        "--examples",
        type=positive,
        metavar="N",
        help="how many examples to run (default: 8, fewer of a model that takes long)",
    )


def run(options: argparse.Namespace) -> int:
    from oomph import verbs

    checks = verbs.check(options.workload, only=options.only, examples=options.examples, say=_say)
    if options.json:
        from oomph.records.stored import as_json

        print(as_json(checks))
    else:
        from oomph.showing.check import print_checks

        print_checks(checks)
    return _EXITS[checks.verdict]


def _say(what: str) -> None:
    if sys.stderr.isatty():
        print(f"oomph: {what}", file=sys.stderr)
