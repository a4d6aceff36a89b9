"""`oomph verify`: predict, train a few steps on the GPU here, compare -> Verification."""

from __future__ import annotations

from oomph.cli.arguments import add_workload, positive, print_json, what_to_train
from oomph.errors import EXIT_NO, EXIT_UNREADABLE, EXIT_YES, UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    import argparse

    from oomph.records.verification import Verification

DESCRIPTION = """\
Do not trust oomph, verify it: predict a training step, train a few real steps on the GPU
of this machine, and compare memory, step time and every request to the allocator. The
first difference is named. --zoo does it for a dozen small models, in about two minutes,
and writes a file that can be attached to an issue."""

EXAMPLES = """\
examples:
  oomph verify --zoo
  oomph verify train.py:workload --precision bf16
  oomph verify train.py -- --config base.yaml
  oomph verify --zoo --emulate 16GiB      without a GPU: tiny models on the CPU
  oomph verify --show oomph-verify.json   print a file again

A workload trains in a child process. A script runs unchanged in a sandbox, with the GPU,
up to the steps that are measured: what it writes is thrown away.

exit codes: 0 right: memory is within the error bar; 1 outside it; 2 a wrong flag, or an
error in your code; 4 no GPU, no torch, nothing measured, or a file cannot be read;
130 Ctrl-C: what was measured until then is printed and written."""

_FILE = "oomph-verify.json"  # of the zoo
_INTERRUPTED = 130
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "pure-bf16")
_OF_ONE = ("micro_batch", "precision", "checkpointing", "optimizer", "expandable_segments")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--zoo", action="store_true", help="verify a dozen small models")
    parser.add_argument(
        "--only", metavar="NAME,...", help="with --zoo: only these models, e.g. gpt,unet"
    )
    parser.add_argument(
        "--emulate",
        metavar="SIZE",
        help="use an emulated GPU of this size, on the CPU; times are not compared",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"write the result to this file (--zoo: {_FILE})",
    )
    parser.add_argument("--show", metavar="FILE", help="print a file that was written before")
    add_workload(parser)
    parser.add_argument(
        "--micro-batch",
        type=positive,
        metavar="N",
        help="examples per forward pass (default: the workload's whole batch)",
    )
    parser.add_argument(
        "--precision", choices=_PRECISIONS, help="as in oomph predict (default: fp32)"
    )
    parser.add_argument("--checkpointing", metavar="HOW", help="as in oomph predict")
    parser.add_argument("--optimizer", metavar="HOW", help="as in oomph predict")
    parser.add_argument(
        "--expandable-segments",
        action="store_true",
        default=None,
        help="train with PYTORCH_ALLOC_CONF=expandable_segments:True",
    )


def run(options: argparse.Namespace) -> int:
    from oomph.verbs.verify import load_verification

    if options.show is not None:
        return _print(load_verification(options.show), None, as_json=options.json)
    if options.only is not None and not options.zoo:
        raise UsageError("--only is for --zoo", attempt=f"oomph verify --zoo --only {options.only}")
    return _verify_zoo(options) if options.zoo else _verify_one(options)


def _verify_zoo(options: argparse.Namespace) -> int:
    from oomph.progress import Progress
    from oomph.store import check_writable
    from oomph.verbs.verify import verify_zoo

    given = [name for name in ("workload", "module", *_OF_ONE) if getattr(options, name)]
    if given or options.of_script:
        raise UsageError(
            "--zoo has models and settings of its own",
            because=f"{' '.join(given) or 'arguments for a script'} was given as well",
            attempt="oomph verify --zoo",
        )
    output = options.output or _FILE
    check_writable(output)
    only = [name for name in (options.only or "").split(",") if name]
    with Progress("starting torch") as say:
        found = verify_zoo(only=only, emulate=options.emulate, say=say)
    return _finish(found, output if found.verified else None, as_json=options.json)


def _verify_one(options: argparse.Namespace) -> int:
    from oomph.progress import Progress
    from oomph.store import check_writable
    from oomph.verbs.verify import verify

    if options.workload is None and options.module is None:
        raise UsageError(
            "nothing to verify was given",
            because="give --zoo, a script, -m MODULE, or a workload such as train.py:workload",
            attempt="oomph verify --zoo",
        )
    if options.output is not None:
        check_writable(options.output)
    settings = {name: getattr(options, name) for name in _OF_ONE}
    trained = what_to_train(options, example="train.py -- --epochs 3")
    with Progress("starting torch") as say:
        found = verify(
            trained,
            emulate=options.emulate,
            **{name: value for name, value in settings.items() if value is not None},
            unprotected=options.unprotected,
            fresh=options.fresh,
            say=say,
        )
    return _finish(found, options.output, as_json=options.json)


def _finish(found: Verification, output: str | None, *, as_json: bool) -> int:
    from oomph.verbs.verify import save_verification

    if output is not None:
        save_verification(found, output)
    return _print(found, output, as_json=as_json)


def _print(found: Verification, output: str | None, *, as_json: bool) -> int:
    if as_json:
        print_json(found)
    else:
        from oomph.showing.verify import print_verification

        print_verification(found, output)
    if found.was_interrupted:
        return _INTERRUPTED
    if found.is_right is None:
        return EXIT_UNREADABLE
    return EXIT_YES if found.is_right else EXIT_NO
