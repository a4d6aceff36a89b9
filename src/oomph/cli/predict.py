"""what a training step will take on a GPU that need not be here"""

from __future__ import annotations

import argparse
import sys

from oomph.errors import EXIT_NO, EXIT_UNCERTAIN, EXIT_YES

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from typing import Any

DESCRIPTION = """\
Rehearse a training step without a GPU, and predict its memory and time. Nothing
is trained, and no memory of the model's size is used."""

EXAMPLES = """\
examples:
  oomph predict train.py:workload --gpu v100-16gb
  oomph predict train.py:workload --gpu rtx4090 --micro-batch 4 --precision bf16
  oomph predict train.py:workload --gpu-memory 12GiB --checkpointing blocks

train.py has, under that name, an oomph.Workload or a function that returns one.

exit codes: 0 it fits; 1 it does not; 2 a wrong flag, or an error in your code;
3 uncertain; 4 a file that cannot be read."""

_EXITS = {"yes": EXIT_YES, "no": EXIT_NO, "uncertain": EXIT_UNCERTAIN}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="FILE:NAME", help="where the workload is")
    gpu = parser.add_argument("--gpu", metavar="GPU", help="a GPU of oomph gpus --catalog")
    gpu.completer = _complete_gpu  # type: ignore[attr-defined] # argcomplete's protocol
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help="its memory, as in 12GiB; alone: any GPU of that size"
    )
    parser.add_argument(
        "--micro-batch",
        type=_positive,
        metavar="N",
        help="examples at a time (default: the whole batch of the workload)",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "tf32", "fp16", "bf16", "pure-bf16"),
        default="fp32",
        help="fp16 and bf16 are autocast; pure-bf16 has the weights in it too (default: fp32)",
    )
    parser.add_argument(
        "--checkpointing",
        metavar="HOW",
        default="none",
        help="none (default), blocks (all are recomputed), every-2 (every second one)",
    )


def run(options: argparse.Namespace) -> int:
    from oomph import verbs

    prediction = verbs.predict(
        options.workload,
        gpu=options.gpu,
        gpu_memory=options.gpu_memory,
        micro_batch=options.micro_batch,
        precision=options.precision,
        checkpointing=options.checkpointing,
        say=_say,
    )
    if options.json:
        from oomph.records.stored import as_json

        print(as_json(prediction))
    else:
        from oomph.showing.prediction import print_prediction

        print_prediction(prediction)
    return _EXITS[prediction.fits]


def _say(what: str) -> None:
    if sys.stderr.isatty():
        print(f"oomph: {what}", file=sys.stderr)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text[:9]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of examples")
    return int(text[:9])


def _complete_gpu(**_: Any) -> list[str]:
    from oomph import verbs

    return [model.name for model in verbs.catalog()]
