"""RankFailure, Job -> lines on a terminal."""

from __future__ import annotations

import sys

from oomph.records.launch import RankFailure
from oomph.showing.terminal import printable

_MOST_LINES = 40  # of a traceback; judgement: a screen


def print_failure(failure: RankFailure) -> None:
    """Print the rank that failed first and its own error, on standard error."""
    for line in failure_lines(failure):
        print(line, file=sys.stderr)
    sys.stderr.flush()


def failure_lines(failure: RankFailure) -> list[str]:
    lines = [f"oomph: rank {failure.rank} failed first: {_ended(failure)}"]
    if failure.is_consequence:
        lines.append("  this error blames another rank, which left no error of its own here")
    if failure.traceback is not None:
        traceback = failure.traceback.rstrip().splitlines()
        if len(traceback) > _MOST_LINES:
            left_out = len(traceback) - _MOST_LINES
            half = _MOST_LINES // 2
            traceback = [*traceback[:half], f"... {left_out} lines ...", *traceback[-half:]]
        lines += [f"  {printable(line)}" for line in traceback]
    elif failure.signal == "SIGKILL":
        lines.append(
            "  try: dmesg, if nobody killed it: the kernel kills when host memory runs out"
        )
    return lines


def _ended(failure: RankFailure) -> str:
    if failure.error is not None:
        return printable(failure.error.splitlines()[0][:300]) if failure.error else "an error"
    if failure.signal is not None:
        return f"ended by {failure.signal}"
    if failure.exit_code is None:
        return "how is not known"
    return f"exit code {failure.exit_code}; what it printed is above"
