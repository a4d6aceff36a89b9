"""GpuModel: a GPU as its datasheet has it, for machines that we do not have. Found: one by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """One GPU of the catalogue. What the hardware lacks, or no source gives, is None.

    Peak rates are dense (no sparsity), per second, with fp32 accumulation.
    """

    name: str  # as people type it, unique in the catalogue: "a100-80gb"
    title: str  # as the maker writes it: "A100 SXM4 80GB"
    architecture: str
    memory_bytes: int  # the nameplate: "80GB" is 80 GiB; what is usable where the two differ
    measured_bytes: int | None  # what the driver leaves to CUDA, where a source measured it
    memory_bandwidth_bytes_per_s: int | None
    fp32_flops: float | None
    tf32_flops: float | None
    fp16_flops: float | None
    bf16_flops: float | None
    matmul_bf16_flops: (
        float | None
    )  # best matmul that was measured: a nearer ceiling than the sheet
    num_sms: int | None
    compute_capability: tuple[int, int] | None
    nvlink_bytes_per_s: int | None  # both directions together
    pcie: str | None  # "4.0 x16"
    # Field name -> where the figure comes from, as tags that catalog.sources() spells out;
    # a field that is None because the hardware lacks it has a text that begins with "none".
    sources: Mapping[str, str] = field(hash=False)
    note: str | None = None

    @property
    def has_fast_tf32(self) -> bool:
        """Whether tensor cores are faster in TF32 than the other units in fp32.

        On GeForce cards they are as fast; datasheets round the two differently.
        """
        return (self.tf32_flops or 0) > 1.5 * (self.fp32_flops or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The GPU that a text means."""

    model: GpuModel
    assumed: str | None  # what the text left open and how it was read; None if it left nothing open
