"""Traces of earlier rehearsals -> the same traces, without importing torch again.

Only for workloads in files. An entry is valid while the workload's file, the user's files it
imported, the installed packages, Python and oomph's own code are unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oomph.errors import UsageError
from oomph.records.trace import Trace, from_columns, to_columns
from oomph.records.workload import Keeps, Variant
from oomph.rehearsing.traces import LINE, Request, Traced, variant_for_batch
from oomph.store import Store, are_unchanged, as_they_are, digest, surroundings

_STORE = Store("traces", most_entries=200)  # judgement: below 200 MB
_MOST_SIZES = 8  # largest micro-batches kept per variant; judgement: keeps a file below 1 MB


def find(place: tuple[Path, str], request: Request, capability: tuple[int, int]) -> Traced | None:
    """Return stored traces that answer a request and are still valid, or None.

    Raises UsageError if the request does not divide the workload's batch size.
    """
    entry = _valid_entry(_name(place, request, capability))
    try:
        if entry is None:
            return None
        variant = variant_for_batch(entry["batch_size"], request)
        traces = tuple(map(from_columns, entry["traces"].get(_structure_of(variant), ())))
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    if not _answer_for([trace.micro_batch for trace in traces], variant.micro_batch):
        return None
    files, batch_size = tuple(entry["files"]), entry["batch_size"]
    return Traced(variant=variant, traces=traces, files=files, batch_size=batch_size)


def keep(
    place: tuple[Path, str], request: Request, capability: tuple[int, int], traced: Traced
) -> None:
    """Store traces next to those of the same tricks at other micro-batches."""
    files = as_they_are((str(place[0].resolve()), *traced.files))
    name = _name(place, request, capability)
    entry = _valid_entry(name)
    if entry is None or entry["files"] != files["files"]:
        entry = {**files, "batch_size": traced.batch_size, "traces": {}}
    structure = _structure_of(traced.variant)
    by_size = {each["micro_batch"]: each for each in entry["traces"].get(structure, ())}
    by_size |= {trace.micro_batch: to_columns(trace) for trace in traced.traces}
    sizes = {*LINE, *sorted(by_size)[-_MOST_SIZES:]} & {*by_size}
    entry["traces"][structure] = [by_size[size] for size in sorted(sizes)]
    _STORE.write_json(name, entry)


def find_exact(
    place: tuple[Path, str], capability: tuple[int, int], keeps: Keeps | None, variant: Variant
) -> Trace | None:
    """Return the trace of one variant at exactly its micro-batch."""
    try:
        found = find(place, _request_for(variant, keeps), capability)
    except UsageError:  # the entry is for another batch size
        return None
    if found is None or (found.variant.accumulation > 1) != (variant.accumulation > 1):
        return None
    return next((one for one in found.traces if one.micro_batch == variant.micro_batch), None)


def keep_exact(
    place: tuple[Path, str], capability: tuple[int, int], keeps: Keeps | None, traced: Traced
) -> None:
    """Store the trace of one variant where `find` and `find_exact` look for it."""
    keep(place, _request_for(traced.variant, keeps), capability, traced)


def _request_for(variant: Variant, keeps: Keeps | None) -> Request:
    return Request(tricks=variant.tricks_alone(), micro_batch=variant.micro_batch, keeps=keeps)


def _answer_for(sizes: Sequence[int], wanted: int) -> bool:
    """Return whether traces at these micro-batches predict the wanted one.

    They do if one is at exactly that micro-batch, or if they form a line with a rehearsal at least
    that large.
    """
    return wanted in sizes or ({*LINE} <= {*sizes} and max(sizes) >= wanted)


def _structure_of(variant: Variant) -> str:
    """Return a key for traces on one line: more than one example, accumulated or not."""
    size = "one" if variant.micro_batch == 1 else "line"
    if variant.offload_activations:  # the size decides what is worth offloading
        size = str(variant.micro_batch)
    return f"{size}, {'many' if variant.accumulation > 1 else 'single'}"


def _valid_entry(name: str) -> dict[str, Any] | None:
    entry = _STORE.read_json(name)
    is_valid = isinstance(entry, dict) and isinstance(entry.get("traces"), dict)
    return entry if is_valid and are_unchanged(entry) else None


def _name(place: tuple[Path, str], request: Request, capability: tuple[int, int]) -> str:
    path, name = place
    tricks = asdict(request.tricks.tricks_alone())
    decided_by = (str(path.resolve()), name, tricks, request.keeps, capability)
    return f"{digest(*surroundings(), *decided_by)}.json.gz"
