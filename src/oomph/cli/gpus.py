"""the GPUs of this machine, and who is on them"""

from __future__ import annotations

import argparse
import sys

from oomph.errors import EXIT_NO, EXIT_UNCERTAIN, EXIT_UNREADABLE, EXIT_YES, UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from typing import Any

    from oomph.records.machine import Machine

DESCRIPTION = """\
All GPUs of this machine: how full, how busy, and whose processes are on them
(this run's, mine, others'). What cannot be read is shown as unknown, with the reason."""

EXAMPLES = """\
examples:
  oomph gpus                          all GPUs and everybody on them
  oomph gpus --visible                those that CUDA_VISIBLE_DEVICES shows, by cuda index
  CUDA_VISIBLE_DEVICES=$(oomph gpus --free --count 2 --format csv) python train.py
  oomph gpus --catalog rtx4090        what is known of a GPU that is not here
  oomph gpus --emulate 8xa100-80gb    the same view of a machine that does not exist"""


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
        help="with --free: one index a line (default), indices with commas, UUIDs with commas",
    )
    parser.add_argument(
        "--emulate", metavar="MACHINE", help="a machine of the catalogue's GPUs, as in 8xa100-80gb"
    )
    catalog = parser.add_argument(
        "--catalog",
        nargs="?",
        const="",
        metavar="GPU",
        help="the GPUs that oomph knows, or one of them with the source of each figure",
    )
    catalog.completer = _complete_gpu  # type: ignore[attr-defined] # argcomplete's protocol


def run(options: argparse.Namespace) -> int:
    _refuse_contradictions(options)
    if options.catalog is not None:
        return _run_catalog(options.catalog, as_json=options.json)
    from oomph import verbs

    machine = verbs.gpus(visible=options.visible, emulate=options.emulate)
    if options.free:
        return _run_free(machine, options)
    _print_machine(machine, as_json=options.json)
    return EXIT_UNREADABLE if machine.problem and not machine.gpus else EXIT_YES


def _refuse_contradictions(options: argparse.Namespace) -> None:
    if not options.free and (options.count is not None or options.format):
        flag = "--count" if options.count is not None else "--format"
        raise UsageError(
            f"{flag} makes sense only with --free", attempt=f"oomph gpus --free {flag}"
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
    """Print the free ones, or nothing: an empty CUDA_VISIBLE_DEVICES is safe, a short one not."""
    from oomph import verbs

    if machine.problem and not machine.gpus:
        return _refuse(machine.problem, EXIT_UNREADABLE)
    found = verbs.free_gpus(machine)
    wanted = options.count or 1
    if found.are_slices and wanted > 1:
        return _refuse("these GPUs are cut into MIG slices, and CUDA shows a process one slice")
    if len(found.free) < wanted:
        unsure = f"; {len(found.uncertain)} could not be told" if found.uncertain else ""
        maybe = len(found.free) + len(found.uncertain) >= wanted
        said = f"{len(found.free)} of {wanted} wanted GPUs are free{unsure}"
        return _refuse(said, EXIT_UNCERTAIN if maybe else EXIT_NO)
    chosen = found.first(options.count or len(found.free))
    if options.json:
        _print_json({"gpus": chosen.free, "problem": machine.problem})
        return EXIT_YES
    tokens = chosen.tokens(as_uuids=options.format == "uuid")
    print("\n".join(tokens) if options.format in (None, "lines") else ",".join(tokens))
    if not chosen.by_index:
        print(
            "oomph: named by UUID, because an index may mean another GPU to CUDA", file=sys.stderr
        )
    return EXIT_YES


def _refuse(said: str, exit_code: int = EXIT_NO) -> int:
    print(f"oomph: {said}", file=sys.stderr)
    return exit_code


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


def _complete_gpu(**_: Any) -> list[str]:
    from oomph import verbs

    return [model.name for model in verbs.catalog()]
