"""A server function -> the same function in a process that can do no harm. Runs in the child.

There are three processes. The *keeper* creates the namespaces and waits. The *first* is process 1
of the new process namespace: it covers the files, drops its capabilities and reaps dead processes.
When it ends, the kernel kills whatever is left in the namespace. The *server* runs the user's code.
Each dies with its parent. They report to the outside in frames of JSON.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import secrets
import select
import signal
import struct
import sys
import tempfile
import termios
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn

from oomph.sandbox import linux
from oomph.sandbox.conversation import read_frame, write_frame
from oomph.sandbox.covering import Cover, Places, everything, to_cover

# ---- what a script expects: a terminal, streams, Ctrl-C, no network ------------------------------

ROWS_AND_COLUMNS = (24, 80)
# Each one ends one read of the terminal, so a script that asks for input gets end-of-file.
NUM_ENDS_OF_INPUT = 1000  # judgement


def furnish(terminal: int) -> None:
    """Set up what the user's code expects: a silent terminal, streams, no core files."""
    os.dup2(terminal, 0)
    os.close(terminal)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # 1, not 0: then the kernel does not start a core handler outside either (fs/coredump.c).
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if hard != 0:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


def make_terminal() -> int:
    """Return a terminal of 80 columns without input. Its other end stays open in this process."""
    try:
        ours, theirs = os.openpty()
    except OSError:  # no pseudo-terminals here
        return os.open(os.devnull, os.O_RDONLY)
    modes = termios.tcgetattr(theirs)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *ROWS_AND_COLUMNS, 0, 0))
    end_of_input = bytes(modes[6][termios.VEOF])
    os.write(ours, end_of_input * NUM_ENDS_OF_INPUT)
    return theirs


# These keep libraries from waiting for a network that is not there. The network namespace blocks
# the network; these only save the time of trying. Each variable is documented by the library in
# its name.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "1",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "DVC_NO_ANALYTICS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# These lead to services outside: a tracking server, or the agent with the user's keys.
UNSET = ("MLFLOW_TRACKING_URI", "SSH_AUTH_SOCK", "DOCKER_HOST", "DBUS_SESSION_BUS_ADDRESS")


def go_offline(temporary: str | None = None) -> None:
    """Change the environment of the child inside. Never call it in the user's process."""
    os.environ.update(OFFLINE)
    for name in UNSET:
        os.environ.pop(name, None)
    sys.dont_write_bytecode = True
    if temporary is not None:
        os.environ["TMPDIR"] = temporary
        tempfile.tempdir = None  # it was determined outside


# ---- the three processes -------------------------------------------------------------------------

Serve = Callable[[BinaryIO, BinaryIO], None]

NAMESPACES = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
)
# With these, root can write to directories of other owners, as a container's root does in a host
# directory. They do not override read-only mounts. Every other capability is dropped.
ROOTS_FILE_CAPABILITIES = frozenset(
    {linux.CAP_CHOWN, linux.CAP_DAC_OVERRIDE, linux.CAP_FOWNER, linux.CAP_FSETID}
)
ALL_IDS, ONE_ID, BEGIN, GO = b"all ids", b"one id", b"begin", b"go"
PRIVATE_TEMPORARY = "/dev/shm"  # noqa: S108 - inside, this is a private directory


class Outside:
    """The process that started the sandbox, as seen from inside."""

    def __init__(self, requests: int, answers: int) -> None:
        self.requests: BinaryIO = os.fdopen(requests, "rb")
        self.answers: BinaryIO = os.fdopen(answers, "wb")

    def report(self, **report: object) -> None:
        write_frame(self.answers, json.dumps(report).encode())

    def wait_for(self, *words: bytes) -> bytes:
        word = read_frame(self.requests)
        if word not in words:  # the outside is gone, or gave up
            os._exit(1)
        return word


def with_exit(work: Callable[[], int]) -> NoReturn:
    """Exit with the code that `work` returns, without running any of the parent's clean-up."""
    code = 1
    try:
        code = _finish(work)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _finish(work: Callable[[], int]) -> int:
    """Run `work` and end like a Python program: print an exception, honour an exit code."""
    try:
        return work()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the output is the only place to report it
        traceback.print_exc()
    return 1


def begin(ends: tuple[int, int, int], parent: int, last_signal: int) -> Outside:
    """Detach from the parent's files and signals, and die with the parent.

    `ends` are the pipe ends of this process: requests to read, answers and output to write.
    """
    linux.die_with_parent(last_signal)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    # If memory runs out, the kernel should kill the script and not the process that asked.
    Path("/proc/self/oom_score_adj").write_text("1000")
    _forget_signals()
    _let_go_of_files(ends)
    return Outside(*ends[:2])


def keep(serve: Serve, outside: Outside, places: Places, scratch_bytes: int) -> int:
    """Run the keeper, until the first process ends. Return its exit code."""
    try:
        covered = to_cover(places)
        linux.unshare(NAMESPACES)
    except OSError as error:
        outside.report(refused=str(error), errno=error.errno)
        return 1
    outside.report()
    is_root = outside.wait_for(ALL_IDS, ONE_ID) == ALL_IDS
    is_kept, keeps = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(keeps)
        covered = everything() if is_root else covered
        with_exit(lambda: _be_first(serve, outside, places, scratch_bytes, covered, is_kept))
    outside.report(pid=first)
    return ending(first)


def ending(child: int) -> int:
    """Return a child's exit code; for signal n it is 128 + n, as in a shell."""
    return _as_in_a_shell(os.waitpid(child, 0)[1])


def _as_in_a_shell(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _be_first(
    serve: Serve,
    outside: Outside,
    places: Places,
    scratch_bytes: int,
    covered: tuple[str, ...],
    is_kept: int,
) -> int:
    linux.die_with_parent()
    # The keeper's pid means nothing in here, but its open end of this pipe shows that it lives.
    if select.select([is_kept], [], [], 0)[0]:
        return 1
    os.close(is_kept)
    outside.wait_for(BEGIN)
    try:
        linux.forbid_namespaces()
        read_only = _wall_in(places, scratch_bytes, covered)
    except OSError as error:
        outside.report(refused=str(error), errno=error.errno)
        return 1
    linux.refuse_to_be_traced()  # a script that attached to us would block its own answer
    terminal = make_terminal()
    server = os.fork()
    if server == 0:
        with_exit(lambda: _be_server(serve, outside, places, terminal, read_only))
    return _collect(server)


def _wall_in(places: Places, scratch_bytes: int, covered: tuple[str, ...]) -> list[str]:
    """Do everything that needs privileges, then drop them. Return what stayed read-only."""
    cover = Cover(places, scratch_bytes)
    cover.directories(covered)
    cover.finish()
    os.chdir(places.cwd)
    linux.bring_up_loopback()
    linux.drop_capabilities(ROOTS_FILE_CAPABILITIES if os.geteuid() == 0 else frozenset())
    return cover.read_only


def _collect(server: int) -> int:
    """Reap all processes until the server ends. If a script stops the server, continue it."""
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            if pid == server:
                os.kill(server, signal.SIGCONT)
        elif pid == server:
            return _as_in_a_shell(status)


def _be_server(
    serve: Serve, outside: Outside, places: Places, terminal: int, read_only: list[str]
) -> int:
    furnish(terminal)
    name = f".oomph-{secrets.token_hex(8)}"
    unwritable = [place for place in places.probed() if not _write_probe(place, name)]
    is_temporary_missing = places.temporary in unwritable
    go_offline(PRIVATE_TEMPORARY if is_temporary_missing else None)
    outside.report(probe=name, read_only=sorted({*unwritable, *read_only}))
    outside.wait_for(GO)
    for place in set(places.probed()) - set(unwritable):
        os.unlink(f"{place}/{name}")  # noqa: PTH108
    serve(outside.requests, outside.answers)
    return 0


def _write_probe(place: str, name: str) -> bool:
    try:
        descriptor = os.open(f"{place}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:  # read-only, so nothing can leave that way either
        return False
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"a probe of oomph's sandbox")
    return True


def _forget_signals() -> None:
    """Reset the parent's signal handlers and blocked signals."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        if signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _let_go_of_files(ends: tuple[int, int, int]) -> None:
    """Detach from the parent's open files and directories.

    Descriptors are not closed but redirected to /dev/null, because Python objects still own their
    numbers.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    kept = {*ends, nothing}
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor not in kept:
            os.dup2(nothing, descriptor, inheritable=descriptor < 3)
    for descriptor in (1, 2):
        os.dup2(ends[2], descriptor)
