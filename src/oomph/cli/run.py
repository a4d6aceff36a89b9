"""`oomph run`: a training command on an emulated GPU -> whether it fits."""

from __future__ import annotations

import argparse
import sys

from oomph.cli.arguments import print_json
from oomph.errors import UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from oomph.records.run import EmulatedRun

DESCRIPTION = """\
Run a training command on the CPU with an emulated GPU: device "cuda" has the memory
you give it, the numbers are real, and torch.OutOfMemoryError is raised where a real
GPU of that size would raise it. For CI: does the job still fit? Put the command and
its arguments after --."""

EXAMPLES = """\
examples:
  oomph run --emulate 2GiB -- python train.py --batch-size 8
  oomph run --emulate 16GiB -- pytest tests/test_training.py

exit codes: the command's own; 2 a wrong flag, or the command cannot be started."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--emulate",
        metavar="SIZE",
        required=True,
        help="memory that PyTorch can use, not counting the CUDA context",
    )
    parser.usage = "oomph run --emulate SIZE [--json] -- COMMAND ..."
    parser.set_defaults(takes_script=True)


def run(options: argparse.Namespace) -> int:
    from oomph.verbs.run import run_emulated

    command = options.of_script
    if not command:
        raise UsageError(
            "there is no command to run", attempt="oomph run --emulate 2GiB -- python train.py"
        )
    done = run_emulated(options.emulate, command)
    if options.json:
        print_json({"run": done, "fits": done.fits})
    else:
        print(f"oomph: {_in_words(done)}", file=sys.stderr)
    return done.exit_code


def _in_words(done: EmulatedRun) -> str:
    from oomph.units import format_bytes, format_ratio

    gpu = f"the emulated GPU of {format_bytes(done.total_bytes)}"
    if done.peak_allocated_bytes is None or done.peak_reserved_bytes is None:
        return f"{gpu} was not used: no process that ended normally had imported torch"
    peak = (
        f"at most {format_bytes(done.peak_allocated_bytes)} allocated and "
        f"{format_bytes(done.peak_reserved_bytes)} reserved "
        f"({format_ratio(done.peak_reserved_bytes / done.total_bytes)})"
    )
    if done.num_out_of_memory:
        times = "once" if done.num_out_of_memory == 1 else f"{done.num_out_of_memory} times"
        verdict = "does not fit" if done.exit_code else "went on with less"
        return f"{verdict}: {gpu} ran out of memory {times}; {peak}"
    if done.exit_code:
        return f"{gpu} was large enough until the command failed (exit {done.exit_code}): {peak}"
    return f"fits: {gpu} had {peak}"
