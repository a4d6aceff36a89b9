"""The text of PYTORCH_CUDA_ALLOC_CONF -> AllocatorSettings.

Keys, limits and defaults are those of torch 2.13 (c10/core/AllocatorConfig.h and
c10/cuda/CUDAAllocatorConfig.h). An older torch may accept less.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.units import MIB

MIN_BLOCK_BYTES = 512  # every block is a multiple of this
SMALL_BYTES = 1 * MIB  # the largest request that the small pool serves
SMALL_SEGMENT_BYTES = 2 * MIB
MIN_LARGE_BYTES = 10 * MIB  # from here on a request gets a segment of its own size
ROUND_LARGE_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB  # torch's default; `large_segment_size_mb` changes it

# roundup_power2_divisions has one entry per power of two from 1 MiB to 32 GiB; smaller sizes use
# the first and larger sizes the last.
NUM_ROUNDUP_INTERVALS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """The memory settings of PYTORCH_CUDA_ALLOC_CONF, with torch's defaults."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None  # blocks of this size or larger are never split
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES  # also the large pool's page, if expandable
    # one for all sizes, or 16; 0 and 1 mean off
    roundup_power2_divisions: int | tuple[int, ...] = 0
    gc_threshold_ratio: float = 0.0  # used only with `memory_fraction_ratio`
    memory_fraction_ratio: float | None = None  # share of the GPU to reserve at most

    def __post_init__(self) -> None:
        divisions = self.roundup_power2_divisions
        if isinstance(divisions, tuple) and len(divisions) != NUM_ROUNDUP_INTERVALS:
            raise UsageError(
                f"{len(divisions)} roundup_power2_divisions make no sense",
                because=f"there is one for all sizes, or {NUM_ROUNDUP_INTERVALS}, from 1 MiB on",
            )

    def divisions_by_interval(self) -> tuple[int, ...]:
        """Return the divisions for each of the 16 intervals; empty if nothing is rounded up."""
        divisions = self.roundup_power2_divisions
        if not isinstance(divisions, tuple):
            divisions = (divisions,) * NUM_ROUNDUP_INTERVALS
        return divisions if max(divisions) > 1 else ()


def settings_for(variant: Variant) -> AllocatorSettings:
    """Return the settings of a variant: torch's own, with expandable segments if it uses them."""
    return AllocatorSettings(expandable_segments=variant.expandable_segments)


def round_size(size_bytes: int, divisions_by_interval: tuple[int, ...] = ()) -> int:
    """Return the bytes that torch sets aside for a request.

    >>> round_size(1), round_size(513), round_size(1200 * 1024, (4,) * 16) // 1024
    (512, 1024, 1280)
    """
    if size_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    if divisions_by_interval:
        interval = (size_bytes // MIB).bit_length() - 1
        divisions = divisions_by_interval[min(max(interval, 0), NUM_ROUNDUP_INTERVALS - 1)]
        if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
            return _round_to_division(size_bytes, divisions)
    return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def _round_to_division(size_bytes: int, divisions: int) -> int:
    """Round up to the next of `divisions` equal steps between two powers of two."""
    floor_bytes = 1 << (size_bytes.bit_length() - 1)
    step_bytes = floor_bytes >> (divisions.bit_length() - 1)
    return -(-size_bytes // step_bytes) * step_bytes


def segment_bytes(size_bytes: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """Return how much torch requests from CUDA if no cached block serves a rounded request."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_LARGE_BYTES:
        return large_segment_bytes
    return -(-size_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


# ---- parsing -------------------------------------------------------------------------------------

_ATTEMPT = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"

# Torch's keys that do not affect GPU memory.
_WITHOUT_EFFECT = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)


def parse_settings(text: str) -> AllocatorSettings:
    """Parse the value of PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF.

    >>> parse_settings("expandable_segments:True,max_split_size_mb:128").max_split_bytes
    134217728
    """
    fields: dict[str, Any] = {}
    for key, value in _pairs(text):
        if key in _WITHOUT_EFFECT:
            continue
        if key not in _READERS:
            raise UsageError(
                f"{key!r} is not a setting of torch's allocator",
                because=f"the known ones are {', '.join(sorted(_READERS))}",
                attempt=_ATTEMPT,
            )
        field, read = _READERS[key]
        try:
            fields[field] = read(value)
        except ValueError as error:
            raise _refusal(key, value, str(error)) from None
    _check_against_segments(fields)
    fields.pop(_NO_FIELD, None)
    return AllocatorSettings(**fields)


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split into keys and values, ignoring spaces as torch does.

    A list in brackets is one value.
    """
    bare = re.sub(r"\s", "", text)
    pairs = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", bare):
        key, colon, value = part.partition(":")
        if not (key and colon and value):
            raise UsageError(
                f"{part!r} is not an allocator setting",
                because="settings are key:value, with commas between them",
                attempt=_ATTEMPT,
            )
        pairs.append((key, value))
    return pairs


def _refusal(key: str, value: str, because: str) -> UsageError:
    return UsageError(f"{key}:{value} makes no sense", because=because, attempt=_ATTEMPT)


def _check_against_segments(fields: dict[str, Any]) -> None:
    """Check sizes against the segment size, which torch reads first wherever it stands."""
    least_bytes: int = fields.get("large_segment_bytes", LARGE_SEGMENT_BYTES)
    for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
        size_bytes: int | None = fields.get(_READERS[key][0])
        if size_bytes is not None and size_bytes < least_bytes:
            because = f"torch wants at least the size of a large segment, {least_bytes // MIB} MiB"
            raise _refusal(key, str(size_bytes // MIB), because)


def _flag(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("it is True or False, written like that")
    return value == "True"


def _mebibytes(value: str) -> int:
    if not value.isdecimal():
        raise ValueError("it is a whole number of MiB")
    return int(value) * MIB


def _large_segment(value: str) -> int:
    size_bytes = _mebibytes(value)
    if size_bytes <= MIN_LARGE_BYTES:
        raise ValueError(f"torch wants more than {MIN_LARGE_BYTES // MIB} MiB")
    return size_bytes


def _ratio(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError("it is a ratio between 0 and 1") from None


def _threshold(value: str) -> float:
    if not 0 < _ratio(value) < 1:
        raise ValueError("it lies between 0 and 1, without these two")
    return _ratio(value)


def _fraction(value: str) -> float | None:
    ratio = _ratio(value)
    if not 0 <= ratio <= 1:
        raise ValueError("it lies between 0 and 1")
    return ratio if ratio < 1 else None  # torch treats the whole memory as no limit


def _backend(value: str) -> None:
    if value != "native":
        raise ValueError("only torch's native allocator can be replayed")


def _power_of_two(value: str, *, or_zero: bool) -> int:
    if value.isdecimal() and (int(value).bit_count() == 1 or (or_zero and int(value) == 0)):
        return int(value)
    raise ValueError(f"{value!r} is not a power of two")


def _divisions(value: str) -> int | tuple[int, ...]:
    """Parse "4" for every size, or by size in MiB: "[256:1,512:2,>:4]"."""
    if not value.startswith("["):
        return _power_of_two(value, or_zero=False)
    by_interval = [0] * NUM_ROUNDUP_INTERVALS
    last, is_first = 0, True
    for entry in value.strip("[]").split(","):
        bound, _, count = entry.partition(":")
        divisions = _power_of_two(count, or_zero=True)
        if bound == ">":
            by_interval[last + 1 :] = [divisions] * (NUM_ROUNDUP_INTERVALS - 1 - last)
            continue
        exponent = _power_of_two(bound, or_zero=False).bit_length() - 1
        last = min(exponent, NUM_ROUNDUP_INTERVALS - 1)
        if is_first:  # it also applies to all smaller sizes
            by_interval[:last] = [divisions] * last
            is_first = False
        by_interval[last] = divisions
    return tuple(by_interval)


_NO_FIELD = ""
_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "backend": (_NO_FIELD, _backend),
    "expandable_segments": ("expandable_segments", _flag),
    "garbage_collection_threshold": ("gc_threshold_ratio", _threshold),
    "large_segment_size_mb": ("large_segment_bytes", _large_segment),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mebibytes),
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "per_process_memory_fraction": ("memory_fraction_ratio", _fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
}
