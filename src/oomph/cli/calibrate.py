"""`oomph calibrate`: measure the GPUs of this machine -> Calibrated records."""

from __future__ import annotations

from oomph.cli.arguments import print_json
from oomph.errors import EXIT_NO, EXIT_YES, UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    import argparse

    from oomph.records.gpu_model import Calibrated

DESCRIPTION = """\
Measure how much memory CUDA itself takes on the GPUs of this machine, and how fast
they are. oomph stores the results and uses them to predict for the same GPU and torch
version. CUDA runs in a separate process for a few seconds. Of several GPUs with the
same name, one is measured."""

EXAMPLES = """\
examples:
  oomph calibrate                takes a few seconds per kind of GPU
  oomph calibrate --memory-only  measure memory, not speed
  oomph calibrate --show         print the stored results
  oomph calibrate --forget       delete them and use the built-in figures again

exit codes: 0 results; 1 nothing is stored (--show); 2 a wrong flag; 4 no GPU, no
torch, or a file cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory-only", action="store_true", help="measure memory only, not speed")
    parser.add_argument("--show", action="store_true", help="print the stored results")
    parser.add_argument("--forget", action="store_true", help="delete the stored results")


def run(options: argparse.Namespace) -> int:
    from oomph.progress import Progress
    from oomph.verbs.calibrate import calibrate, calibrations

    chosen = [f"--{name}" for name in ("memory-only", "show", "forget") if _has(options, name)]
    if len(chosen) > 1:
        raise UsageError(
            f"{' and '.join(chosen)} cannot be combined", attempt=f"oomph calibrate {chosen[0]}"
        )
    if options.forget:
        return _forget(as_json=options.json)
    if options.show:
        return _print(calibrations(), as_json=options.json)
    with Progress("looking for GPUs") as say:
        found = calibrate(memory_only=options.memory_only, say=say)
    return _print(found, as_json=options.json)


def _has(options: argparse.Namespace, name: str) -> bool:
    return bool(getattr(options, name.replace("-", "_")))


def _forget(*, as_json: bool) -> int:
    from oomph.verbs.calibrate import forget_calibrations

    was_there = forget_calibrations()
    if as_json:
        print_json({"forgotten": was_there})
    else:
        print("deleted the stored results" if was_there else "nothing was stored")
    return EXIT_YES


def _print(found: tuple[Calibrated, ...], *, as_json: bool) -> int:
    if as_json:
        print_json({"calibrations": found})
    elif found:
        from oomph.showing.calibrate import print_calibrations

        print_calibrations(found)
    else:
        print("nothing is stored; to measure, run oomph calibrate on a machine with a GPU")
    return EXIT_YES if found else EXIT_NO
