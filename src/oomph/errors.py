"""The exceptions of oomph, and the exit code that each one becomes.

    OomphError              anything that oomph refuses to do         exit 2
    |-- UsageError          a flag or an argument that makes no sense exit 2
    |   |-- UnknownGpu      a GPU name that the catalogue cannot place exit 2
    |   `-- NotOnThisSystem what only Linux can do                      exit 2
    |-- UserCodeError       the user's own code raised something      exit 2
    `-- Unreadable          a machine or a file that cannot be read   exit 4

"It does not fit" and "no GPU is free" are answers, not exceptions: verbs
return them and the command line turns them into an exit code. Every error
says what happened, because of what, and what to try.
"""

from __future__ import annotations

EXIT_YES = 0
EXIT_NO = 1
EXIT_USAGE = 2
EXIT_UNCERTAIN = 3
EXIT_UNREADABLE = 4


class OomphError(Exception):
    """What happened, because of what, and what to try next."""

    exit_code = EXIT_USAGE
    printed: tuple[str, ...] = ()  # the last lines that the user's program printed before

    def __init__(self, what: str, *, because: str | None = None, attempt: str | None = None):
        self.what = what
        self.because = because
        self.attempt = attempt
        super().__init__(what)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled in child processes, and their keyword arguments must survive that.
        return _again, (type(self), self.__dict__.copy())

    def __str__(self) -> str:
        lines = [self.what]
        if self.because:
            lines.append(f"  because: {self.because}")
        if self.attempt:
            lines.append(f"  try: {self.attempt}")
        if self.printed:
            lines += ["  its last output:", *(f"    {line}" for line in self.printed)]
        return "\n".join(lines)

    def in_one_line(self) -> str:
        """Return the error as one line, for the middle of a training log."""
        because = f" ({self.because})" if self.because else ""
        attempt = f"; try: {self.attempt}" if self.attempt else ""
        return f"{self.what}{because}{attempt}"


class UsageError(OomphError):
    """A flag or an argument that is not valid."""


class UnknownGpu(UsageError):
    """A GPU name that is not in the catalogue; `nearest` are names it might mean."""

    def __init__(
        self, what: str, *, nearest: tuple[str, ...] = (), because: str | None = None
    ) -> None:
        self.nearest = nearest
        attempt = f"one of {', '.join(nearest)}" if nearest else "oomph gpus --catalog"
        super().__init__(what, because=because, attempt=attempt)


class NotOnThisSystem(UsageError):
    """Something that only Linux can do; `what` is that something."""

    def __init__(self, what: str, *, because: str | None = None, attempt: str | None = None):
        import sys

        name = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        super().__init__(
            f"{what} needs Linux",
            because=because or f"this is {name}, for which oomph cannot do it",
            attempt=attempt
            or "Linux (on Windows: WSL); oomph predict and oomph plan work here for Workloads",
        )


class UserCodeError(OomphError):
    """The user's own code raised something; the message names their line."""


class Unreadable(OomphError):
    """A machine or a file that cannot be read."""

    exit_code = EXIT_UNREADABLE


def without_attempt(line: str) -> str:
    """Return an error in one line without what to try, for another error that advises itself.

    >>> without_attempt("no driver (it was not found); try: installing it")
    'no driver (it was not found)'
    """
    return line.partition("; try: ")[0]


def _again(kind: type[OomphError], fields: dict[str, object]) -> OomphError:
    error = kind.__new__(kind)
    Exception.__init__(error, fields["what"])
    error.__dict__.update(fields)
    return error


# ---- how a sandbox can fail ----------------------------------------------------------------------
# UsageError
# `-- NoSandbox       it cannot be made here, or it does not hold          exit 2
# UserCodeError
# |-- DiedInside      the process inside ended without an answer           exit 2
# |-- OutOfTime       it did not answer in time, and was killed            exit 2
# `-- SpokeNonsense   its answer is not valid, or larger than allowed      exit 2


class NoSandbox(UsageError):
    """A sandbox cannot be made here, or it let a write through."""


class DiedInside(UserCodeError):
    """The process inside ended without an answer."""


class OutOfTime(UserCodeError):
    """There was no answer in the given time; everything inside was killed."""


class SpokeNonsense(UserCodeError):
    """The answer is not valid, or larger than allowed."""


class CannotBePutOn(Exception):
    """A script does not run with a trick. The trick is left out, and the error says why."""

    def __init__(self, error: OomphError) -> None:
        self.error = error
        super().__init__(error.in_one_line())
