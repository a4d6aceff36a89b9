"""GpuModel: a GPU as its datasheet describes it, for GPUs that are not at hand. Found: a match."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from oomph.errors import UsageError
from oomph.records.generation import generation_of

Tf32 = Literal["none", "as fast as fp32", "faster than fp32"]

# The product line, as NVIDIA writes it: four digits without a letter.
_GEFORCE = re.compile(r"(GeForce )?(RTX|GTX) \d{4}\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What joins machines, as the user names it: "infiniband-400", "ethernet-100"."""

    name: str
    adapter_bits_per_s: float
    num_adapters: int | None  # of a machine; None: one for each GPU
    is_rdma: bool  # adapters read GPU memory; else the host copies

    def bytes_per_s(self, gpus_per_node: int) -> float:
        """Return what all adapters of a machine carry in one direction."""
        return self.adapter_bits_per_s / 8 * (self.num_adapters or gpus_per_node)

    def __str__(self) -> str:
        return self.name


_NETWORK = re.compile(r"(infiniband|roce|efa|ethernet)-(\d{1,4})(?:x(\d{1,2}))?")


def network_of(name: str | None) -> Network | None:
    """Return the network that a name stands for, such as "ethernet-100x2". Raises UsageError.

    The first number is what one adapter carries, in Gbit/s. The second is how many of them a
    machine has; by default there is one for each GPU, or on Ethernet one.
    """
    if name is None:
        return None
    found = _NETWORK.fullmatch(name)
    if found is None or not int(found[2]) or found[3] in ("0", "00"):
        raise UsageError(
            f"unknown link {name!r:.40}",
            because="it is infiniband, roce, efa or ethernet, with the Gbit/s of an adapter and, if"
            " a machine has another number than usual, how many there are",
            attempt="infiniband-400, infiniband-200x4, or ethernet-100",
        )
    is_rdma = found[1] != "ethernet"
    usual = None if is_rdma else 1
    return Network(
        name=name,
        adapter_bits_per_s=int(found[2]) * 1e9,
        num_adapters=int(found[3]) if found[3] else usual,
        is_rdma=is_rdma,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """One GPU of the catalogue. None if the hardware lacks it or no source gives it.

    Peak rates are dense (no sparsity), per second, with fp32 accumulation.
    """

    name: str  # as people type it, unique in the catalogue: "a100-80gb"
    title: str  # as the maker writes it: "A100 SXM4 80GB"
    architecture: str
    memory_bytes: int  # nameplate: "80GB" is 80 GiB; the usable memory if the two differ
    measured_bytes: int | None = None  # left to CUDA by the driver, if a source measured it
    memory_bandwidth_bytes_per_s: int | None = None
    fp32_flops: float | None = None
    tf32_flops: float | None = None
    fp16_flops: float | None = None
    bf16_flops: float | None = None
    matmul_bf16_flops: float | None = None  # best measured: closer than the datasheet
    num_sms: int | None = None
    compute_capability: tuple[int, int] | None = None
    nvlink_bytes_per_s: int | None = None  # both directions together
    pcie: str | None = None  # "4.0 x16"
    network: Network | None = None  # between machines: not the GPU's own, so no catalogue has it
    # Field name -> source of the figure, as tags that catalog.sources() spells out. If a field is
    # None because the hardware lacks it, the text begins with "none".
    sources: Mapping[str, str] = field(hash=False)
    note: str | None = None

    @property
    def is_geforce_desktop(self) -> bool:
        """Return whether it is a consumer's board: "RTX 4090", and not "RTX 6000 Ada"."""
        is_other = any(word in self.title for word in ("Ada", "Laptop", "Max-Q", "Mobile"))
        return bool(_GEFORCE.match(self.title)) and not is_other

    @property
    def tf32(self) -> Tf32:
        """Return whether tensor cores in TF32 are faster than the other units in fp32.

        On GeForce cards they are equally fast; datasheets round the two differently.
        """
        if (self.tf32_flops or 0) > 1.5 * (self.fp32_flops or 0):
            return "faster than fp32"
        capability = self.compute_capability
        has_it = self.tf32_flops or (capability and generation_of(capability).has_bf16)
        return "as fast as fp32" if has_it else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The GPU that a text refers to."""

    model: GpuModel
    assumed: str | None  # how an ambiguous text was read; None if it was not ambiguous


# ---- Calibration: what CUDA takes on one kind of GPU, measured on the machine itself -------------

# process: the driver reported what the measuring process held. difference: it did not, so the whole
# GPU's use before was subtracted.
MeasuredBy = Literal["process", "difference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A measurement of one GPU with one driver and one torch. It is not valid for others."""

    gpu_name: str  # as the driver names it
    driver_version: str
    torch_version: str
    cuda_version: str  # of the torch build
    context_bytes: int  # after torch.ones(1, device="cuda"), without torch's reserved memory
    context_with_libraries_bytes: int  # after a matmul and a convolution, likewise
    total_bytes: int  # of the card, as torch reports it
    matmul_flops: Mapping[str, float]  # per second, by dtype; the best measured
    bandwidth_bytes_per_s: float | None  # read and written by a copy
    measured_by: MeasuredBy
    measured_at: float  # seconds since the epoch

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return what the measurement is valid for."""
        return (self.gpu_name, self.driver_version, self.torch_version, self.cuda_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a prediction assumes without a measurement."""

    gpu: str  # its name in the catalogue
    context_bytes: int
    context_low_bytes: int
    context_high_bytes: int
    total_bytes: int
    total_low_bytes: int
    total_high_bytes: int
    matmul_flops: Mapping[str, float | None]
    bandwidth_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A measurement and the values it replaces; None if the catalogue lacks the GPU."""

    calibration: Calibration
    assumed: Assumed | None


def from_jsonable(entry: Any) -> Calibration:
    """Read a stored calibration. Raises ValueError if it is not one."""
    names = {field.name for field in fields(Calibration)}
    if not isinstance(entry, dict) or set(entry) != names:
        raise ValueError("an entry does not have the fields of a calibration")
    texts = ("gpu_name", "driver_version", "torch_version", "cuda_version")
    sizes = ("context_bytes", "context_with_libraries_bytes", "total_bytes")
    rates = entry["matmul_flops"]
    is_sound = (
        all(isinstance(entry[name], str) for name in texts)
        and all(type(entry[name]) is int and entry[name] > 0 for name in sizes)
        and isinstance(rates, dict)
        and all(_is_rate(rate) for rate in rates.values())
        and (entry["bandwidth_bytes_per_s"] is None or _is_rate(entry["bandwidth_bytes_per_s"]))
        and entry["measured_by"] in ("process", "difference")
        and _is_rate(entry["measured_at"])
    )
    if not is_sound:
        raise ValueError("an entry has impossible figures")
    return Calibration(**entry)


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")
