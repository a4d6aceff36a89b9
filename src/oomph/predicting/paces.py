"""How much of what the hardware can do a training step has: likely, at best and at worst."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How much of what the hardware can do is had. Ratios of the best matmul, or of the sheet."""

    matmul: float  # of the best measured matmul
    convolution: float  # of the same
    attention: float  # fused, of the datasheet
    bandwidth: float  # of the datasheet
    bus: float  # of what the bus can carry
    host_bytes_per_s: float  # that an optimizer on the host reads and writes
    kernel_s: float  # the least that a kernel takes on the GPU
    host_s: float  # Python, autograd, dispatcher and launch of one op
    nvlink: float  # of the datasheet, one direction
    pcie: float  # of the same
    collective_s: float  # the least that a collective takes


# matmul, attention, bandwidth: 0.70 of the A100's sheet, 0.45 and 0.80 were chosen once, untuned,
# in a study before this module, and gave 7020 tokens/s where torchtune's README has 7075.
# host: between the 5 and 25 us that are told of torch
# (https://jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html); the
# simplest op took 7 us on a CPU (https://github.com/pytorch/pytorch/issues/41383).
# bus: 25 to 26 GB/s of 31.5 are commonly seen with pinned memory. host bandwidth: between two
# channels of DDR4 and a server's eight, of which an optimizer has a part. Both judgement, as are
# convolution and kernel.
# nvlink: 230 to 250 GB/s of 300 between 8 A100s; pcie: 35 to 45 of 63 between 8 H100s
# (https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests), 28 between 8 RTX 5090s
# (https://github.com/NVIDIA/nccl/issues/1639). collective: 42 us for 8 bytes on PCIe
# (https://github.com/NVIDIA/nccl/issues/1530), less on NVLink: judgement.
LIKELY = Pace(
    matmul=0.80,
    convolution=0.60,
    attention=0.45,
    bandwidth=0.80,
    bus=0.80,
    host_bytes_per_s=50e9,
    kernel_s=3e-6,
    host_s=10e-6,
    nvlink=0.78,
    pcie=0.50,
    collective_s=30e-6,
)
# attention: FlashAttention-2 reaches 50 to 73 % of an A100, its forerunner 25 to 40 %
# (https://arxiv.org/abs/2307.08691). host: as above. All others: judgement.
BEST = Pace(
    matmul=0.95,
    convolution=0.85,
    attention=0.70,
    bandwidth=0.92,
    bus=0.85,
    host_bytes_per_s=200e9,
    kernel_s=1.5e-6,
    host_s=5e-6,
    nvlink=0.95,
    pcie=0.75,
    collective_s=10e-6,
)
WORST = Pace(
    matmul=0.55,
    convolution=0.30,
    attention=0.25,
    bandwidth=0.60,
    bus=0.40,
    host_bytes_per_s=15e9,
    kernel_s=6e-6,
    host_s=25e-6,
    nvlink=0.50,
    pcie=0.20,
    collective_s=60e-6,
)
