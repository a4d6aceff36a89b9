"""CUDA_VISIBLE_DEVICES, by the table of what CUDA makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.records.machine import Device
from oomph.sensing.devices import NOTHING_READ
from oomph.sensing.mapping import shown_by_cuda


def gpu(index: int, uuid: str) -> Device:
    return replace(NOTHING_READ, index=index, uuid=uuid, name="A100")


def a_slice(slot: int, uuid: str, instance: tuple[int, int]) -> Device:
    return replace(NOTHING_READ, index=slot, uuid=uuid, is_slice=True, mig_instance=instance)


GPUS = (
    gpu(0, "GPU-a1b2c3d4-0000-0000-0000-000000000000"),
    gpu(1, "GPU-a9b2c3d4-0000-0000-0000-000000000001"),
    gpu(2, "GPU-b1b2c3d4-0000-0000-0000-000000000002"),
)
SLICES = (
    a_slice(0, "MIG-11111111-0000-0000-0000-000000000000", (1, 0)),
    a_slice(1, "MIG-22222222-0000-0000-0000-000000000000", (5, 0)),
)
MIG = (*GPUS[:2], replace(GPUS[2], slices=SLICES, mig_enabled=True))


def indices(variable: str | None, gpus: tuple[Device, ...] = GPUS) -> list[int]:
    return [shown.gpu.index for shown in shown_by_cuda(variable, gpus)]


def uuids(variable: str | None) -> list[str | None]:
    return [shown.uuid for shown in shown_by_cuda(variable, MIG)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        pytest.param(None, [0, 1, 2], id="unset shows all"),
        pytest.param("", [], id="empty shows none"),
        pytest.param("-1", [], id="minus one shows none"),
        pytest.param("NoDevFiles", [], id="a word shows none"),
        pytest.param("void", [], id="void shows none"),
        pytest.param("2,0", [2, 0], id="the order is the list's"),
        pytest.param("0,9,1", [0], id="the list ends at an index out of range"),
        pytest.param("9,0", [], id="an index out of range in front shows none"),
        pytest.param("0,-1,1", [0], id="the list ends at a negative index"),
        pytest.param("0,0", [], id="a repeat shows none"),
        pytest.param("0,1,0", [], id="a later repeat shows none"),
        pytest.param("1gpu2", [1], id="leading digits are read"),
        pytest.param("0-2", [0], id="there are no ranges"),
        pytest.param(" 1 , 2", [1, 2], id="spaces do not matter"),
        pytest.param("0,,1", [0], id="the list ends at an empty entry"),
        pytest.param("0,1,", [0, 1], id="a comma at the end does not matter"),
        pytest.param("99999999999999999999", [], id="a huge index shows none"),
        pytest.param(GPUS[1].uuid, [1], id="a full UUID"),
        pytest.param(f"{GPUS[2].uuid},{GPUS[0].uuid}", [2, 0], id="full UUIDs in their order"),
        pytest.param("GPU-a1", [0], id="a unique UUID prefix"),
        pytest.param("GPU-b", [2], id="a very short unique prefix"),
        pytest.param("GPU-a", [], id="an ambiguous prefix shows none"),
        pytest.param("GPU-b,GPU-a,GPU-a1", [2], id="the list ends at an ambiguous prefix"),
        pytest.param("GPU-ffff", [], id="an unknown UUID shows none"),
        pytest.param("GPU-b1,GPU-b", [], id="a repeat by another prefix shows none"),
        pytest.param("a1b2c3d4", [], id="a UUID without its GPU- is no UUID"),
        pytest.param("0,GPU-b", [0], id="the list ends where indices turn into UUIDs"),
        pytest.param("GPU-b,0", [2], id="the list ends where UUIDs turn into indices"),
        pytest.param("MIG-11111111", [], id="a MIG id shows none where there is no MIG"),
    ],
)
def test_cuda_shows_these_gpus(variable: str | None, expected: list[int]) -> None:
    assert indices(variable) == expected


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        pytest.param(SLICES[1].uuid, [SLICES[1].uuid], id="a slice by its UUID"),
        pytest.param("MIG-2", [SLICES[1].uuid], id="a slice by a unique prefix"),
        pytest.param("MIG-", [], id="an ambiguous prefix shows none"),
        pytest.param(
            f"{SLICES[1].uuid},{SLICES[0].uuid}", [SLICES[1].uuid], id="only the first of several"
        ),
        pytest.param(f"MIG-{GPUS[2].uuid}/5/0", [SLICES[1].uuid], id="the form of older drivers"),
        pytest.param(f"MIG-{GPUS[2].uuid}/6/0", [], id="an instance that is not there"),
        pytest.param("2", [SLICES[0].uuid], id="a GPU in MIG mode shows its first slice"),
        pytest.param(GPUS[2].uuid, [SLICES[0].uuid], id="and so by its UUID"),
        pytest.param("0,2", [SLICES[0].uuid], id="a slice hides the whole GPUs"),
        pytest.param(None, [SLICES[0].uuid], id="and so if the variable is not set"),
        pytest.param("0,1", [GPUS[0].uuid, GPUS[1].uuid], id="whole GPUs without the cut one"),
    ],
)
def test_cuda_shows_these_slices(variable: str | None, expected: list[str]) -> None:
    assert uuids(variable) == expected


@given(st.text(alphabet="0123456789,-+ GPUMIGabcdef/x", max_size=60))
def test_any_value_shows_each_gpu_at_most_once(variable: str) -> None:
    for gpus in (GPUS, MIG, ()):
        shown = shown_by_cuda(variable, gpus)
        assert len({device.uuid for device in shown}) == len(shown)
        assert all(device.gpu in gpus for device in shown)


@given(st.permutations(range(3)))
def test_valid_indices_are_shown_in_their_order(order: list[int]) -> None:
    assert indices(",".join(map(str, order))) == order
