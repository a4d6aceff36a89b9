"""Footprints <-> bytes: arrays as numpy writes them, the rest as JSON. Nothing in it is code."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any
from zipfile import BadZipFile

from oomph.predicting.footprint import OF_ALLOCATIONS, OF_EVENTS, Footprint, Kernel

_ARRAYS = (*OF_ALLOCATIONS, "event", *OF_EVENTS, "op")
_HEADER = "header"


def to_bytes(footprints: Mapping[str, Footprint], facts: Mapping[str, Any]) -> bytes:
    """Footprints by name, and facts that JSON can hold."""
    import numpy as np

    arrays: dict[str, Any] = {}
    rest: list[dict[str, Any]] = []
    for number, footprint in enumerate(footprints.values()):
        rest.append({name: getattr(footprint, name) for name in ("kernels", "names", "host_bytes")})
        for name in _ARRAYS:
            arrays[f"{number}.{name}"] = _narrow(getattr(footprint, name))
    header = {"names": list(footprints), "rest": rest, "facts": facts}
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
        footprints = {
            name: Footprint(
                **{
                    column: arrays[f"{number}.{column}"].astype(np.int64, copy=False)
                    for column in _ARRAYS
                },
                kernels=tuple(Kernel(*kernel) for kernel in rest["kernels"]),
                names=tuple(rest["names"]),
                host_bytes=(rest["host_bytes"][0], rest["host_bytes"][1]),
            )
            for number, (name, rest) in enumerate(zip(header["names"], header["rest"], strict=True))
        }
    return footprints, header["facts"]


def _narrow(column: Any) -> Any:
    """The smallest kind of integer that holds a column."""
    import numpy as np

    low, high = int(column.min(initial=0)), int(column.max(initial=0))
    kinds = (np.int8, np.int16, np.int32, np.int64)
    return column.astype(
        next(k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    )
