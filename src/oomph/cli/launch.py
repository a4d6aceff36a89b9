"""`oomph launch`: a plan and a training script -> torchrun here, or a scheduler's job."""

from __future__ import annotations

import argparse
import contextlib
import sys

from oomph.cli.arguments import positive, print_json

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from oomph.verbs.launch import Launched

DESCRIPTION = """\
Start a training as its plan says, or with --nproc processes: by torchrun on this
machine, on GPUs that nobody uses and no other launch has taken. Every rank is watched;
if one fails, the others are ended and its error is shown first. Put the script and its
arguments after --."""

EXAMPLES = """\
examples:
  oomph plan train.py --gpu a100-80gb --gpus 4 -o plan.json
  oomph launch plan.json -- train.py --epochs 3
  oomph launch --nproc 4 -- train.py --epochs 3
  oomph launch --nproc 2 --gpus 0,3 -- train.py
  oomph launch --nproc 2 --gpus none -- train.py            on the CPU
  oomph launch plan.json --dry-run -- train.py              print what would run
  oomph launch plan.json --script submit_train.sh -- --lr 1e-4

exit codes: that of the rank that failed first, or 0; 128 + N if signal N ended it;
1 too few GPUs are free; 2 a wrong flag; 4 the GPUs cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(takes_script=True)
    parser.usage = "oomph launch [plan.json] [options] -- SCRIPT ..."
    parser.add_argument(
        "plan", metavar="plan.json", nargs="?", help="what oomph plan -o wrote: how many GPUs"
    )
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="processes on this machine, one per GPU, without a plan",
    )
    parser.add_argument(
        "--gpus",
        metavar="LIST",
        help="these GPUs, as nvidia-smi numbers them or by UUID (default: free ones); none: train"
        " on the CPU",
    )
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", help="run a module, as python -m would"
    )
    parser.add_argument(
        "--script",
        metavar="SUBMIT.SH",
        help="run your own shell script, which calls torchrun; it finds the number of GPUs in $M",
    )
    parser.add_argument(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start all ranks again after a failure, up to N times",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be started")
    parser.add_argument(
        "--quiet", action="store_true", help="print no report at the end, and no alerts"
    )
    several = parser.add_argument_group("on each of several machines")
    several.add_argument("--nodes", type=positive, metavar="N", help="how many machines there are")
    several.add_argument(
        "--meet", metavar="HOST:PORT", help="the first machine and a free port, the same on all"
    )
    several.add_argument(
        "--meet-as", metavar="NAME", help="a name for this training, if several meet there"
    )


def run(options: argparse.Namespace) -> int:
    from oomph.verbs import launch as verb

    here = verb.here(
        verb.training_of(options.of_script, module=options.module, own_script=options.script),
        plan=options.plan,
        num_processes=options.nproc,
        gpus=options.gpus,
        num_nodes=options.nodes,
        meeting=options.meet,
        rendezvous=options.meet_as,
        max_restarts=options.max_restarts,
    )
    if options.dry_run:
        return _print_dry_run(verb.in_words(here), options)
    launched = verb.launch(here, alerts=not options.quiet)
    # If the report is interrupted or cannot be written, the exit code is still the training's.
    with contextlib.suppress(KeyboardInterrupt, OSError):
        _report(launched, options)
    from oomph.verbs.watch import end_like

    return end_like(launched.watched.ended)


def _print_dry_run(text: str, options: argparse.Namespace) -> int:
    if options.json:
        print_json({"would_run": text})
    else:
        print(text)
    return 0


def _report(launched: Launched, options: argparse.Namespace) -> None:
    """Print the rank that failed first, and then the report, on standard error."""
    if sys.stderr is None:
        return
    if launched.failure is not None:
        from oomph.showing.launch import print_failure

        print_failure(launched.failure)
    run = launched.watched.run
    if run is None or options.quiet:
        return
    from oomph.showing.report import print_report
    from oomph.verbs.report import report

    try:
        print_report(report(run), run, to_stderr=True)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - the exit code must be the training's
        print(f"oomph: the report failed: {error}", file=sys.stderr)
    sys.stderr.flush()


def _count(text: str) -> int:
    if text == "0":
        return 0
    return positive(text)
