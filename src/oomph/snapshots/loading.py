"""The path of a memory snapshot -> a Snapshot, read in a child process that can do no harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oomph.errors import Unreadable
from oomph.records.snapshot import Annotation, Columns, DeviceSnapshot, Frame, Record, Snapshot
from oomph.snapshots.unpickling import ACTIONS, STATES

_PROGRAM = Path(__file__).with_name("unpickling.py")
_TYPES = "bqqqqi"  # of the columns
_TRY = 'torch.cuda.memory._dump_snapshot("oom.pickle"), or oomph.record("oom.pickle")'


def is_snapshot(start: bytes) -> bool:
    """Return whether a file that starts like this may be a snapshot, and is no log."""
    if start.startswith((b"\x80", b"\x1f\x8b", b"SQLite format", b"PK\x03\x04")):
        return True
    return start.lstrip()[:1] in (b"{", b"[") and (b'"segments"' in start or b'"address"' in start)


def load(path: str | os.PathLike[str]) -> Snapshot:
    """Read a snapshot of torch 2.0 or newer: pickle, JSON or gzip. Raises Unreadable."""
    name = os.fspath(path)
    try:
        with Path(name).open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            output = _run(file.fileno(), size_bytes)
    except OSError as error:
        raise Unreadable(f"{name} cannot be read", because=error.strerror) from None
    snapshot = taken_apart(output)
    if isinstance(snapshot, str):
        raise _not_one(name, snapshot)
    return snapshot


def taken_apart(output: bytes) -> Snapshot | str:
    """Return the snapshot in the child's answer, or why there is none."""
    try:
        header, columns = _split(output)
    except ValueError:
        return "reading it was ended: it takes too much memory or time"
    return header["error"] if "error" in header else _snapshot(header, columns)


def _not_one(name: str, because: str) -> Unreadable:
    return Unreadable(f"{name} is not a memory snapshot", because=because, attempt=_TRY)


def _run(file: int, size_bytes: int) -> bytes:
    # -I and -S: nothing of the user's environment is imported.
    command = [sys.executable, "-I", "-S", str(_PROGRAM), str(size_bytes)]
    child = subprocess.Popen(
        command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/"
    )
    try:
        output, _ = child.communicate()  # it ends itself when its time is over
    finally:
        child.kill()
        child.wait()
    return output


def _split(output: bytes) -> tuple[dict[str, Any], list[Columns]]:
    """Split the child's answer. Raises ValueError if it is not whole."""
    end = 8 + int.from_bytes(output[:8], "little")
    if len(output) < max(end, 9):
        raise ValueError("the header is cut off")
    header = json.loads(output[8:end])
    view, columns = memoryview(output)[end:], []
    for num_events in header.get("num_events", ()):
        parts = []
        for kind in _TYPES:
            column = array(kind)
            length = num_events * column.itemsize
            column.frombytes(view[:length])
            if len(column) != num_events:
                raise ValueError("a column is cut off")
            view = view[length:]
            parts.append(column)
        columns.append(Columns(**dict(zip(Columns.__slots__, parts, strict=True))))
    return header, columns


def _snapshot(header: dict[str, Any], columns: list[Columns]) -> Snapshot:
    by_device: dict[int, list[Record]] = {}
    for written in header["segments"]:
        by_device.setdefault(written[0], []).append(_segment(written))
    numbers = sorted({*by_device, *range(len(columns))})
    empty = Columns(**{name: array("q") for name in Columns.__slots__})
    return Snapshot(
        devices=tuple(
            DeviceSnapshot(
                device=number,
                segments=tuple(by_device.get(number, ())),
                columns=columns[number] if number < len(columns) else empty,
                action_names=ACTIONS,
            )
            for number in numbers
        ),
        frames=tuple(Frame(*frame) for frame in header["frames"]),
        stacks=tuple(tuple(stack) for stack in header["stacks"]),
        settings=header["settings"],
        annotations=tuple(Annotation(*one) for one in header["annotations"]),
    )


def _segment(written: list[Any]) -> Record:
    device, address, total, stream, is_small, is_expandable, pool, blocks = written
    return {
        "device": device,
        "address": address,
        "total_size": total,
        "stream": stream,
        "segment_type": "small" if is_small else "large",
        "is_expandable": is_expandable,
        "segment_pool_id": tuple(pool),
        "blocks": list(_blocks(blocks)),
    }


def _blocks(written: list[list[int]]) -> Iterator[Record]:
    for size, requested, state, stack in written:
        yield {
            "size": size,
            "requested_size": requested,
            "state": STATES[state],
            "frames": stack or None,
        }
