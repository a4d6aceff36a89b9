"""Compute capability -> what all GPUs of a generation have in common, one row each.

Everything that depends on the generation and not on the single card is here, so a new generation is
one new row. Figures of single cards (SMs, rates, memory) are in catalog.json.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Capability = tuple[int, int]

# at::cuda::parseChosenWorkspaceSize (CublasHandlePool.cpp). Since torch 2.0 it is ":4096:2:16:8" in
# KiB, and 32 MiB on compute capability 9.0 exactly. Since torch 2.12 it is 32 MiB on all GPUs of
# capability 9, 10 and 12 (pytorch pull request 175344). Snapshots of torch 2.11 on capability 12.0
# show the smaller one.
_CUBLAS_BYTES, _CUBLAS_BYTES_FROM_9 = 8_519_680, 32 << 20
_ALL_FROM_9_SINCE = (2, 12)  # the version of torch


@dataclass(frozen=True, slots=True)
class Generation:
    """GPUs from one compute capability up to the next row's.

    since, threads_per_sm: CUDA C++ Programming Guide, "Technical Specifications per Compute
    Capability" (maximum number of resident threads per SM).
    fp64_of_fp32: the same guide, "Arithmetic Instructions". Kepler's 1/3 and the 1/32 of some are
    taken as 1/64, because these GPUs are not used to train in fp64. Judgement.
    has_tensor_cores: since Volta (NVIDIA V100 white paper, 2017).
    has_bf16: tensor cores for bfloat16 and TF32 (the guide, "Tensor Core Operations"), and torch's
    flash attention, which needs the same GPUs (sdp_utils.cpp).
    cublas_bytes, cublas_bytes_before_2_12: what cuBLAS takes for each handle and stream, see above.
    host_speed: of one thread of the CPU that is sold beside it, of that beside an A100, see below.
    """

    name: str
    since: Capability
    threads_per_sm: int
    fp64_of_fp32: float
    has_tensor_cores: bool
    has_bf16: bool
    cublas_bytes: int
    cublas_bytes_before_2_12: int = _CUBLAS_BYTES
    host_speed: float = 1.0

    def cublas_workspace_bytes(self, torch_version: str) -> int:
        """Return what cuBLAS takes for each handle and stream under a version of torch.

        >>> generation_of((12, 0)).cublas_workspace_bytes("2.11.0+cu128")
        8519680
        """
        numbers = tuple(int(digits) for digits in re.findall(r"\d+", torch_version)[:2])
        is_old = numbers < _ALL_FROM_9_SINCE
        return self.cublas_bytes_before_2_12 if is_old else self.cublas_bytes


# NVIDIA's own machines (DGX user guides): an A100 is beside an EPYC 7742 (Zen 2, up to 3.4 GHz), an
# H100 beside a Xeon 8480C (Golden Cove, 3.8 GHz), a B200 beside a Xeon 8570 (Raptor Cove, 4.0 GHz).
# Instructions per cycle: Golden Cove is 1.19 of Cypress Cove (Intel's Architecture Day 2021), which
# is Sunny Cove's core, and that is 1.18 of Skylake (the same, 2018); Zen 2 is about Skylake's:
# judgement. A V100 is beside a Xeon E5-2698 v4 (Broadwell, 3.6 GHz), about as fast as an A100's.
# Nothing is known of the CPU beside a workstation's or a desktop's GPU: people also rent them in
# servers, and the published RTX 4090 has one of the slowest hosts.
_HOST_OF_HOPPER = 1.19 * 1.18 * 3.8 / 3.4
_HOST_OF_B200 = 1.19 * 1.18 * 4.0 / 3.4

_FAST, _SLOW = 1 / 2, 1 / 64  # fp64
GENERATIONS = (
    Generation("Kepler and Maxwell", (0, 0), 2048, _SLOW, False, False, _CUBLAS_BYTES),
    Generation("Pascal P100", (6, 0), 2048, _FAST, False, False, _CUBLAS_BYTES),
    Generation("Pascal", (6, 1), 2048, _SLOW, False, False, _CUBLAS_BYTES),
    Generation("Volta", (7, 0), 2048, _FAST, True, False, _CUBLAS_BYTES),
    Generation("Turing", (7, 5), 1024, _SLOW, True, False, _CUBLAS_BYTES),
    Generation("Ampere A100 and A30", (8, 0), 2048, _FAST, True, True, _CUBLAS_BYTES),
    Generation("Ampere", (8, 6), 1536, _SLOW, True, True, _CUBLAS_BYTES),
    Generation("Ada", (8, 9), 1536, _SLOW, True, True, _CUBLAS_BYTES),
    Generation(
        *("Hopper", (9, 0), 2048, _FAST, True, True, _CUBLAS_BYTES_FROM_9, _CUBLAS_BYTES_FROM_9),
        host_speed=_HOST_OF_HOPPER,
    ),
    Generation(
        *("Blackwell B200", (10, 0), 2048, _FAST, True, True, _CUBLAS_BYTES_FROM_9),
        host_speed=_HOST_OF_B200,
    ),
    Generation(
        *("Blackwell Ultra B300", (10, 3), 2048, _SLOW, True, True, _CUBLAS_BYTES_FROM_9),
        host_speed=_HOST_OF_B200,
    ),
    Generation("Blackwell RTX", (12, 0), 1536, _SLOW, True, True, _CUBLAS_BYTES_FROM_9),
)

# The most threads that a GPU of the catalogue can hold: a B300 has 160 SMs (NVIDIA at Hot Chips
# 2025, https://www.tweaktown.com/news/107373), and no generation has more threads per SM.
MOST_RESIDENT_THREADS = 160 * 2048

# If no GPU is named, an A100 SXM4 40GB is assumed: the most common one in the published runs that
# predictions are compared with. Figures: catalog.json, a100-40gb.
DEFAULT_GPU = "a100-40gb"
DEFAULT_CAPABILITY: Capability = (8, 0)
DEFAULT_NUM_SMS = 108
DEFAULT_MATMUL_FLOPS = 250e12  # 0.80 of the sheet's 312e12 in bf16: rates.BEST_OF_SHEET
DEFAULT_BYTES_PER_S = 1.6e12  # the sheet's 1555e9, rounded


def generation_of(capability: Capability) -> Generation:
    """Return the row of a compute capability; one newer than all rows uses the last.

    >>> generation_of((8, 0)).name, generation_of((8, 7)).name
    ('Ampere A100 and A30', 'Ampere')
    """
    return next(row for row in reversed(GENERATIONS) if row.since <= capability)


def trace_capability(capability: Capability) -> Capability:
    """Return the lowest capability with the same trace; it stands for all GPUs of its kind.

    Traces differ by the available attention kernels and by cuBLAS's workspace.

    >>> trace_capability((7, 5)), trace_capability((8, 9)), trace_capability((12, 0))
    ((0, 0), (8, 0), (10, 0))
    """
    own = generation_of(capability)
    return next(row.since for row in GENERATIONS if _decides(row) == _decides(own))


def _decides(row: Generation) -> tuple[bool, int, int]:
    """Return what makes a trace differ."""
    return row.has_bf16, row.cublas_bytes, row.cublas_bytes_before_2_12
