"""`oomph watch`: the live view of the GPUs, or a command -> a recorded run and its report."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from oomph.cli.arguments import positive
from oomph.cli.gpus import complete_machine, exit_code_of
from oomph.errors import EXIT_YES, UsageError

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from oomph.records.machine import Look
    from oomph.records.run import Probe, Run
    from oomph.verbs.watch import Watched


# ---- oomph watch -- COMMAND ----------------------------------------------------------------------

_MOST_DIGITS = 9


def _add_command_arguments(parser: argparse.ArgumentParser) -> None:
    command = parser.add_argument_group("with a command after --")
    command.add_argument(
        "--for",
        dest="wanted",
        metavar="AMOUNT",
        help="stop after 1-epoch, 100-steps or 5m, with exit code 0",
    )
    command.add_argument("--steps", type=positive, metavar="N", help="stop after N steps")
    command.add_argument("--time", metavar="TIME", help="stop after a time: 90s, 5m, 2h")
    command.add_argument(
        "--html", metavar="REPORT.HTML", help="at the end, write a page with charts of the run"
    )
    command.add_argument(
        "--record",
        action="store_true",
        help="record every allocation; if the GPU runs out of memory, oomph explain says why",
    )
    command.add_argument(
        "--quiet",
        action="store_true",
        help="print no report at the end; oomph report last prints it",
    )
    parser.set_defaults(takes_script=True)


def _watch_command(options: argparse.Namespace) -> int:
    """Run the command after --, and end the way it ends."""
    from oomph.verbs.watch import end_like, watch

    probe = _probe(options)
    if options.html:
        from oomph.showing.html_page import check_page

        check_page("report", options.html)
    watched = watch(options.of_script, probe, alerts=not options.quiet, records=options.record)
    # If the report is interrupted or cannot be written, the exit code is still the command's.
    with contextlib.suppress(KeyboardInterrupt, OSError):
        _report(watched, options)
    return end_like(watched.ended)


def _report(watched: Watched, options: argparse.Namespace) -> None:
    """Print the report on standard error: standard output belongs to the command."""
    if watched.run is None or sys.stderr is None:
        return
    try:
        _show(watched.run, options)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - the exit code must be the command's
        print(f"oomph: the report failed: {error}", file=sys.stderr)
    sys.stderr.flush()


def _show(run: Run, options: argparse.Namespace) -> None:
    from oomph.verbs.report import report

    found = report(run)
    if options.json and not options.quiet:
        from oomph.records.stored import as_json

        print(as_json(found), file=sys.stderr)
    elif not options.quiet:
        from oomph.showing.report import print_report

        print_report(found, run, to_stderr=True)
    if options.html:  # last, so that an error in writing it does not lose the report
        from oomph.showing.report import write_report_page

        write_report_page(found, run, options.html)
        if not options.quiet:
            from oomph.showing.terminal import print_written

            print_written([options.html], to_stderr=True)


def _probe(options: argparse.Namespace) -> Probe | None:
    given = [flag for flag in (options.wanted, options.steps, options.time) if flag is not None]
    if len(given) > 1:
        raise UsageError(
            "only one of --for, --steps and --time can be given",
            attempt="oomph watch --for 1-epoch -- python train.py",
        )
    from oomph.records.run import Probe
    from oomph.units import parse_duration

    if options.steps is not None:
        return Probe(num_steps=options.steps)
    if options.time is not None:
        return Probe(time_s=parse_duration(options.time))
    return None if options.wanted is None else _amount(options.wanted)


def _amount(text: str) -> Probe:
    from oomph.records.run import Probe
    from oomph.units import parse_duration

    number, dash, unit = text.partition("-")
    if not dash:
        return Probe(time_s=parse_duration(text))
    count = int(number) if number.isdecimal() and len(number) <= _MOST_DIGITS else 0
    if count and unit in ("step", "steps"):
        return Probe(num_steps=count)
    if count and unit in ("epoch", "epochs"):
        return Probe(num_epochs=count)
    raise UsageError(
        f"{text!r:.40} is not a number of epochs or steps, or a time",
        attempt="--for 1-epoch, --for 100-steps or --for 5m",
    )


def _refuse_without_a_command(options: argparse.Namespace) -> None:
    """Raise UsageError for a flag that needs a command."""
    given = {"--for": options.wanted, "--steps": options.steps, "--time": options.time}
    given |= {"--html": options.html, "--quiet": options.quiet or None}
    given |= {"--record": options.record or None}
    flag = next((flag for flag, value in given.items() if value is not None), None)
    if flag:
        attempt = "oomph watch --time 5m -- python train.py"
        raise UsageError(f"{flag} needs a command", attempt=attempt)


# ---- oomph watch: the live view ------------------------------------------------------------------

_INTERVALS_S = (1.0, 3600.0)  # the driver averages its samples over a second
_DEFAULT_INTERVAL_S = 1.0


def _add_live_arguments(parser: argparse.ArgumentParser) -> None:
    live = parser.add_argument_group("without a command")
    live.add_argument("--once", action="store_true", help="print the current state and exit")
    live.add_argument(
        "--interval",
        type=_interval,
        metavar="SECONDS",
        help="seconds between updates (default: 1)",
    )
    live.add_argument(
        "--filter",
        choices=("all", "mine", "visible"),
        default="all",
        help="only my processes, or only the GPUs in CUDA_VISIBLE_DEVICES",
    )
    live.add_argument("--no-color", action="store_true", help="no colours, like NO_COLOR=1")
    emulate = live.add_argument(
        "--emulate", metavar="MACHINE", help="show an emulated machine, e.g. 8xa100-80gb"
    )
    emulate.completer = complete_machine  # type: ignore[attr-defined] # argcomplete's protocol


def _refuse_with_a_command(options: argparse.Namespace) -> None:
    """Raise UsageError for a flag of the live view."""
    given = {
        "--once": options.once,
        "--interval": options.interval is not None,
        "--filter": options.filter != "all",
        "--no-color": options.no_color,
        "--emulate": options.emulate is not None,
    }
    flag = next((flag for flag, is_given in given.items() if is_given), None)
    if flag:
        raise UsageError(
            f"{flag} is for the live view, without a command",
            attempt="oomph watch -- python train.py",
        )


def _watch_live(options: argparse.Namespace) -> int:
    if options.json:
        return _print_json(options)
    why_not_live = None if options.once else _why_not_live()
    if options.once or why_not_live:
        if why_not_live:
            print(f"oomph: {why_not_live}, so this is the output of --once", file=sys.stderr)
        return _print_once(options)
    return _show_live(options)


def _why_not_live() -> str | None:
    if not sys.stdout.isatty():
        return "standard output is not a terminal"
    if os.environ.get("TERM", "dumb") == "dumb":
        return "this terminal cannot move its cursor (TERM=dumb)"
    return None


def _show_live(options: argparse.Namespace) -> int:
    from oomph.verbs.watch import watch_live

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
    from oomph.showing.live import lines_of
    from oomph.showing.terminal import ansi
    from oomph.verbs.watch import look_once

    look = look_once(emulate=options.emulate)
    for line in lines_of(look, filter=options.filter, glyphs=_glyphs(), width=_width()):
        print(ansi(line, colours=_has_colours(options)).rstrip())
    return exit_code_of(look.machine)


def _print_json(options: argparse.Namespace) -> int:
    """Print the current state; with an interval, one line per update until interrupted."""
    from oomph.verbs.watch import look_once, looks

    if options.interval is None or options.once:
        seen = look_once(emulate=options.emulate)
        print(_json(seen, indent=2))
        return exit_code_of(seen.machine)
    for seen in looks(options.interval, emulate=options.emulate):
        print(_json(seen, indent=None), flush=True)
    return exit_code_of(seen.machine)  # it ends only if there is no GPU


def _json(look: Look, indent: int | None) -> str:
    import json

    from oomph.records.stored import SCHEMA, to_jsonable

    return json.dumps({"schema": SCHEMA, **to_jsonable(look)}, indent=indent, ensure_ascii=False)


# ---- the terminal ----


def _has_colours(options: argparse.Namespace) -> bool:
    # https://no-color.org: set and not empty
    return sys.stdout.isatty() and not options.no_color and not os.environ.get("NO_COLOR")


def _glyphs() -> Any:
    from oomph.showing.terminal import glyphs_for

    return glyphs_for(sys.stdout.encoding or "utf-8")


def _width() -> int:
    from oomph.showing.terminal import given_width

    return given_width(sys.stdout) or os.get_terminal_size(sys.stdout.fileno()).columns or 80


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


DESCRIPTION = """\
Without a command: show all GPUs of this machine live: how full, how busy
(kernel-active time), who uses them, and their recent history. Keys: q quit, f filter,
s sort, t time span, space pause, ? help.

With a command after --: run it unchanged and record the GPUs it uses. Its input,
output, signals and exit code stay its own. The recording survives a crash; a report is
printed at the end on standard error."""

EXAMPLES = """\
examples:
  oomph watch                                      until q or Ctrl-C
  oomph watch --filter mine                        only my processes and their GPUs
  oomph watch --once                               print the current state and exit
  oomph watch --json --interval 10                 one line of JSON every 10 seconds
  oomph watch -- python train.py --epochs 3
  oomph watch -- torchrun --nproc-per-node 4 train.py
  oomph watch --for 1-epoch -- python train.py     stop after one epoch
  oomph watch --time 5m -- python train.py
  oomph watch --record -- python train.py          if it runs out of memory: oomph explain

exit codes without a command: 0 you quit; 1 there is no GPU; 2 a wrong flag; 4 the GPUs
cannot be read; 130 stopped by Ctrl-C. With a command: the command's own, or the signal
that ended it; 0 if --for, --steps or --time stopped it; 126 or 127, as in a shell, if
it could not be started; 2 a wrong flag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_live_arguments(parser)
    _add_command_arguments(parser)
    parser.usage = "oomph watch [options]\n       oomph watch [options] -- COMMAND ..."


def run(options: argparse.Namespace) -> int:
    if options.of_script:
        _refuse_with_a_command(options)
        return _watch_command(options)
    _refuse_without_a_command(options)
    return _watch_live(options)
