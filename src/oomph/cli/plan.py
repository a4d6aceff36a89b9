"""`oomph plan`: a workload or script -> training settings that fit on a GPU, ranked."""

from __future__ import annotations

import argparse
import shlex
import sys

from oomph.cli.arguments import (
    add_keeps,
    add_lora,
    add_workload_and_gpu,
    asked_again,
    positive,
    print_json,
    what_to_train,
    with_more,
)
from oomph.errors import EXIT_NO, EXIT_UNCERTAIN, EXIT_YES

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from oomph.records.check import Checks
    from oomph.records.plan import Plans
    from oomph.records.script import Patched, Script, ScriptChanges

EXPORTS = ("hf", "lightning", "accelerate", "deepspeed", "torchrun", "slurm", "sge", "code")

DESCRIPTION = """\
Find the training settings that fit on a GPU: micro-batch, precision, checkpointing,
optimizer, offload, several GPUs. Every plan keeps your batch size, and tricks that
change training are used only with --allow."""

EXAMPLES = """\
examples:
  oomph plan train.py --gpu a100-40gb -- --config base.yaml
  oomph plan train.py --gpu a100-40gb --diff --verify -- --config base.yaml
  oomph plan train.py:workload --gpu v100-16gb
  oomph plan train.py:workload --gpu rtx4090 --prefer memory --html plan.html
  oomph plan train.py:workload --gpu a100-40gb --max-gpus 4 --allow lora
  oomph plan train.py:workload --gpu-memory 12GiB --forbid fp16 -o plan.json
  oomph plan train.py:workload --gpu v100-16gb --check
  oomph check train.py:workload --json > checks.json
  oomph plan train.py:workload --gpu rtx4090 --checks checks.json

exit codes: 0 a plan fits; 1 none does; 2 a wrong flag, or an error in your code;
3 uncertain; 4 a file cannot be read. With --verify: 0 the patched script is as
planned and fits; 1 it does not fit; 3 it differs, or only a part could be patched."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_and_gpu(parser)
    parser.add_argument(
        "--max-gpus", type=positive, default=1, metavar="N", help="use up to N GPUs (default: 1)"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=positive,
        default=8,
        metavar="N",
        help="GPUs of one machine; more are several machines (default: 8)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="examples per optimizer step (default: the workload's own)",
    )
    for flag, text in (
        ("--allow", "use these tricks although they change training, e.g. lora,adafactor"),
        ("--forbid", "never use these tricks, e.g. fp16,offload-activations"),
    ):
        names = parser.add_argument(
            flag, action="append", default=[], metavar="TRICK,...", help=text
        )
        names.completer = _complete_trick  # type: ignore[attr-defined]
    parser.add_argument(
        "--target-memory",
        type=_share,
        default=1.0,
        metavar="SHARE",
        help="fill at most this share of the GPU, e.g. 90%% (default: all that CUDA can use)",
    )
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="memory of the host that offload may take, e.g. 64GiB (default: what is free,"
        " for a GPU of this machine; otherwise unknown)",
    )
    parser.add_argument(
        "--prefer",
        choices=("balance", "time", "memory", "resources"),
        default="balance",
        help="what ranks the plans that fit (default: balance)",
    )
    add_keeps(parser)
    add_lora(parser)
    parser.add_argument(
        "--checks",
        metavar="CHECKS.JSON",
        help="output of oomph check --json: use its verdicts on which tricks are safe",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run oomph check first, on the CPU of this machine, and use its verdicts",
    )
    parser.add_argument(
        "--time-limit",
        metavar="TIME",
        help="stop searching after this time, e.g. 60s, with the best plan so far",
    )
    parser.add_argument("-o", metavar="PLAN.JSON", help="write the recommended plan to this file")
    parser.add_argument(
        "--diff",
        action="store_true",
        help="print the changes to your script as a diff; the script itself is not touched",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="with --diff: exit with 0 only if the script with all changes, rehearsed again, needs"
        " and does what was planned",
    )
    parser.add_argument(
        "--explain", action="store_true", help="say why each trick was not considered"
    )
    parser.add_argument(
        "--export",
        choices=EXPORTS,
        help="print only the recommended plan, as the settings of this tool or as code",
    )
    parser.add_argument("--html", metavar="PLAN.HTML", help="write a page with charts of the plans")


def run(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from oomph.progress import Progress
    from oomph.records.plan import PlanOptions
    from oomph.records.workload import check_lora
    from oomph.units import seconds_of
    from oomph.verbs.plan import checked_tricks, plan_with_options
    from oomph.verbs.planned import export_of, save_plan

    trained = what_to_train(options)
    _check_diff(options, trained)
    _check_files(options)
    plan_options = PlanOptions(
        batch_size=options.batch_size,
        max_gpus=options.max_gpus,
        gpus_per_node=options.gpus_per_node,
        allow=_names(options.allow),
        forbid=_names(options.forbid),
        prefer=options.prefer,
        target_ratio=options.target_memory,
        keeps=options.keeps,
        time_limit_s=seconds_of(options.time_limit),
        **check_lora(options.lora_rank, options.lora_targets),
    )
    with Progress("starting") as say:
        checks, unchecked = _checks(options, trained, say)
        plans = plan_with_options(
            trained,
            replace(plan_options, checked=checked_tricks(checks)),
            gpu=options.gpu,
            gpu_memory=options.gpu_memory,
            host_memory=options.host_memory,
            say=say,
            draws=bool(options.html),
            effort="rehearsed" if options.diff else "edits",
            unprotected=options.unprotected,
            fresh=options.fresh,
        )
    if unchecked:
        plans = replace(plans, caveats=(*plans.caveats, *unchecked))
    # First, so that an error in writing files does not lose the answer.
    _print(plans, options, trained)
    if plans.changes is not None and options.diff and not isinstance(trained, str):
        _print_changes(plans.changes, options.of_script, trained)
    written: list[str | None] = []
    if options.o and plans.best is not None:
        save_plan(plans.best, options.o)
        written.append(options.o)
    if options.html:
        from oomph.showing.plan import write_plan_page

        code = [export_of(plan, "code") for plan in plans]
        write_plan_page(plans, plans.timelines, code, options.html)
        written.append(options.html)
    if not (options.json or options.export):
        from oomph.showing.terminal import print_written

        print_written(written)
    patched = plans.changes.patched if plans.changes is not None else None
    if options.verify and plans.changes is not None and patched is not None:
        return _exit_code_of_patch(patched, is_whole=plans.changes.is_whole)
    return _exit_code(plans)


def _checks(
    options: argparse.Namespace, trained: str | Script, say: Callable[[str], None]
) -> tuple[Checks | str | None, list[str]]:
    """Return what checks found, or their file, and what they could not find out."""
    from oomph.errors import UsageError
    from oomph.verbs.check import check

    if not options.check:
        return options.checks, []
    if options.checks or not isinstance(trained, str):
        raise UsageError(
            "--check runs the checks of a workload",
            because="--checks names a file of them" if options.checks else "this is a script",
            attempt="oomph plan train.py:workload --gpu v100-16gb --check",
        )
    try:
        checks = check(trained, say=say)
    except UsageError as error:  # too large for this machine: the plan is still of use
        why = f"{error.what}: {error.because}" if error.because else error.what
        return None, [f"not checked: {why}"]
    unsure = [(name, one) for name, one in checks if one.verdict not in ("passes", "fails")]
    return checks, [f"oomph check on {name}: {one.conclusion}" for name, one in unsure]


def _check_files(options: argparse.Namespace) -> None:
    """Raise now what writing the files would raise after the work."""
    if options.html:
        from oomph.showing.html_page import check_page

        check_page("plan", options.html)
    if options.o:
        from oomph.store import check_writable

        check_writable(options.o)


def _check_diff(options: argparse.Namespace, trained: str | Script) -> None:
    from oomph.errors import UsageError

    if options.verify and not options.diff:
        raise UsageError(
            "--verify is about the changes of --diff",
            attempt="oomph plan train.py --gpu v100-16gb --diff --verify",
        )
    if options.diff and (options.json or isinstance(trained, str)):
        raise UsageError(
            "--diff needs a script, and prints to the terminal",
            because="a workload does not say which lines to change"
            if isinstance(trained, str)
            else "--json prints one object",
            attempt="oomph plan train.py --gpu v100-16gb --diff",
        )


def _print_changes(changes: ScriptChanges, given: Sequence[str], trained: Script) -> None:
    from oomph.showing.script import print_changes

    print_changes(changes, given)
    from oomph.showing.terminal import new_console, print_command

    words = ["python", *(["-m", trained.module] if trained.module else [trained.path or ""])]
    command = shlex.join([*words, *changes.arguments])
    print_command(new_console(), f"oomph watch --for 1-epoch -- {command}  # after the change")


def _print(plans: Plans, options: argparse.Namespace, trained: str | Script) -> None:
    if options.json:
        from oomph.records.plan import as_answer

        print_json(as_answer(plans))
    elif options.export:
        from oomph.verbs.planned import export_of

        script = "" if isinstance(trained, str) else trained.path or ""
        if plans.best is not None:
            print(export_of(plans.best, options.export, script, options.of_script))
        else:
            print("oomph: nothing that is allowed fits: there is no plan", file=sys.stderr)
    else:
        from oomph.showing.plan import print_plans

        then = _next(plans, options, trained)
        print_plans(plans, explains=options.explain, then=then)


def _next(plans: Plans, options: argparse.Namespace, trained: str | Script) -> list[str]:
    """Return the commands or the code that come after this answer."""
    if plans.best is None:
        return _next_of_none(plans, options)
    if options.o:
        stepper = f"oomph.Stepper(model, optimizer, loss, plan=oomph.load_plan({options.o!r}))"
        return [f"{stepper}  # in your training loop"]
    if isinstance(trained, str):
        return [f"{with_more(options, '-o', 'plan.json')}  # to train with oomph.Stepper"]
    if options.diff:
        return []  # after the diff
    return [f"{with_more(options, '--diff')}  # what to change in your script"]


def _next_of_none(plans: Plans, options: argparse.Namespace) -> list[str]:
    """Return the command that comes nearest to a plan that fits."""
    short = plans.shortfall
    if plans.offers and plans.offers[0].fits == "yes":
        offered = plans.offers[0].allow
        return [f"{with_more(options, '--allow', offered)}  # if training may change"]
    if short is not None and short.num_gpus:
        return [f"{with_more(options, '--max-gpus', str(short.num_gpus))}  # on more GPUs"]
    if short is not None and short.smallest_gpu:
        return [f"{asked_again(options, 'plan', gpu=short.smallest_gpu)}  # on a larger GPU"]
    return []


def _exit_code(plans: Plans) -> int:
    if plans.best is None:
        return EXIT_NO if plans.cut is None else EXIT_UNCERTAIN
    return EXIT_YES if plans.best.fits == "yes" else EXIT_UNCERTAIN


def _exit_code_of_patch(patched: Patched, *, is_whole: bool) -> int:
    """Return whether the changes are the whole plan, and the changed script is as planned."""
    if patched.fits == "no":
        return EXIT_NO
    is_sure = is_whole and patched.is_as_planned and patched.fits == "yes"
    return EXIT_YES if is_sure else EXIT_UNCERTAIN


def _names(lists: list[str]) -> frozenset[str]:
    return frozenset(name for text in lists for name in text.split(",") if name)


def _share(text: str) -> float:
    number = text.removesuffix("%")
    try:
        share = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 90% or 0.9")
    return share


def _complete_trick(**_: Any) -> list[str]:
    from oomph.verbs.planned import trick_names

    return list(trick_names())
