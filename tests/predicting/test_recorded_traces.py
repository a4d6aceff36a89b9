"""Real recordings of torch 2.1 to 2.11, replayed address by address.

They are other people's and not part of the repository; where they are not at hand, these tests are
skipped. Nothing of their content is shown: they hold paths and user names.
"""

from __future__ import annotations

import io
import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

from oomph.predicting.allocator import CachingAllocator
from oomph.predicting.recorded import recorded_requests, recorded_settings, state_before
from oomph.predicting.replay import replay
from oomph.predicting.reproduction import Reproduction, reproduce
from oomph.units import MIB

FOLDER = Path(__file__).parents[2].parent / "shared" / "data" / "snapshots"
MANIFEST = FOLDER / "MANIFEST.json"

pytestmark = pytest.mark.skipif(not MANIFEST.exists(), reason="the recordings are not here")


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, dicts, texts and numbers; whatever would run code is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:  # noqa: ARG002
        raise pickle.UnpicklingError("a snapshot has no classes")

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ARG002
        raise pickle.UnpicklingError("a snapshot refers to nothing outside")


@cache
def load(name: str) -> Any:
    return _PlainUnpickler(io.BytesIO((FOLDER / name).read_bytes())).load()


def traces() -> list[tuple[str, int]]:
    """Every device of every real recording that has a trace."""
    if not MANIFEST.exists():
        return []
    return [
        (entry["name"], device)
        for entry in json.loads(MANIFEST.read_text())
        if not entry["synthetic"]
        for device, num_events in enumerate(entry["events_per_device"])
        if num_events > 1
    ]


def parts(name: str, device: int) -> tuple[list[Any], list[Any], Any]:
    snapshot = load(name)
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    settings = recorded_settings(snapshot.get("allocator_settings"), segments)
    return segments, snapshot["device_traces"][device], settings


def reproduced(name: str, device: int, begin: int = 0, **options: int) -> Reproduction:
    segments, trace, settings = parts(name, device)
    return reproduce(segments, trace[begin:], settings, **options)


def assert_exact(result: Reproduction) -> None:
    assert result.problem is None
    assert result.num_exact_allocs == result.num_allocs
    assert result.num_exact_segment_events == result.num_segment_events
    assert result.num_exact_blocks == result.num_blocks
    assert result.peak_reserved_bytes == result.recorded_peak_reserved_bytes


def test_the_recordings_are_those_that_the_figures_are_about() -> None:
    results = [reproduced(name, device) for name, device in traces()]
    assert len(results) == 20
    assert sum(result.num_exact_allocs for result in results) == 45_209
    assert sum(result.num_exact_segment_events for result in results) == 5_134
    assert sum(result.num_exact_blocks for result in results) == 7_491


@pytest.mark.parametrize(("name", "device"), traces())
def test_every_block_and_every_segment_is_where_torch_had_it(name: str, device: int) -> None:
    assert_exact(reproduced(name, device))


@pytest.mark.parametrize(("name", "device"), traces())
def test_a_trace_without_its_beginning_is_reproduced_as_well(name: str, device: int) -> None:
    num_events = len(parts(name, device)[1])
    for part in range(1, 8):
        assert_exact(reproduced(name, device, begin=num_events * part // 8))


def test_from_the_budget_alone_all_39_failures_of_cuda_are_predicted() -> None:
    name = "era2.1_oom-retries.pickle"
    known = reproduced(name, 0)
    assert (known.budget_bytes, known.too_much_bytes) == (21_476 * MIB, 21_512 * MIB)
    for budget_bytes in (known.budget_bytes, 21_512 * MIB - 1):
        predicted = reproduced(name, 0, budget_bytes=budget_bytes)
        assert_exact(predicted)
        assert (predicted.num_retries, predicted.num_exact_segment_events) == (39, 1_163)


@pytest.mark.parametrize("budget_bytes", [21_476 * MIB - 1, 21_512 * MIB])
def test_any_other_budget_leads_elsewhere(budget_bytes: int) -> None:
    assert not reproduced("era2.1_oom-retries.pickle", 0, budget_bytes=budget_bytes).is_exact


def test_the_real_out_of_memory_is_predicted_at_its_event() -> None:
    name = "era2.8_real-oom_3gpus_expandable.pickle"
    budget_bytes = 80_302 * MIB + 95_682_560  # reserved, and what CUDA called free
    assert reproduced(name, 1).budget_bytes == budget_bytes
    predicted = reproduced(name, 1, budget_bytes=budget_bytes)
    assert_exact(predicted)
    assert predicted.ran_out_at == (421,)


def test_one_retry_is_predicted_where_memory_was_fragmented() -> None:
    name = "era2.5_fragmented.pickle"
    known = reproduced(name, 0)
    assert (known.budget_bytes, known.too_much_bytes) == (23_238 * MIB, 25_744 * MIB)
    predicted = reproduced(name, 0, budget_bytes=known.budget_bytes)
    assert_exact(predicted)
    assert predicted.num_retries == 1


def test_the_bulk_replay_of_a_whole_recording_reserves_what_torch_reserved() -> None:
    segments, trace, settings = parts("era2.9_longest-trace.pickle", 0)
    before = state_before(segments, trace, settings)
    requests = recorded_requests(before.segments, trace)
    result = replay(CachingAllocator(settings), requests.sizes, requests.events, requests.streams)
    assert result.peak_reserved_bytes == 1_810 * MIB


def test_a_trace_with_random_addresses_is_not_believed() -> None:
    result = reproduced("synthetic_test-file.pickle", 0)
    assert result.problem is not None
    assert result.num_exact_allocs == 0
