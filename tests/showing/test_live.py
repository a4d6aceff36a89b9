"""Frames of the live view, as a person sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oomph.records.machine import Ancestor, Device, HostLook, Job, Look, Machine, Process
from oomph.sensing.devices import emulated_machine
from oomph.showing.live import Drawn, Frame, draw, draw_once
from oomph.showing.live_view import LOOKS_PER_CELL, Filter, Histories, Sort, View
from oomph.showing.terminal import ASCII, UNICODE, ansi, num_cells
from oomph.units import GIB

EIGHT = emulated_machine("8xa100-80gb", now=0)


def frame_of(machine: Machine, *, num_looks: int = 5, **changes: Any) -> Frame:
    histories = Histories()
    for _ in range(num_looks):
        histories.add(Look(at=0.0, machine=machine, host=changes.get("host")))
    of_look = ("jobs", "visible", "sm_active_ratios", "notes", "host")
    look = {key: changes.pop(key) for key in of_look if key in changes}
    view = View(**{key: changes.pop(key) for key in list(changes) if hasattr(View(), key)})
    return Frame(
        look=Look(at=0.0, machine=machine, **look),
        histories=histories,
        view=view,
        interval_s=1.0,
        **{"glyphs": UNICODE, **changes},
    )


def text_of(drawn: Drawn) -> str:
    return "\n".join(ansi(line, colours=False).rstrip() for line in drawn.lines)


def shown(machine: Machine = EIGHT, width: int = 120, height: int = 40, **changes: Any) -> str:
    return text_of(draw(frame_of(machine, **changes), width, height))


def a_process(pid: int, **changes: Any) -> Process:
    assert EIGHT.gpus[0].processes
    return replace(EIGHT.gpus[0].processes[0], pid=pid, **changes)


def with_processes(*processes: Process) -> Machine:
    """Each on a GPU of its own."""
    gpus = zip(EIGHT.gpus, processes, strict=False)
    return Machine(gpus=tuple(replace(gpu, processes=(process,)) for gpu, process in gpus))


def a_job(pid: int, **changes: Any) -> Job:
    return Job(**{"pid": pid, "parent_pid": 1, "launcher": None, "launcher_pid": None, **changes})


# ---- at a glance -------------------------------------------------------------------------------


def test_the_first_line_says_whose_the_gpus_are() -> None:
    assert shown().splitlines()[0].startswith("8 GPUs: 3 mine, 3 others', 2 free, 1 unknown")


def test_each_gpu_has_its_bar_its_figures_its_history_and_its_people() -> None:
    row = next(line for line in shown().splitlines() if line.startswith("  4 "))
    for part in ("█", "▓", "░", "34.0 of 79.1  43%", "41%", "▄▄▄▄▄", "48 C", "mine, bob"):
        assert part in row
    assert "kernel-active" in shown()


def test_a_machine_that_cannot_be_read_does_not_claim_to_have_no_gpus() -> None:
    text = shown(Machine(gpus=(), is_readable=False, problem="the driver is not loaded"))
    assert "0 GPUs" not in text
    assert "the driver is not loaded" in text


def test_a_lost_gpu_is_said_and_the_others_are_shown() -> None:
    lost = replace(
        EIGHT.gpus[1], uuid=None, used_bytes=None, busy_ratio=None, processes=None, problem="lost"
    )
    text = shown(Machine(gpus=(EIGHT.gpus[0], lost)))
    assert "GPU 1: lost" in text
    assert "could not be read" in text
    assert "56.2 of 79.1" in text


def test_a_driver_that_does_not_answer_is_said_over_the_last_look() -> None:
    lines = shown(replace(EIGHT, problem="the driver has not answered for 7 s")).splitlines()
    assert lines[1] == "the driver has not answered for 7 s"
    assert "56.2 of 79.1" in "\n".join(lines)


def test_before_the_first_answer_the_view_says_what_it_waits_for() -> None:
    frame = replace(frame_of(EIGHT), look=None)
    assert "asking the driver" in text_of(draw(frame, 80, 24))
    frame = replace(frame, silent_s=3.0)
    assert "for 3 s, without an answer" in text_of(draw(frame, 80, 24))


def test_sm_activity_is_shown_where_the_gpu_has_it() -> None:
    ratios = {EIGHT.gpus[0].uuid or "": 0.37}
    assert "SM active" in shown(sm_active_ratios=ratios)
    assert "37%" in shown(sm_active_ratios=ratios)
    assert "SM active" not in shown()


def test_what_cannot_be_watched_is_noted() -> None:
    assert "left to DCGM" in shown(notes=("SM activity is left to DCGM",))


def test_slices_of_a_gpu_have_rows_of_their_own() -> None:
    parts = tuple(
        replace(
            EIGHT.gpus[0], index=i, uuid=f"MIG-{i}", is_slice=True, processes=(a_process(70 + i),)
        )
        for i in range(2)
    )
    gpu = replace(EIGHT.gpus[0], mig_enabled=True, slices=parts, busy_ratio=None)
    text = shown(Machine(gpus=(gpu,)))
    assert "1 GPU, 2 slices: 2 mine" in text
    assert "0.0" in text
    assert "0.1" in text
    assert text.count("python train.py") == 2  # by slice, and not by GPU once more


def test_a_process_on_two_gpus_is_told_once() -> None:
    text = shown(with_processes(a_process(7), a_process(7)))
    assert "(1)" in text
    assert text.count("python train.py") == 1


def test_escape_sequences_of_others_cannot_reach_the_terminal() -> None:
    evil = a_process(1, command="a \x1b[2J\x1b]0;x\x07 b\u202e", user="u\x1b[31m")
    text = shown(with_processes(evil))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text


def test_a_machine_without_unicode_gets_ascii_alone() -> None:
    assert shown(glyphs=ASCII, width=60).isascii()


# ---- what belongs together ---------------------------------------------------------------------


def test_the_workers_of_a_launcher_stand_under_one_heading_by_rank() -> None:
    machine = with_processes(*(a_process(100 + i) for i in range(4)))
    jobs = tuple(
        a_job(100 + i, launcher="torchrun", launcher_pid=99, rank=3 - i, world_size=4)
        for i in range(4)
    )
    lines = shown(machine, jobs=jobs).splitlines()
    start = next(i for i, line in enumerate(lines) if "torchrun" in line)
    assert "0-3" in lines[start]
    assert "(4)" in lines[start]
    assert "224.8" in lines[start]  # of all four
    ranks = [line.partition("rank ")[2] for line in lines[start + 1 : start + 5]]
    assert ranks == ["0 of 4", "1 of 4", "2 of 4", "3 of 4"]


def test_a_run_of_oomph_keeps_together_what_two_launchers_started() -> None:
    machine = with_processes(a_process(1), a_process(2))
    jobs = (a_job(1, run_id="r1", launcher_pid=8), a_job(2, run_id="r1", launcher_pid=9))
    assert "run r1" in shown(machine, jobs=jobs)
    assert "(2)" in shown(machine, jobs=jobs)


def test_a_script_that_starts_the_other_ranks_itself_is_one_group() -> None:
    machine = with_processes(a_process(1), a_process(2))
    assert "(2)" in shown(machine, jobs=(a_job(1), a_job(2, parent_pid=1)))


def test_two_users_with_the_same_run_id_are_not_mixed() -> None:
    machine = with_processes(a_process(1), a_process(2, user="bob", owner="others"))
    jobs = (a_job(1, run_id="r1"), a_job(2, run_id="r1"))
    assert "(2)" not in shown(machine, jobs=jobs)


def test_memory_of_a_group_is_unknown_as_soon_as_one_part_of_it_is() -> None:
    machine = with_processes(a_process(1, used_bytes=None), a_process(2))
    jobs = (a_job(1, run_id="r"), a_job(2, run_id="r"))
    heading = next(line for line in shown(machine, jobs=jobs).splitlines() if "(2)" in line)
    assert " ? " in heading


@pytest.mark.parametrize(
    ("sort", "expected"),
    [("GPU", [1, 2, 3]), ("memory", [2, 3, 1]), ("user", [2, 1, 3]), ("newest", [3, 1, 2])],
)
def test_the_processes_are_in_the_order_that_is_wanted(sort: Sort, expected: list[int]) -> None:
    machine = with_processes(
        a_process(1, used_bytes=1 * GIB, user="bob", owner="others", started_at=-50.0),
        a_process(2, used_bytes=9 * GIB, user="me", owner="mine", started_at=-90.0),
        a_process(3, used_bytes=5 * GIB, user="carol", owner="others", started_at=-10.0),
    )
    lines = shown(machine, sort=sort).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("who"))
    pids = [int(line.split()[3]) for line in lines[start + 1 : start + 4]]
    assert pids == expected


# ---- filters -----------------------------------------------------------------------------------


def test_mine_shows_my_processes_and_the_gpus_that_they_are_on() -> None:
    text = shown(filter="mine")
    assert "evaluate.py" in text
    assert "ipykernel" not in text
    assert "carol" not in text
    assert "mine, bob" in text  # the neighbour is not hidden


def test_visible_shows_what_cuda_shows_in_its_order() -> None:
    uuids = (EIGHT.gpus[7].uuid or "", EIGHT.gpus[2].uuid or "")
    lines = shown(filter="visible", visible=uuids, width=160).splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["7", "cuda:0"], ["2", "cuda:1"]]
    assert "carol" in "\n".join(lines)
    assert "train.py" not in "\n".join(lines)


def test_a_filter_that_leaves_nothing_says_so() -> None:
    assert "no process of yours" in shown(Machine(gpus=(EIGHT.gpus[2],)), filter="mine")
    assert "shows none of these GPUs" in shown(filter="visible", visible=())


# ---- sizes -------------------------------------------------------------------------------------


def test_forty_columns_still_say_how_full_how_busy_and_whose() -> None:
    lines = shown(width=40, height=24).splitlines()
    row = next(line for line in lines if line.startswith("  4 "))
    for part in ("█", "34/79", "41%", "mine, bob"):
        assert part in row


def test_eighty_columns_have_room_for_history_beside_sm_activity() -> None:
    lines = shown(width=80, sm_active_ratios={EIGHT.gpus[4].uuid or "": 0.37}).splitlines()
    row = next(line for line in lines if line.startswith("  4 "))
    for part in ("█", "34/79", "41%", "▄▄▄▄▄", "37%", "mine, bob"):
        assert part in row


def test_a_small_window_scrolls_over_everything() -> None:
    whole = draw_once(frame_of(EIGHT), 100)
    seen: list[str] = []
    for scroll in range(40):
        drawn = draw(frame_of(EIGHT, scroll=scroll), 100, 8)
        assert len(drawn.lines) == 8
        seen += [ansi(line, colours=False) for line in drawn.lines]
    assert {ansi(line, colours=False) for line in whole} <= set(seen)


def test_scrolling_stops_at_the_end() -> None:
    drawn = draw(frame_of(EIGHT, scroll=10**6), 100, 10)
    assert "carol" in text_of(drawn)
    assert drawn.scroll < 30


HOST = HostLook(num_cpus=64, cpu_ratio=0.12, total_bytes=512 * GIB, used_bytes=128 * GIB, load=8.1)


def test_spare_lines_become_graphs_and_a_line_of_the_host() -> None:
    text = shown(width=120, height=50, host=HOST)
    assert "CPU 12% of 64 cores  RAM 128.0 of 512.0 GiB 25%  load 8.1" in text
    assert "kernel-active, all GPUs" in text
    assert "GPU memory" in text


def test_where_there_is_no_room_the_processes_come_before_graphs_and_host() -> None:
    full = shown(width=120, height=20, host=HOST)
    assert "RAM" not in full
    assert "GPU memory" not in full
    assert "python serve.py" in full


def test_forty_columns_have_a_short_line_of_the_host_and_graphs_below_each_other() -> None:
    text = shown(width=40, height=60, host=HOST)
    assert "CPU 12%  RAM 128.0 of 512.0 GiB" in text
    rows = [
        line for line in text.splitlines() if line.startswith(("kernel-active, all", "GPU mem"))
    ]
    assert len(rows) == 2


def test_an_emulated_machine_has_no_host() -> None:
    assert "RAM" not in shown(width=120, height=50)


def test_processes_have_their_shares_of_the_gpu_and_of_the_cpus() -> None:
    machine = with_processes(a_process(7, sm_ratio=0.42, cpu_cores=3.5), a_process(8))
    lines = shown(machine, width=100).splitlines()
    heading = next(line for line in lines if line.startswith("who") and "SM" in line)
    row = next(line for line in lines if "   7 " in line)
    assert row[: heading.index("SM") + 2].endswith("42%")
    assert row[: heading.index("CPU") + 3].endswith("350%")


def test_power_has_its_cap_and_what_is_nearly_full_is_coloured() -> None:
    gpu = replace(EIGHT.gpus[0], power_w=395.0, power_limit_w=400.0, temperature_c=90)
    gpu = replace(gpu, busy_ratio=0.3, used_bytes=int((gpu.total_bytes or 0) * 0.97))
    frame = frame_of(Machine(gpus=(gpu,)))
    pieces = [piece for line in draw(frame, 160, 30).lines for piece in line]
    assert ("395", "yellow") in pieces
    assert (" of 400 W", "dim") in pieces
    assert ("90 C", "red") in pieces
    assert ("30%", "green") in pieces
    assert any(text.endswith("97%") and style == "red" for text, style in pieces)


def test_the_tree_has_processes_below_what_started_them() -> None:
    above = (Ancestor(5, "python torchrun"), Ancestor(4, "-bash"))
    machine = with_processes(a_process(7, sm_ratio=0.42), a_process(8))
    jobs = (a_job(7, ancestors=above), a_job(8, ancestors=above))
    lines = shown(machine, jobs=jobs, is_tree=True, width=100).splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith("bash > python torchrun"))
    assert "├─ 7 you" in lines[at + 1]
    assert "42%" in lines[at + 1]
    assert "└─ 8 you" in lines[at + 2]


def test_help_names_every_key() -> None:
    text = shown(is_help=True)
    for word in ("quit", "filter", "sort", "pause", "scroll", "kernel-active"):
        assert word in text


# What may stand in a command line: also what moves cursors, and bytes that are no UTF-8.
NASTY = "ab \x00\x01\x02\x1b[2J\x07\r\n\u0085\u202e\udcff訓é\u0301\U0001f642"
WORDS = st.text(st.sampled_from(NASTY), max_size=12)
PROCESSES = st.builds(
    Process,
    pid=st.integers(1, 9) | st.integers(1, 4_000_000),
    owner=st.sampled_from(["this-run", "mine", "others", "unknown"]),
    user=st.none() | WORDS,
    command=st.none() | WORDS,
    used_bytes=st.none() | st.integers(0, 2**40),
    started_at=st.none() | st.floats(-1e9, 1e9),
    kind=st.sampled_from(["compute", "graphics"]),
    note=st.none() | WORDS,
    sm_ratio=st.none() | st.floats(0, 1),
    cpu_cores=st.none() | st.floats(0, 9999),
)
RATIOS = st.none() | st.floats(0, 1)
ANCESTORS = st.builds(Ancestor, st.integers(2, 4), st.none() | WORDS)
JOBS = st.builds(
    Job,
    pid=st.integers(1, 9),
    parent_pid=st.none(),
    launcher=st.none(),
    launcher_pid=st.none(),
    ancestors=st.lists(ANCESTORS, max_size=3).map(tuple),
)
HOSTS = st.builds(
    HostLook,
    num_cpus=st.integers(1, 512),
    cpu_ratio=RATIOS,
    total_bytes=st.none() | st.integers(0, 2**50),
    used_bytes=st.none() | st.integers(0, 2**50),
    load=st.none() | st.floats(0, 9999),
)


@st.composite
def devices(draw_from: st.DrawFn, index: int, is_slice: bool = False) -> Device:
    total = draw_from(st.none() | st.integers(0, 2**40))
    slices = () if is_slice else draw_from(st.lists(devices(0, is_slice=True), max_size=2))
    return Device(
        index=index,
        uuid=draw_from(st.none() | st.uuids().map(str)),
        name=draw_from(st.none() | WORDS),
        total_bytes=total,
        used_bytes=None if total is None else draw_from(st.none() | st.integers(0, total)),
        memory_source=None,
        busy_ratio=draw_from(RATIOS),
        temperature_c=draw_from(st.none() | st.integers(-60, 200)),
        power_w=draw_from(st.none() | st.floats(0, 9999)),
        processes=draw_from(st.none() | st.lists(PROCESSES, max_size=3).map(tuple)),
        problem=draw_from(st.none() | WORDS),
        is_slice=is_slice,
        mig_enabled=bool(slices),
        power_limit_w=draw_from(st.none() | st.floats(0, 9999)),
        slices=tuple(slices),
    )


@st.composite
def machines(draw_from: st.DrawFn) -> Machine:
    count = draw_from(st.integers(0, 3))
    return Machine(
        gpus=tuple(draw_from(devices(index)) for index in range(count)),
        problem=draw_from(st.none() | WORDS),
        driver_version=draw_from(st.none() | WORDS),
    )


VIEWS = st.fixed_dictionaries(
    {
        "filter": st.sampled_from(get_args(Filter)),
        "sort": st.sampled_from(get_args(Sort)),
        "looks_per_cell": st.sampled_from(LOOKS_PER_CELL),
        "is_paused": st.booleans(),
        "is_help": st.booleans(),
        "is_tree": st.booleans(),
        "jobs": st.lists(JOBS, max_size=3).map(tuple),
        "host": st.none() | HOSTS,
        "scroll": st.integers(0, 100),
        "glyphs": st.sampled_from([ASCII, UNICODE]),
        "silent_s": st.sampled_from([0.0, 12.0]),
        "hears_keys": st.booleans(),
    }
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is slow
@given(machines(), st.integers(1, 220), st.integers(1, 60), VIEWS)
def test_no_frame_is_larger_than_the_terminal_whatever_is_in_it(
    machine: Machine, width: int, height: int, changes: dict[str, Any]
) -> None:
    drawn = draw(frame_of(machine, **changes), width, height)
    lines = [ansi(line, colours=False) for line in drawn.lines]
    assert len(lines) <= height
    assert all(num_cells(line) <= width for line in lines)
    assert all(character.isprintable() for line in lines for character in line)
