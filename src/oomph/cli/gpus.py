"""`oomph gpus`: the GPUs of this machine, who uses them, and which are free."""

from __future__ import annotations

import argparse
import os
import sys

from oomph.cli.arguments import complete_gpu, print_json
from oomph.errors import EXIT_NO, EXIT_UNCERTAIN, EXIT_UNREADABLE, EXIT_YES, UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from typing import Any

    from oomph.records.machine import Machine

DESCRIPTION = """\
List the GPUs of this machine: how full, how busy, and whose processes use them (this
run's, mine, others'). What cannot be read is shown as unknown, with the reason."""

EXAMPLES = """\
examples:
  oomph gpus                        all GPUs and their processes
  oomph gpus --visible              only the GPUs in CUDA_VISIBLE_DEVICES
  oomph gpus --catalog rtx4090      what oomph knows about a GPU model
  oomph gpus --emulate 8xa100-80gb  an emulated machine
  oomph gpus --emulate 2xh100,t4    an emulated machine with mixed GPUs
  gpus=$(oomph gpus --free --count 2 --format csv) &&
    CUDA_VISIBLE_DEVICES=$gpus python train.py

--free does not reserve the GPUs: somebody else may start on them before you do.

exit codes: 0 the answer; 1 too few GPUs are free, or none is visible; 2 a wrong flag;
3 uncertain (--free); 4 the GPUs cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--visible",
        action="store_true",
        help="only the GPUs in CUDA_VISIBLE_DEVICES, in CUDA's order",
    )
    parser.add_argument(
        "--free",
        action="store_true",
        help="print only the GPUs that nobody uses; exit 1 if there are too few",
    )
    parser.add_argument(
        "--count", type=_count, metavar="N", help="with --free: exactly N GPUs, or none"
    )
    parser.add_argument(
        "--format",
        choices=("lines", "csv", "uuid"),
        help="with --free: one per line (default), comma-separated, or comma-separated UUIDs; UUIDs"
        " are also used where CUDA numbers the GPUs differently",
    )
    emulate = parser.add_argument(
        "--emulate", metavar="MACHINE", help="show an emulated machine, e.g. 8xa100-80gb"
    )
    emulate.completer = complete_machine  # type: ignore[attr-defined] # argcomplete's protocol
    catalog = parser.add_argument(
        "--catalog",
        nargs="?",
        const="",
        metavar="GPU",
        help="list the GPU models oomph knows, or show one with the source of each figure",
    )
    catalog.completer = complete_gpu  # type: ignore[attr-defined]


def run(options: argparse.Namespace) -> int:
    _refuse_contradictions(options)
    if options.catalog is not None:
        return _run_catalog(options.catalog, as_json=options.json)
    from oomph.verbs.gpus import gpus

    machine = gpus(visible=options.visible, emulate=options.emulate)
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
            "--catalog cannot be combined with another choice of GPUs",
            attempt="oomph gpus --catalog",
        )


def _print_machine(machine: Machine, *, as_json: bool) -> None:
    if as_json:
        print_json(machine)
        return
    import time

    from oomph.showing.gpus import print_machine

    print_machine(machine, time.time())


def _run_free(machine: Machine, options: argparse.Namespace) -> int:
    """Print enough free GPUs or none: a script would take a shorter list for the answer."""
    from oomph.verbs.gpus import free_gpus

    if exit_code_of(machine) == EXIT_UNREADABLE:
        return _say_no(machine.problem or "no GPU can be read", EXIT_UNREADABLE, options.json)
    found = free_gpus(machine)
    wanted = options.count or 1
    if found.are_slices and wanted > 1:
        cut = "these GPUs are divided into MIG slices, and CUDA gives a process only one slice"
        return _say_no(cut, EXIT_NO, options.json)
    if len(found.free) < wanted:
        unsure = f"; {len(found.uncertain)} unknown" if found.uncertain else ""
        maybe = len(found.free) + len(found.uncertain) >= wanted
        problem = f"{len(found.free)} of {wanted} wanted GPUs are free{unsure}"
        return _say_no(problem, EXIT_UNCERTAIN if maybe else EXIT_NO, options.json)
    _warn_of_an_allocation(options)
    chosen = found.first(options.count or len(found.free))
    if options.json:
        print_json({"gpus": chosen.free, "problem": machine.problem})
    else:
        tokens = chosen.tokens(as_uuids=options.format == "uuid")
        print("\n".join(tokens) if options.format in (None, "lines") else ",".join(tokens))
    return EXIT_YES


def _say_no(problem: str, exit_code: int, as_json: bool) -> int:
    if as_json:
        print_json({"gpus": (), "problem": problem})
    print(f"oomph: {problem}", file=sys.stderr)
    return exit_code


def _warn_of_an_allocation(options: argparse.Namespace) -> None:
    """Warn if a scheduler gave this shell some GPUs: the others belong to somebody else."""
    if "CUDA_VISIBLE_DEVICES" in os.environ and not options.visible:
        print(
            "oomph: CUDA_VISIBLE_DEVICES is set, but these come from all GPUs; use --visible",
            file=sys.stderr,
        )


def _run_catalog(name: str, *, as_json: bool) -> int:
    from oomph.verbs.gpus import catalog, catalog_sources, find_gpu

    if not name:
        models = catalog()
        if as_json:
            print_json({"catalog": models})
        else:
            from oomph.showing.gpus import print_models

            print_models(models)
        return EXIT_YES
    found = find_gpu(name)
    if as_json:
        print_json(found)
    else:
        from oomph.showing.gpus import print_model

        print_model(found, catalog_sources())
    return EXIT_YES


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:6]) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs")
    return int(text)


def complete_machine(prefix: str, **_: Any) -> list[str]:
    count, times, _name = prefix.partition("x")
    counted = f"{count}{times}" if count.isdecimal() else "8x"
    return [f"{counted}{name}" for name in complete_gpu()]
