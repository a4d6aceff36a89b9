"""A machine that is described, not read."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.errors import OomphError, UsageError
from oomph.records.gpu_model import GpuModel
from oomph.sensing.catalog import all_models
from oomph.sensing.devices import emulated_machine


def test_a_description_has_a_number_of_gpus_of_a_name() -> None:
    machine = emulated_machine("8xa100-80gb", now=0)
    assert machine.emulated
    assert [gpu.name for gpu in machine.gpus] == ["A100 SXM4 80GB"] * 8
    assert {process.owner for gpu in machine.gpus for process in gpu.processes or ()} >= {
        "mine",
        "others",
        "unknown",
    }


def test_a_list_describes_a_mixed_machine() -> None:
    machine = emulated_machine("2 x rtx 4090, t4", now=0)
    assert [gpu.name for gpu in machine.gpus] == ["RTX 4090", "RTX 4090", "Tesla T4"]


@given(st.sampled_from(all_models()))
def test_every_gpu_of_the_catalogue_can_be_emulated_within_its_memory(model: GpuModel) -> None:
    machine = emulated_machine(f"8x{model.name}", now=0)
    for gpu in machine.gpus:
        assert gpu.used_bytes is not None
        assert gpu.total_bytes is not None
        assert gpu.used_bytes <= gpu.total_bytes
    assert len({gpu.uuid for gpu in machine.gpus}) == 8


@pytest.mark.parametrize(
    "description", ["", "8x", "0xt4", "8xfoo", ",", "65xt4", "999xt4", "-1xt4"]
)
def test_what_describes_no_machine_is_refused(description: str) -> None:
    with pytest.raises(UsageError):
        emulated_machine(description, now=0)


@given(st.text(max_size=40))
def test_no_description_raises_anything_else(description: str) -> None:
    with contextlib.suppress(OomphError):
        assert emulated_machine(description, now=0).gpus
