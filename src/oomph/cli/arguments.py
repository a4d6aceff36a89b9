"""Arguments that several verbs take."""

from __future__ import annotations

import argparse

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from typing import Any

    from oomph.records.script import Script

_MOST_DIGITS = 9  # of a number of examples or GPUs


def add_workload_and_gpu(parser: argparse.ArgumentParser) -> None:
    """What is to be trained, and where."""
    parser.set_defaults(takes_script=True)
    parser.add_argument(
        "workload",
        metavar="SCRIPT | FILE:NAME",
        nargs="?",
        help="a training script as it is (its arguments after --), or where a workload is",
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="a script, as python -m has it")
    parser.add_argument(
        "--unprotected",
        action="store_true",
        help="run a script where it cannot be kept from writing (docs/sandbox.md)",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="rehearse a script again, though what is kept of it seems true (docs/scripts.md)",
    )
    gpu = parser.add_argument("--gpu", metavar="GPU", help="a GPU of oomph gpus --catalog")
    gpu.completer = complete_gpu  # type: ignore[attr-defined] # argcomplete's protocol
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help="its memory, as in 12GiB; alone: any GPU of that size"
    )


def add_keeps(parser: argparse.ArgumentParser) -> None:
    """Of a workload's loop."""
    parser.add_argument(
        "--keeps",
        choices=("outputs", "nothing"),
        help="what your loop keeps of the model's outputs until the next step (default: what the"
        " workload says; if it says nothing, the error bar covers both)",
    )


def what_to_train(options: argparse.Namespace) -> str | Script:
    """A script, or where a workload is. Raises UsageError."""
    from oomph.errors import UsageError
    from oomph.records.script import Script, names_workload

    script, module = options.workload, options.module
    if (script is None) == (module is None):
        raise UsageError(
            "it is not said what to train" if script is None else "two things to train are named",
            because="it is a script, or -m and its module, or a workload as train.py:workload",
            attempt=f"oomph {options.verb} train.py --gpu v100-16gb -- --epochs 3",
        )
    if script is not None and names_workload(script):
        if options.of_script:
            raise UsageError(
                f"a workload takes no arguments: {' '.join(options.of_script):.200}",
                because=f"{script!r:.200} is the name of an object in a file",
                attempt="the script itself, without :NAME",
            )
        return str(script)
    import os

    here = os.getcwd()  # noqa: PTH109 - pathlib costs more than the rest of this file
    return Script(path=script, module=module, arguments=tuple(options.of_script), directory=here)


def positive(text: str) -> int:
    """A number of things, of which there is at least one."""
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number above 0 that makes sense")
    return int(text)


def complete_gpu(**_: Any) -> list[str]:
    from oomph import verbs

    return [model.name for model in verbs.catalog()]
