"""Rehearsals for a workload's plans -> the same rehearsals later, without importing torch.

Replays are stored in a separate file. It grows with each question, and the rehearsals, which are
larger, need not be written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomph.planning.rehearsals import Rehearsed
from oomph.predicting.combinations import PassSettings, Step
from oomph.predicting.demand import UnlimitedPeaks
from oomph.predicting.footprint import Footprint, from_bytes, to_bytes
from oomph.records.stored import from_jsonable, to_jsonable
from oomph.records.trace import Trace
from oomph.records.workload import Keeps, Possible, Variant
from oomph.store import Store, are_unchanged, as_they_are, digest, surroundings

_STORE = Store("plans", most_entries=40)  # two per workload, a few megabytes each; judgement
# Fields of Rehearsed that JSON can write directly.
_PLAIN = (
    "batch_size",
    "clips_gradients",
    "torch_version",
    "doubt",
    "has_convolutions",
    "kind",
    "example_elements",
    "example_tokens",
)


@dataclass(frozen=True, slots=True)
class RehearsalStore:
    """The stored rehearsals of one workload for one kind of GPU."""

    place: tuple[Path, str]
    capability: tuple[int, int]
    keeps: Keeps | None = None  # what the user says the loop keeps; None: ask the workload

    def find(self) -> Rehearsed | None:
        """Return the stored rehearsals if still valid; None if they have to be made again."""
        name = self._name()
        content = _STORE.read(f"{name}.npz")
        try:
            if content is None:
                return None
            footprints, facts = from_bytes(content)
            if not are_unchanged(facts):
                return None
            found = _as_rehearsed(footprints, facts)
        except (ValueError, KeyError, TypeError, IndexError):
            return None
        _add_replays(found, name, facts["hashes"])
        return found

    def keep(self, rehearsed: Rehearsed) -> None:
        footprints = {
            f"{kind} {json.dumps(to_jsonable(key))}": footprint
            for kind, known in (
                ("families", rehearsed.pass_footprints),
                ("steps", rehearsed.steps),
                ("exact", rehearsed.exact),
            )
            for key, footprint in known.items()
        }
        facts = {
            **self._files(rehearsed),
            **{name: getattr(rehearsed, name) for name in _PLAIN},
            "possible": to_jsonable(rehearsed.possible),
            "costs": to_jsonable(rehearsed.costs),
            "notes": list(rehearsed.notes),
            "not_affine": [list(settings) for settings in sorted(rehearsed.not_affine)],
            "failed": [
                ["Step" if isinstance(part, Step) else "Family", list(part), why]
                for part, why in rehearsed.failed.items()
            ],
        }
        _STORE.write(f"{self._name()}.npz", to_bytes(footprints, facts))
        self.keep_replays(rehearsed)

    def keep_replays(self, rehearsed: Rehearsed) -> None:
        """Store the replays of rehearsals that are already stored."""
        content = {
            "hashes": self._files(rehearsed)["hashes"],
            "replays": rehearsed.replays,
            "weighed": to_jsonable(rehearsed.unlimited_peaks),
        }
        _STORE.write_json(f"{self._name()}.json.gz", content)

    # ---- traces of whole variants, shared with `oomph predict` -----------------------------------

    def find_trace(self, variant: Variant) -> Trace | None:
        from oomph.rehearsing import trace_store

        return trace_store.find_exact(self.place, self.capability, self.keeps, variant)

    def keep_trace(
        self, variant: Variant, trace: Trace, files: tuple[str, ...], batch_size: int
    ) -> None:
        from oomph.rehearsing import trace_store
        from oomph.rehearsing.traces import Traced

        traced = Traced(variant=variant, traces=(trace,), files=files, batch_size=batch_size)
        trace_store.keep_exact(self.place, self.capability, self.keeps, traced)

    def _files(self, rehearsed: Rehearsed) -> dict[str, list[str]]:
        return as_they_are((str(self.place[0].resolve()), *rehearsed.files))

    def _name(self) -> str:
        path, name = self.place
        return digest(*surroundings(), str(path.resolve()), name, self.keeps, self.capability)


def _as_rehearsed(footprints: Mapping[str, Footprint], facts: Mapping[str, Any]) -> Rehearsed:
    found: dict[str, dict[Any, Footprint]] = {"families": {}, "steps": {}, "exact": {}}
    for name, footprint in footprints.items():
        kind, _, key = name.partition(" ")
        read = json.loads(key)
        part = {"families": PassSettings, "steps": Step}.get(kind)
        found[kind][Variant(**read) if part is None else part(*read)] = footprint
    parts = {"Family": PassSettings, "Step": Step}
    return Rehearsed(
        **{name: facts[name] for name in _PLAIN},
        pass_footprints=found["families"],
        steps=found["steps"],
        exact=found["exact"],
        possible=from_jsonable(Possible, facts["possible"]),
        files=tuple(facts["files"]),
        costs=[(saved, seconds) for saved, seconds in facts["costs"]],
        notes=tuple(facts["notes"]),
        not_affine={PassSettings(*each) for each in facts["not_affine"]},
        failed={parts[kind](*part): why for kind, part, why in facts["failed"]},
    )


def _add_replays(found: Rehearsed, name: str, hashes: list[str]) -> None:
    """Add the replays of exactly these rehearsals. Unreadable ones are replayed again."""
    content = _STORE.read_json(f"{name}.json.gz")
    try:
        if content["hashes"] != hashes:
            return
        replays = {str(key): int(value) for key, value in content["replays"].items()}
        unlimited_peaks = {
            key: from_jsonable(UnlimitedPeaks, one) for key, one in content["weighed"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    found.replays.update(replays)
    found.unlimited_peaks.update(unlimited_peaks)
