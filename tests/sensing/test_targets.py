"""What is left to torch of the GPU that a question is about."""

from __future__ import annotations

import pytest
from conftest import OnMachine
from nvml.machine import Gpu

from oomph.errors import UsageError
from oomph.sensing.target import find_target
from oomph.units import GIB


def test_all_of_an_emulated_gpu_is_torchs() -> None:
    card = find_target("emulated", "2GiB").with_torch("2.13.0").card
    assert card.usable.low_bytes == card.usable.high_bytes == 2 * GIB
    assert card.outside(has_convolutions=True).high_bytes == 0
    assert card.is_emulated  # and has no kernels that nobody has seen
    with pytest.raises(UsageError, match="no memory of its own"):
        find_target("emulated", None)


def test_without_a_name_the_gpu_with_the_most_free_memory_is_meant(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    on_machine(
        [
            Gpu(name="Tesla T4", total_bytes=15 * GIB, used_bytes=0),  # the emptiest
            Gpu(name="NVIDIA A100-SXM4-80GB", total_bytes=80 * GIB, used_bytes=4 * GIB),
        ]
    )
    target = find_target(None, None)
    assert (target.model.name, target.taken_bytes) == ("a100-80gb", 4 * GIB)
