"""A command -> how it ended: run it as if oomph were not in between, while it is watched.

The command shares our terminal, process group, standard streams and open files; we never read or
write them while it runs. It starts with the signal mask and the dispositions that we were started
with. What the terminal sends (Ctrl-C, Ctrl-Z) reaches it directly; a signal that a program sends to
us alone is passed on. When it stops we stop; when it dies by a signal we die by the same one.

SIGKILL to us does not touch the command: it runs on, and what was written stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from oomph.errors import UsageError
from oomph.records.run import Ending, Event, GpuSpan, WatchedGpu
from oomph.units import format_bytes

# ---- the probe has seen enough -> end the command: politely, then firmly ----
# First as Ctrl-C would, to every process of the run, so that a script that saves on
# KeyboardInterrupt has time to. Then SIGTERM, then SIGKILL.

# Judgement: writing a checkpoint of tens of gigabytes takes about 30 s; SIGTERM handlers are quick.
_GRACES_S = ((signal.SIGINT, 30.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))


class Stopping:
    """The signals that end the command: one thread requests the end, another sends them."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self.pids = pids
        self._wanted = threading.Event()
        self._step = 0
        self._next: float | None = None

    def want(self) -> None:
        """Request the end, from any thread."""
        self._wanted.set()

    @property
    def is_wanted(self) -> bool:
        return self._wanted.is_set()

    @property
    def has_begun(self) -> bool:
        return self._step > 0

    def next_signal(self, now: float) -> signal.Signals | None:
        """Return the signal to send now, if any."""
        if not self._wanted.is_set() or (self._next is not None and now < self._next):
            return None
        number, grace_s = _GRACES_S[min(self._step, len(_GRACES_S) - 1)]
        self._step += 1
        self._next = now + grace_s
        return number


# Signals that end, stop or inform a program. SIGKILL and SIGSTOP cannot be passed on, and a signal
# raised by a fault (SIGSEGV) is our own.
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
# Stops that a shell must see. SIGSTOP and its SIGCONT go to the command alone: if we stopped
# too, nothing would wake us.
_BY_THE_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_CHANGES = os.WEXITED | os.WSTOPPED | os.WCONTINUED
_TICK_S = 1.0  # signals and the command's end wake it earlier; what it polls for takes seconds
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as in shells, env and timeout

# Called when the command halts or resumes, with the name of the signal.
OnHalt = Callable[[Literal["halted", "resumed"], str], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: with a code, or by a signal."""

    code: int | None
    signal: int | None = None
    was_stopped: bool = False  # by us, because the probe had seen enough

    @property
    def exit_code(self) -> int:
        """Return the exit code as a shell reports it."""
        return 128 + self.signal if self.signal is not None else self.code or 0


class NotStarted(UsageError):
    """The command could not be started; the exit code is what a shell would report."""

    def __init__(self, command: str, error: OSError) -> None:
        self.exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        is_missing = isinstance(error, FileNotFoundError)
        super().__init__(
            f"{command!r:.200} cannot be started",
            because=error.strerror,
            attempt="the command as a shell would find it, such as python train.py"
            if is_missing
            else f"python {command:.200}, if it is a script",
        )


@contextlib.contextmanager
def held_signals() -> Iterator[set[signal.Signals]]:
    """Block signals in this thread and the threads it starts, until they are fetched.

    Yield the previous mask, for the command. Enter before starting threads.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        # A signal that arrived after the command's end was meant for the command.
        while signal.sigtimedwait(_WAITED_FOR, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(
    command: list[str], environment: Mapping[str, str], mask: set[signal.Signals]
) -> subprocess.Popen[bytes]:
    """Start the command with all files that we inherited (`cat <(...)`), and none of our own.

    posix_spawn is not used: glibc's version leaves two signals ignored that otherwise are not.
    """

    def restore_mask() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        return subprocess.Popen(command, env=environment, close_fds=False, preexec_fn=restore_mask)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        # A script without a shebang line: run it as shells and execvp do.
        path = shutil.which(command[0]) or command[0]
        return _spawn(["/bin/sh", path, *command[1:]], environment, mask)


class Child:
    """A running command."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], mask: set[signal.Signals]
    ) -> None:
        try:
            self._process = _spawn(list(command), environment, mask)
        except OSError as error:
            raise NotStarted(command[0], error) from error
        self.pid = self._process.pid
        self._is_halted = False
        self._on_halt: OnHalt = lambda *_: None

    def wait(self, stopping: Stopping, on_halt: OnHalt | None = None) -> Ended:
        """Wait until it ends.

        `stopping` is asked regularly whether to end it; `on_halt` is called when the command halts
        (by Ctrl-Z, for example) and when it resumes.
        """
        self._on_halt = on_halt or self._on_halt
        while True:
            info = signal.sigtimedwait(_WAITED_FOR, _TICK_S)
            if info is not None and info.si_signo != signal.SIGCHLD:
                self._pass_on(info, stopping.pids())
            ended = self._look()
            if ended is not None:
                self._process.returncode = ended.exit_code  # no other code needs to wait for it
                return Ended(ended.code, ended.signal, stopping.has_begun)
            number = stopping.next_signal(time.monotonic())
            if number is not None:
                for pid in stopping.pids() or (self.pid,):
                    _send(pid, number)

    def _pass_on(self, info: signal.struct_siginfo, own_pids: Sequence[int]) -> None:
        """Pass on a signal, unless the terminal or the command itself has sent it to the group."""
        is_own = info.si_pid == self.pid or info.si_pid in own_pids
        if info.si_code <= _FROM_A_PROGRAM and not is_own:
            _send(self.pid, info.si_signo)

    def _look(self) -> Ended | None:
        while True:
            found = os.waitid(os.P_PID, self.pid, _CHANGES | os.WNOHANG)
            if found is None:
                return None
            if found.si_code == os.CLD_EXITED:
                self._note(False, signal.SIGCONT)  # it has resumed, even if only just before
                return Ended(found.si_status)
            if found.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
                return Ended(None, found.si_status)
            self._note(found.si_code == os.CLD_STOPPED, found.si_status)
            if found.si_code == os.CLD_STOPPED and found.si_status in _BY_THE_TERMINAL:
                self._stop_with_it()

    def _stop_with_it(self) -> None:
        """Stop too, so that the shell sees the job stop; when we are woken, wake the command."""
        os.kill(os.getpid(), signal.SIGSTOP)
        _send(self.pid, signal.SIGCONT)
        self._note(False, signal.SIGCONT)

    def _note(self, is_halted: bool, number: int) -> None:
        if is_halted != self._is_halted:
            self._is_halted = is_halted
            self._on_halt("halted" if is_halted else "resumed", signal.Signals(number).name)


def _send(pid: int, number: int) -> None:
    # It may have ended a moment ago, or run as another user, whom we may not signal.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def end_like(ended: Ended) -> int:
    """End this process as the command ended; return the exit code if there was no signal."""
    if ended.was_stopped:
        return 0
    if ended.signal is None:
        return ended.exit_code
    import resource

    # The command has already dumped its core; a second dump of ours would hide it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has only the default disposition
        signal.signal(ended.signal, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended.signal})
    os.kill(os.getpid(), ended.signal)
    return ended.exit_code  # the signal does not end a process: report it as a shell does


# ---- how a command ended and what was seen before -> did it run out of memory? ----
# An error from the script itself is certain. So is the kernel's count of processes killed because
# host memory ran out. A GPU that was nearly full when the command failed makes it likely, and the
# message says "probably".

# Judgement: torch asks the driver for whole segments; when one fails, mostly less than 5% is free.
_NEARLY_FULL = 0.95
RECENT_S = 30.0  # a traceback and interpreter shutdown with large tensors take seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known when a command has ended."""

    at_s: float
    gpus: Sequence[WatchedGpu]
    recent: Sequence[GpuSpan]  # from the last seconds
    says_out_of_memory: bool  # reported by the script itself
    killed_in_group: bool  # by the kernel, because host memory ran out
    killed_on_machine: bool


def judge(ended: Ended, evidence: Evidence) -> tuple[Ending, Event | None]:
    """Return how it ended and, if something about that is only likely, an event that says so."""
    is_failure = not ended.was_stopped and ended.exit_code != 0
    out_of_memory, event = _out_of_memory(ended, evidence) if is_failure else (None, None)
    ending = Ending(
        at_s=evidence.at_s,
        exit_code=ended.exit_code,
        signal=None if ended.signal is None else signal.Signals(ended.signal).name,
        out_of_memory=out_of_memory,
    )
    return ending, event


def _out_of_memory(
    ended: Ended, evidence: Evidence
) -> tuple[Literal["gpu", "host"] | None, Event | None]:
    was_killed = ended.exit_code == 128 + signal.SIGKILL
    if evidence.killed_in_group:
        return "host", None
    if evidence.killed_on_machine and was_killed:
        text = "probably killed by the kernel, which ran out of host memory at that time"
        return "host", Event(at_s=evidence.at_s, kind="warning", text=text)
    if evidence.says_out_of_memory:
        return "gpu", None
    full = _nearly_full(evidence)
    if full is None or was_killed:
        return None, None
    return "gpu", full


def _nearly_full(evidence: Evidence) -> Event | None:
    for span in reversed(evidence.recent):
        gpu = evidence.gpus[span.gpu]
        most_bytes, total_bytes = span.most_used_bytes, gpu.total_bytes
        if not gpu.is_used or most_bytes is None or not total_bytes:
            continue
        if most_bytes >= _NEARLY_FULL * total_bytes:
            text = (
                f"probably out of GPU memory: {format_bytes(most_bytes)} of"
                f" {format_bytes(total_bytes)} were taken {evidence.at_s - span.ended_s:.0f} s"
                " before the command failed"
            )
            return Event(at_s=evidence.at_s, kind="warning", text=text, gpu=span.gpu)
    return None
