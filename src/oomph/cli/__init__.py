"""The command line: one file per verb, arguments -> verb -> showing.

Only argparse is imported here, so that `oomph --help` costs what it must; each verb
imports what it needs when it runs. `main` has the only `except`.
"""

from __future__ import annotations

import argparse
import os
import sys

from oomph import __version__
from oomph.cli import (
    calibrate,
    check,
    compare,
    gpus,
    plan,
    predict,
    report,
    run,
    runs,
    serve,
    watch,
)
from oomph.errors import EXIT_UNREADABLE, EXIT_USAGE, OomphError, Unreadable, UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_VERBS = {
    "plan": plan,
    "predict": predict,
    "check": check,
    "run": run,
    "watch": watch,
    "runs": runs,
    "report": report,
    "compare": compare,
    "serve": serve,
    "gpus": gpus,
    "calibrate": calibrate,
}
_SHELLS = ("bash", "zsh", "fish")
_EXIT_CODES = """\
exit codes:
  0  the answer, or yes
  1  the answer is no
  2  a wrong flag, or an error in your code
  3  uncertain
  4  a machine or a file that cannot be read"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        return _run(arguments)
    except OomphError as error:
        print(f"oomph: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain once more when it
        # flushes standard output at its end; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # the disk is full, say
        print(f"oomph: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREADABLE


def _run(arguments: Sequence[str] | None) -> int:
    if sys.stdout is None:  # closed by whoever started us
        raise Unreadable("there is no standard output to write the answer to")
    # A terminal or a file that cannot show a character shows "?" instead of a traceback.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    parser = new_parser()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _refuse_unknown_verb(arguments)
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments, of_script = _split(arguments)
    options, unknown = parser.parse_known_args(arguments)
    options.of_script = of_script
    if of_script and not getattr(options, "takes_script", False):
        unknown = [*unknown, "--", *of_script]
    if unknown:
        # Asked of the verb's own parser, which knows what else might have been meant.
        options.parser.unknown(unknown)
    if options.completion:
        return _print_completion(options.completion)
    if options.verb is None:
        parser.print_help()
        return EXIT_USAGE
    code: int = options.run(options)
    sys.stdout.flush()
    return code


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Ours, and after `--` those of the script."""
    if "--" not in arguments:
        return list(arguments), []
    at = arguments.index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def _refuse_unknown_verb(arguments: Sequence[str]) -> None:
    """argparse would list the verbs as choices of an argument that nobody sees."""
    if not arguments or arguments[0].startswith("-") or arguments[0] in _VERBS:
        return
    import difflib

    near = difflib.get_close_matches(arguments[0], _VERBS, n=1)
    raise UsageError(
        f"there is no verb {arguments[0]!r:.80}",
        because=f"the verbs are {', '.join(_VERBS)}",
        attempt=f"oomph {near[0]}" if near else "oomph --help",
    )


class _Parser(argparse.ArgumentParser):
    """argparse, with oomph's errors: what, because, try."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, attempt=f"{self.prog} --help")

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """Refuse what nobody knows, with what was probably meant."""
        import difflib

        flags = [flag for action in self._actions for flag in action.option_strings]
        near = difflib.get_close_matches(words[0].partition("=")[0], flags, n=1, cutoff=0.7)
        attempt = f"{self.prog} {near[0]}" if near else f"{self.prog} --help"
        raise UsageError(f"there is no {' '.join(words)}", attempt=attempt)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """argparse's, with a width that was found without importing shutil."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(_terminal_width(), 100) - 2)


def _terminal_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns[:4]) > 0:
        return int(columns[:4])
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):  # a file, a pipe, or no standard output at all
        return 80


def new_parser() -> argparse.ArgumentParser:
    """The whole command line, without anything that a verb needs to run."""
    parser = _Parser(
        prog="oomph",
        description="Fit PyTorch training into GPU memory, and see what the GPUs are doing.",
        epilog=_EXIT_CODES,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"oomph {__version__}")
    parser.add_argument(
        "--completion",
        choices=_SHELLS,
        help='print shell completion: eval "$(oomph --completion bash)"',
    )
    verbs = parser.add_subparsers(dest="verb", metavar="verb", title="verbs")
    for name, module in _VERBS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        verb = verbs.add_parser(
            name,
            help=summary,
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(verb)
        verb.add_argument("--json", action="store_true", help="print the answer as JSON")
        verb.set_defaults(run=module.run, parser=verb)
    parser.set_defaults(parser=parser)
    return parser


def _print_completion(shell: str) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["oomph"], shell=shell))
    return 0
