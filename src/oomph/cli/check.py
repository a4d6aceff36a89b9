"""`oomph check`: a workload -> whether tricks change its training."""

from __future__ import annotations

import argparse
import shlex

from oomph.cli.arguments import positive, print_json
from oomph.errors import EXIT_NO, EXIT_UNCERTAIN, EXIT_YES

DESCRIPTION = """\
Check whether splitting the batch, fp16, bf16 and checkpointing change your training.
oomph runs a few examples for real, on the CPU, in seconds. If something changes, it
names the module, op or loss, and what to do. No weights are updated, no GPU is needed."""

EXAMPLES = """\
examples:
  oomph check train.py:workload
  oomph check train.py:workload --only accumulation
  oomph check train.py:workload --only bf16,checkpointing --json

train.py must define that name as an oomph.Workload or a function that returns one. Its
batch needs real values; its model can be a small configuration of the same code.

exit codes: 0 all checks pass; 1 a check fails; 2 a wrong flag, an error in your code,
or a model too large for this machine; 3 uncertain."""

_EXITS = {"passes": EXIT_YES, "skipped": EXIT_YES, "fails": EXIT_NO, "uncertain": EXIT_UNCERTAIN}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="FILE:NAME", help="file and name of the workload")
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
        help="how many examples to run (default: 8, or fewer for a slow model)",
    )


def run(options: argparse.Namespace) -> int:
    from oomph.progress import Progress
    from oomph.verbs.check import check

    with Progress("starting torch") as say:
        checks = check(options.workload, only=options.only, examples=options.examples, say=say)
    if options.json:
        print_json(checks)
    else:
        from oomph.showing.check import print_checks

        then = f"oomph plan {shlex.quote(options.workload)} --check --gpu rtx4090"
        print_checks(checks, then=f"{then}  # plans that use these verdicts; name your GPU")
    return _EXITS[checks.verdict]
