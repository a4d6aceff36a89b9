"""A Question -> plans, in a process of its own: progress and the answer are lines of JSON.

    {"kind": "progress", "what": ...}        while it searches
    {"kind": "plans", "plans": ...}          the data of a page of plans
    {"kind": "error", "what": ..., "because": ..., "try": ...}

A model by name has no code but that of its library. A workload file may hold anything: it is loaded
and rehearsed in the sandbox, and what comes out is data that must read as the records that it
should be. The server kills this process to cancel a search, and everything that it started ends
with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from oomph.errors import NoSandbox, OomphError, SpokeNonsense, UserCodeError
from oomph.records.plan import PlanOptions, Plans
from oomph.records.script import PROGRESS
from oomph.records.stored import LARGEST_FILE_BYTES, from_json, from_jsonable, to_jsonable
from oomph.serving.questions import Question
from oomph.units import GIB, format_bytes

Say = Callable[[str], None]

# Judgement: a search should not slow down what trains on this machine.
_NICENESS = 10
_SCRATCH_BYTES = GIB // 4  # a workload writes nothing that it needs
_MOST_CHARACTERS = 200  # of a line of progress
_MOST_IN_ERRORS = 2_000
_MOST_SAID_PER_S = 20  # a file may print as much as it likes


class _Teller:
    """Writes the lines. The answer is the last of them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._second, self._num_said = 0, 0

    def progress(self, what: str) -> None:
        second = int(time.monotonic())
        self._num_said = self._num_said + 1 if second == self._second else 1
        self._second = second
        if what and self._num_said <= _MOST_SAID_PER_S:
            self._write({"kind": "progress", "what": what[:_MOST_CHARACTERS]})

    def plans(self, data: dict[str, Any]) -> None:
        self._write({"kind": "plans", "plans": data})

    def error(self, error: OomphError) -> None:
        told = {"what": error.what, "because": error.because, "try": error.attempt}
        short = {name: text and text[:_MOST_IN_ERRORS] for name, text in told.items()}
        self._write({"kind": "error", **short})

    def _write(self, line: dict[str, Any]) -> None:
        unwritten = json.dumps(line, allow_nan=False).encode() + b"\n"
        while unwritten:
            unwritten = unwritten[os.write(self._descriptor, unwritten) :]


def main() -> None:
    """Answer the question in the first argument, with the memory limit in the second."""
    teller = _Teller(os.dup(1))
    os.dup2(2, 1)  # what libraries print is no answer
    _end_with_the_server()
    try:
        question, most_bytes = from_json(Question, sys.argv[2]), int(sys.argv[3])
        teller.plans(_page(_searched(question, most_bytes, teller.progress)))
    except OomphError as error:
        teller.error(error)
    except Exception as error:  # noqa: BLE001 - a fault of ours is an answer, too
        said = f"{type(error).__name__}: {error}"
        attempt = "reporting this bug, with the command line"
        teller.error(OomphError("the search failed", because=said, attempt=attempt))


def _end_with_the_server() -> None:
    os.nice(_NICENESS)
    if sys.platform == "linux":
        from oomph.sandbox import linux

        with contextlib.suppress(OSError):  # if the kernel refuses, only kill -9 leaves it behind
            linux.die_with_parent()


def _searched(question: Question, most_bytes: int, say: Say) -> Plans:
    if question.place is not None:
        say("preparing a sandbox")
        return _in_sandbox(question, question.place, most_bytes, say)
    from oomph.rehearsing.models_by_name import workload_file

    name, size = f"hf:{question.model}", question.batch_size
    say(f"rehearsing {question.model}")
    return _planned(question, workload_file(name, seq_len=question.seq_len, batch_size=size), say)


def _planned(question: Question, place: str, say: Say) -> Plans:
    from oomph.planning.plans import check_options, plan_workload
    from oomph.rehearsing.traces import split
    from oomph.sensing.target import find_target

    # The batch of a model by name stands in its file.
    size = None if question.place is None else question.batch_size
    options = PlanOptions(batch_size=size, max_gpus=question.max_gpus)
    check_options(options)
    target = find_target(question.gpu, None)
    return plan_workload(split(place), question.shown, options, target, say, draws=True)


def _page(plans: Plans) -> dict[str, Any]:
    from oomph.exporting.planned import Planned
    from oomph.showing.plan import plan_data

    code = [Planned.of(plan).exported("code", "train.py", ()) for plan in plans]
    return plan_data(plans, plans.timelines, code)


# ---- a workload file -----------------------------------------------------------------------------


def _in_sandbox(question: Question, place: str, most_bytes: int, say: Say) -> Plans:
    """Plan a workload that may be hostile: nothing of it runs outside."""
    from oomph.sandbox.conversation import write_frame
    from oomph.sandbox.sandbox import Sandbox

    def serve(_: BinaryIO, replies: BinaryIO) -> None:
        _limit_memory(most_bytes)
        write_frame(replies, _answer_inside(question, place))

    def pass_on(printed: bytes) -> None:
        for line in printed.decode(errors="replace").splitlines():
            if line.startswith(PROGRESS):  # the file may fake such a line: pass text only
                say("".join(c for c in line.removeprefix(PROGRESS) if c.isprintable()))

    os.chdir(Path(place).parent)
    try:
        with Sandbox(serve, scratch_bytes=_SCRATCH_BYTES) as sandbox:
            return _read(sandbox.ask(b"", on_output=pass_on))
    except NoSandbox as error:
        raise NoSandbox(
            "a workload file is planned only in a sandbox, and none is possible here",
            because=error.because or error.what,
            attempt=f"{question.command}, in a terminal, if you trust the file",
        ) from None


def _limit_memory(most_bytes: int) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _answer_inside(question: Question, place: str) -> bytes:
    """Return the answer from inside the sandbox, as JSON of records."""

    def say(what: str) -> None:
        print(f"{PROGRESS}{what}", flush=True)

    try:
        return json.dumps({"plans": to_jsonable(_planned(question, place, say))}).encode()
    except OomphError as error:
        return json.dumps({"error": [error.what, error.because, error.attempt]}).encode()


def _read(answer: bytes) -> Plans:
    """Read what came out of the sandbox: records, or nothing. Raises UserCodeError."""
    try:
        if len(answer) > LARGEST_FILE_BYTES:
            raise ValueError(f"it has more than {format_bytes(LARGEST_FILE_BYTES)}")
        content = json.loads(answer, parse_constant=_refuse)
        if "error" in content:
            error = from_jsonable(tuple[str | None, ...], content["error"])
            what, because, attempt = error
            raise UserCodeError(what or "", because=because, attempt=attempt)
        return from_jsonable(Plans, content["plans"])
    except (ValueError, TypeError, KeyError, RecursionError) as reason:
        raise SpokeNonsense("the answer makes no sense", because=str(reason)) from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")
