"""`oomph explain`: a log, a snapshot or a run -> why memory ran out, and what would avoid it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from oomph.cli.arguments import print_json
from oomph.errors import EXIT_NO, EXIT_YES

if TYPE_CHECKING:
    from oomph.records.explanation import Explanation
    from oomph.records.script import Script

DESCRIPTION = """\
Explain why memory ran out: too much at once, fragmentation, other processes, one
absurd request, a leak, or the machine's own memory. Then where the memory went, and what
would have avoided it. A memory snapshot of torch also says who held the memory, and is
replayed with other settings. It is read safely, whoever wrote it."""

EXAMPLES = """\
examples:
  oomph explain train.log                     a log of any size; - reads standard input
  python train.py 2>&1 | oomph explain -
  oomph explain oom.pickle                    a memory snapshot of torch 2.0 or newer
  oomph explain oom.pickle --html oom.html    with charts
  oomph explain before.pickle after.pickle    what grew from one to the other
  oomph explain                               the last run of oomph watch
  oomph explain 20261116-0612                 another run
  oomph explain train.log --alloc-conf expandable_segments:True
  oomph explain train.log --script train.py -- --epochs 3    with plans of the script that died

exit codes: 0 the explanation; 1 nothing ran out of memory; 2 there is no such file or
run; 4 it cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="LOG | SNAPSHOT | RUN | -",
        nargs="?",
        default="last",
        help="a log, a memory snapshot, the id of a run, or - for standard input (default: the"
        " last run)",
    )
    parser.add_argument(
        "later", metavar="LATER", nargs="?", help="a later snapshot of the same program"
    )
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help="memory of the GPU, which a snapshot does not have"
    )
    parser.add_argument(
        "--html", metavar="PAGE.HTML", help="of a snapshot: write a page with charts of it"
    )
    parser.add_argument(
        "--alloc-conf",
        metavar="SETTINGS",
        default="",
        help="PYTORCH_CUDA_ALLOC_CONF of the run, so that nothing is advised that was on",
    )

    parser.add_argument(
        "--script",
        metavar="SCRIPT | FILE:NAME",
        help="what ran out of memory, its arguments after --: also say which plans of it would fit",
    )
    parser.add_argument("--gpu", help="with --script: the GPU by name, for the plans' times")
    parser.set_defaults(takes_script=True)


def run(options: argparse.Namespace) -> int:
    from oomph.verbs.explain import explain

    _check_script(options)
    if options.html:
        return _draw(options)
    what = sys.stdin.buffer if options.what == "-" else options.what
    found = explain(
        what, options.later, alloc_conf=options.alloc_conf, gpu_memory=options.gpu_memory
    )
    if found is None:
        print(f"nothing ran out of memory in {_name(options.what)}", file=sys.stderr)
        return EXIT_NO
    if options.script is not None:
        found = _with_plans(found, options)
    if options.json:
        print_json(found)
    else:
        from oomph.showing.explain import print_explanation

        print_explanation(found)
    return EXIT_YES


def _check_script(options: argparse.Namespace) -> None:
    from oomph.errors import UsageError

    what = "arguments after -- belong to a script" if options.of_script else "--gpu plans a script"
    if options.script is None and (options.of_script or options.gpu):
        raise UsageError(
            what,
            because="without --script, nothing is planned",
            attempt="oomph explain train.log --script train.py --gpu rtx4090 -- --epochs 3",
        )
    if options.script is not None and (options.html or options.later is not None):
        raise UsageError("--script goes with one log, snapshot or run, and without --html")


def _with_plans(found: Explanation, options: argparse.Namespace) -> Explanation:
    import os

    from oomph.progress import Progress
    from oomph.records.script import Script, names_workload, refuse_notebook
    from oomph.verbs.remedies import with_plans

    refuse_notebook(options.script.rpartition(":")[0])
    trained: str | Script = options.script
    if not names_workload(options.script):
        here = os.getcwd()  # noqa: PTH109 - as cli/arguments.py
        arguments = tuple(options.of_script)
        trained = Script(path=options.script, arguments=arguments, directory=here)
    with Progress("starting") as say:
        return with_plans(found, trained, gpu=options.gpu, gpu_memory=options.gpu_memory, say=say)


def _draw(options: argparse.Namespace) -> int:
    from oomph.errors import UsageError
    from oomph.showing.explain import print_explanation, write_explanation_page
    from oomph.showing.html_page import check_page
    from oomph.verbs.explain import draw

    if options.later is not None or options.what == "-":
        raise UsageError("--html draws one snapshot", attempt="oomph explain oom.pickle --html x")
    check_page("explain", options.html)
    found, picture = draw(options.what, gpu_memory=options.gpu_memory)
    if options.json:
        print_json(found)
    else:
        print_explanation(found)
    write_explanation_page(found, picture, options.html)  # last: the answer is never lost to it
    return EXIT_YES


def _name(what: str) -> str:
    return {"-": "standard input", "last": "the last run"}.get(what, what)
