"""Rehearsals for plans that were made before -> the same, without importing torch again.

Beside them lies what was replayed of them, in a file of its own: it grows with each question, and
the rehearsals, which are larger, do not.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from oomph.records.trace import Trace
    from oomph.records.workload import Keeps, Variant
    from oomph.tracing.traces import Wish
    from oomph.verbs.rehearsals import Rehearsed, Rehearser

    # A workload's file and name, and what its loop is said to keep.
    Place = tuple[Path, str] | tuple[Path, str, Keeps | None]

_MOST_ENTRIES = 40  # two for each workload, of some megabytes


def find(place: Place, capability: tuple[int, int]) -> Rehearsed | None:
    """What is known of a workload, if it is still true; what cannot be read is made anew."""
    from oomph.predicting.footprint_file import from_bytes
    from oomph.tracing.cache import hashes

    try:
        path = _path(place, capability)  # once: it hashes all that decides a rehearsal
        footprints, facts = from_bytes(path.read_bytes())
        if hashes(facts["files"]) != facts["hashes"]:
            return None
        found = _rehearsed(footprints, facts)
        _find_replays(path, facts["hashes"], found)
        return found
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def keep(place: Place, capability: tuple[int, int], rehearsed: Rehearsed) -> None:
    """Keep it. A cache that cannot be written is no error: the answer is there already."""
    from oomph.predicting.footprint_file import to_bytes
    from oomph.records.stored import to_jsonable
    from oomph.tracing.cache import drop_oldest, hashes, write

    files = sorted({str(place[0].resolve()), *rehearsed.files})
    footprints = {
        **{f"family {json.dumps(key)}": found for key, found in rehearsed.families.items()},
        **{f"step {json.dumps(key)}": found for key, found in rehearsed.steps.items()},
        **{
            f"exact {json.dumps(to_jsonable(key))}": found for key, found in rehearsed.exact.items()
        },
    }
    facts = {
        "files": files,
        "hashes": hashes(files),
        "possible": to_jsonable(rehearsed.possible),
        "not_affine": [list(family) for family in sorted(rehearsed.not_affine)],
        "failed": [
            [type(part).__name__, list(part), why] for part, why in rehearsed.failed.items()
        ],
        **{name: to_jsonable(getattr(rehearsed, name)) for name in _PLAIN},
    }
    path = _path(place, capability)
    if write(path, to_bytes(footprints, facts)):
        keep_replays(place, capability, rehearsed)
        drop_oldest(path.parent, _MOST_ENTRIES)


def keep_replays(place: Place, capability: tuple[int, int], found: Rehearsed) -> None:
    """Keep what was replayed of rehearsals that are kept already."""
    from oomph.records.stored import to_jsonable
    from oomph.tracing.cache import hashes, write

    content = {
        "hashes": hashes(sorted({str(place[0].resolve()), *found.files})),
        "replays": found.replays,
        "weighed": to_jsonable(found.weighed),
    }
    path = _path(place, capability)
    write(_beside(path), json.dumps(content).encode())


def find_whole(
    place: tuple[Path, str], capability: tuple[int, int], keeps: Keeps | None, variant: Variant
) -> Trace | None:
    """The rehearsal of one way to train, which a plan or a prediction made before."""
    from oomph.errors import UsageError
    from oomph.tracing import kept

    try:
        found = kept.find(place, _as_wish(variant, keeps), capability)
    except UsageError:  # it is of another batch
        return None
    if found is None or (found.variant.accumulation > 1) != (variant.accumulation > 1):
        return None
    alike = (trace for trace in found.traces if trace.micro_batch == variant.micro_batch)
    return next(alike, None)


def keep_whole(
    place: tuple[Path, str],
    capability: tuple[int, int],
    keeps: Keeps | None,
    rehearser: Rehearser,
    traces: Mapping[Variant, Trace],
) -> None:
    """Keep what a plan has rehearsed as a whole, where `oomph predict` looks for it."""
    from oomph.tracing import kept
    from oomph.tracing.traces import Traced

    for variant, trace in traces.items():
        traced = Traced(
            variant=variant,
            traces=(trace,),
            files=rehearser.files,
            batch_size=rehearser.batch_size,
        )
        kept.keep(place, _as_wish(variant, keeps), capability, traced)


def _as_wish(variant: Variant, keeps: Keeps | None) -> Wish:
    from dataclasses import fields

    from oomph.records.workload import How
    from oomph.tracing.traces import Wish

    how = {field.name: getattr(variant, field.name) for field in fields(How)}
    return Wish(micro_batch=variant.micro_batch, keeps=keeps, **how)


def _find_replays(path: Path, hashes: list[str], found: Rehearsed) -> None:
    """Those of the very rehearsals; what cannot be read is replayed again."""
    from oomph.predicting.weighing import Weighed
    from oomph.records.prediction import Moment

    try:
        content = json.loads(_beside(path).read_bytes())
        if content["hashes"] != hashes:
            return
        replays = {str(key): int(value) for key, value in content["replays"].items()}
        weighed = {
            key: Weighed(**{**value, "peak_at": Moment(**value["peak_at"])})
            for key, value in content["weighed"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    found.replays.update(replays)
    found.weighed.update(weighed)


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")


_PLAIN = (
    "batch_size",
    "clips_gradients",
    "costs",
    "torch_version",
    "notes",
    "doubt",
    "has_convolutions",
    "example_elements",
)


def _rehearsed(footprints: dict[str, Any], facts: dict[str, Any]) -> Rehearsed:
    from oomph.predicting.ways import Family, Step
    from oomph.records.possible import Possible
    from oomph.records.workload import Variant
    from oomph.verbs.rehearsals import Rehearsed

    found: dict[str, dict[Any, Any]] = {"family": {}, "step": {}, "exact": {}}
    for name, footprint in footprints.items():
        kind, _, written = name.partition(" ")
        found[kind][written] = footprint
    lists = ("block_names", "batch_norm_names")
    possible: dict[str, Any] = {
        name: tuple(value) if name in lists else value for name, value in facts["possible"].items()
    }
    return Rehearsed(
        possible=Possible(**possible),
        files=tuple(facts["files"]),
        families={Family(*json.loads(k)): v for k, v in found["family"].items()},
        steps={Step(*json.loads(k)): v for k, v in found["step"].items()},
        exact={Variant(**json.loads(k)): v for k, v in found["exact"].items()},
        not_affine={Family(*each) for each in facts["not_affine"]},
        failed={
            {"Family": Family, "Step": Step}[of](*part): why for of, part, why in facts["failed"]
        },
        **{name: facts[name] for name in _PLAIN if name not in ("notes", "costs")},
        notes=tuple(facts["notes"]),
        costs=[(saved, seconds) for saved, seconds in facts["costs"]],
    )


def _path(place: Place, capability: tuple[int, int]) -> Path:
    from oomph.tracing.cache import cache_directory, hashes_of_rooms
    from oomph.tracing.kept import installed

    decided_by = (
        hashes_of_rooms("records", "tracing", "training", "predicting"),
        sys.version,
        installed(),
        str(place[0].resolve()),
        *place[1:],
        capability,
    )
    digest = hashlib.sha256(json.dumps(decided_by).encode()).hexdigest()
    return cache_directory().with_name("plans") / f"{digest[:32]}.npz"
