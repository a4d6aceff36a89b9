"""Traces that were made before -> the same traces, without importing torch again.

Kept for workloads of files, by content: the file, the files of the user's that it imported, the
installed packages, the Python. Anything that changes makes a new trace. An entry that cannot be
read is made anew.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from oomph.records.trace_columns import from_columns, to_columns
from oomph.records.workload import How, Variant
from oomph.tracing.cache import cache_directory as cache_directory
from oomph.tracing.cache import drop_oldest, hashes, hashes_of_the_tracer, write
from oomph.tracing.traces import LINE, Traced, Wish, variant_for_batch

_MOST_ENTRIES = 200
_MOST_SIZES = 8  # of micro-batches that one way to train was rehearsed at


def find(place: tuple[Path, str], wish: Wish, capability: tuple[int, int]) -> Traced | None:
    """The traces of an earlier rehearsal that are still true."""
    try:
        entry = json.loads(gzip.decompress(_path(place, wish, capability).read_bytes()))
        if hashes(entry["files"]) != entry["hashes"]:
            return None
        variant = variant_for_batch(entry["batch_size"], wish)
        columns = entry["traces"].get(_shape_of(variant))
        if columns is None:
            return None
        traces = tuple(from_columns(trace) for trace in columns)
        if not _speak_for([trace.micro_batch for trace in traces], variant.micro_batch):
            return None
        return Traced(
            variant=variant,
            traces=traces,
            files=tuple(entry["files"]),
            batch_size=entry["batch_size"],
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError):
        return None


def keep(place: tuple[Path, str], wish: Wish, capability: tuple[int, int], traced: Traced) -> None:
    """Keep traces. A cache that cannot be written is no error: the answer is there already."""
    path = _path(place, wish, capability)
    files = sorted({str(place[0].resolve()), *traced.files})
    entry = _earlier(path, files) or {
        "files": files,
        "hashes": hashes(files),
        "batch_size": traced.batch_size,
        "traces": {},
    }
    shape = _shape_of(traced.variant)
    by_size = {each["micro_batch"]: each for each in entry["traces"].get(shape, ())}
    by_size |= {trace.micro_batch: to_columns(trace) for trace in traced.traces}
    kept_sizes = {*LINE, *sorted(by_size)[-_MOST_SIZES:]} & {*by_size}
    entry["traces"][shape] = [by_size[size] for size in sorted(kept_sizes)]
    if write(path, gzip.compress(json.dumps(entry).encode(), compresslevel=1)):
        drop_oldest(path.parent, _MOST_ENTRIES)


def _speak_for(sizes: Sequence[int], wanted: int) -> bool:
    """Whether one of the traces is of the very micro-batch, or they are a line that was held
    against a rehearsal at least as far away."""
    return wanted in sizes or ({*LINE} <= {*sizes} and max(sizes) >= wanted)


def _earlier(path: Path, files: Sequence[str]) -> dict[str, Any] | None:
    """The entry as it is, if it is still true."""
    try:
        entry: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError):
        return None
    is_same = entry.get("files") == list(files) and entry.get("hashes") == hashes(files)
    return entry if is_same and isinstance(entry.get("traces"), dict) else None


def _shape_of(variant: Variant) -> str:
    """Traces differ by whether they are of one example, and whether they accumulate."""
    size = "one" if variant.micro_batch == 1 else "line"
    if variant.offload_activations:  # traced at the very size
        size = str(variant.micro_batch)
    return f"{size}, {'many' if variant.accumulation > 1 else 'single'}"


def _path(place: tuple[Path, str], wish: Wish, capability: tuple[int, int]) -> Path:
    decided_by = (
        hashes_of_the_tracer(),
        sys.version,
        installed(),
        str(place[0].resolve()),
        place[1],
        {field.name: getattr(wish, field.name) for field in fields(How)},
        wish.keeps,
        capability,
    )
    digest = hashlib.sha256(json.dumps(decided_by).encode()).hexdigest()
    return cache_directory() / f"{digest[:32]}.json.gz"


def installed() -> list[str]:
    """Name and version of every package that Python can find, the user's own place included."""
    found = (name for place in sys.path if Path(place).is_dir() for name in Path(place).iterdir())
    return sorted(str(path) for path in found if path.suffix in (".dist-info", ".egg-info"))
