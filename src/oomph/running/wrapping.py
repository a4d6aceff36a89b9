"""A command -> its end, as if nobody stood in between, while somebody watches.

The command shares our terminal, process group, standard streams and open files; we never read or
write them while it runs. It starts with the signal mask and the dispositions that we were started
with. What the terminal sends (Ctrl-C, Ctrl-Z) reaches it without us; what a program sends to us
alone is passed on. When it stops we stop, when it dies by a signal we die by the same one.

Killing us with SIGKILL does not touch the command: it runs on, and what was written stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from oomph.errors import UsageError
from oomph.running.stopping import Stopping

# What ends, stops or tells a program something. SIGKILL and SIGSTOP cannot be passed on, and what
# a fault raises (SIGSEGV) is our own.
_PASSED_ON = frozenset(
    {
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGWINCH,
        signal.SIGCONT,
        signal.SIGTSTP,
    }
)
_WAITED_FOR = _PASSED_ON | {signal.SIGCHLD}
_FROM_A_PROGRAM = 0  # si_code: kill is 0, sigqueue and tgkill are below; the kernel's are above
# A stop that a shell must see. SIGSTOP is sent to the command alone, and so is its SIGCONT: had
# we stopped with it, nobody would wake us.
_BY_THE_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_CHANGES = os.WEXITED | os.WSTOPPED | os.WCONTINUED
_TICK_S = 1.0  # signals, and the end, wake it up; what it looks for by itself takes seconds
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as shells, env and timeout have it

# What it does not end of: told with the name of the signal.
Tell = Callable[[Literal["halted", "resumed"], str], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: with a code, or by a signal."""

    code: int | None
    signal: int | None = None
    was_stopped: bool = False  # by us, because what was asked for had been seen

    @property
    def exit_code(self) -> int:
        """As a shell reports it."""
        return 128 + self.signal if self.signal is not None else self.code or 0


class NotStarted(UsageError):
    """The command could not be started; the exit code is what a shell would report."""

    def __init__(self, command: str, error: OSError) -> None:
        self.exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        super().__init__(f"{command!r:.200} cannot be started", because=error.strerror)


@contextlib.contextmanager
def held_signals() -> Iterator[set[signal.Signals]]:
    """Signals wait until they are fetched, in this thread and those it starts; yields the mask of
    before, for the command. Enter before threads are started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        # What came after the command had ended was for the command.
        while signal.sigtimedwait(_WAITED_FOR, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(
    command: list[str], environment: Mapping[str, str], mask: set[signal.Signals]
) -> subprocess.Popen[bytes]:
    """With every file that we were given (`cat <(...)`), and none of ours.

    Not by posix_spawn: glibc's leaves two signals ignored that are not without us.
    """

    def restore_mask() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        return subprocess.Popen(command, env=environment, close_fds=False, preexec_fn=restore_mask)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        # A script without a first line that names its shell: run it as shells and execvp do.
        path = shutil.which(command[0]) or command[0]
        return _spawn(["/bin/sh", path, *command[1:]], environment, mask)


class Child:
    """A command that was started."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], mask: set[signal.Signals]
    ) -> None:
        try:
            self._process = _spawn(list(command), environment, mask)
        except OSError as error:
            raise NotStarted(command[0], error) from error
        self.pid = self._process.pid
        self._is_halted = False
        self._tell: Tell = lambda *_: None

    def wait(self, stopping: Stopping, tell: Tell | None = None) -> Ended:
        """Until it ends. `stopping` is asked now and then whether it is to be ended; `tell` hears
        when the command stands still, as by Ctrl-Z, and when it goes on."""
        self._tell = tell or self._tell
        while True:
            info = signal.sigtimedwait(_WAITED_FOR, _TICK_S)
            if info is not None and info.si_signo != signal.SIGCHLD:
                self._pass_on(info, stopping.pids())
            ended = self._look()
            if ended is not None:
                self._process.returncode = ended.exit_code  # nobody else is to wait for it
                return Ended(ended.code, ended.signal, stopping.has_begun)
            number = stopping.next_signal(time.monotonic())
            if number is not None:
                for pid in stopping.pids() or (self.pid,):
                    _send(pid, number)

    def _pass_on(self, info: signal.struct_siginfo, own_pids: Sequence[int]) -> None:
        """The terminal, and a command that signals its whole group, have reached it already."""
        is_own = info.si_pid == self.pid or info.si_pid in own_pids
        if info.si_code <= _FROM_A_PROGRAM and not is_own:
            _send(self.pid, info.si_signo)

    def _look(self) -> Ended | None:
        while True:
            found = os.waitid(os.P_PID, self.pid, _CHANGES | os.WNOHANG)
            if found is None:
                return None
            if found.si_code == os.CLD_EXITED:
                self._note(False, signal.SIGCONT)  # it has gone on, however shortly before
                return Ended(found.si_status)
            if found.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
                return Ended(None, found.si_status)
            self._note(found.si_code == os.CLD_STOPPED, found.si_status)
            if found.si_code == os.CLD_STOPPED and found.si_status in _BY_THE_TERMINAL:
                self._stop_with_it()

    def _stop_with_it(self) -> None:
        """So that the shell sees the job stop; whoever wakes us wakes the command."""
        os.kill(os.getpid(), signal.SIGSTOP)
        _send(self.pid, signal.SIGCONT)
        self._note(False, signal.SIGCONT)

    def _note(self, is_halted: bool, number: int) -> None:
        if is_halted != self._is_halted:
            self._is_halted = is_halted
            self._tell("halted" if is_halted else "resumed", signal.Signals(number).name)


def _send(pid: int, number: int) -> None:
    # It may have ended a moment ago, or, where its program is another user's, not be ours to tell.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def end_like(ended: Ended) -> int:
    """End this process as the command ended; returns the exit code where that is one."""
    if ended.was_stopped:
        return 0
    if ended.signal is None:
        return ended.exit_code
    import resource

    # The command has left its core already; a second one of ours would hide it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no other disposition to begin with
        signal.signal(ended.signal, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended.signal})
    os.kill(os.getpid(), ended.signal)
    return ended.exit_code  # a signal that ends nothing by itself: then as a shell tells it
