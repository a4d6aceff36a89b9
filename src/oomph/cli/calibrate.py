"""measure once what CUDA takes on the GPUs here"""

from __future__ import annotations

import sys

from oomph.errors import EXIT_NO, EXIT_YES, UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    import argparse

    from oomph.records.calibration import Calibrated

DESCRIPTION = """\
Measure what CUDA takes on the GPUs of this machine, and how fast they are. The
figures are kept, and oomph predict uses them from then on for the same GPU and
torch. CUDA runs in a process of its own for some seconds; of GPUs with the same
name one is measured."""

EXAMPLES = """\
examples:
  oomph calibrate                a few seconds for each kind of GPU
  oomph calibrate --memory-only  without the rates
  oomph calibrate --show         what is kept
  oomph calibrate --forget       back to the figures that oomph comes with

exit codes: 0 the figures; 1 --show has nothing to show; 2 a wrong flag; 4 no
GPU, no torch, or a file that cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-only", action="store_true", help="measure no rates: predictions of memory alone"
    )
    parser.add_argument("--show", action="store_true", help="print what is kept, measure nothing")
    parser.add_argument("--forget", action="store_true", help="remove what is kept")


def run(options: argparse.Namespace) -> int:
    from oomph import verbs

    chosen = [f"--{name}" for name in ("memory-only", "show", "forget") if _has(options, name)]
    if len(chosen) > 1:
        raise UsageError(
            f"{' and '.join(chosen)} do not go together", attempt=f"oomph calibrate {chosen[0]}"
        )
    if options.forget:
        return _forget(as_json=options.json)
    if options.show:
        return _print(verbs.calibrations(), as_json=options.json)
    return _print(verbs.calibrate(memory_only=options.memory_only, say=_say), as_json=options.json)


def _has(options: argparse.Namespace, name: str) -> bool:
    return bool(getattr(options, name.replace("-", "_")))


def _forget(*, as_json: bool) -> int:
    from oomph import verbs

    was_there = verbs.forget_calibrations()
    if as_json:
        from oomph.records.stored import as_json as jsoned

        print(jsoned({"forgotten": was_there}))
    else:
        print("what was measured is forgotten" if was_there else "nothing was kept")
    return EXIT_YES


def _print(found: tuple[Calibrated, ...], *, as_json: bool) -> int:
    if as_json:
        from oomph.records.stored import as_json as jsoned

        print(jsoned({"calibrations": found}))
    elif found:
        from oomph.showing.calibration import print_calibrations

        print_calibrations(found)
    else:
        print("nothing is kept: oomph calibrate measures, on a machine with a GPU")
    return EXIT_YES if found else EXIT_NO


def _say(what: str) -> None:
    if sys.stderr.isatty():
        print(f"oomph: {what}", file=sys.stderr)
