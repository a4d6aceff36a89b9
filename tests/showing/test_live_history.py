"""What the sparklines are drawn from."""

from __future__ import annotations

from dataclasses import replace

from oomph.records.machine import Look, Machine
from oomph.sensing.devices import emulated_machine
from oomph.showing.live_view import LOOKS_PER_CELL, Histories, Track

GPU = emulated_machine("a100-80gb", now=0).gpus[0]


def test_a_cell_is_the_mean_of_its_looks() -> None:
    track = Track()
    for i in range(25):
        track.add(1.0 if i % 2 else 0.0)
    assert track.cells(10) == (0.5, 0.5, 0.4)
    assert track.cells(1)[-2:] == (1.0, 0.0)


def test_what_nobody_could_read_counts_for_nothing_and_alone_is_a_gap() -> None:
    track = Track()
    for ratio in (1.0, None, None):
        track.add(ratio)
    assert track.cells(1) == (1.0, None, None)
    assert track.cells(10) == (1.0,)


def test_a_view_that_is_open_for_weeks_keeps_no_more_than_it_can_draw() -> None:
    track = Track()
    for _ in range(10_000):
        track.add(0.5)
    assert {len(track.cells(pace)) for pace in LOOKS_PER_CELL} == {64}


def test_a_gpu_that_is_lost_has_a_gap_and_comes_back_where_it_was() -> None:
    histories = Histories()
    machine = Machine(gpus=(replace(GPU, busy_ratio=0.5),))
    for seen in (machine, Machine(gpus=(replace(GPU, uuid=None),)), machine):
        histories.add(Look(at=0.0, machine=seen))
    assert histories.busy[GPU.uuid or ""].cells(1) == (0.5, None, 0.5)
