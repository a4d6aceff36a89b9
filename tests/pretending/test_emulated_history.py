"""Memory snapshots of the emulated GPU: torch's viewer reads them, the replay repeats them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.cuda import _memory_viz as _torchs_viewer

import oomph
from oomph.predicting.recorded import recorded_settings
from oomph.predicting.reproduction import Reproduction, reproduce
from oomph.units import MIB

CUDA: Any = torch.cuda  # much of it is untyped
VIEWER: Any = _torchs_viewer
RECORD: Any = CUDA.memory._record_memory_history
ALLOCATORS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.8",
]


def take(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


def train(sizes: list[int]) -> int:
    """Some steps, of which some do not fit: how many."""
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    num_ooms = 0
    for size in sizes:
        try:
            model(torch.randn(size, 64, device="cuda")).square().mean().backward()
            optimizer.step()
        except torch.OutOfMemoryError:
            num_ooms += 1
        optimizer.zero_grad()
    return num_ooms


class _NoGlobals(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise AssertionError(f"a snapshot needs {module}.{name}")


def loaded(path: Path) -> Any:
    with path.open("rb") as file:
        return _NoGlobals(file).load()


def reproduced(snapshot: Any, budget_bytes: int | None = None) -> Reproduction:
    written = recorded_settings(snapshot["allocator_settings"], snapshot["segments"])
    (trace,) = snapshot["device_traces"]
    return reproduce(snapshot["segments"], trace, written, budget_bytes=budget_bytes)


def actions(snapshot: Any) -> list[str]:
    (trace,) = snapshot["device_traces"]
    return [event["action"] for event in trace]


# ---- the file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_dumped_snapshot_is_replayed_address_by_address(allocator: str, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    with oomph.emulated_gpu("60MiB", allocator=allocator):
        RECORD()
        num_ooms = train([8, 1024, 15_000, 64])
        CUDA.empty_cache()
        train([512])
        with CUDA.stream(CUDA.Stream()):
            held = take(3 * MIB)
        CUDA.memory._dump_snapshot(str(path))
        del held
    snapshot = loaded(path)
    found = reproduced(snapshot)
    assert found.problem is None
    assert found.num_allocs == found.num_exact_allocs > 100
    assert len(found.ran_out_at) == num_ooms == 1
    assert actions(snapshot)[-1] == "snapshot"
    if not allocator.startswith("garbage"):  # a fraction is no part of a snapshot
        assert reproduced(snapshot, budget_bytes=60 * MIB).problem is None


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dump") / "snapshot.pickle"
    with oomph.emulated_gpu("48MiB"):
        RECORD(max_entries=100_000, stacks="python")
        train([8, 12_000])
        CUDA.memory._dump_snapshot(str(path))
    return path


@pytest.mark.parametrize("verb", ["stats", "trace", "trace_plot", "segment_plot"])
def test_torchs_viewer_opens_it(verb: str, dumped: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    into = ["-o", str(page)] if verb.endswith("plot") else []
    command = [sys.executable, "-W", "ignore", "-m", "torch.cuda._memory_viz", verb, str(dumped)]
    done = subprocess.run([*command, *into], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if verb == "trace":
        assert "cudaMalloc(" in done.stdout
        assert "OOM" in done.stdout or "OutOfMemory" in done.stdout
    elif verb.endswith("plot"):
        assert "MemoryViz" in page.read_text()


def test_torchs_functions_take_it(dumped: Path) -> None:
    snapshot = loaded(dumped)
    reserved_bytes = sum(segment["total_size"] for segment in snapshot["segments"])
    assert f"{reserved_bytes / MIB:.1f}MiB" in VIEWER.segsum(snapshot)
    num_events = len(snapshot["device_traces"][0])
    assert f"{num_events} entries" in VIEWER.trace(snapshot)


def test_it_has_the_fields_of_torchs_files(dumped: Path) -> None:
    snapshot = loaded(dumped)
    assert list(snapshot) == [
        "segments",
        "device_traces",
        "allocator_settings",
        "external_annotations",
    ]
    segment, block = snapshot["segments"][0], snapshot["segments"][0]["blocks"][0]
    assert set(segment) == {
        *("device", "address", "total_size", "allocated_size", "active_size", "requested_size"),
        *("stream", "segment_type", "segment_pool_id", "is_expandable", "frames", "blocks"),
    }
    assert set(block) == {"address", "size", "requested_size", "state", "frames"}
    for event in snapshot["device_traces"][0]:
        where = "device_free" if event["action"] == "oom" else "addr"
        assert {"action", where, "size", "stream", "time_us"} <= set(event)
    assert [one["name"] for one in snapshot["external_annotations"]].count(
        "Optimizer.step#AdamW.step"
    ) == 2
    times = [event["time_us"] for event in snapshot["device_traces"][0]]
    assert times == sorted(times)


# ---- events --------------------------------------------------------------------------------------


def test_events_come_in_torchs_order() -> None:
    with oomph.emulated_gpu("40MiB"):
        RECORD()
        first = take(30 * MIB)
        del first
        second = take(36 * MIB)  # the cache is given back first
        with pytest.raises(torch.OutOfMemoryError):
            take(30 * MIB)
        del second
        CUDA.empty_cache()
        snapshot = CUDA.memory._snapshot()
    assert actions(snapshot) == [
        *("segment_alloc", "alloc", "free_requested", "free_completed"),
        *("segment_free", "segment_alloc", "alloc", "oom"),
        *("free_requested", "free_completed", "segment_free", "snapshot"),
    ]
    (oom,) = [event for event in snapshot["device_traces"][0] if event["action"] == "oom"]
    assert (oom["size"], oom["device_free"]) == (30 * MIB, 4 * MIB)
    assert snapshot["segments"] == []


def line_of(frames: Any) -> str:
    """The source of the innermost frame."""
    filename, line = str(frames[0]["filename"]), int(frames[0]["line"])
    return Path(filename).read_text().splitlines()[line - 1].strip()


def test_events_say_on_which_line_of_the_program_they_happened() -> None:
    with oomph.emulated_gpu("40MiB"):
        RECORD(stacks="python")
        kept = torch.ones(MIB, device="cuda")
        doubled = kept * 2
        del doubled
        snapshot = CUDA.memory._snapshot()
        frames = CUDA.memory._allocation_traceback(kept.untyped_storage().data_ptr())
    (trace,) = snapshot["device_traces"]
    lines = [line_of(event["frames"]) for event in trace if event.get("frames")]
    assert lines == [
        'kept = torch.ones(MIB, device="cuda")',
        'kept = torch.ones(MIB, device="cuda")',
        "doubled = kept * 2",
        "del doubled",
        "del doubled",
    ]
    assert frames is not None
    assert line_of(frames) == 'kept = torch.ones(MIB, device="cuda")'
    live = [block for block in snapshot["segments"][0]["blocks"] if block["frames"]]
    assert [line_of(block["frames"]) for block in live] == ['kept = torch.ones(MIB, device="cuda")']


@pytest.mark.parametrize(
    ("context", "of_alloc", "of_free", "of_block"),
    [
        ("all", "take", "free", True),
        ("alloc", "take", "take", True),
        ("state", None, None, True),
        (None, None, None, False),
    ],
)
def test_contexts_keep_what_torch_keeps(
    context: Any, of_alloc: Any, of_free: Any, of_block: bool
) -> None:
    def free(held: list[torch.Tensor]) -> None:
        held.clear()

    with oomph.emulated_gpu("40MiB"):
        RECORD(context=context)
        held, kept = [take(MIB)], take(MIB)
        free(held)
        snapshot = CUDA.memory._snapshot()
        del kept
    by_action = {event["action"]: event for event in snapshot["device_traces"][0]}
    names = [by_action[one].get("frames", [{"name": None}]) for one in ("alloc", "free_completed")]
    assert [one[0]["name"] for one in names] == [of_alloc, of_free]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert any(block["frames"] for block in blocks) == of_block


def test_the_newest_entries_are_kept_and_recording_stops() -> None:
    with oomph.emulated_gpu("40MiB"):
        RECORD(max_entries=4)
        for _ in range(10):
            take(MIB)
        newest = ["alloc", "free_requested", "free_completed", "snapshot"]
        assert actions(CUDA.memory._snapshot()) == newest
        RECORD(enabled=None)
        take(MIB)
        assert actions(CUDA.memory._snapshot()) == []
        RECORD(enabled="state")
        kept = take(MIB)
        snapshot = CUDA.memory._snapshot()
        assert len(actions(snapshot)) == 1
        assert snapshot["segments"][0]["blocks"][0]["frames"]
        del kept


def test_all_forms_of_the_call_are_taken() -> None:
    with oomph.emulated_gpu("40MiB"):
        RECORD(True)  # as before torch 2.1: one entry
        take(MIB)
        assert len(actions(CUDA.memory._snapshot())) == 1
        RECORD(True, trace_alloc_max_entries=100, trace_alloc_record_context=True)
        take(MIB)
        assert "alloc" in actions(CUDA.memory._snapshot())
        RECORD(False)
        RECORD("all", "alloc", "python", 50, clear_history=True, skip_actions=["free_requested"])
        take(MIB)
        assert actions(CUDA.memory._snapshot()) == ["alloc", "free_completed", "snapshot"]
        for wrong in ({"enabled": "some"}, {"context": "none"}, {"stacks": "cpp"}):
            with pytest.raises(RuntimeError, match="expected"):
                RECORD(**wrong)


def test_metadata_is_written_to_the_events() -> None:
    with oomph.emulated_gpu("40MiB"):
        RECORD()
        CUDA.memory._set_memory_metadata("epoch 3")
        take(MIB)
        assert CUDA.memory._get_memory_metadata() == "epoch 3"
        (trace,) = CUDA.memory._snapshot()["device_traces"]
    assert {event["user_metadata"] for event in trace} == {"epoch 3"}


def test_an_observer_writes_a_snapshot_when_memory_runs_out(tmp_path: Path) -> None:
    path, told = tmp_path / "oom.pickle", []

    def observe(*what: int) -> None:
        told.append(what)
        CUDA.memory._dump_snapshot(str(path))

    with oomph.emulated_gpu("40MiB"):
        RECORD()
        attach: Any = vars(torch._C)["_cuda_attach_out_of_memory_observer"]
        attach(observe)
        held = take(20 * MIB)
        with pytest.raises(torch.OutOfMemoryError):
            take(30 * MIB)
        del held
    assert told == [(0, 30 * MIB, 40 * MIB, 20 * MIB)]
    assert actions(loaded(path)) == ["segment_alloc", "alloc", "oom", "snapshot"]


# ---- segments ------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    allocator=st.sampled_from(ALLOCATORS),
    steps=st.lists(
        st.tuples(st.sampled_from(["take", "drop", "empty"]), st.integers(1, 9 * MIB)), max_size=40
    ),
)
def test_segments_blocks_and_statistics_say_the_same(
    allocator: str, steps: list[tuple[str, int]]
) -> None:
    with oomph.emulated_gpu("64MiB", allocator=allocator):
        RECORD()
        held: list[torch.Tensor] = []
        for what, number in steps:
            if what == "take":
                try:
                    held.append(take(number))
                except torch.OutOfMemoryError:
                    held.clear()
            elif what == "drop" and held:
                del held[number % len(held)]
            elif what == "empty":
                CUDA.empty_cache()
        segments = CUDA.memory_snapshot()
        stats = CUDA.memory_stats()
        snapshot = CUDA.memory._snapshot()
        blocks = [(segment, block) for segment in segments for block in segment["blocks"]]
        live = [block for _, block in blocks if block["state"] == "active_allocated"]
        split = [
            block["size"]
            for segment, block in blocks
            if block["state"] == "inactive" and block["size"] < segment["total_size"]
        ]
        is_expandable = "expandable" in allocator
        assert sum(one["total_size"] for one in segments) == CUDA.memory_reserved()
        assert sum(block["size"] for block in live) == CUDA.memory_allocated()
        assert sum(one["requested_size"] for one in live) == stats["requested_bytes.all.current"]
        assert stats["segment.all.current"] == (0 if is_expandable else len(segments))
        assert stats["inactive_split.all.current"] == (0 if is_expandable else len(split))
        assert stats["inactive_split_bytes.all.current"] == (0 if is_expandable else sum(split))
        for name in ("allocated_bytes", "reserved_bytes", "segment", "inactive_split_bytes"):
            pools = [stats[f"{name}.{pool}_pool.current"] for pool in ("small", "large")]
            assert sum(pools) == stats[f"{name}.all.current"]
        for name, value in stats.items():
            if name.endswith(".current"):
                of = name.removesuffix(".current")
                assert 0 <= value == stats[f"{of}.allocated"] - stats[f"{of}.freed"]
                assert stats[f"{of}.peak"] >= value
        assert reproduced(snapshot).problem is None
        held.clear()
