"""The verb explain: a message, a log, a memory snapshot or a run -> why memory ran out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oomph.records.explanation import Explanation
    from oomph.records.run import Run

_PIECE_BYTES = 1 << 20


def explain(
    what: str | os.PathLike[str] | BaseException | BinaryIO = "last", *, alloc_conf: str = ""
) -> Explanation | None:
    """Return why memory ran out, and what would have avoided it; None: it did not run out.

    oomph.explain(error)                    # the exception
    oomph.explain("train.log")              # a log of any size
    oomph.explain("last")                   # the last run of `oomph watch`, or its id

    `alloc_conf` is the value of PYTORCH_CUDA_ALLOC_CONF in the run, so that nothing is advised that
    was on already. Raises OomphError.
    """
    if isinstance(what, BaseException):
        return _of_text([str(what).encode()], type(what).__name__, alloc_conf)
    if not isinstance(what, str | os.PathLike):
        return _of_text(_pieces(what), "standard input", alloc_conf)
    name = os.fspath(what)
    if os.path.isfile(name):  # noqa: PTH113 - the name as it was given
        return _of_file(name, alloc_conf)
    return _of_run(name, alloc_conf)


def _of_file(name: str, alloc_conf: str) -> Explanation | None:
    from oomph.errors import Unreadable

    try:
        with open(name, "rb") as file:  # noqa: PTH123 - a FIFO is read as well
            return _of_text(_pieces(file), name, alloc_conf)
    except OSError as error:
        raise Unreadable(f"{name} cannot be read", because=error.strerror) from None


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece


def _of_text(
    pieces: Iterator[bytes] | list[bytes], name: str, alloc_conf: str
) -> Explanation | None:
    from oomph.explaining.log import read_log
    from oomph.explaining.message import explain_log

    return explain_log(read_log(pieces), source=name, settings=alloc_conf)


def _of_run(name: str, alloc_conf: str) -> Explanation | None:
    from oomph.errors import UsageError
    from oomph.explaining.ended import explain_run
    from oomph.verbs.watch import load_run

    try:
        run: Run = load_run(name)
    except UsageError as error:
        if name == "last":
            raise
        raise UsageError(
            f"{name!r:.200} is neither a file nor a run",
            because=error.what,
            attempt="oomph explain oom.log, or python train.py 2>&1 | oomph explain -",
        ) from None
    return explain_run(run, settings=alloc_conf)
