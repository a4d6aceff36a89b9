"""A server function -> its answers, from a process that cannot harm anything of the user's.

    with Sandbox(serve) as sandbox:
        answer = sandbox.ask(request)

`serve` runs in a fork of this process, with everything imported so far. What it and the programs
it starts write, overwrite or delete is visible only to them and is thrown away. The kernel
enforces this; if it refuses to, there is no sandbox unless the user chooses to go without
(`is_unprotected`). docs/sandbox.md lists what is not covered.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oomph.errors import DiedInside, NoSandbox
from oomph.sandbox import inside, linux, unprotected
from oomph.sandbox.conversation import Conversation
from oomph.sandbox.covering import Places, find_places
from oomph.sandbox.inside import Outside, Serve
from oomph.units import GIB

# ---- what the kernel allows -> how well a script is contained, in words --------------------------

NAMESPACED = (
    "the script runs in user, mount, process, network and IPC namespaces of its own: what it "
    "writes goes to a scratch in memory that is thrown away, it has no network, and nothing of "
    "it survives"
)
BY_LANDLOCK = (
    "writes outside a scratch directory are refused by the kernel (Landlock), not redirected: a "
    "script that writes elsewhere fails"
)
BY_PYTHON = (
    "writes outside a scratch directory are refused by a hook in Python, which native code gets "
    "around: an extension that opens files itself can overwrite and delete whatever you can"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """How a script is kept from doing harm. docs/sandbox.md lists what it can still do."""

    kind: Literal["namespaces", "none"]
    why: str


def unprotected_by(error: NoSandbox, has_landlock: bool) -> Protection:
    """Describe the protection without namespaces, exactly as weak as it is."""
    weaker = BY_LANDLOCK if has_landlock else BY_PYTHON
    return Protection(
        kind="none", why=f"{error.because or error.what}. With --unprotected {weaker}"
    )


def refusal(reason: str, number: int | None) -> NoSandbox:
    """Return the error for the kernel's refusal, with the likeliest cause on this machine."""
    options = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    in_docker = f"docker run {options}; or " if is_in_container() else ""
    return NoSandbox(
        "the script cannot be kept from writing to your files here",
        because=f"the kernel refuses it: {reason}{_cause(reason, number)}",
        attempt=f"{in_docker}--unprotected, which protects less (docs/sandbox.md)",
    )


def _cause(reason: str, number: int | None) -> str:
    """Name the setting of this machine that refuses namespaces, as far as known."""
    is_of_unshare = "unshare" in reason
    if is_of_unshare and number == errno.ENOSPC:
        return "; user.max_user_namespaces is used up, or 0"
    if is_of_unshare and _setting("kernel/unprivileged_userns_clone") == "0":
        return "; kernel.unprivileged_userns_clone is 0"
    if number in (errno.ENOSYS, errno.EINVAL):
        return "; Linux 5.12 or later is needed, with user namespaces"
    if number not in (errno.EPERM, errno.EACCES):
        return ""
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "; kernel.apparmor_restrict_unprivileged_userns is 1 (Ubuntu since 23.10)"
    if is_in_container():
        return "; this is a container, whose seccomp profile forbids namespaces by default"
    return ""


def is_in_container() -> bool:
    """Return whether Docker's or Podman's marker file exists."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:  # this kernel does not have it
        return None


# ---- identities in a new user namespace: the same as outside -------------------------------------
# Every user is mapped to themselves, never to root. Root can map everyone, so files of other users
# keep their owners inside. Any other user can map only themselves; all others become `nobody`.


def map_everyone(pid: int) -> bool:
    """Map all users and groups of this namespace. Return whether this process may."""
    try:
        for name in ("uid_map", "gid_map"):
            ranges = (line.split() for line in Path("/proc/self", name).read_text().splitlines())
            same = "".join(f"{first} {first} {count}\n" for first, _, count in ranges)
            Path(f"/proc/{pid}", name).write_text(same)
    except PermissionError:
        return False
    return True


def map_ourselves(pid: int) -> None:
    """Map only this user and group, which every user may do (user_namespaces(7))."""
    Path(f"/proc/{pid}/setgroups").write_text("deny")
    for name, number in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        Path(f"/proc/{pid}", name).write_text(f"{number} {number} 1\n")


# ---- the sandbox ---------------------------------------------------------------------------------

SCRATCH_BYTES = 4 * GIB  # judgement: room for a few checkpoints, and little for most machines
IS_LINUX = sys.platform.startswith("linux")
# Judgement. Mounting takes milliseconds; if it takes longer, a network file system is dead.
START_WITHIN_S = 60.0


class Sandbox:
    """Runs `serve(requests, answers)` in a process that cannot harm anything of the user's.

    Both streams carry frames (conversation.py). A sandbox belongs to the thread that created it:
    when that thread ends, so does everything inside.
    """

    def __init__(
        self,
        serve: Serve,
        *,
        scratch_bytes: int = SCRATCH_BYTES,
        is_unprotected: bool = False,
        devices: tuple[str, ...] = (),
    ) -> None:
        """Start the process. `devices` are the nodes below /dev that it gets besides the usual."""
        self._is_closed = False
        self._output_before = 0  # bytes printed before the last request
        self._exit_code: int | None = None
        self._first: int | None = None
        self._last_signal = signal.SIGKILL
        self.read_only: tuple[str, ...] = ()
        """Directories that the user can write to, and the script cannot."""
        try:
            self._start_walled(serve, scratch_bytes, devices)
        except NoSandbox as error:
            if not is_unprotected or not IS_LINUX:
                raise
            self._is_closed = False
            self._start_unwalled(serve, error, devices)

    def ask(
        self,
        request: bytes,
        *,
        within_s: float | None = None,
        on_output: Callable[[bytes], None] = lambda _: None,
    ) -> bytes:
        """Send a request and wait for its answer. Any failure kills everything inside."""
        if self._is_closed:
            raise DiedInside("the sandbox is closed", because=_in_words(self._exit_code))
        self._talk.output()
        self._output_before = self._talk.num_printed
        try:
            answer = self._talk.receive(request, within_s=within_s, on_output=on_output)
        except BaseException:
            self.close()
            raise
        if answer is None:
            self.close()
            raise self._died()
        return answer

    def output(self) -> str:
        """Return the end of the output inside, both streams in one."""
        return self._talk.output()

    def output_of_request(self) -> str:
        """Return the end of the output inside since the last request."""
        return self._talk.output(self._output_before)

    def close(self) -> None:
        """Kill everything inside, and wait until it is gone along with its files."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._first is not None:
            _kill_namespace(self._first)
            self._first = None
        else:
            os.kill(self._keeper, self._last_signal)
        self._exit_code = _ending(self._keeper)
        self._talk.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_walled(self, serve: Serve, scratch_bytes: int, devices: tuple[str, ...]) -> None:
        if not IS_LINUX:
            raise refusal(f"{sys.platform} has no namespaces", None)
        places = find_places(devices)
        self._fork(lambda outside: inside.keep(serve, outside, places, scratch_bytes))
        with self._closed_on_failure():
            self._next_report()
            self._talk.send(self._map_identities())
            self._first = os.pidfd_open(self._next_report()["pid"])
            self._talk.send(inside.BEGIN)
            ready = self._next_report()
            _check_nothing_left(places, ready["probe"])
            self._talk.send(inside.GO)
        self.read_only = tuple(ready["read_only"])
        self.protection = Protection(kind="namespaces", why=NAMESPACED)

    def _start_unwalled(self, serve: Serve, why: NoSandbox, devices: tuple[str, ...]) -> None:
        us = os.getpid()
        self._last_signal = signal.SIGTERM  # its keeper has to clean up
        self._fork(lambda outside: unprotected.watch(serve, outside, us, devices))
        with self._closed_on_failure():
            has_landlock = self._next_report()["has_landlock"]
            self._talk.send(inside.GO)
        self.protection = unprotected_by(why, has_landlock)

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _fork(self, keep: Callable[[Outside], int]) -> None:
        us = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pipes = [os.pipe() for _ in range(3)]
        (read_requests, requests), (answers, write_answers), (output, write_output) = pipes
        with warnings.catch_warnings():
            # Python 3.12 warns about a fork in a process with threads. The child needs none of
            # them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._keeper = os.fork()
        ends = (read_requests, write_answers, write_output)
        if self._keeper == 0:
            inside.with_exit(lambda: keep(inside.begin(ends, us, self._last_signal)))
        for theirs in ends:
            os.close(theirs)
        self._talk = Conversation(requests=requests, answers=answers, output=output)

    def _next_report(self) -> dict[str, Any]:
        """Return what the inside reports while it starts. Raises NoSandbox if it was refused."""
        frame = self._talk.receive(within_s=START_WITHIN_S)
        if frame is None:
            self.close()
            raise self._died()
        report: dict[str, Any] = json.loads(frame)
        if "refused" in report:
            raise refusal(report["refused"], report["errno"])
        return report

    def _map_identities(self) -> bytes:
        try:
            if map_everyone(self._keeper):
                return inside.ALL_IDS
            map_ourselves(self._keeper)
        except OSError as error:
            raise refusal(str(error), error.errno) from error
        return inside.ONE_ID

    def _died(self) -> DiedInside:
        printed = self.output().strip().splitlines()
        last_output = f"; its last output: {printed[-1][:500]}" if printed else ""
        return DiedInside(
            "the process inside the sandbox ended without an answer",
            because=f"{_in_words(self._exit_code)}{last_output}",
            attempt="running the script by itself",
        )


def protection() -> Protection:
    """Find out what protection a sandbox would have here, by creating one."""
    try:
        with Sandbox(lambda *_: None) as sandbox:
            return sandbox.protection
    except NoSandbox as error:
        return unprotected_by(error, linux.version() > 0)


def _check_nothing_left(places: Places, probe: str) -> None:
    """Raise if a probe file that was written inside exists outside."""
    left = [path for p in places.probed() if os.path.lexists(path := f"{p}/{probe}")]
    for path in left:
        os.unlink(path)  # noqa: PTH108 - our own probe
    if left:
        raise NoSandbox(
            "the sandbox leaked",
            because=f"a file that was written inside appeared outside: {left[0]}",
            attempt="reporting this bug: it must not happen",
        )


def _kill_namespace(first: int) -> None:
    """Kill process 1 and wait: it ends only after all other processes of its namespace."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(first, signal.SIGKILL)
    select.select([first], [], [])
    os.close(first)


def _ending(child: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:  # other code in this process has already waited for it
        return None


def _in_words(code: int | None) -> str:
    """Describe how a process ended.

    >>> _in_words(3), _in_words(137), _in_words(-9)
    ('it ended with exit code 3', 'it was killed by signal 9', 'it was killed by signal 9')
    """
    if code is None:
        return "how it ended is unknown"
    if code < 0 or code > 128:
        return f"it was killed by signal {-code if code < 0 else code - 128}"
    return f"it ended with exit code {code}"
