"""`oomph watch` without a command: the live view, and one look where there is no screen."""

from __future__ import annotations

import argparse
import os
import sys

from oomph.cli.gpus import complete_machine, exit_code_of
from oomph.errors import EXIT_YES, UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from typing import Any

    from oomph.records.live import Look

_INTERVALS_S = (1.0, 3600.0)  # the driver's samples are gathered by the second
_DEFAULT_INTERVAL_S = 1.0
_NO_EDGE = 10_000  # in a file or a pipe nothing has to fit, unless COLUMNS says so


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that go without a command."""
    live = parser.add_argument_group("without a command")
    live.add_argument("--once", action="store_true", help="print one look, and end")
    live.add_argument(
        "--interval",
        type=_interval,
        metavar="SECONDS",
        help="between two looks (default: 1)",
    )
    live.add_argument(
        "--filter",
        choices=("all", "mine", "visible"),
        default="all",
        help="my processes only, or the GPUs that CUDA_VISIBLE_DEVICES shows",
    )
    live.add_argument("--no-color", action="store_true", help="no colours; NO_COLOR=1 does too")
    emulate = live.add_argument(
        "--emulate", metavar="MACHINE", help="a machine of the catalogue's GPUs, as in 8xa100-80gb"
    )
    emulate.completer = complete_machine  # type: ignore[attr-defined] # argcomplete's protocol


def refuse_with_a_command(options: argparse.Namespace) -> None:
    """Raises UsageError for what makes sense only without one."""
    given = {
        "--once": options.once,
        "--interval": options.interval is not None,
        "--filter": options.filter != "all",
        "--no-color": options.no_color,
        "--emulate": options.emulate is not None,
    }
    for flag, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{flag} goes with the live view, not with a command",
                attempt="oomph watch -- python train.py",
            )


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
    from oomph.verbs.live import lines_of, look_once

    look = look_once(emulate=options.emulate)
    for line in lines_of(look, filter=options.filter, glyphs=_glyphs(), width=_width()):
        print(ansi(line, colours=_has_colours(options)).rstrip())
    return exit_code_of(look.machine)


def _print_json(options: argparse.Namespace) -> int:
    """One look; with an interval, one a line until somebody ends it."""
    from oomph.verbs.live import look_once, looks

    if options.interval is None or options.once:
        seen = look_once(emulate=options.emulate)
        print(_json(seen, indent=2))
        return exit_code_of(seen.machine)
    for seen in looks(options.interval, emulate=options.emulate):
        print(_json(seen, indent=None), flush=True)
    return exit_code_of(seen.machine)  # it ends only where there is no GPU


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

    is_unicode = (sys.stdout.encoding or "utf-8").lower().replace("-", "").startswith("utf")
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
