"""A watched run -> why memory ran out in it, from what the script and the watcher reported."""

from __future__ import annotations

from dataclasses import replace

from oomph.explaining.diagnose import diagnose
from oomph.explaining.log import Log
from oomph.explaining.message import explain_log
from oomph.oom_message import parse
from oomph.records.explanation import Explanation
from oomph.records.run import Run

_OUT = ("out-of-memory", "maybe-out-of-memory", "recovered")


def explain_run(run: Run, *, settings: str = "") -> Explanation | None:
    """Explain a run by the message of its error; without one, by how it ended."""
    found = [
        replace(message, line=place)
        for place, event in enumerate(run.events, 1)
        if (message := parse(event.text)) is not None
    ]
    log = Log(messages=tuple(found), num_lines=0, settings=None, script=script_of(run.command))
    explained = explain_log(log, source=f"run {run.id}", settings=settings)
    if explained is not None:
        unnumbered = (replace(one, line=None) for one in explained.others)
        message = explained.message and replace(explained.message, line=None)
        return replace(explained, message=message, others=tuple(unnumbered))
    finding = diagnose(run).findings[0]
    if finding.kind not in _OUT:
        return None
    is_host = run.ending is not None and run.ending.out_of_memory == "host"
    return Explanation(
        source=f"run {run.id}",
        verdict="host" if is_host else "unknown",
        sentence=finding.sentence,
        confidence="inferred",
        reasons=finding.evidence,
        record_better=("with oomph.watching(): in the script, the run keeps torch's message",),
        next_command=f"oomph report {run.id}",
    )


def script_of(command: tuple[str, ...]) -> str | None:
    """Return the Python file of a command."""
    return next((word for word in command if word.endswith(".py")), None)
