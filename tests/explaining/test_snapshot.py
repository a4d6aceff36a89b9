"""A memory snapshot -> the verdict, who held the memory, and what would have avoided it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from snapshots.written import Writer, training, write

from oomph.explaining.snapshot import compare_snapshots, explain_snapshot
from oomph.predicting.allocator import OutOfMemory
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.records.explanation import Explanation
from oomph.snapshots.loading import load
from oomph.units import GIB, MIB


def explained(tmp_path: Path, content: Any, **options: Any) -> Explanation:
    return explain_snapshot(load(write(tmp_path / "one.pickle", content)), source="x", **options)


def holders(found: Explanation, kind: str) -> dict[str, int]:
    return {one.name: one.size_bytes for one in found.holders if one.kind == kind}


def helps(found: Explanation) -> dict[str, bool | None]:
    return {one.name: one.helps for one in found.remedies}


def needs(found: Explanation, name: str) -> int:
    return next(one.needed_bytes for one in found.remedies if one.name.startswith(name)) or 0


def out_of_memory() -> Writer:
    writer = training(layers=8, free_bytes=500 * MIB)
    assert writer.trace[-1]["action"] == "oom"
    return writer


def test_a_full_gpu_is_capacity_and_its_holders_are_named(tmp_path: Path) -> None:
    found = explained(tmp_path, out_of_memory().snapshot())
    assert found.verdict == "capacity"
    assert found.gate is not None
    assert found.gate.is_exact
    assert found.gate.num_exact == found.gate.num_recorded
    categories = holders(found, "category")
    assert max(categories, key=lambda name: categories[name]).startswith("activations")
    lines = holders(found, "line")
    assert {"/home/me/model.py:20 in forward", "/home/me/model.py:21 in forward"} <= lines.keys()
    assert "forward in /home/me/model.py" in holders(found, "module")


def test_what_if_says_what_passes_with_the_memory_that_was_there(tmp_path: Path) -> None:
    found = explained(tmp_path, out_of_memory().snapshot())
    by_name = helps(found)
    assert by_name["as it was"] is False
    assert by_name["expandable_segments:True"] is False
    assert by_name["activations in place"] is True
    assert any(name.endswith("of the batch at once") and by_name[name] for name in by_name)
    budget = 500 * MIB
    for one in found.remedies:
        assert one.helps == ((one.needed_bytes or 0) <= budget)


def test_the_needed_budget_is_the_smallest_with_which_the_program_completes(
    tmp_path: Path,
) -> None:
    needed = needs(explained(tmp_path, training(layers=4, steps=2).snapshot()), "as it was")
    complete = training(layers=4, steps=2, free_bytes=needed)
    assert complete.trace[-1]["action"] != "oom"
    less = training(layers=4, steps=2, free_bytes=needed - max(4 * MIB, needed // 200))
    assert less.trace[-1]["action"] == "oom"


def in_pieces(settings: AllocatorSettings | None = None) -> Writer:
    """Every second of many blocks is freed, then one larger than each is asked for."""
    writer = Writer(settings, free_bytes=1 * GIB)
    addresses = [writer.ask(100 * MIB, "forward", 30 + n) for n in range(10)]
    for address in addresses[::2]:
        writer.drop(address)
    halves = [writer.ask(60 * MIB, "forward", 50) for _ in addresses[::2]]
    assert halves
    try:
        writer.ask(100 * MIB, "forward", 60)
    except OutOfMemory:
        return writer
    raise AssertionError("it did not run out")


def test_fragmentation_is_a_verdict_that_a_replay_proves(tmp_path: Path) -> None:
    found = explained(tmp_path, in_pieces().snapshot())
    assert found.verdict == "fragmentation"
    assert helps(found)["expandable_segments:True"] is True
    assert any("the replay passes with the same memory" in reason for reason in found.reasons)
    assert found.next_command == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py"


def test_a_setting_that_is_on_is_not_tried(tmp_path: Path) -> None:
    settings = AllocatorSettings(expandable_segments=True)
    writer = training(layers=8, free_bytes=500 * MIB, settings=settings)
    found = explained(tmp_path, writer.snapshot())
    assert found.gate is not None
    assert found.gate.is_exact
    assert "expandable_segments:True" not in helps(found)


def test_one_request_beyond_everything_is_named_as_such(tmp_path: Path) -> None:
    writer = Writer(free_bytes=1 * GIB)
    writer.ask(100 * MIB)
    with pytest.raises(OutOfMemory):
        writer.ask(90 * GIB)
    found = explained(tmp_path, writer.snapshot())
    assert found.verdict == "request"
    assert "90.0 GiB" in found.sentence


def test_a_leak_is_found_with_its_line_its_step_and_its_rate(tmp_path: Path) -> None:
    writer = training(steps=12, layers=4, free_bytes=700 * MIB, leak_bytes=24 * MIB)
    assert writer.trace[-1]["action"] == "oom"
    found = explained(tmp_path, writer.snapshot())
    assert found.verdict == "growth"
    assert found.growth[0].name == "/home/me/train.py:77 in <module>"
    assert found.growth[0].per_step_bytes == 24 * MIB
    assert found.growth[0].since_step == 2


@pytest.mark.parametrize("era", ["2.1", "2.13"])
def test_a_steady_training_does_not_leak(tmp_path: Path, era: Any) -> None:
    found = explained(tmp_path, training(steps=6).snapshot(era))
    assert found.growth == ()
    assert found.verdict == "full"


def test_two_snapshots_show_what_grew_between_them(tmp_path: Path) -> None:
    earlier = write(tmp_path / "a", training(steps=3, leak_bytes=24 * MIB).snapshot())
    later = write(tmp_path / "b", training(steps=6, leak_bytes=24 * MIB).snapshot())
    found = compare_snapshots(load(earlier), load(later), source="a, b")
    assert found.verdict == "growth"
    assert found.growth[0].name == "/home/me/train.py:77 in <module>"
    assert (found.growth[0].grown_bytes, found.growth[0].num_blocks) == (3 * 24 * MIB, 3)
    assert compare_snapshots(load(later), load(later), source="b, b").verdict == "full"


def test_a_trace_without_its_beginning_is_explained_as_well(tmp_path: Path) -> None:
    content = out_of_memory().snapshot()
    content["device_traces"][0] = content["device_traces"][0][-40:]
    found = explained(tmp_path, content)
    assert found.gate is not None
    assert found.gate.is_exact
    assert found.verdict == "capacity"
    assert any("from before the recording" in caveat for caveat in found.caveats)


def test_a_recording_that_contradicts_itself_gets_no_what_if(tmp_path: Path) -> None:
    content = out_of_memory().snapshot()
    for event in content["device_traces"][0][20:]:
        if "addr" in event:
            event["addr"] += 512
    found = explained(tmp_path, content)
    assert found.gate is not None
    assert found.gate.problem is not None
    assert found.remedies == ()


def test_without_history_it_says_how_to_record_better(tmp_path: Path) -> None:
    found = explained(tmp_path, training().snapshot("list"))
    assert found.gate is None
    assert found.verdict == "full"
    assert any("no allocations are recorded" in caveat for caveat in found.caveats)
    assert any("oomph.record" in line for line in found.record_better)


# ---- the real one --------------------------------------------------------------------------------

DATA = Path(os.environ.get("OOMPH_RECORDINGS", "../shared/data/recordings")).parent / "snapshots"
REAL = DATA / "era2.8_real-oom_3gpus_expandable.pickle"


@pytest.mark.skipif(not REAL.exists(), reason="the recordings are not here")
def test_the_real_out_of_memory_is_capacity_held_by_one_function() -> None:
    found = explain_snapshot(load(REAL), source="x")
    assert (found.device, found.verdict) == (1, "capacity")
    top = [one for one in found.holders if one.kind == "line"][:3]
    assert [one.name.rpartition("/")[2].partition(" ")[0] for one in top] == [
        "models.py:174",
        "models.py:181",
        "models.py:176",
    ]
    assert [round(one.size_bytes / MIB) for one in top] == [30_391, 25_314, 15_188]
    by_name = helps(found)
    assert by_name["activations in place"] is True
    assert by_name["90% of the batch at once"] is True
    assert not any(by_name[one.name] for one in found.remedies if one.source == "replay")
