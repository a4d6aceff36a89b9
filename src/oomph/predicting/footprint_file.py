"""Footprints <-> bytes: arrays as numpy writes them, the rest as JSON. Nothing in it is code.

The columns of all footprints lie behind each other, those of one kind of integer in one array:
there are hundreds of columns, and an array for each takes longer to open than to read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from oomph.predicting.footprint import OF_ALLOCATIONS, OF_EVENTS, Footprint, Kernel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

_COLUMNS = (*OF_ALLOCATIONS, "event", *OF_EVENTS, "op")
_KINDS = ("int8", "int16", "int32", "int64")
_HEADER = "header"


def to_bytes(footprints: Mapping[str, Footprint], facts: Mapping[str, Any]) -> bytes:
    """Footprints by name, and facts that JSON can hold."""
    import numpy as np

    every = [getattr(footprint, name) for footprint in footprints.values() for name in _COLUMNS]
    kinds = [_narrowest(column) for column in every]
    arrays: dict[str, Any] = {kind: _joined(every, kinds, kind) for kind in _KINDS}
    header = {
        "names": list(footprints),
        "rest": [
            {name: getattr(footprint, name) for name in ("kernels", "names", "host_bytes")}
            for footprint in footprints.values()
        ],
        "columns": [[kind, len(column)] for kind, column in zip(kinds, every, strict=True)],
        "facts": facts,
    }
    arrays[_HEADER] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    written = io.BytesIO()
    np.savez(written, **arrays)
    return written.getvalue()


def from_bytes(content: bytes) -> tuple[dict[str, Footprint], dict[str, Any]]:
    """What `to_bytes` wrote. Raises ValueError or KeyError for anything else."""
    try:
        return _read(content)
    except (BadZipFile, OSError, EOFError, TypeError, IndexError) as error:
        raise ValueError("these are no footprints") from error


def _read(content: bytes) -> tuple[dict[str, Footprint], dict[str, Any]]:
    import numpy as np

    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        header = json.loads(arrays[_HEADER].tobytes())
        wide = {kind: arrays[kind].astype(np.int64, copy=False) for kind in _KINDS}
    every = _columns(wide, header["columns"])
    footprints = {
        name: Footprint(
            **dict(zip(_COLUMNS, islice(every, len(_COLUMNS)), strict=True)),
            kernels=tuple(Kernel(*kernel) for kernel in rest["kernels"]),
            names=tuple(rest["names"]),
            host_bytes=(rest["host_bytes"][0], rest["host_bytes"][1]),
        )
        for name, rest in zip(header["names"], header["rest"], strict=True)
    }
    return footprints, header["facts"]


def _columns(wide: Mapping[str, Numbers], parts: Sequence[tuple[str, int]]) -> Iterator[Numbers]:
    """One column after the other, each from where the last of its kind ended."""
    done = dict.fromkeys(wide, 0)
    for kind, length in parts:
        begin, done[kind] = done[kind], done[kind] + length
        if done[kind] > len(wide[kind]):
            raise ValueError(f"a column ends after the {kind} do")
        yield wide[kind][begin : done[kind]]


def _joined(every: Sequence[Numbers], kinds: Sequence[str], kind: str) -> NDArray[Any]:
    """All columns of a kind."""
    import numpy as np

    those = [column for column, its in zip(every, kinds, strict=True) if its == kind]
    return np.concatenate([np.zeros(0, np.int64), *those]).astype(kind)


def _narrowest(column: Numbers) -> str:
    """The smallest kind of integer that holds a column."""
    import numpy as np

    low, high = int(column.min(initial=0)), int(column.max(initial=0))
    return next(k for k in _KINDS if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
