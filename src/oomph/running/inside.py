"""A function that serves -> the same, in a process that can harm nobody. Runs in the child.

Three processes. The *keeper* makes the namespaces and waits. The *first* is process 1 of the
new process namespace: it covers the files, drops its capabilities and collects the dead; when
it ends, the kernel kills whatever is left in the namespace. The *server* runs the user's code.
Each dies with the one that started it. What they tell the outside are frames of JSON.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from oomph.running import linux
from oomph.running.covering import Cover
from oomph.running.frames import read_frame, write_frame
from oomph.running.furnishing import furnish, make_terminal
from oomph.running.offline import go_offline
from oomph.running.places import Places, everything, to_cover

Serve = Callable[[BinaryIO, BinaryIO], None]

NAMESPACES = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
)
# Without them root could not write where others own the directory, as a container's root does in
# one of the host. They pass no read-only mount; every other capability is dropped.
ROOTS_FILE_CAPABILITIES = frozenset(
    {linux.CAP_CHOWN, linux.CAP_DAC_OVERRIDE, linux.CAP_FOWNER, linux.CAP_FSETID}
)
ALL_IDS, ONE_ID, BEGIN, GO = b"all ids", b"one id", b"begin", b"go"
PRIVATE_TEMPORARY = "/dev/shm"  # noqa: S108 - inside, it is a directory of our own


@dataclass(frozen=True, slots=True)
class Ends:
    """The inside's ends of the pipes."""

    requests: int
    answers: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the child is forked for."""

    serve: Serve
    ends: Ends
    parent: int
    places: Places
    scratch_bytes: int


class Outside:
    """The one who asked, as seen from inside."""

    def __init__(self, ends: Ends) -> None:
        self.requests: BinaryIO = os.fdopen(ends.requests, "rb")
        self.answers: BinaryIO = os.fdopen(ends.answers, "wb")

    def tell(self, **news: object) -> None:
        write_frame(self.answers, json.dumps(news).encode())

    def wait_for(self, *words: bytes) -> bytes:
        heard = read_frame(self.requests)
        if heard not in words:  # the outside is gone, or thinks better of it
            os._exit(1)
        return heard


def keep(task: Task) -> NoReturn:
    """Be the keeper, from the fork to the end."""
    with_exit(lambda: _keep(task))


def with_exit(work: Callable[[], int]) -> NoReturn:
    """End with the code that `work` returns, and never with anything of the parent's."""
    code = 1
    try:
        code = _finish(work)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _finish(work: Callable[[], int]) -> int:
    """Do as Python does at the end of a program: tell what was raised, and take exit's word."""
    try:
        return work()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - it has nowhere to go but to the output
        traceback.print_exc()
    return 1


def begin(ends: Ends, parent: int, last_signal: int) -> Outside:
    """Be a process of our own: nothing of the parent's stays open, and none outlives it."""
    linux.die_with_parent(last_signal)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    # Where memory runs out, the kernel takes the script and not the one who asked.
    Path("/proc/self/oom_score_adj").write_text("1000")
    _forget_signals()
    _let_go_of_files(ends)
    return Outside(ends)


def _keep(task: Task) -> int:
    outside = begin(task.ends, task.parent, signal.SIGKILL)
    try:
        covered = to_cover(task.places)
        linux.unshare(NAMESPACES)
    except OSError as error:
        outside.tell(refused=str(error), errno=error.errno)
        return 1
    outside.tell(stage="unshared")
    is_root = outside.wait_for(ALL_IDS, ONE_ID) == ALL_IDS
    is_kept, keeps = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(keeps)
        with_exit(lambda: _be_first(task, outside, is_kept, everything() if is_root else covered))
    outside.tell(stage="forked", pid=first)
    return ending(first)


def ending(child: int) -> int:
    """How a child ended, as an exit code: a signal n is 128 + n, as in a shell."""
    return _as_in_a_shell(os.waitpid(child, 0)[1])


def _as_in_a_shell(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _be_first(task: Task, outside: Outside, is_kept: int, covered: tuple[str, ...]) -> int:
    linux.die_with_parent()
    # The keeper's number means nothing in here; that its end of this pipe is open means it lives.
    if select.select([is_kept], [], [], 0)[0]:
        return 1
    os.close(is_kept)
    outside.wait_for(BEGIN)
    try:
        is_last = linux.forbid_namespaces()
        read_only = _wall_in(task, covered)
    except OSError as error:
        outside.tell(refused=str(error), errno=error.errno)
        return 1
    linux.refuse_to_be_traced()  # a script that attached to us would hold up its own answer
    terminal = make_terminal()
    server = os.fork()
    if server == 0:
        with_exit(lambda: _be_server(task, outside, terminal, read_only, is_last))
    return _collect(server)


def _wall_in(task: Task, covered: tuple[str, ...]) -> list[str]:
    """Everything that needs privileges, and then without them. Returns what stayed read-only."""
    cover = Cover(task.places, task.scratch_bytes)
    cover.directories(covered)
    cover.finish()
    os.chdir(task.places.cwd)
    linux.bring_up_loopback()
    linux.drop_capabilities(ROOTS_FILE_CAPABILITIES if os.geteuid() == 0 else frozenset())
    return cover.read_only


def _collect(server: int) -> int:
    """Reap everyone; end when the server has ended. A script that stops it gains nothing."""
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            if pid == server:
                os.kill(server, signal.SIGCONT)
        elif pid == server:
            return _as_in_a_shell(status)


def _be_server(
    task: Task, outside: Outside, terminal: int, read_only: list[str], is_last: bool
) -> int:
    furnish(terminal)
    places = task.places
    name = f".oomph-{secrets.token_hex(8)}"
    unwritable = [place for place in places.probed() if not _write_probe(place, name)]
    is_temporary_missing = places.temporary in unwritable
    go_offline(PRIVATE_TEMPORARY if is_temporary_missing else None)
    outside.tell(
        stage="ready", probe=name, read_only=sorted({*unwritable, *read_only}), is_last=is_last
    )
    outside.wait_for(GO)
    for place in set(places.probed()) - set(unwritable):
        os.unlink(f"{place}/{name}")  # noqa: PTH108
    task.serve(outside.requests, outside.answers)
    return 0


def _write_probe(place: str, name: str) -> bool:
    try:
        descriptor = os.open(f"{place}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:  # read-only: then nothing can leave that way either
        return False
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"a probe of oomph's sandbox")
    return True


def _forget_signals() -> None:
    """Handlers and blocked signals of the parent mean nothing here."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        if signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _let_go_of_files(ends: Ends) -> None:
    """Nothing that the parent has open can be written to, nor a directory of it be walked.

    Descriptors are not closed but lead to /dev/null: objects of Python still own their numbers.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    kept = {ends.requests, ends.answers, ends.output, nothing}
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor not in kept:
            os.dup2(nothing, descriptor, inheritable=descriptor < 3)
    for descriptor in (1, 2):
        os.dup2(ends.output, descriptor)
