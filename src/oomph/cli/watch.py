"""watch a command, and keep what the GPUs did meanwhile"""

from __future__ import annotations

import argparse

from oomph.cli import watch_command
from oomph.errors import UsageError

DESCRIPTION = """\
Run a command untouched and watch the GPUs that it uses: how full, how busy, whose.
Its input, output, signals and exit code are its own; what was seen is kept, also after
a crash, and told at the end on standard error. What stands after -- is the command."""

EXAMPLES = """\
examples:
  oomph watch -- python train.py --epochs 3
  oomph watch -- torchrun --nproc-per-node 4 train.py
  oomph watch --for 1-epoch -- python train.py     stop after a probe; exit code 0
  oomph watch --time 5m -- python train.py

exit codes: those of the command, also a death by signal; 0 if it was stopped after
what --for, --steps or --time asked for; 126 and 127 as a shell: it could not be
started; 2 a wrong flag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    watch_command.add_arguments(parser)
    parser.usage = "oomph watch [--for AMOUNT] [--json] -- COMMAND ..."


def run(options: argparse.Namespace) -> int:
    if options.of_script:
        return watch_command.run(options)
    raise UsageError(
        "there is no command to watch", attempt="oomph watch -- python train.py, or oomph gpus"
    )
