"""a live view of the GPUs: how full, how busy, whose"""

from __future__ import annotations

import argparse
import os
import sys

from oomph.cli.gpus import complete_machine, exit_code_of
from oomph.errors import EXIT_YES

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from typing import Any

    from oomph.records.live import Look

DESCRIPTION = """\
All GPUs of this machine, live: how full, how busy (kernel-active time), whose
processes are on them, what belongs to one run, and how it has been over the last
minutes. Keys: q quit, f filter, s sort, t time span, space pause, ? help."""

EXAMPLES = """\
examples:
  oomph watch                        until q or Ctrl-C
  oomph watch --filter mine          my processes, and the GPUs that they are on
  oomph watch --interval 5           look every 5 seconds
  oomph watch --once                 one look, printed; also what a pipe gets
  oomph watch --json                 one look, for programs
  oomph watch --json --interval 10   one line of JSON every 10 seconds
  oomph watch --emulate 8xa100-80gb  a machine that does not exist

exit codes: 0 as wanted; 1 there is no GPU; 2 a wrong flag; 4 the GPUs cannot be
read; 130 ended by Ctrl-C."""

_INTERVALS_S = (0.2, 3600.0)  # faster than the driver's own samples is of no use
_DEFAULT_INTERVAL_S = 1.0
_NO_EDGE = 10_000  # in a file or a pipe nothing has to fit, unless COLUMNS says so


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print one look, and end")
    parser.add_argument(
        "--interval",
        type=_interval,
        metavar="SECONDS",
        help="between two looks (default: 1)",
    )
    parser.add_argument(
        "--filter",
        choices=("all", "mine", "visible"),
        default="all",
        help="my processes only, or the GPUs that CUDA_VISIBLE_DEVICES shows",
    )
    parser.add_argument("--no-color", action="store_true", help="no colours; NO_COLOR=1 does too")
    emulate = parser.add_argument(
        "--emulate", metavar="MACHINE", help="a machine of the catalogue's GPUs, as in 8xa100-80gb"
    )
    emulate.completer = complete_machine  # type: ignore[attr-defined] # argcomplete's protocol


def run(options: argparse.Namespace) -> int:
    if options.json:
        return _print_json(options)
    why_not_live = None if options.once else _why_not_live()
    if options.once or why_not_live:
        if why_not_live:
            print(f"oomph: {why_not_live}: one look, as with --once", file=sys.stderr)
        return _print_once(options)
    return _show_live(options)


def _why_not_live() -> str | None:
    if not sys.stdout.isatty():
        return "standard output is not a terminal"
    if os.environ.get("TERM", "dumb") == "dumb":
        return "this terminal cannot move its cursor (TERM=dumb)"
    return None


def _show_live(options: argparse.Namespace) -> int:
    from oomph.verbs.live import watch_live

    unreadable = watch_live(
        interval_s=options.interval or _DEFAULT_INTERVAL_S,
        filter=options.filter,
        colours=_has_colours(options),
        glyphs=_glyphs(),
        emulate=options.emulate,
    )
    if unreadable is None:
        return EXIT_YES
    print(f"oomph: {unreadable.problem}", file=sys.stderr)
    return exit_code_of(unreadable)


def _print_once(options: argparse.Namespace) -> int:
    from oomph.showing.cells import ansi
    from oomph.verbs.live import look_once

    look, lines = look_once(
        filter=options.filter, glyphs=_glyphs(), width=_width(), emulate=options.emulate
    )
    for line in lines:
        print(ansi(line, colours=_has_colours(options)).rstrip())
    return exit_code_of(look.machine)


def _print_json(options: argparse.Namespace) -> int:
    """One look; with an interval, one a line until somebody ends it."""
    import time

    from oomph.verbs.live import looking

    look = looking(emulate=options.emulate)
    if options.interval is None or options.once:
        seen = look()
        print(_json(seen, indent=2))
        return exit_code_of(seen.machine)
    next_s = time.monotonic()
    while True:
        print(_json(look(), indent=None), flush=True)
        next_s += options.interval
        time.sleep(max(next_s - time.monotonic(), 0.0))


def _json(look: Look, indent: int | None) -> str:
    import json

    from oomph.records.stored import SCHEMA, to_jsonable

    return json.dumps({"schema": SCHEMA, **to_jsonable(look)}, indent=indent, ensure_ascii=False)


# ---- the terminal ------------------------------------------------------------------------------


def _has_colours(options: argparse.Namespace) -> bool:
    # https://no-color.org: set and not empty
    return sys.stdout.isatty() and not options.no_color and not os.environ.get("NO_COLOR")


def _glyphs() -> Any:
    from oomph.showing.cells import ASCII, UNICODE

    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    return UNICODE if is_unicode else ASCII


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns[:5]) > 0:
        return int(columns[:5])
    if not sys.stdout.isatty():
        return _NO_EDGE
    return os.get_terminal_size(sys.stdout.fileno()).columns or 80


def _interval(text: str) -> float:
    least_s, most_s = _INTERVALS_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not least_s <= seconds <= most_s:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is not a number of seconds from {least_s:g} to {most_s:g}"
        )
    return seconds
