"""`oomph watch -- COMMAND`: the arguments and the end of a watched command."""

from __future__ import annotations

import argparse
import contextlib
import sys

from oomph.cli.arguments import positive
from oomph.errors import UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from oomph.records.probe import Probe
    from oomph.records.run import Run
    from oomph.verbs.watching import Watched

_MOST_DIGITS = 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that go with a command."""
    command = parser.add_argument_group("with a command after --")
    command.add_argument(
        "--for",
        dest="wanted",
        metavar="AMOUNT",
        help="stop it after so much: 1-epoch, 100-steps, 5m; then the exit code is 0",
    )
    command.add_argument("--steps", type=positive, metavar="N", help="stop it after N steps")
    command.add_argument("--time", metavar="TIME", help="stop it after a time: 90s, 5m, 2h")
    command.add_argument(
        "--html", metavar="REPORT.HTML", help="write a page that draws the run, at its end"
    )
    command.add_argument(
        "--quiet", action="store_true", help="say nothing at the end; oomph report last has it"
    )
    parser.set_defaults(takes_script=True)


def run(options: argparse.Namespace) -> int:
    """Run the command of `options.of_script`, and end as it ends."""
    from oomph import verbs

    probe = _probe(options)
    if options.html:
        from oomph.showing.html_page import check_page

        check_page("report", options.html)
    watched = verbs.watch(options.of_script, probe, alerts=not options.quiet)
    # Nobody wants to read it, or it cannot be written: the exit code is still the command's.
    with contextlib.suppress(KeyboardInterrupt, OSError):
        _report(watched, options)
    return verbs.end_like(watched.ended)


def _report(watched: Watched, options: argparse.Namespace) -> None:
    """On standard error: standard output is the command's own."""
    if watched.run is None or sys.stderr is None:
        return
    try:
        _show(watched.run, options)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever is wrong here, the exit code is the command's
        print(f"oomph: the report could not be made: {error}", file=sys.stderr)
    sys.stderr.flush()


def _show(run: Run, options: argparse.Namespace) -> None:
    from oomph import verbs

    report = verbs.report(run)
    if options.json and not options.quiet:
        from oomph.records.stored import as_json

        print(as_json(report), file=sys.stderr)
    elif not options.quiet:
        from oomph.showing.report import print_report

        print_report(report, run, to_stderr=True)
    if options.html:  # last: where it cannot be written, the report has been printed
        from oomph.showing.report_page import write_report_page

        write_report_page(report, run, options.html)


def _probe(options: argparse.Namespace) -> Probe | None:
    given = [flag for flag in (options.wanted, options.steps, options.time) if flag is not None]
    if len(given) > 1:
        raise UsageError(
            "--for, --steps and --time are three ways to say one thing",
            attempt="oomph watch --for 1-epoch -- python train.py",
        )
    from oomph.records.probe import Probe

    if options.steps is not None:
        return Probe(num_steps=options.steps)
    if options.time is not None:
        return Probe(time_s=_seconds(options.time))
    return None if options.wanted is None else _amount(options.wanted)


def _amount(text: str) -> Probe:
    from oomph.records.probe import Probe

    number, dash, unit = text.partition("-")
    if not dash:
        return Probe(time_s=_seconds(text))
    count = int(number) if number.isdecimal() and len(number) <= _MOST_DIGITS else 0
    if count and unit in ("step", "steps"):
        return Probe(num_steps=count)
    if count and unit in ("epoch", "epochs"):
        return Probe(num_epochs=count)
    raise UsageError(
        f"{text!r:.40} is no amount of a run",
        because="it is a number of epochs or steps, or a time",
        attempt="--for 1-epoch, --for 100-steps or --for 5m",
    )


def _seconds(text: str) -> float:
    from oomph.units import parse_duration

    return parse_duration(text)


def refuse_without_a_command(options: argparse.Namespace) -> None:
    """Raises UsageError for what makes sense only with one."""
    given = {"--for": options.wanted, "--steps": options.steps, "--time": options.time}
    given |= {"--html": options.html, "--quiet": options.quiet or None}
    for flag, value in given.items():
        if value is not None:
            raise UsageError(
                f"{flag} goes with a command", attempt="oomph watch --time 5m -- python train.py"
            )
