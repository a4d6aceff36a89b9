"""the ways to train that fit on a GPU, ranked, and what each costs"""

from __future__ import annotations

import argparse
import sys

from oomph.cli.arguments import add_keeps, add_workload_and_gpu, positive, what_to_train
from oomph.errors import EXIT_NO, EXIT_UNCERTAIN, EXIT_YES

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from oomph.records.plan import Plans
    from oomph.records.script import Script, ScriptChanges

DESCRIPTION = """\
Find every way to train a model that fits on a GPU: micro-batch, precision,
checkpointing, optimizer, offload, several GPUs. The batch stays what it is, and
nothing that changes training is done without --allow."""

EXAMPLES = """\
examples:
  oomph plan train.py --gpu a100-40gb -- --config base.yaml
  oomph plan train.py:workload --gpu v100-16gb
  oomph plan train.py:workload --gpu rtx4090 --prefer memory --html plan.html
  oomph plan train.py:workload --gpu a100-40gb --max-gpus 4 --allow lora
  oomph plan train.py:workload --gpu-memory 12GiB --forbid fp16 -o plan.json
  oomph check train.py:workload --json > checks.json
  oomph plan train.py:workload --gpu rtx4090 --checks checks.json

exit codes: 0 a plan fits; 1 none does; 2 a wrong flag, or an error in your code;
3 uncertain; 4 a file that cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_and_gpu(parser)
    parser.add_argument(
        "--max-gpus", type=positive, default=1, metavar="N", help="at most so many (default: 1)"
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="of one optimizer step (default: the workload's own)",
    )
    for flag, said in (
        ("--allow", "tricks that change training and may be used, as in lora,adafactor"),
        ("--forbid", "tricks that may not be used, as in fp16,offload-activations"),
    ):
        names = parser.add_argument(
            flag, action="append", default=[], metavar="TRICK,...", help=said
        )
        names.completer = _complete_trick  # type: ignore[attr-defined]
    parser.add_argument(
        "--target-memory",
        type=_share,
        default=1.0,
        metavar="SHARE",
        help="of the GPU, as in 90%% (default: all that CUDA can have)",
    )
    parser.add_argument(
        "--prefer",
        choices=("balance", "time", "memory", "resources"),
        default="balance",
        help="what decides between plans that fit (default: balance)",
    )
    add_keeps(parser)
    parser.add_argument(
        "--checks",
        metavar="CHECKS.JSON",
        help="what oomph check --json printed: its verdicts decide which tricks are safe",
    )
    parser.add_argument("-o", metavar="PLAN.JSON", help="write the recommended plan")
    parser.add_argument(
        "--diff",
        action="store_true",
        help="print what to change in the script, and change nothing",
    )
    parser.add_argument("--html", metavar="PLAN.HTML", help="write a page that draws the plans")


def run(options: argparse.Namespace) -> int:
    from oomph.verbs.plans import checked_tricks, plan_and_draw, save_plan
    from oomph.verbs.rehearsals import Asked

    asked = Asked(
        batch_size=options.batch_size,
        max_gpus=options.max_gpus,
        allow=_names(options.allow),
        forbid=_names(options.forbid),
        prefer=options.prefer,
        target_ratio=options.target_memory,
        checked=checked_tricks(options.checks),
        keeps=options.keeps,
    )
    trained = what_to_train(options)
    _check_diff(options, trained)
    _check_files(options)
    try:
        drawn = plan_and_draw(
            trained,
            asked,
            gpu=options.gpu,
            gpu_memory=options.gpu_memory,
            say=_say,
            draws=bool(options.html),
            unprotected=options.unprotected,
            fresh=options.fresh,
        )
    finally:
        _say("")  # an error, too, begins on a line of its own
    plans = drawn.plans
    _print(plans, as_json=options.json)  # first: the answer is never lost to a file
    if drawn.changes is not None and options.diff:
        _print_changes(drawn.changes, options.of_script)
    if options.o and plans.best is not None:
        save_plan(plans.best, options.o)
    if options.html:
        from oomph.showing.plan_page import write_plan_page

        write_plan_page(plans, drawn.timelines, drawn.code, options.html)
    return _exit_code(plans)


def _check_files(options: argparse.Namespace) -> None:
    """Raise before the work what would be raised after it."""
    if options.html:
        from oomph.showing.html_page import check_page

        check_page("plan", options.html)
    if options.o:
        from oomph.store import check_writable

        check_writable(options.o)


def _check_diff(options: argparse.Namespace, trained: str | Script) -> None:
    from oomph.errors import UsageError

    if options.diff and (options.json or isinstance(trained, str)):
        raise UsageError(
            "--diff is for a script, and on the terminal",
            because="a workload says what is trained, and not in which lines"
            if isinstance(trained, str)
            else "--json prints one object",
            attempt="oomph plan train.py --gpu v100-16gb --diff",
        )


def _print_changes(changes: ScriptChanges, given: Sequence[str]) -> None:
    from oomph.showing.script import print_changes

    print_changes(changes, given)


def _print(plans: Plans, *, as_json: bool) -> None:
    if as_json:
        import json

        from oomph.verbs.plans import as_answer

        print(json.dumps(as_answer(plans), indent=2, ensure_ascii=False))
    else:
        from oomph.showing.plans import print_plans

        print_plans(plans)


def _exit_code(plans: Plans) -> int:
    if plans.best is None:
        return EXIT_NO
    return EXIT_YES if plans.best.fits == "yes" else EXIT_UNCERTAIN


def _say(what: str) -> None:
    """One line that is written over by the next; nothing of it stays."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what[: _width()]}", end="", file=sys.stderr, flush=True)


def _width() -> int:
    import os

    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        columns = 0
    return (columns or 80) - 1  # a terminal that nobody has given a size has 0


def _names(lists: list[str]) -> frozenset[str]:
    return frozenset(name for text in lists for name in text.split(",") if name)


def _share(text: str) -> float:
    number = text.removesuffix("%")
    try:
        share = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, as in 90% or 0.9")
    return share


def _complete_trick(**_: Any) -> list[str]:
    from oomph.verbs.plans import trick_names

    return list(trick_names())
