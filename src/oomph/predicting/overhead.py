"""GpuModel, versions -> what CUDA takes before torch's allocator begins, and what a driver leaves.

The context has two parts. One goes with the threads that a GPU can hold at a time: the driver
keeps local memory for each of them (threads per SM x SMs x bytes per thread, says NVIDIA,
https://forums.developer.nvidia.com/t/local-memory-management/289339). The other is the code of
the kernels: all of it before CUDA 11.7, and only what has been called since, which is little.
Both are read off published figures, which stand in overheads.json with their sources.

Limits: Linux, one process per GPU. A kernel that needs much local memory lets the context grow
beyond the interval, and so does CUDA_MODULE_LOADING=EAGER; libraries that allocate beside torch
are not counted. One reading of the machine itself is better than all of this: `measured_bytes`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, Literal

from oomph.records.catalog import GpuModel
from oomph.units import GIB, MIB

Memory = Literal["hbm", "gddr", "gddr with ecc", "gddr, ecc can be switched"]
Version = tuple[int, int]

# Two dozen readings do not show the extremes: the interval goes this far beyond them. Judgement.
_MARGIN_RATIO = 0.10

# CUDA programming guide, "Technical Specifications per Compute Capability": resident threads
# per SM. 2048 wherever it is not said here.
_THREADS_PER_SM = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
_MOST_THREADS_PER_SM = 2048
# The largest GPU of the catalogue, the B300: 160 SMs, from memory.
_MOST_THREADS = 160 * _MOST_THREADS_PER_SM

# The CUDA of the wheel that `pip install torch==...` takes, by the first torch that has it:
# https://pytorch.org/get-started/previous-versions, not checked for each. From 2.0 on every wheel
# has 11.7 or later, from 2.1 on 12.1 or later.
_CUDA_OF_WHEELS: tuple[tuple[Version, Version], ...] = (
    ((2, 1), (12, 1)),
    ((1, 13), (11, 7)),
    ((1, 5), (10, 2)),
    ((0, 0), (10, 1)),
)
# torch asks for lazy loading since 1.13 (https://github.com/pytorch/pytorch/pull/86509), CUDA
# can do it since 11.7 (https://github.com/pytorch/pytorch/issues/107667).
_LAZY_SINCE_TORCH: Version = (1, 13)
_LAZY_SINCE_CUDA: Version = (11, 7)
# The driver must be able to, too: that of CUDA 11.7, R515, is the first. Programs of CUDA 11 run
# with R450 already, those of CUDA 12 want R525
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
_LAZY_WITH_EVERY_DRIVER: Version = (12, 0)

# Cards of one name differ by as much: an A100-40GB has 39.43 GiB in pytorch#126766, 39.50 in
# CoSeR#10 and 39.56 in xMem's figures.
_SAME_CARD_RATIO = 0.004

# Which memory a card has, by its name in the catalogue. On data-centre cards with GDDR ECC is on
# as delivered, on RTX and Quadro cards it is off and can be switched on; it takes 1/16 of the
# memory (CUDA Best Practices Guide).
_MEMORY_OF: tuple[tuple[Memory, re.Pattern[str]], ...] = (
    ("hbm", re.compile(r"(p100|v100s?|titan-v|a30|a100|h\d+|gh200|g?b[23]00)(-|$)")),
    ("gddr with ecc", re.compile(r"(k80|m40|p4|p40|t4|a10g?|a16|a40|l4|l40s?)(-|$)")),
    ("gddr, ecc can be switched", re.compile(r"(quadro-|a\d000|a4500|rtx\d000-ada|rtx-pro-)")),
    ("gddr", re.compile(r"(gtx|rtx)\d{4}|titan-rtx")),
)


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes that nobody has measured here: the bounds, the likely value, and what they rest on."""

    low_bytes: int
    likely_bytes: int
    high_bytes: int
    because: str


NOTHING = Interval(0, 0, 0, "nothing")


def together(one: Interval, other: Interval) -> Interval:
    """Both at once, each unknown by itself."""
    return Interval(
        low_bytes=one.low_bytes + other.low_bytes,
        likely_bytes=one.likely_bytes + other.likely_bytes,
        high_bytes=one.high_bytes + other.high_bytes,
        because=f"{one.because}; {other.because}",
    )


# ---- the context -----------------------------------------------------------------------------


def context(
    model: GpuModel,
    torch_version: str | None,
    cuda_version: str | None = None,
    *,
    measured_bytes: int | None = None,
) -> Interval:
    """What the CUDA context of one process takes. A machine's own reading wins, and is exact."""
    if measured_bytes is not None:
        return exactly(measured_bytes, "measured on this machine")
    is_lazy, why = _loads_lazily(_version(torch_version), _cuda(torch_version, cuda_version))
    lazy = _lazy_context(model, why)
    if is_lazy:
        return lazy
    eager = _eager_context(lazy, _cuda(torch_version, cuda_version), why)
    if is_lazy is None:
        return Interval(
            low_bytes=lazy.low_bytes,
            likely_bytes=lazy.likely_bytes,
            high_bytes=eager.high_bytes,
            because=f"{lazy.because}; much more if kernels are loaded eagerly",
        )
    return eager


def _loads_lazily(torch: Version | None, cuda: Version | None) -> tuple[bool | None, str]:
    """Whether kernels are loaded when they are first called, and why one thinks so."""
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
    threads = _threads(model.num_sms, model.compute_capability)
    if threads is None:
        return _context_of_unknown_size(model, readings, why)
    slope, intercept = _context_line()
    likely = slope * threads + intercept
    least, most = _around_the_line(readings)
    rule = (
        f"{intercept:.0f} MiB and {slope * 1000:.2f} MiB per 1000 of {threads} resident threads, "
        f"from {len(readings)} published readings of {_num_gpus(readings)} GPUs"
    )
    return _in_mib(likely * least, likely, likely * most, f"{rule}; {why}")


def _context_of_unknown_size(
    model: GpuModel, readings: Sequence[dict[str, Any]], why: str
) -> Interval:
    """Nobody says how many SMs it has: as on GPUs with such SMs, and at most as on the largest."""
    slope, intercept = _context_line()
    same = [each for each in readings if _have_same_sms(each, model)] or readings
    taken = [reading["mib"] for reading in same]
    least, most = _around_the_line(readings)
    rule = f"its SMs are not known: {len(same)} published readings of {_num_gpus(same)} other GPUs"
    largest = (slope * _MOST_THREADS + intercept) * most
    return _in_mib(min(taken) * least, median(taken), largest, f"{rule}; {why}")


def _have_same_sms(reading: dict[str, Any], model: GpuModel) -> bool:
    capability = model.compute_capability
    return capability is not None and _per_sm(capability) == _per_sm(
        tuple(reading["compute_capability"])
    )


def _around_the_line(readings: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """How far below and above the line there may be GPUs, as a factor."""
    ratios = [reading["mib"] / _on_line(reading) for reading in readings]
    return min(ratios) * (1 - _MARGIN_RATIO), max(ratios) * (1 + _MARGIN_RATIO)


def _eager_context(lazy: Interval, cuda: Version | None, why: str) -> Interval:
    """The same, and the code of all kernels, which grew with CUDA 11."""
    readings = _readings("eager")
    if cuda is not None:
        readings = [each for each in readings if (each["cuda"][0] >= 11) == (cuda[0] >= 11)]
    code = [reading["mib"] - _on_line(reading) for reading in readings]
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
    """MiB per resident thread, and MiB for none."""
    readings = _readings("lazy")
    threads = [_threads_of(reading) for reading in readings]
    line = linear_regression(threads, [reading["mib"] for reading in readings])
    return line.slope, line.intercept


def _on_line(reading: dict[str, Any]) -> float:
    slope, intercept = _context_line()
    return slope * _threads_of(reading) + intercept


def _threads_of(reading: dict[str, Any]) -> int:
    return int(reading["num_sms"]) * _per_sm(tuple(reading["compute_capability"]))


def _threads(num_sms: int | None, capability: Version | None) -> int | None:
    """How many threads a GPU can hold at a time."""
    if num_sms is None or capability is None:
        return None
    return num_sms * _per_sm(capability)


def _per_sm(capability: Version) -> int:
    return _THREADS_PER_SM.get(capability, _MOST_THREADS_PER_SM)


def _readings(loading: str) -> list[dict[str, Any]]:
    return [reading for reading in _file()["context"] if reading["loading"] == loading]


def _num_gpus(readings: Sequence[dict[str, Any]]) -> int:
    return len({reading["gpu"] for reading in readings})


def cudnn(
    model: GpuModel,
    torch_version: str | None,
    cuda_version: str | None = None,
    *,
    measured_context_bytes: int | None = None,
) -> Interval:
    """What cuDNN's own kernels take, from the first convolution on.

    Since version 8 cuDNN is several libraries, each loaded when it is first needed: with all of
    its kernels, where kernels are not loaded one by one. They are not in a context that was
    measured with one small tensor, but such a measurement shows how kernels are loaded.
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


# ---- versions --------------------------------------------------------------------------------


def _version(text: str | None) -> Version | None:
    """("2.1.1+cu121") -> (2, 1); None if it is no version."""
    found = re.match(r"v?(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def _cuda(torch_version: str | None, cuda_version: str | None) -> Version | None:
    """As it is given, else as torch's version says ("+cu121"), else as torch's wheels have it."""
    given = _version(cuda_version)
    if given is not None:
        return given
    tag = re.search(r"\+cu(\d{2})(\d)$", torch_version or "")
    if tag:
        return int(tag[1]), int(tag[2])
    torch = _version(torch_version)
    if torch is None:
        return None
    return next(cuda for first, cuda in _CUDA_OF_WHEELS if torch >= first)


# ---- several GPUs ----------------------------------------------------------------------------


def nccl(num_groups: int = 1, *, measured_bytes: int | None = None) -> Interval:
    """What NCCL takes on each GPU for its process groups, beside torch's allocator."""
    if measured_bytes is not None:
        return exactly(measured_bytes, "measured on this machine")
    if num_groups < 1:
        return exactly(0, "no process group")
    taken = [reading["mib"] * num_groups for reading in _file()["nccl"]]
    groups = "a process group" if num_groups == 1 else f"{num_groups} process groups"
    because = f"{len(taken)} published readings, for {groups}; grows with channels and neighbours"
    return _in_mib(min(taken), median(taken), max(taken), because)


# ---- what a driver leaves --------------------------------------------------------------------


def usable_bytes(model: GpuModel) -> Interval:
    """What CUDA has of a card's nameplate: all contexts and all of torch must fit into it."""
    if model.measured_bytes is not None:
        spread = round(model.measured_bytes * _SAME_CARD_RATIO)
        return Interval(
            low_bytes=model.measured_bytes - spread,
            likely_bytes=model.measured_bytes,
            high_bytes=min(model.measured_bytes + spread, model.memory_bytes),
            because=f"a published reading; cards of one name differ by {_SAME_CARD_RATIO:.1%}",
        )
    return _usable_by_memory(model)


def _usable_by_memory(model: GpuModel) -> Interval:
    memory = memory_of(model.name)
    ratios, usual = _usable_ratios(memory)
    shares = f"{min(ratios):.1%} to {max(ratios):.1%} of the nameplate"
    cards = f"{len(ratios)} published readings of GPUs with {memory or 'any memory'}"
    return Interval(
        low_bytes=int(model.memory_bytes * min(ratios)),
        likely_bytes=int(model.memory_bytes * median(usual)),
        high_bytes=int(model.memory_bytes * max(ratios)),
        because=f"{shares} in {cards}",
    )


def _usable_ratios(memory: Memory | None) -> tuple[list[float], list[float]]:
    """The shares of the nameplate that may be, and those that are usual."""
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
    """Which memory a GPU of the catalogue has; None if it is not one of it.

    >>> memory_of("a100-80gb"), memory_of("l4"), memory_of("rtx4090")
    ('hbm', 'gddr with ecc', 'gddr')
    """
    return next((memory for memory, names in _MEMORY_OF if names.match(name)), None)


# ---- the file --------------------------------------------------------------------------------


@functools.cache
def _file() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        Path(__file__).with_name("overheads.json").read_text("utf-8")
    )
    return content


def exactly(size_bytes: int, because: str) -> Interval:
    """An interval that is a figure: somebody knows."""
    return Interval(
        low_bytes=size_bytes, likely_bytes=size_bytes, high_bytes=size_bytes, because=because
    )


def _in_mib(low: float, likely: float, high: float, because: str) -> Interval:
    return Interval(
        low_bytes=round(low * MIB),
        likely_bytes=round(likely * MIB),
        high_bytes=round(high * MIB),
        because=because,
    )
