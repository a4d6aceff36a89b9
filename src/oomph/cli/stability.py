"""`oomph stability`: a workload -> batch sizes that train as well, and their learning rates."""

from __future__ import annotations

import argparse

from oomph.cli.arguments import positive, print_json
from oomph.errors import EXIT_UNCERTAIN, EXIT_YES

DESCRIPTION = """\
Find out which batch sizes train as well as yours, and with which learning rate. oomph
trains short runs on your data, all from the same start and with the same number of
examples, and compares their losses. It uses the GPU of this machine, or the CPU."""

EXAMPLES = """\
examples:
  oomph stability train.py:workload
  oomph stability train.py:workload --batch-sizes 16,32,64 --minutes 5
  oomph run --emulate 8GiB -- oomph stability train.py:workload

train.py must define that name as an oomph.Workload whose batch(n) draws n examples of
your data. Finished runs are kept: the same command goes on after Ctrl-C.

exit codes: 0 done; 2 a wrong flag, an error in your code, or batches that are all equal;
3 done, with low confidence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="FILE:NAME", help="file and name of the workload")
    parser.add_argument(
        "--batch-sizes",
        metavar="N,...",
        type=lambda text: [positive(part) for part in text.split(",")],
        help="batch sizes to try beside the workload's own (default: a quarter, half, twice)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        metavar="M",
        help="about how long it may take (default: 10)",
    )
    parser.add_argument(
        "--examples",
        type=positive,
        metavar="N",
        help="examples that each run sees (default: what the minutes allow)",
    )
    parser.add_argument(
        "--seeds", type=positive, default=2, metavar="N", help="runs of each kind (default: 2)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument(
        "--out",
        default="stability.json",
        metavar="FILE",
        help="where the result is written (default: stability.json)",
    )


def run(options: argparse.Namespace) -> int:
    from oomph.progress import Progress
    from oomph.verbs.stability import study_stability

    with Progress("starting torch") as say:
        study = study_stability(
            options.workload,
            batch_sizes=options.batch_sizes,
            minutes=options.minutes,
            num_examples=options.examples,
            num_seeds=options.seeds,
            seed=options.seed,
            out=options.out,
            say=say,
        )
    if options.json:
        print_json(study)
    else:
        from oomph.showing.stability import print_study

        print_study(study, options.out)
    return EXIT_UNCERTAIN if study.confidence == "low" else EXIT_YES
