"""`oomph explain`: a log, a snapshot or a run -> why memory ran out, and what would avoid it."""

from __future__ import annotations

import argparse
import sys

from oomph.cli.arguments import print_json
from oomph.errors import EXIT_NO, EXIT_YES

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
  oomph explain before.pickle after.pickle    what grew from one to the other
  oomph explain                               the last run of oomph watch
  oomph explain 20261116-0612                 another run
  oomph explain train.log --alloc-conf expandable_segments:True

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
        "--alloc-conf",
        metavar="SETTINGS",
        default="",
        help="PYTORCH_CUDA_ALLOC_CONF of the run, so that nothing is advised that was on",
    )


def run(options: argparse.Namespace) -> int:
    from oomph.verbs.explain import explain

    what = sys.stdin.buffer if options.what == "-" else options.what
    found = explain(
        what, options.later, alloc_conf=options.alloc_conf, gpu_memory=options.gpu_memory
    )
    if found is None:
        print(f"nothing ran out of memory in {_name(options.what)}", file=sys.stderr)
        return EXIT_NO
    if options.json:
        print_json(found)
    else:
        from oomph.showing.explain import print_explanation

        print_explanation(found)
    return EXIT_YES


def _name(what: str) -> str:
    return {"-": "standard input", "last": "the last run"}.get(what, what)
