"""The command line: one file per command, arguments -> verb -> showing.

Only argparse and the file of the given command are imported, so `oomph --help` starts fast. A
command imports what it needs when it runs. `main` turns errors into messages and exit codes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from oomph import __version__
from oomph.errors import (
    EXIT_UNREADABLE,
    EXIT_USAGE,
    NotOnThisSystem,
    OomphError,
    Unreadable,
    UsageError,
)

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from typing import NoReturn

_COMMANDS = {
    "plan": "find training settings that fit on a GPU, ranked, with what each costs",
    "predict": "predict memory and time of a training step, without a GPU",
    "verify": "train a few steps on the GPU here, and compare with what oomph predicts",
    "check": "check whether accumulation, mixed precision and checkpointing change your training",
    "stability": "find batch sizes that train as well as yours, and their learning rates",
    "run": "run a training command on an emulated GPU",
    "launch": "start a training on several GPUs, here or through a scheduler",
    "watch": "show the GPUs live, or watch a command and record what its GPUs do",
    "runs": "list the runs that were watched",
    "report": "explain a watched run: out of memory or not, how busy, why not busier",
    "explain": "explain an out-of-memory error: why, who held the memory, what avoids it",
    "compare": "compare two watched runs",
    "serve": "serve a dashboard of this machine, and /metrics for Prometheus",
    "gpus": "list the GPUs of this machine, and who uses them",
    "calibrate": "measure the GPUs of this machine once, for better predictions",
}
_LINUX_ONLY = {"launch", "watch", "run", "verify", "check", "serve", "calibrate"}
_SHELLS = ("bash", "zsh", "fish")
_EXIT_CODES = """\
exit codes:
  0  yes, or the answer
  1  no
  2  a wrong flag, or an error in your code
  3  uncertain
  4  a machine or a file cannot be read"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _run(arguments)
    except OomphError as error:
        if "--json" in _split(arguments)[0]:
            from oomph.cli.arguments import print_error_as_json

            print_error_as_json(error)
        print(f"oomph: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) closed the pipe. Python would complain again when it flushes
        # standard output at exit, so that goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # for example, a full disk
        print(f"oomph: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREADABLE


def _run(arguments: Sequence[str]) -> int:
    if sys.stdout is None:  # closed by the parent process
        raise Unreadable("there is no standard output to write the answer to")
    # A terminal or a file that cannot show a character shows "?" instead of a traceback.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(_new_parser(_COMMANDS))
    _refuse_unknown_command(arguments)
    parser = _new_parser(arguments[:1])
    arguments, of_script = _split(arguments)
    options, unknown = parser.parse_known_args(arguments)
    options.of_script, options.given = of_script, arguments
    if of_script and not getattr(options, "takes_script", False):
        unknown = [*unknown, "--", *of_script]
    if unknown:
        # The command's own parser knows which flag was probably meant.
        options.parser.unknown(unknown)
    if options.completion:
        return _print_completion(options.completion)
    if options.env:
        return _print_environment()
    if options.command is None:
        parser.print_help()
        return EXIT_USAGE
    if sys.platform != "linux" and options.command in _LINUX_ONLY:
        raise NotOnThisSystem(f"oomph {options.command}")
    code: int = options.run(options)
    sys.stdout.flush()
    return code


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return oomph's own arguments, and those after `--`, which are the script's."""
    if "--" not in arguments:
        return list(arguments), []
    at = arguments.index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def _refuse_unknown_command(arguments: Sequence[str]) -> None:
    """Raise UsageError. argparse's own message would call the command an invalid choice."""
    if not arguments or arguments[0].startswith("-") or arguments[0] in _COMMANDS:
        return
    import difflib

    near = difflib.get_close_matches(arguments[0], _COMMANDS, n=1)
    raise UsageError(
        f"there is no command {arguments[0]!r:.80}",
        because=f"the commands are {', '.join(_COMMANDS)}",
        attempt=f"oomph {near[0]}" if near else "oomph --help",
    )


class _Parser(argparse.ArgumentParser):
    """An argparse parser with oomph's errors: what, because, try."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, attempt=self._attempt(message))

    def _attempt(self, message: str) -> str:
        """Return the nearest choice, or the command's first example, if the message is about it."""
        import difflib
        import re

        if "arguments are required" in message and self.epilog and "examples:\n" in self.epilog:
            return self.epilog.partition("examples:\n")[2].partition("\n")[0].strip()
        chosen = re.search(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if chosen is not None:
            choices = re.findall(r"[\w-]+", chosen[3])
            near = difflib.get_close_matches(chosen[2], choices, n=1, cutoff=0.4) or choices
            return f"{self.prog} {chosen[1]} {near[0]}"
        return f"{self.prog} --help"

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """Raise UsageError with the flag that was probably meant."""
        import difflib

        flag = words[0].partition("=")[0]
        if not flag.startswith("-"):
            raise UsageError(
                f"{self.prog} takes no {' '.join(words)!r:.80}",
                because="all its own arguments begin with a dash",
                attempt=f"{self.prog} -- {' '.join(words)}"
                if self.prog.endswith(("watch", "run"))
                else f"{self.prog} --help",
            )
        flags = [flag for action in self._actions for flag in action.option_strings]
        part = flag.strip("-")
        near = [one for one in flags if part in one.strip("-").split("-")]  # --gpus: --max-gpus
        near = near or difflib.get_close_matches(flag, flags, n=1, cutoff=0.7)
        attempt = f"{self.prog} {near[0]}" if near else f"{self.prog} --help"
        raise UsageError(f"there is no {' '.join(words)}", attempt=attempt)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """argparse's formatter, with a width found without importing shutil."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(_terminal_width(), 100) - 2)


def _terminal_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns[:4]) > 0:
        return int(columns[:4])
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):  # a file, a pipe, or no standard output
        return 80


def _new_parser(loaded: Container[str]) -> argparse.ArgumentParser:
    """Return the parser, with the arguments of the commands in `loaded`."""
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
    parser.add_argument(
        "--env", action="store_true", help="print versions, GPUs and settings, for an issue"
    )
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, formatter_class=_HelpFormatter, allow_abbrev=False
        )
        if name in loaded:
            module = importlib.import_module(f"oomph.cli.{name}")
            command.description, command.epilog = module.DESCRIPTION, module.EXAMPLES
            module.add_arguments(command)
            command.add_argument("--json", action="store_true", help="print the answer as JSON")
            command.set_defaults(run=module.run, parser=command)
    parser.set_defaults(parser=parser)
    return parser


def _print_environment() -> int:
    from oomph.verbs.environment import environment

    for name, value in environment().items():
        print(f"{name}: {value}")
    return 0


def _print_completion(shell: str) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["oomph"], shell=shell))
    return 0
