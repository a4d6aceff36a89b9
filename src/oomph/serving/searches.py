"""A Question -> lines for the page that asked it: its place in the queue, progress, the plans.

One search runs at a time, in a process of its own (search_child.py), and a few wait. A search ends
when nobody reads its lines any more, when it takes too long, or when it takes too much memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from oomph.errors import OomphError, OutOfTime, UserCodeError
from oomph.records.stored import as_json
from oomph.sensing.host import ProcessTree, free_memory_bytes
from oomph.serving.questions import Question
from oomph.units import GIB, MIB, format_bytes

# Judgement, all of them.
MOST_WAITING = 4
LIMIT_S = 900.0
_TOLD_EVERY_S = 1.0
_WATCHED_EVERY_S = 0.5
_MOST_PROCESSES = 64  # a rehearsal has five
_MOST_OF_FREE_MEMORY = 0.5
_LEAST_BYTES = 2 * GIB  # with torch, a rehearsal of a large model takes one
_LONGEST_LINE_BYTES = 32 * MIB  # ten plans with their timelines have one
# The child finds the package where this process found it. The working directory, which Python would
# search first, is not searched: it may be anybody's.
_START = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]];"
    " from oomph.serving.search_child import main; main()"
)


class Searches:
    """The searches of one server."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # given in the order of asking
        self._tasks: list[asyncio.Task[bytes]] = []  # the first of them runs
        self.is_closed = False

    @property
    def is_full(self) -> bool:
        return self.is_closed or len(self._tasks) > MOST_WAITING

    async def lines(self, question: Question) -> AsyncGenerator[bytes, None]:
        """Yield lines of JSON, the last of them the answer. Closing this ends the search."""
        search = _Search(question)
        task = asyncio.create_task(self._in_turn(search))
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        began_s = time.monotonic()
        try:
            yield _line("asked", command=question.command)
            while not task.done():
                elapsed_s = round(time.monotonic() - began_s, 1)
                num_ahead = self._tasks.index(task)
                if num_ahead:
                    yield _line("waiting", num_ahead=num_ahead, elapsed_s=elapsed_s)
                else:
                    yield _line("progress", what=search.newest, elapsed_s=elapsed_s)
                await asyncio.wait([task], timeout=_TOLD_EVERY_S)
            if not task.cancelled():
                yield task.result()
        finally:
            task.cancel()

    def close(self) -> None:
        """End all searches; there will be no others."""
        self.is_closed = True
        for task in self._tasks:
            task.cancel()

    async def _in_turn(self, search: _Search) -> bytes:
        async with self._turn:
            try:
                return await search.run()
            except OomphError as error:
                told = {"what": error.what, "because": error.because, "try": error.attempt}
                return _line("error", **told)


class _Search:
    """One search: a process, and the newest that it said."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self.newest = "starting"

    async def run(self) -> bytes:
        """Return the line with the answer. Raises OomphError."""
        free = free_memory_bytes() or 0
        most_bytes = max(int(free * _MOST_OF_FREE_MEMORY), _LEAST_BYTES)
        root = str(Path(__file__).parents[2])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _START, root, as_json(self._question), str(most_bytes)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            limit=_LONGEST_LINE_BYTES,
            start_new_session=True,
        )
        watching = asyncio.create_task(_watch(process.pid, most_bytes))
        reading = asyncio.create_task(self._read(process))
        try:
            both = {reading, watching}
            done, _ = await asyncio.wait(both, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise OutOfTime(
                    f"no answer within {LIMIT_S / 60:g} minutes: the search was stopped",
                    attempt=f"{self._question.command}, in a terminal, which waits",
                )
            return (reading if reading in done else watching).result()
        finally:
            for task in (reading, watching):
                task.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what is in the sandbox dies with it
            await process.wait()

    async def _read(self, process: asyncio.subprocess.Process) -> bytes:
        """Return the answer; what comes before it is progress."""
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            while line := await process.stdout.readline():
                if not line.startswith(b'{"kind": "progress"'):
                    return line
                self.newest = json.loads(line)["what"]
        except ValueError as error:  # longer than the limit
            raise UserCodeError("the answer is too large to show", because=str(error)) from None
        raise UserCodeError(
            "the search ended without an answer",
            because=f"its process ended with {await process.wait()}",
            attempt=f"{self._question.command}, in a terminal",
        )


async def _watch(pid: int, most_bytes: int) -> bytes:
    """Raise UserCodeError when the processes of a search take too much; otherwise never end."""
    tree = ProcessTree(pid, None, time.monotonic())
    while True:
        await asyncio.sleep(_WATCHED_EVERY_S)
        seen = tree.look(time.monotonic())
        if (seen.num_processes or 0) > _MOST_PROCESSES:
            raise UserCodeError(
                f"the search started more than {_MOST_PROCESSES} processes",
                attempt="a workload that starts none",
            )
        if (seen.memory_bytes or 0) > most_bytes:
            raise UserCodeError(
                f"the search took more than {format_bytes(most_bytes)} of this machine's memory",
                because="a search may take half of what is free when it begins",
                attempt="a model that is built without large real tensors",
            )


def _line(kind: str, **told: Any) -> bytes:
    return json.dumps({"kind": kind, **told}).encode() + b"\n"
