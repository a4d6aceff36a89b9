"""Arguments that several verbs take."""

from __future__ import annotations

import argparse

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from typing import Any

_MOST_DIGITS = 9  # of a number of examples or GPUs


def add_workload_and_gpu(parser: argparse.ArgumentParser) -> None:
    """What is to be trained, and where."""
    parser.add_argument("workload", metavar="FILE:NAME", help="where the workload is")
    gpu = parser.add_argument("--gpu", metavar="GPU", help="a GPU of oomph gpus --catalog")
    gpu.completer = complete_gpu  # type: ignore[attr-defined] # argcomplete's protocol
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help="its memory, as in 12GiB; alone: any GPU of that size"
    )


def positive(text: str) -> int:
    """A number of things, of which there is at least one."""
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number above 0 that makes sense")
    return int(text)


def complete_gpu(**_: Any) -> list[str]:
    from oomph import verbs

    return [model.name for model in verbs.catalog()]
