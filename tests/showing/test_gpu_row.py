"""The cells of a GPU's row."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from oomph.sensing.devices import emulated_machine
from oomph.showing.gpus import bar_of, memory_of
from oomph.showing.terminal import ASCII
from oomph.units import GIB

GPU = emulated_machine("a100-80gb", now=0).gpus[0]


@given(
    used=st.integers(min_value=0, max_value=100 * GIB),
    mine=st.integers(min_value=0, max_value=100 * GIB),
    width=st.integers(min_value=3, max_value=60),
)
def test_the_bar_always_has_its_width(used: int, mine: int, width: int) -> None:
    assert GPU.processes
    process = replace(GPU.processes[0], used_bytes=mine)
    bar = bar_of(replace(GPU, used_bytes=used, processes=(process,)), width, ASCII.bar)
    assert bar is not None
    drawn = "".join(text for text, _ in bar)
    assert len(drawn) == width
    assert (ASCII.bar["mine"] in drawn) == bool(mine)


def test_memory_that_nobody_told_has_no_bar() -> None:
    assert bar_of(replace(GPU, used_bytes=None), 10, ASCII.bar) is None


def test_of_a_gpu_that_has_no_memory_nothing_is_a_share() -> None:
    assert memory_of(replace(GPU, used_bytes=0, total_bytes=0)).split()[-1] == "?"
