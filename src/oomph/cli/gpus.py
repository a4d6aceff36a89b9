"""the GPUs of this machine, and who is on them"""

from __future__ import annotations

import argparse
import os
import sys

from oomph.cli.arguments import complete_gpu
from oomph.errors import EXIT_NO, EXIT_UNCERTAIN, EXIT_UNREADABLE, EXIT_YES, UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from typing import Any

    from oomph.records.machine import Machine

DESCRIPTION = """\
All GPUs of this machine: how full, how busy, and whose processes are on them
(this run's, mine, others'). What cannot be read is shown as unknown, with the
reason."""

EXAMPLES = """\
examples:
  oomph gpus                        all GPUs and everybody on them
  oomph gpus --visible              those that CUDA_VISIBLE_DEVICES shows
  oomph gpus --catalog rtx4090      what is known of a GPU that is not here
  oomph gpus --emulate 8xa100-80gb  a machine that does not exist
  oomph gpus --emulate 2xh100,t4    a mixed one
  gpus=$(oomph gpus --free --count 2 --format csv) &&
    CUDA_VISIBLE_DEVICES=$gpus python train.py

exit codes: 0 the answer; 1 not that many are free, or none is visible;
2 a wrong flag; 3 --free cannot tell; 4 the GPUs cannot be read.
--free reserves nothing: whoever starts first has the GPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--visible",
        action="store_true",
        help="only the GPUs that CUDA_VISIBLE_DEVICES shows, in CUDA's order",
    )
    parser.add_argument(
        "--free",
        action="store_true",
        help="only print the GPUs with nobody on them; exit 1 if there are not enough",
    )
    parser.add_argument(
        "--count", type=_count, metavar="N", help="with --free: just N of them, or none at all"
    )
    parser.add_argument(
        "--format",
        choices=("lines", "csv", "uuid"),
        help="with --free: one a line (default), with commas, or as UUIDs with commas; UUIDs also"
        " where CUDA would take the index for another GPU",
    )
    emulate = parser.add_argument(
        "--emulate", metavar="MACHINE", help="a machine of the catalogue's GPUs, as in 8xa100-80gb"
    )
    emulate.completer = complete_machine  # type: ignore[attr-defined] # argcomplete's protocol
    catalog = parser.add_argument(
        "--catalog",
        nargs="?",
        const="",
        metavar="GPU",
        help="the GPUs that oomph knows, or one of them with the source of each figure",
    )
    catalog.completer = complete_gpu  # type: ignore[attr-defined]


def run(options: argparse.Namespace) -> int:
    _refuse_contradictions(options)
    if options.catalog is not None:
        return _run_catalog(options.catalog, as_json=options.json)
    from oomph import verbs

    machine = verbs.gpus(visible=options.visible, emulate=options.emulate)
    if options.free:
        return _run_free(machine, options)
    _print_machine(machine, as_json=options.json)
    return exit_code_of(machine)


def exit_code_of(machine: Machine) -> int:
    if not machine.is_readable or (machine.gpus and not any(gpu.uuid for gpu in machine.gpus)):
        return EXIT_UNREADABLE
    return EXIT_YES if machine.gpus else EXIT_NO


def _refuse_contradictions(options: argparse.Namespace) -> None:
    if not options.free and (options.count is not None or options.format):
        flag, value = ("--format", options.format) if options.format else ("--count", options.count)
        raise UsageError(
            f"{flag} makes sense only with --free", attempt=f"oomph gpus --free {flag} {value}"
        )
    others = ("visible", "free", "emulate")
    if options.catalog is not None and any(getattr(options, name) for name in others):
        raise UsageError(
            "--catalog goes with no other choice of GPUs", attempt="oomph gpus --catalog"
        )


def _print_machine(machine: Machine, *, as_json: bool) -> None:
    if as_json:
        _print_json(machine)
        return
    import time

    from oomph.showing.gpus import print_machine

    print_machine(machine, time.time())


def _run_free(machine: Machine, options: argparse.Namespace) -> int:
    """Print the free ones, or nothing: a list that is too short would be taken for the answer."""
    from oomph import verbs

    if exit_code_of(machine) == EXIT_UNREADABLE:
        return _say_no(machine.problem or "no GPU can be read", EXIT_UNREADABLE, options.json)
    found = verbs.free_gpus(machine)
    wanted = options.count or 1
    if found.are_slices and wanted > 1:
        cut = "these GPUs are cut into MIG slices, and CUDA shows a process one slice"
        return _say_no(cut, EXIT_NO, options.json)
    if len(found.free) < wanted:
        unsure = f"; {len(found.uncertain)} could not be told" if found.uncertain else ""
        maybe = len(found.free) + len(found.uncertain) >= wanted
        said = f"{len(found.free)} of {wanted} wanted GPUs are free{unsure}"
        return _say_no(said, EXIT_UNCERTAIN if maybe else EXIT_NO, options.json)
    _warn_of_an_allocation(options)
    chosen = found.first(options.count or len(found.free))
    if options.json:
        _print_json({"gpus": chosen.free, "problem": machine.problem})
    else:
        tokens = chosen.tokens(as_uuids=options.format == "uuid")
        print("\n".join(tokens) if options.format in (None, "lines") else ",".join(tokens))
    return EXIT_YES


def _say_no(said: str, exit_code: int, as_json: bool) -> int:
    if as_json:
        _print_json({"gpus": (), "problem": said})
    print(f"oomph: {said}", file=sys.stderr)
    return exit_code


def _warn_of_an_allocation(options: argparse.Namespace) -> None:
    """A scheduler may have given this shell some GPUs; the others are somebody's."""
    if "CUDA_VISIBLE_DEVICES" in os.environ and not options.visible:
        print(
            "oomph: CUDA_VISIBLE_DEVICES is set; these are of all GPUs: --visible stays within it",
            file=sys.stderr,
        )


def _run_catalog(name: str, *, as_json: bool) -> int:
    from oomph import verbs

    if not name:
        models = verbs.catalog()
        if as_json:
            _print_json({"catalog": models})
        else:
            from oomph.showing.catalog import print_models

            print_models(models)
        return EXIT_YES
    found = verbs.find_gpu(name)
    if as_json:
        _print_json(found)
    else:
        from oomph.showing.catalog import print_model

        print_model(found, verbs.catalog_sources())
    return EXIT_YES


def _print_json(value: Any) -> None:
    from oomph.records.stored import as_json

    print(as_json(value))


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:6]) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs")
    return int(text)


def complete_machine(prefix: str, **_: Any) -> list[str]:
    count, times, _name = prefix.partition("x")
    counted = f"{count}{times}" if count.isdecimal() else "8x"
    return [f"{counted}{name}" for name in complete_gpu()]
