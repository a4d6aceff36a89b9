"""`oomph launch`: a plan and a training script -> torchrun here, or a scheduler's job."""

from __future__ import annotations

import argparse
import contextlib
import sys

from oomph.cli.arguments import positive, print_json
from oomph.errors import EXIT_NO, EXIT_YES, UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from oomph.records.launch import JobState, Wanted
    from oomph.verbs.launch import Launched

DESCRIPTION = """\
Start a training as its plan says, or with --nproc processes. Here, by torchrun, on GPUs
that nobody uses and no other launch has taken; or with --via as a job of Slurm or Grid
Engine. Every rank is watched; if one fails, the others are ended and its error is shown
first. Put the script and its arguments after --."""

EXAMPLES = """\
examples:
  oomph plan train.py --gpu a100-80gb --gpus 4 -o plan.json
  oomph launch plan.json -- train.py --epochs 3
  oomph launch --nproc 4 -- train.py --epochs 3
  oomph launch --nproc 2 --gpus 0,3 -- train.py
  oomph launch --nproc 2 --gpus none -- train.py            on the CPU
  oomph launch plan.json --dry-run -- train.py              print what would run
  oomph launch plan.json --script submit_train.sh -- --lr 1e-4
  oomph launch plan.json --via slurm --time 12h -- train.py
  oomph launch plan.json --via --wait -- train.py           through the scheduler found here
  oomph launch plan.json --via kubernetes --image mine:1 -- train.py | kubectl apply -f -
  oomph launch --status last
  oomph launch --follow last
  oomph launch --cancel 20261119-0612

exit codes: that of the rank that failed first, or 0; 128 + N if signal N ended it;
1 too few GPUs are free, or a job ended without an exit code; 2 a wrong flag, or a job
that the scheduler refuses; 4 the GPUs or a file cannot be read. --via without --wait, and
--status of a job under way: 0."""


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
    _add_job_arguments(parser)
    several = parser.add_argument_group("by hand, on each of several machines")
    several.add_argument("--nodes", type=positive, metavar="N", help="how many machines there are")
    several.add_argument(
        "--meet", metavar="HOST:PORT", help="the first machine and a free port, the same on all"
    )
    several.add_argument(
        "--meet-as", metavar="NAME", help="a name for this training, if several meet there"
    )


def _add_job_arguments(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("as a job")
    job.add_argument(
        "--via",
        nargs="?",
        const="found",
        metavar="WHAT",
        help="slurm or sge (Grid Engine); without a name: the one that answers here. pbs,"
        " kubernetes (a Job) and trainjob (Kubeflow's) are printed, not submitted",
    )
    job.add_argument("--name", metavar="NAME", help="of the job (default: the script's name)")
    job.add_argument("--time", metavar="TIME", help="time limit: 90m, 12h")
    job.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help="optimizer steps of the training: the time limit comes from the plan's estimate",
    )
    job.add_argument("--memory", metavar="SIZE", help="host memory of each machine: 64GiB")
    job.add_argument("--cpus-per-gpu", type=positive, metavar="N", help="(default on Slurm: 4)")
    job.add_argument("--queue", metavar="NAME", help="Slurm's partition, Grid Engine's queue")
    job.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="OPTION",
        help="any other option of the scheduler: --option=--account=nlp",
    )
    job.add_argument(
        "--gpu-resource", default="gpu", metavar="NAME", help="what the site calls its GPUs"
    )
    job.add_argument("--image", metavar="IMAGE", help="of the pods, with Kubernetes")
    job.add_argument("--pe", metavar="NAME", help="Grid Engine's parallel environment")
    job.add_argument(
        "--wait", action="store_true", help="print the job's output, and end with its exit code"
    )
    job.add_argument("--status", metavar="RUN", help="where a job is: its run, number, or last")
    job.add_argument("--follow", metavar="RUN", help="print a job's output until it has ended")
    job.add_argument("--cancel", metavar="RUN", help="end a job")


def run(options: argparse.Namespace) -> int:
    if options.status or options.follow or options.cancel:
        return _run_existing(options)
    return _run_here(options) if options.via is None else _run_job(options)


def _run_existing(options: argparse.Namespace) -> int:
    """Ask about a job, follow it, or end it."""
    from oomph.verbs import launch as verb

    if options.cancel:
        state = verb.cancel(options.cancel)
    elif options.follow:
        return _follow(options.follow, options)
    else:
        state = verb.status(options.status)
    _print_state(state, options)
    return EXIT_YES if options.cancel else _exit_code(state)


def _run_job(options: argparse.Namespace) -> int:
    from oomph.records.launch import PRINTED
    from oomph.verbs import launch as verb

    wanted = _wanted(options, via=_via(options))
    _refuse_what_is_for_here(options)
    if options.wait and options.via in PRINTED:
        raise UsageError(
            f"oomph does not submit to {options.via}, and cannot wait for it",
            attempt="without --wait: what is printed is for qsub or kubectl apply -f -",
        )
    if options.dry_run or options.via in PRINTED:
        return _print_dry_run(verb.dry_run(wanted), options)
    job = verb.submit(wanted)
    if not options.json:
        from oomph.showing.launch import print_submitted

        print_submitted(job)
    if options.wait:
        return _follow(job.id, options)
    if options.json:
        print_json(job)
    return EXIT_YES


def _wanted(options: argparse.Namespace, via: str | None) -> Wanted:
    from oomph.records.launch import Wanted

    return Wanted(
        words=tuple(options.of_script),
        module=options.module,
        own_script=options.script,
        plan=options.plan,
        num_processes=options.nproc,
        num_nodes=options.nodes,
        gpus=options.gpus,
        meeting=options.meet,
        meeting_name=options.meet_as,
        max_restarts=options.max_restarts,
        via=via,
        name=options.name,
        time=options.time,
        steps=options.steps,
        memory=options.memory,
        cpus_per_gpu=options.cpus_per_gpu,
        queue=options.queue,
        options=tuple(options.option),
        gpu_resource=options.gpu_resource,
        parallel_environment=options.pe,
        image=options.image,
    )


def _via(options: argparse.Namespace) -> str:
    from oomph.records.launch import PRINTED

    if options.via in ("found", "slurm", "sge", *PRINTED):
        return str(options.via)
    is_plan = options.plan is None and options.via.endswith(".json")
    raise UsageError(
        f"--via {options.via!r:.60} is no scheduler",
        because=f"it is one of slurm, sge, {', '.join(PRINTED)}, or stands alone",
        attempt=f"oomph launch {options.via} --via -- SCRIPT" if is_plan else "--via slurm",
    )


def _refuse_what_is_for_here(options: argparse.Namespace) -> None:
    given = {"--gpus": options.gpus, "--meet": options.meet, "--meet-as": options.meet_as}
    given |= {"--max-restarts": options.max_restarts or None}
    flag = next((flag for flag, value in given.items() if value is not None), None)
    if flag:
        raise UsageError(
            f"{flag} is for this machine, and --via is for another",
            because="the scheduler and the job choose it",
            attempt=f"without {flag}",
        )


def _follow(name: str, options: argparse.Namespace) -> int:
    from oomph.verbs import launch as verb

    try:
        state = verb.follow(name)
    except KeyboardInterrupt:
        print(
            f"oomph: the job goes on; to end it: oomph launch --cancel {name}",
            file=sys.stderr,
        )
        return EXIT_YES
    if options.json or state.exit_code != 0:
        _print_state(state, options)
    return _exit_code(state)


def _print_state(state: JobState, options: argparse.Namespace) -> None:
    if options.json:
        print_json(state)
    else:
        from oomph.showing.launch import print_state

        print_state(state)


def _exit_code(state: JobState) -> int:
    """Return the job's own exit code; 1 if it ended without one, 0 while it is under way."""
    if state.exit_code is not None:
        return state.exit_code
    return EXIT_NO if state.state == "killed" else EXIT_YES


def _run_here(options: argparse.Namespace) -> int:
    from oomph.verbs import launch as verb

    _refuse_what_is_for_a_job(options)
    wanted = _wanted(options, via=None)
    if options.dry_run:
        return _print_dry_run(verb.dry_run(wanted), options)
    launched = verb.launch(wanted, alerts=not options.quiet)
    # If the report is interrupted or cannot be written, the exit code is still the training's.
    with contextlib.suppress(KeyboardInterrupt, OSError):
        _report(launched, options)
    from oomph.verbs.watch import end_like

    return end_like(launched.watched.ended)


def _refuse_what_is_for_a_job(options: argparse.Namespace) -> None:
    given = {"--name": options.name, "--time": options.time, "--steps": options.steps}
    given |= {"--memory": options.memory, "--queue": options.queue, "--pe": options.pe}
    given |= {"--cpus-per-gpu": options.cpus_per_gpu, "--option": options.option or None}
    given |= {"--wait": options.wait or None, "--image": options.image}
    flag = next((flag for flag, value in given.items() if value is not None), None)
    if flag:
        raise UsageError(
            f"{flag} is for a job of a scheduler",
            because="this would run here",
            attempt="--via, or --via slurm",
        )


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
