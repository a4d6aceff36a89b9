"""A function that serves -> its answers, from a place where it can harm nothing of the user's.

    with Sandbox(serve) as sandbox:
        answer = sandbox.ask(request)

`serve` runs in a fork of this process: it has whatever was imported before. What it and the
programs that it starts write, overwrite or delete is seen by them alone and is thrown away. The
wall is the kernel's; where the kernel refuses one, there is no sandbox unless the user wants to go
without (`is_unprotected`). What is not covered stands in docs/sandbox.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

from oomph.running import inside, landlock, unprotected
from oomph.running.conversation import Conversation
from oomph.running.failures import DiedInside, NoSandbox
from oomph.running.identities import map_everyone, map_ourselves
from oomph.running.inside import Ends, Serve
from oomph.running.places import Places, find_places
from oomph.running.protection import (
    LIMITS,
    NAMESPACED,
    NESTED,
    Protection,
    refusal,
    unprotected_by,
)
from oomph.units import GIB

SCRATCH_BYTES = 4 * GIB
IS_LINUX = sys.platform.startswith("linux")
# Mounting takes milliseconds; longer is a dead network file system.
START_WITHIN_S = 60.0


class Sandbox:
    """Runs `serve(requests, answers)` where nothing of the user's can be harmed.

    Both streams carry frames (frames.py). A sandbox belongs to the thread that made it: when
    that one ends, so does everything inside.
    """

    def __init__(
        self, serve: Serve, *, scratch_bytes: int = SCRATCH_BYTES, is_unprotected: bool = False
    ) -> None:
        self._is_closed = False
        self._asked_at = 0  # bytes that were printed before the last request
        self._exit_code: int | None = None
        self._first: int | None = None
        self._last_signal = signal.SIGKILL
        self.read_only: tuple[str, ...] = ()
        """Directories that the user can write to, and the script cannot."""
        try:
            self._start_walled(serve, scratch_bytes)
        except NoSandbox as error:
            if not is_unprotected or not IS_LINUX:
                raise
            self._is_closed = False
            self._start_unwalled(serve, error)

    def ask(
        self,
        request: bytes,
        *,
        within_s: float | None = None,
        on_output: Callable[[bytes], None] = lambda _: None,
    ) -> bytes:
        """Hand in a request and wait for its answer. Any failure ends everything inside."""
        if self._is_closed:
            raise DiedInside("the sandbox is closed", because=_in_words(self._exit_code))
        self._talk.output()
        self._asked_at = self._talk.num_printed
        try:
            answer = self._talk.hear(request, within_s=within_s, on_output=on_output)
        except BaseException:
            self.close()
            raise
        if answer is None:
            self.close()
            raise self._died()
        return answer

    def output(self) -> str:
        """The last of what was printed inside, both streams in one."""
        return self._talk.output()

    def output_of_request(self) -> str:
        """The last of what was printed inside since the last request."""
        return self._talk.output(self._asked_at)

    def close(self) -> None:
        """Kill everything inside, and wait until it is gone with all it wrote."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _start_walled(self, serve: Serve, scratch_bytes: int) -> None:
        if not IS_LINUX:
            raise refusal(f"{sys.platform} has no namespaces", None)
        places, us = find_places(), os.getpid()

        def be_keeper(ends: Ends) -> NoReturn:
            inside.keep(
                inside.Task(
                    serve=serve, ends=ends, parent=us, places=places, scratch_bytes=scratch_bytes
                )
            )

        self._fork(be_keeper)
        with self._closed_on_failure():
            self._hear_news()
            self._talk.say(self._map_identities())
            self._first = os.pidfd_open(self._hear_news()["pid"])
            self._talk.say(inside.BEGIN)
            ready = self._hear_news()
            _check_nothing_left(places, ready["probe"])
            self._talk.say(inside.GO)
        self.read_only = tuple(ready["read_only"])
        limits = LIMITS if ready["is_last"] else (*LIMITS, NESTED)
        self.protection = Protection(kind="namespaces", why=NAMESPACED, limits=limits)

    def _start_unwalled(self, serve: Serve, why: NoSandbox) -> None:
        us = os.getpid()
        self._last_signal = signal.SIGTERM  # its keeper has to clean up
        self._fork(lambda ends: unprotected.watch(serve, ends, us))
        with self._closed_on_failure():
            has_landlock = self._hear_news()["has_landlock"]
            self._talk.say(inside.GO)
        self.protection = unprotected_by(why, has_landlock)

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _fork(self, be_keeper: Callable[[Ends], NoReturn]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pipes = [os.pipe() for _ in range(3)]
        (read_requests, requests), (answers, write_answers), (output, write_output) = pipes
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads. The child needs none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._keeper = os.fork()
        if self._keeper == 0:
            be_keeper(Ends(read_requests, write_answers, write_output))
        for theirs in (read_requests, write_answers, write_output):
            os.close(theirs)
        self._talk = Conversation(requests=requests, answers=answers, output=output)

    def _hear_news(self) -> dict[str, Any]:
        """What the inside tells while it is made. Raises what it was refused."""
        told = self._talk.hear(within_s=START_WITHIN_S)
        if told is None:
            self.close()
            raise self._died()
        news: dict[str, Any] = json.loads(told)
        if "refused" in news:
            raise refusal(news["refused"], news["errno"])
        return news

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
        said = f"; it said last: {printed[-1][:500]}" if printed else ""
        return DiedInside(
            "the process inside the sandbox ended without an answer",
            because=f"{_in_words(self._exit_code)}{said}",
            attempt="running the script by itself",
        )


def protection() -> Protection:
    """What a sandbox would be here, found out by making one."""
    try:
        with Sandbox(_serve_nobody) as sandbox:
            return sandbox.protection
    except NoSandbox as error:
        return unprotected_by(error, landlock.version() > 0)


def _serve_nobody(requests: BinaryIO, answers: BinaryIO) -> None:
    """Ends at once."""


def _check_nothing_left(places: Places, probe: str) -> None:
    """The inside has written a file into each of these places: none may be there."""
    left = [path for p in places.probed() if os.path.lexists(path := f"{p}/{probe}")]
    for path in left:
        os.unlink(path)  # noqa: PTH108 - our own probe
    if left:
        raise NoSandbox(
            "the sandbox does not hold",
            because=f"a file that was written inside appeared outside: {left[0]}",
            attempt="reporting this: it must not happen",
        )


def _kill_namespace(first: int) -> None:
    """Process 1 has ended only when every other process of its namespace has."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(first, signal.SIGKILL)
    select.select([first], [], [])
    os.close(first)


def _ending(child: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:  # someone else in this process has waited for it
        return None


def _in_words(code: int | None) -> str:
    """How a process ended.

    >>> _in_words(3), _in_words(137), _in_words(-9)
    ('it ended with exit code 3', 'it was killed by signal 9', 'it was killed by signal 9')
    """
    if code is None:
        return "nobody knows how it ended"
    if code < 0 or code > 128:
        return f"it was killed by signal {-code if code < 0 else code - 128}"
    return f"it ended with exit code {code}"
