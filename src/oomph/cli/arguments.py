"""What several commands share: arguments, JSON."""

from __future__ import annotations

import argparse
import sys

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from typing import Any, TextIO

    from oomph.errors import OomphError
    from oomph.records.script import Script

_MOST_DIGITS = 9  # in a number of examples or GPUs


def add_workload_and_gpu(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what to train, and on which GPU."""
    add_workload(parser)
    gpu = parser.add_argument(
        "--gpu", metavar="GPU", help="a GPU by name; oomph gpus --catalog lists them"
    )
    gpu.completer = complete_gpu  # type: ignore[attr-defined] # argcomplete's protocol
    parser.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="its memory, e.g. 12GiB; without --gpu: any GPU of that size",
    )


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what to train."""
    parser.set_defaults(takes_script=True)
    parser.add_argument(
        "workload",
        metavar="SCRIPT | FILE:NAME | hf:MODEL",
        nargs="?",
        help="your training script (its arguments after --), a Workload in a file, or a model by"
        " its name, such as hf:meta-llama/Llama-3.1-8B",
    )
    parser.add_argument(
        "--seq-len",
        type=positive,
        metavar="N",
        help="for a model by name: tokens of a sequence (default: 1024, or what the model takes)",
    )
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", help="run the script as python -m would"
    )
    parser.add_argument(
        "--unprotected",
        action="store_true",
        help="run the script even where no sandbox is possible (docs/sandbox.md)",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="rehearse again instead of using stored results (docs/scripts.md)",
    )


def add_keeps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keeps",
        choices=("outputs", "nothing"),
        help="what your loop keeps of the model's outputs until the next step (default: as the"
        " workload says; otherwise the error bar covers both)",
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus-per-node",
        type=positive,
        metavar="N",
        default=8,
        help="GPUs of one machine (default: 8); more are several machines",
    )
    parser.add_argument(
        "--link",
        metavar="NAME",
        help="the network between machines: infiniband-400, ethernet-100 (Gbit/s of an adapter);"
        " infiniband-200x4 if a machine has another number of adapters than GPUs",
    )


def add_lora(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora-rank", type=positive, metavar="R", help="rank of LoRA's adapters (default: 16)"
    )
    parser.add_argument(
        "--lora-targets",
        choices=("all-linear", "attention"),
        help="which linear layers of the blocks have adapters (default: all-linear)",
    )


def what_to_train(
    options: argparse.Namespace, *, example: str = "train.py --gpu v100-16gb -- --epochs 3"
) -> str | Script:
    """Return the script, or the FILE:NAME of the workload. Raises UsageError."""
    from oomph.errors import UsageError
    from oomph.records.script import Script, names_workload, refuse_notebook

    script, module = options.workload, options.module
    if (script is None) == (module is None):
        raise UsageError(
            "nothing to train was given" if script is None else "a script and -m were both given",
            because="give one of: a script, -m MODULE, or a workload such as train.py:workload",
            attempt=f"oomph {options.command} {example}",
        )
    if script is not None and script.startswith("hf:") and not options.of_script:
        from oomph.verbs.by_name import by_name

        size = getattr(options, "batch_size", None)
        return by_name(script, seq_len=options.seq_len, batch_size=size)
    if options.seq_len is not None:
        raise UsageError(
            "--seq-len goes with a model by name",
            because="a script and a Workload have their own",
            attempt="hf:NAME, or the script's own argument after --",
        )
    if script is not None:
        refuse_notebook(script.rpartition(":")[0])
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


def with_more(options: argparse.Namespace, *words: str) -> str:
    """Return this very command line with more words, before the script's own arguments."""
    import shlex

    of_script = ["--", *options.of_script] if options.of_script else []
    return shlex.join(["oomph", *options.given, *words, *of_script])


def asked_again(options: argparse.Namespace, command: str, *, gpu: str | None = None) -> str:
    """Return the command line that asks another command of the same training and GPU, or `gpu`."""
    import shlex

    words = ["oomph", command]
    words += ["-m", options.module] if options.module else [options.workload]
    words += ["--seq-len", str(options.seq_len)] if options.seq_len else []
    size = getattr(options, "batch_size", None)
    words += ["--batch-size", str(size)] if size else []
    named, size = (options.gpu, options.gpu_memory) if gpu is None else (gpu, None)
    words += ["--gpu", named] if named else []
    words += ["--gpu-memory", size] if size else []
    words += ["--", *options.of_script] if options.of_script else []
    return shlex.join(words)


def positive(text: str) -> int:
    """Parse a count of at least 1."""
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number above 0")
    return int(text)


def complete_gpu(**_: Any) -> list[str]:
    from oomph.verbs.gpus import catalog

    return [model.name for model in catalog()]


_printed: list[TextIO] = []  # the standard output that has its JSON already


def print_json(value: Any) -> None:
    from oomph.records.stored import as_json

    _printed[:] = [sys.stdout]
    print(as_json(value))


def print_error_as_json(error: OomphError) -> None:
    """Print the error where a program waits for JSON, unless the answer is there already."""
    if _printed and _printed[0] is sys.stdout:
        return
    told = {"what": error.what, "because": error.because, "try": error.attempt}
    print_json({"error": told, "exit_code": error.exit_code})
    sys.stdout.flush()
