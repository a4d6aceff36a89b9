"""How a sandbox can fail, each with its own name.

UsageError
`-- NoSandbox       it cannot be made here, or it does not hold          exit 2
UserCodeError
|-- DiedInside      the process inside ended without an answer           exit 2
|-- OutOfTime       it did not answer within the time given, was killed  exit 2
`-- SpokeNonsense   its answer is no answer, or larger than allowed      exit 2
"""

from __future__ import annotations

from oomph.errors import UsageError, UserCodeError


class NoSandbox(UsageError):
    """A sandbox cannot be made here, or a write was seen to leave it."""


class DiedInside(UserCodeError):
    """The process inside ended without an answer."""


class OutOfTime(UserCodeError):
    """No answer within the time given; everything inside was killed."""


class SpokeNonsense(UserCodeError):
    """What came back is no answer, or larger than an answer may be."""
