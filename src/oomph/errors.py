"""The exceptions of oomph, and the exit code that each one becomes.

    OomphError              anything that oomph refuses to do         exit 2
    |-- UsageError          a flag or an argument that makes no sense exit 2
    |   `-- UnknownGpu      a GPU name that the catalogue cannot place exit 2
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
    printed: tuple[str, ...] = ()  # the last lines of what the user's program wrote before

    def __init__(self, what: str, *, because: str | None = None, attempt: str | None = None):
        self.what = what
        self.because = because
        self.attempt = attempt
        super().__init__(what)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors come back from child processes; their keywords must come with them.
        return _again, (type(self), self.__dict__.copy())

    def __str__(self) -> str:
        lines = [self.what]
        if self.because:
            lines.append(f"  because: {self.because}")
        if self.attempt:
            lines.append(f"  try: {self.attempt}")
        if self.printed:
            lines += ["  the last that it wrote:", *(f"    {line}" for line in self.printed)]
        return "\n".join(lines)

    def in_one_line(self) -> str:
        """The same, for the middle of a training log."""
        because = f" ({self.because})" if self.because else ""
        attempt = f"; try: {self.attempt}" if self.attempt else ""
        return f"{self.what}{because}{attempt}"


class UsageError(OomphError):
    """A flag or an argument that makes no sense."""


class UnknownGpu(UsageError):
    """A GPU name that the catalogue cannot place; `nearest` are the names it might mean."""

    def __init__(
        self, what: str, *, nearest: tuple[str, ...] = (), because: str | None = None
    ) -> None:
        self.nearest = nearest
        attempt = f"one of {', '.join(nearest)}" if nearest else "oomph gpus --catalog"
        super().__init__(what, because=because, attempt=attempt)


class UserCodeError(OomphError):
    """The user's own code raised something; the message names their line."""


class Unreadable(OomphError):
    """A machine or a file that cannot be read."""

    exit_code = EXIT_UNREADABLE


def _again(kind: type[OomphError], fields: dict[str, object]) -> OomphError:
    error = kind.__new__(kind)
    Exception.__init__(error, fields["what"])
    error.__dict__.update(fields)
    return error
