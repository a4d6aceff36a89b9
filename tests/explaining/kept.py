"""A run made by hand -> the directory that `oomph watch` would have left of it."""

from __future__ import annotations

import json
from pathlib import Path

from oomph.monitoring.diary import Diary, RunStart, this_host
from oomph.records.run import Run
from oomph.records.stored import SCHEMA, to_jsonable


def keep(run: Run, runs: Path) -> Path:
    """In the directory of runs, under its id."""
    directory = runs / run.id
    directory.mkdir(parents=True)
    start = RunStart(
        id=run.id,
        command=run.command,
        directory=run.directory,
        host=this_host(),
        user=run.user,
        started_at=run.started_at,
        clock_s=0.0,
        pid=2**22 - 1,  # nobody's
        oomph_version=run.oomph_version,
        num_cpus=run.num_cpus,
    )
    diary = Diary(directory, start)
    diary.add_gpus(run.gpus)
    diary.add_spans(run.gpu_spans, run.host_spans)
    for event in run.events:
        diary.add(event)
    for peak in run.peaks:
        diary.add(peak)
    if run.ending:
        diary.add(run.ending)
    diary.close()
    for rank in sorted({span.rank for span in run.step_spans}):
        _keep_steps(run, rank, directory)
    return directory


def _keep_steps(run: Run, rank: int, directory: Path) -> None:
    process = {"schema": SCHEMA, "rank": rank, "pid": 7 + rank, "host": this_host()}
    lines = [json.dumps({"process": {**process, "clock_s": 0.0, "at": run.started_at}}) + "\n"]
    own = (span for span in run.step_spans if span.rank == rank)
    lines += [json.dumps({"steps": to_jsonable(span)}) + "\n" for span in own]
    (directory / f"steps-{rank}-{7 + rank}.jsonl").write_text("".join(lines))
