"""GpuModel, versions -> the CUDA memory outside torch's allocator, and what the driver leaves.

The context has two parts. One grows with the threads that a GPU can hold at a time: the driver
keeps local memory for each of them (threads per SM x SMs x bytes per thread, says NVIDIA,
https://forums.developer.nvidia.com/t/local-memory-management/289339). The other is the code of the
kernels: all of it before CUDA 11.7, and since then only the kernels that were called, which is
little. Both are fitted to published figures, which overheads.json lists with their sources.
"""

# Limits: Linux, one process per GPU. A kernel that needs much local memory makes the context grow
# beyond the interval, and so does CUDA_MODULE_LOADING=EAGER. Libraries that allocate outside torch
# are not counted. One measurement on the machine itself beats all of this: `measured_bytes`.

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, Literal, NamedTuple

from oomph.records.generation import MOST_RESIDENT_THREADS, generation_of
from oomph.records.gpu_model import GpuModel
from oomph.units import GIB, MIB

Memory = Literal["hbm", "gddr", "gddr with ecc", "gddr, ecc can be switched"]
Version = tuple[int, int]

# Two dozen readings do not show the extremes, so the interval extends this far beyond them.
# Judgement.
_MARGIN_RATIO = 0.10

# The CUDA version of the wheel that `pip install torch==...` takes, by the first torch that has it:
# https://pytorch.org/get-started/previous-versions, where the command without a suffix is the one
# for this CUDA (1.5 to 1.12: 10.2). Before 1.5 it was 9 or 10, which makes no difference here.
_CUDA_OF_WHEELS: tuple[tuple[Version, Version], ...] = (
    ((2, 1), (12, 1)),
    ((1, 13), (11, 7)),
    ((1, 5), (10, 2)),
    ((0, 0), (10, 1)),
)
# torch requests lazy loading since 1.13 (https://github.com/pytorch/pytorch/pull/86509); CUDA
# supports it since 11.7 (https://github.com/pytorch/pytorch/issues/107667).
_LAZY_SINCE_TORCH: Version = (1, 13)
_LAZY_SINCE_CUDA: Version = (11, 7)
# The driver must support it too: R515, the driver of CUDA 11.7, is the first. Programs built for
# CUDA 11 already run with R450, those for CUDA 12 need R525
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
_LAZY_WITH_EVERY_DRIVER: Version = (12, 0)

# Cards of one name differ by this much: an A100-40GB has 39.43 GiB in pytorch#126766, 39.50 in
# CoSeR#10 and 39.56 in xMem's figures.
_SAME_CARD_RATIO = 0.004

# The kind of memory of a card, by its name in the catalogue. ECC is on by default on data-centre
# cards with GDDR; on RTX and Quadro cards it is off and can be switched on. It takes 1/16 of the
# memory (CUDA Best Practices Guide).
_MEMORY_OF: tuple[tuple[Memory, re.Pattern[str]], ...] = (
    ("hbm", re.compile(r"(p100|v100s?|titan-v|a30|a[18]00|h\d+|gh200|g?b[23]00)(-|$)")),
    ("gddr with ecc", re.compile(r"(k80|m40|p4|p40|t4|a10g?|a16|a40|l4|l40s?)(-|$)")),
    ("gddr, ecc can be switched", re.compile(r"(quadro-|a\d[05]00|rtx\d000-ada|rtx-pro-)")),
    ("gddr", re.compile(r"(gtx|rtx)\d{4}|titan-(rtx|xp)")),
)


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes that were not measured here: bounds, likely value, and the evidence for them."""

    low_bytes: int
    likely_bytes: int
    high_bytes: int
    because: str


NOTHING = Interval(0, 0, 0, "nothing")


class _Reading(NamedTuple):
    """A published reading of a CUDA context."""

    gpu: str
    mib: float
    threads_per_sm: int
    threads: int  # that the GPU can hold at a time
    cuda_major: int | None


def together(one: Interval, other: Interval) -> Interval:
    """Return the sum of two independent intervals."""
    return Interval(
        one.low_bytes + other.low_bytes,
        one.likely_bytes + other.likely_bytes,
        one.high_bytes + other.high_bytes,
        f"{one.because}; {other.because}",
    )


# ---- the context


def context(
    model: GpuModel,
    torch_version: str | None,
    cuda_version: str | None = None,
    *,
    measured_bytes: int | None = None,
) -> Interval:
    """Return the CUDA context's memory in one process; exact if measured on this machine."""
    if measured_bytes is not None:
        return exactly(measured_bytes, "measured on this machine")
    is_lazy, why = _loads_lazily(_version(torch_version), _cuda(torch_version, cuda_version))
    lazy = _lazy_context(model, why)
    if is_lazy:
        return lazy
    eager = _eager_context(lazy, _cuda(torch_version, cuda_version), why)
    if is_lazy is not None:
        return eager
    because = f"{lazy.because}; much more if kernels are loaded eagerly"
    return replace(lazy, high_bytes=eager.high_bytes, because=because)


def _loads_lazily(torch: Version | None, cuda: Version | None) -> tuple[bool | None, str]:
    """Return whether kernels are loaded on first call (None: unknown), and why."""
    if torch is not None and torch < _LAZY_SINCE_TORCH:
        return False, "torch before 1.13 loads all kernels"
    if cuda is not None and cuda < _LAZY_SINCE_CUDA:
        return False, "CUDA before 11.7 loads all kernels"
    if torch is None and cuda is None:
        return None, "neither torch's version nor CUDA's is known"
    if cuda is not None and cuda < _LAZY_WITH_EVERY_DRIVER:
        return None, "CUDA 11 also runs with drivers that are too old for loading kernels lazily"
    return True, "kernels are loaded when they are called, as torch 1.13 with CUDA 11.7 began"


def _lazy_context(model: GpuModel, why: str) -> Interval:
    readings = _readings("lazy")
    if model.num_sms is None or model.compute_capability is None:
        return _context_of_unknown_size(model, readings, why)
    threads = model.num_sms * _threads_per_sm(model.compute_capability)
    slope, intercept = _context_line()
    likely = slope * threads + intercept
    least, most = _around_the_line(readings)
    rule = (
        f"{intercept:.0f} MiB and {slope * 1000:.2f} MiB per 1000 of {threads} resident threads, "
        f"from {len(readings)} published readings of {_num_gpus(readings)} GPUs"
    )
    return _in_mib(likely * least, likely, likely * most, f"{rule}; {why}")


def _context_of_unknown_size(model: GpuModel, readings: Sequence[_Reading], why: str) -> Interval:
    """Estimate from GPUs with the same SMs, up to the largest, if the number of SMs is unknown."""
    slope, intercept = _context_line()
    own = model.compute_capability and _threads_per_sm(model.compute_capability)
    same = [each for each in readings if each.threads_per_sm == own] or readings
    taken = [reading.mib for reading in same]
    least, most = _around_the_line(readings)
    rule = f"its SMs are not known: {len(same)} published readings of {_num_gpus(same)} other GPUs"
    largest = (slope * MOST_RESIDENT_THREADS + intercept) * most
    return _in_mib(min(taken) * least, median(taken), largest, f"{rule}; {why}")


def _around_the_line(readings: Sequence[_Reading]) -> tuple[float, float]:
    """Return how far below and above the line a GPU may be, as factors."""
    ratios = [reading.mib / _on_line(reading) for reading in readings]
    return min(ratios) * (1 - _MARGIN_RATIO), max(ratios) * (1 + _MARGIN_RATIO)


def _eager_context(lazy: Interval, cuda: Version | None, why: str) -> Interval:
    """Add the code of all kernels to a lazy context; the code grew with CUDA 11."""
    readings = _readings("eager")
    if cuda is not None:
        readings = [r for r in readings if ((r.cuda_major or 0) >= 11) == (cuda[0] >= 11)]
    code = [reading.mib - _on_line(reading) for reading in readings]
    return Interval(
        low_bytes=lazy.low_bytes + round(min(code) * (1 - _MARGIN_RATIO) * MIB),
        likely_bytes=lazy.likely_bytes + round(median(code) * MIB),
        high_bytes=lazy.high_bytes + round(max(code) * (1 + _MARGIN_RATIO) * MIB),
        because=(
            f"{why}: {min(code):.0f} to {max(code):.0f} MiB in {len(code)} published readings, "
            f"beside local memory for the GPU's threads"
        ),
    )


@functools.cache
def _context_line() -> tuple[float, float]:
    """Return the MiB per resident thread and the MiB without any."""
    readings = _readings("lazy")
    line = linear_regression([each.threads for each in readings], [each.mib for each in readings])
    return line.slope, line.intercept


def _on_line(reading: _Reading) -> float:
    slope, intercept = _context_line()
    return slope * reading.threads + intercept


def _threads_per_sm(capability: Version) -> int:
    return generation_of(capability).threads_per_sm


def _readings(loading: str) -> list[_Reading]:
    found = []
    for each in _file()["context"]:
        if each["loading"] == loading:
            per_sm = _threads_per_sm(tuple(each["compute_capability"]))
            cuda_major = each["cuda"][0] if each.get("cuda") else None
            threads = per_sm * each["num_sms"]
            found.append(_Reading(each["gpu"], each["mib"], per_sm, threads, cuda_major))
    return found


def _num_gpus(readings: Sequence[_Reading]) -> int:
    return len({reading.gpu for reading in readings})


def cudnn(
    model: GpuModel,
    torch_version: str | None,
    cuda_version: str | None = None,
    *,
    measured_context_bytes: int | None = None,
) -> Interval:
    """Return the memory of cuDNN's own kernels, taken from the first convolution on.

    Since version 8 cuDNN consists of several libraries, each loaded on first use, with all of its
    kernels unless kernels are loaded one by one. A context measured with one small tensor does not
    include them, but it does show how kernels are loaded.
    """
    is_lazy, why = _loads_lazily(_version(torch_version), _cuda(torch_version, cuda_version))
    if measured_context_bytes is not None:
        is_lazy = measured_context_bytes <= _lazy_context(model, why).high_bytes
        why = "as large as the context is, all kernels are loaded"
    if is_lazy:
        return NOTHING
    taken = [reading["mib"] for reading in _file()["cudnn"]]
    likely = 0 if is_lazy is None else sum(taken) / len(taken)
    because = f"{min(taken)} to {max(taken)} MiB in {len(taken)} published readings; {why}"
    return _in_mib(0, likely, max(taken), because)


# ---- versions


def _version(text: str | None) -> Version | None:
    """("2.1.1+cu121") -> (2, 1); None if it is not a version."""
    found = re.match(r"v?(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def _cuda(torch_version: str | None, cuda_version: str | None) -> Version | None:
    """Return the given version, else the one in torch's ("+cu121"), else that of torch's wheels."""
    tag = re.search(r"\+cu(\d{2})(\d)$", torch_version or "")
    given = _version(cuda_version) or (tag and (int(tag[1]), int(tag[2])))
    torch = _version(torch_version)
    if given or torch is None:
        return given or None
    return next(cuda for first, cuda in _CUDA_OF_WHEELS if torch >= first)


# ---- several GPUs


def nccl(num_groups: int = 1, *, measured_bytes: int | None = None) -> Interval:
    """Return what NCCL's process groups take on each GPU, outside torch's allocator."""
    if measured_bytes is not None:
        return exactly(measured_bytes, "measured on this machine")
    if num_groups < 1:
        return exactly(0, "no process group")
    taken = [reading["mib"] * num_groups for reading in _file()["nccl"]]
    groups = "a process group" if num_groups == 1 else f"{num_groups} process groups"
    because = f"{len(taken)} published readings, for {groups}; grows with channels and neighbours"
    return _in_mib(min(taken), median(taken), max(taken), because)


# ---- the memory that the driver leaves -----------------------------------------------------------


def usable_bytes(model: GpuModel) -> Interval:
    """Return how much of a card's nameplate CUDA can use, for all contexts and all of torch."""
    if model.measured_bytes is not None:
        spread = round(model.measured_bytes * _SAME_CARD_RATIO)
        return Interval(
            model.measured_bytes - spread,
            model.measured_bytes,
            min(model.measured_bytes + spread, model.memory_bytes),
            f"a published reading; cards of one name differ by {_SAME_CARD_RATIO:.1%}",
        )
    memory = memory_of(model.name)
    ratios, usual = _usable_ratios(memory)
    shares = f"{min(ratios):.1%} to {max(ratios):.1%} of the nameplate"
    cards = f"{len(ratios)} published readings of GPUs with {memory or 'any memory'}"
    return Interval(
        int(model.memory_bytes * min(ratios)),
        int(model.memory_bytes * median(usual)),
        int(model.memory_bytes * max(ratios)),
        f"{shares} in {cards}",
    )


def _usable_ratios(memory: Memory | None) -> tuple[list[float], list[float]]:
    """Return the possible and the usual shares of the nameplate."""
    by_memory: dict[str, list[float]] = {}
    for reading in _file()["usable"]:
        ratio = reading["bytes"] / (reading["of_gib"] * GIB)
        by_memory.setdefault(reading["memory"], []).append(ratio)
    if memory is None:
        every = [ratio for ratios in by_memory.values() for ratio in ratios]
        return every, every
    if memory == "gddr, ecc can be switched":
        return by_memory["gddr"] + by_memory["gddr with ecc"], by_memory["gddr"]
    return by_memory[memory], by_memory[memory]


def memory_of(name: str) -> Memory | None:
    """Return the kind of memory of a GPU in the catalogue; None if it is not listed.

    >>> memory_of("a100-80gb"), memory_of("l4"), memory_of("rtx4090")
    ('hbm', 'gddr with ecc', 'gddr')
    """
    return next((memory for memory, names in _MEMORY_OF if names.match(name)), None)


# ---- the file


@functools.cache
def _file() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        Path(__file__).with_name("overheads.json").read_text("utf-8")
    )
    return content


def exactly(size_bytes: int, because: str) -> Interval:
    """Return the interval of a known figure."""
    return Interval(size_bytes, size_bytes, size_bytes, because)


def _in_mib(low: float, likely: float, high: float, because: str) -> Interval:
    return Interval(round(low * MIB), round(likely * MIB), round(high * MIB), because)
