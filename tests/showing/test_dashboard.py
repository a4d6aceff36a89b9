"""What the page of oomph serve is sent."""

from __future__ import annotations

import json
from dataclasses import replace

from serving.fakes import FakeSampler, device, process, span, watched

from oomph.records.machine import Job, Sighting
from oomph.serving.feed import Feed
from oomph.showing.serve import as_frame, as_history, held_bytes
from oomph.units import GIB

SECRET = "--key=hunter2"  # noqa: S105


def sighting(*processes: object, **more: object) -> Sighting:
    sampler = FakeSampler((device(processes=processes or (), **more),), (watched(),))  # type: ignore[arg-type]
    sampler.spans.append(span())
    sampler.now_s = 1.1
    return Feed(sampler).newest


def test_command_lines_of_others_are_left_out_unless_asked_for() -> None:
    seen = sighting(process(1), process(2, owner="others", user="eve", command=f"x {SECRET}"))
    hidden = as_frame(seen, shows_commands=False)["gpus"][0]["processes"]
    assert [one["command"] for one in hidden] == ["python train.py", None]
    assert [one["is_hidden"] for one in hidden] == [False, True]
    assert hidden[1]["user"] == "eve"
    assert SECRET in json.dumps(as_frame(seen, shows_commands=True))


def test_a_process_of_nobody_knows_whom_counts_as_anothers() -> None:
    seen = sighting(process(1, owner="unknown", user=None, command=SECRET))
    assert SECRET not in json.dumps(as_frame(seen, shows_commands=False))


def test_a_command_of_any_length_is_cut() -> None:
    seen = sighting(process(1, command="x" * 100_000))
    assert len(json.dumps(as_frame(seen, shows_commands=True))) < 2000


def test_a_process_is_told_with_what_it_is_part_of_but_never_with_a_token() -> None:
    seen = sighting(process(1), process(2), process(3))
    kept = Job(
        pid=1,
        parent_pid=None,
        launcher="torchrun",
        launcher_pid=None,
        run_id="20261116-050000-ab12",
        rank=1,
        world_size=4,
    )
    jobs = [kept, replace(kept, pid=2, run_id="0123456789abcdef" * 2)]
    told = as_frame(seen, jobs, shows_commands=False)["gpus"][0]["processes"]
    whole = {"run": "20261116-050000-ab12", "rank": 1, "world_size": 4, "launcher": "torchrun"}
    assert [one["job"] for one in told] == [whole, {**whole, "run": None}, None]


def test_what_is_held_is_told_by_whose_it_is() -> None:
    some = (process(1), process(2, owner="this-run"), process(3, owner="others", used_bytes=GIB))
    assert held_bytes(device(processes=some)) == {"mine": 20 * GIB, "others": GIB}
    assert held_bytes(device(processes=())) == {}
    assert held_bytes(device(processes=None)) is None
    assert held_bytes(device(processes=(process(used_bytes=None),))) is None


def test_a_gpu_that_does_not_answer_has_no_figures_of_the_past() -> None:
    sampler = FakeSampler((device(),), (watched(),))
    frame = as_frame(Feed(sampler).newest, shows_commands=True)["gpus"][0]
    unknown = ("used_bytes", "busy_ratio", "power_w", "temperature_c", "processes", "is_free")
    assert [frame[name] for name in unknown] == [None] * 6
    assert frame["problem"] == "it does not answer"


def test_history_has_a_column_for_each_figure_of_each_gpu() -> None:
    sampler = FakeSampler((device(0), device(1)), (watched(0), watched(1)))
    feed = Feed(sampler)
    sampler.spans += [span(0, busy_ratio=1 / 3), span(1, power_w=None)]
    feed.look()
    told = as_history(feed.newest, tuple(feed.history))
    assert len(told["times"]) == 2
    assert told["gpus"][0]["busy_ratio"] == [None, 0.3333]
    assert told["gpus"][1]["power_w"] == [None, None]
    json.dumps(told, allow_nan=False)


def test_slices_of_a_gpu_are_told_apart_by_their_numbers() -> None:
    slices = tuple(device(n, uuid=f"MIG-{n}", is_slice=True) for n in (0, 3))
    whole = replace(device(2, mig_enabled=True), slices=slices)
    parts = (watched(2, uuid="MIG-0"), watched(2, uuid="MIG-3"))
    told = as_frame(Feed(FakeSampler((whole,), parts)).newest, shows_commands=False)["gpus"]
    assert [(one["index"], one["slice"]) for one in told] == [(2, 0), (2, 3)]
    assert as_frame(sighting(), shows_commands=False)["gpus"][0]["slice"] is None
