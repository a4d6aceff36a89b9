"""A command -> its exit code: its input, output and signals are the user's own.

The child shares our terminal and process group, so Ctrl-C reaches it without us; we only wait
until it has ended. What is sent to us alone (SIGTERM by a scheduler, SIGHUP) is passed on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from oomph.errors import UsageError

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SIGNALLED = 128  # shells report a death by signal as 128 + its number


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end, and return its exit code as a shell would."""
    try:
        child = subprocess.Popen(command, env=environment)
    except (FileNotFoundError, PermissionError) as error:
        raise UsageError(
            f"{command[0]!r} cannot be started",
            because=os.strerror(error.errno or 0),
            attempt="oomph run --emulate 2GiB -- python train.py",
        ) from None
    with _signals_of(child):
        code = child.wait()
    return code if code >= 0 else _SIGNALLED - code


@contextlib.contextmanager
def _signals_of(child: subprocess.Popen[bytes]) -> Iterator[None]:
    def pass_on(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
