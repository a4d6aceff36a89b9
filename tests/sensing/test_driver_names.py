"""A GPU of the catalogue is named as its driver names it."""

from __future__ import annotations

import pytest

from oomph.records.gpu_model import GpuModel
from oomph.sensing import catalog
from oomph.sensing.catalog import driver_name


@pytest.mark.parametrize("model", catalog.all_models(), ids=lambda model: model.name)
def test_the_name_leads_back_to_the_gpu(model: GpuModel) -> None:
    total_bytes = model.measured_bytes or model.memory_bytes
    found = catalog.find_by_nvml_name(driver_name(model), total_bytes)
    assert found is not None
    assert found.memory_bytes == model.memory_bytes
    assert found.compute_capability == model.compute_capability


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("rtx3060-12gb", "NVIDIA GeForce RTX 3060"),
        ("gtx1080-ti", "NVIDIA GeForce GTX 1080 Ti"),
        ("v100-16gb", "Tesla V100-SXM2-16GB"),
        ("v100-pcie-32gb", "Tesla V100-PCIE-32GB"),
        ("t4", "Tesla T4"),
        ("titan-rtx", "NVIDIA TITAN RTX"),
        ("a6000", "NVIDIA RTX A6000"),
        ("rtx6000-ada", "NVIDIA RTX 6000 Ada Generation"),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB"),
        ("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB"),
        ("h100-80gb", "NVIDIA H100 80GB HBM3"),
        ("h100-pcie-80gb", "NVIDIA H100 PCIe"),
        ("l4", "NVIDIA L4"),
        ("a10g", "NVIDIA A10G"),
    ],
)
def test_names_from_real_machines(name: str, said: str) -> None:
    assert driver_name(catalog.find(name).model) == said
