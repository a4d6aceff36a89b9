"""GpuModel -> the name that a driver and torch give such a GPU.

Scripts choose by it: `"A100" in torch.cuda.get_device_name()`. The rules follow the names that the
tests of the catalogue have from real machines; a GPU that none of them has is named by the rules
of its kind.
"""

from __future__ import annotations

import re

from oomph.records.catalog import GpuModel

_SIZE = re.compile(r" \d+GB$")
_OF_GAMERS = re.compile(r"(RTX|GTX) \d{4}")
_OF_FORM = re.compile(r"(?P<chip>\w+) (?P<form>SXM\d|PCIe) (?P<size>\d+GB)")
# That follow no rule, as real machines have them.
_OWN = {
    "a100-pcie-80gb": "NVIDIA A100 80GB PCIe",
    "h100-80gb": "NVIDIA H100 80GB HBM3",
    "h100-pcie-80gb": "NVIDIA H100 PCIe",
    "h100-nvl": "NVIDIA H100 NVL",
    "h200": "NVIDIA H200",
    "h200-nvl": "NVIDIA H200 NVL",
    "gh200": "NVIDIA GH200 480GB",
    "b200": "NVIDIA B200",
    "b300": "NVIDIA B300 SXM6 AC",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
}


def driver_name(model: GpuModel) -> str:
    """As nvidia-smi and torch.cuda.get_device_name() have it."""
    if model.name in _OWN:
        return _OWN[model.name]
    title = model.title
    is_ada = "Ada" in title
    if _OF_GAMERS.match(title) and not is_ada:
        return f"NVIDIA GeForce {_SIZE.sub('', title)}"
    if title.startswith("Tesla"):
        return f"Tesla {_with_form(title.removeprefix('Tesla '))}"
    if title.startswith("Titan"):
        return f"NVIDIA {title.upper()}"
    if title.startswith("Quadro"):
        return title
    if is_ada:
        return f"NVIDIA {title} Generation"
    return f"NVIDIA {_with_form(title)}"


def _with_form(title: str) -> str:
    """A100 SXM4 40GB is A100-SXM4-40GB."""
    found = _OF_FORM.fullmatch(title)
    if found is None:
        return title
    return f"{found['chip']}-{found['form'].upper()}-{found['size']}"
