"""the GPUs live; or watch a command, and keep what they did meanwhile"""

from __future__ import annotations

import argparse

from oomph.cli import watch_command, watch_live

DESCRIPTION = """\
Without a command: all GPUs of this machine, live: how full, how busy (kernel-active
time), whose, and how it has been. Keys: q quit, f filter, s sort, t time span, space
pause, ? help.

With a command after --: run it untouched and watch the GPUs that it uses. Its input,
output, signals and exit code are its own; what was seen is kept, also after a crash,
and told at the end on standard error."""

EXAMPLES = """\
examples:
  oomph watch                                      until q or Ctrl-C
  oomph watch --filter mine                        my processes and their GPUs
  oomph watch --once                               one look; also what a pipe gets
  oomph watch --json --interval 10                 a line of JSON every 10 seconds
  oomph watch -- python train.py --epochs 3
  oomph watch -- torchrun --nproc-per-node 4 train.py
  oomph watch --for 1-epoch -- python train.py     stop after a probe; exit code 0
  oomph watch --time 5m -- python train.py

exit codes without a command: 0 as wanted; 1 there is no GPU; 2 a wrong flag; 4 the
GPUs cannot be read; 130 ended by Ctrl-C. With one: those of the command, also a death
by signal; 0 if it was stopped after what --for, --steps or --time asked for; 126 and
127 as a shell: it could not be started; 2 a wrong flag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    watch_live.add_arguments(parser)
    watch_command.add_arguments(parser)
    parser.usage = "oomph watch [options]\n       oomph watch [options] -- COMMAND ..."


def run(options: argparse.Namespace) -> int:
    if options.of_script:
        watch_live.refuse_with_a_command(options)
        return watch_command.run(options)
    watch_command.refuse_without_a_command(options)
    return watch_live.run(options)
