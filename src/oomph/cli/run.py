"""run a command with an emulated GPU"""

from __future__ import annotations

import argparse
import sys

from oomph.errors import UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from oomph.records.emulated_run import EmulatedRun

DESCRIPTION = """\
Run a training command on the CPU with a GPU that is not there: device "cuda" has so
much memory, real numbers come out, and torch.OutOfMemoryError is raised where a real
GPU of that size would raise it. For CI: does the job still fit? What stands after --
is the command, with its arguments."""

EXAMPLES = """\
examples:
  oomph run --emulate 2GiB -- python train.py --batch-size 8
  oomph run --emulate 16GiB -- pytest tests/test_training.py

exit codes: those of the command; 2 a wrong flag, or a command that cannot be started."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--emulate",
        metavar="SIZE",
        required=True,
        help="the memory that PyTorch can have, without what the CUDA context takes",
    )
    parser.usage = "oomph run --emulate SIZE [--json] -- COMMAND ..."
    parser.set_defaults(takes_script=True)


def run(options: argparse.Namespace) -> int:
    from oomph import verbs

    command = options.of_script
    if not command:
        raise UsageError(
            "there is no command to run", attempt="oomph run --emulate 2GiB -- python train.py"
        )
    done = verbs.run_emulated(options.emulate, command)
    if options.json:
        from oomph.records.stored import as_json

        print(as_json({"run": done, "fits": done.fits}))
    else:
        print(f"oomph: {_told(done)}", file=sys.stderr)
    return done.exit_code


def _told(done: EmulatedRun) -> str:
    from oomph.units import format_bytes, format_ratio

    gpu = f"the emulated GPU of {format_bytes(done.total_bytes)}"
    if done.peak_allocated_bytes is None or done.peak_reserved_bytes is None:
        return f"{gpu} was not used: no process that ended by itself had imported torch"
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
        return f"{gpu} sufficed until the command failed (exit {done.exit_code}): {peak}"
    return f"fits: {gpu} had {peak}"
