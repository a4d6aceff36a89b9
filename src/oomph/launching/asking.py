"""A scheduler's command -> what it answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomph.errors import UsageError


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed, and its exit code."""

    exit_code: int
    printed: str
    complained: str

    @property
    def everything(self) -> str:
        """Return all it said, on one line for an error."""
        return " ".join(f"{self.complained} {self.printed}".split())[:500]


# A client of Slurm without its configuration tries for a minute before it gives up.
_ANSWERS_WITHIN_S = 10.0


def ask(*words: str, within_s: float | None = None) -> Answer:
    """Run a command of a scheduler to its end. Raises UsageError if it is not here."""
    import subprocess

    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", check=False, timeout=within_s
        )
    except subprocess.TimeoutExpired:
        return Answer(1, "", f"{words[0]} did not answer within {within_s:g} s")
    except OSError as error:
        raise UsageError(
            f"{words[0]} cannot be started",
            because=error.strerror or str(error),
            attempt="a machine from which jobs are submitted",
        ) from error
    return Answer(done.returncode, done.stdout, done.stderr)


def answers(*words: str) -> bool:
    """Return whether a command is here and succeeds: a client without its daemon does not."""
    try:
        return ask(*words, within_s=_ANSWERS_WITHIN_S).exit_code == 0
    except UsageError:
        return False


def refused(answer: Answer, by: str, attempt: str) -> UsageError:
    """Return the error for a request that a scheduler refuses, in its own words."""
    return UsageError(
        f"{by} refuses this job", because=answer.everything or "it gives no reason", attempt=attempt
    )


def last_line(words: Sequence[str]) -> str:
    """Return the last line that is not empty."""
    return next((line for line in reversed(words) if line.strip()), "")
