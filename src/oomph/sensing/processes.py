"""NVML's process lists -> (pid, bytes), whatever the driver's struct looks like.

One symbol, `nvmlDeviceGetComputeRunningProcesses_v3`, fills entries of 16, 24 or 32 bytes
depending on the driver, and nothing in the answer says which (nvitop#79 #226, go-nvml#75).
nvidia-ml-py reads 24 and asks twice, once for the size. Here the list is asked once into a
buffer filled with a pattern: the last byte that changed tells the size of an entry, and
every entry must make sense, or the list is called unreadable. It is never called empty.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any, Literal

from oomph.sensing.nvml import (
    FUNCTION_NOT_FOUND,
    INSUFFICIENT_SIZE,
    NOT_SUPPORTED,
    UNREADABLE,
    Handle,
    Nvml,
    Refusal,
)

Kind = Literal["compute", "graphics"]

_STRIDES = (24, 32, 16)  # the most common first
_PATTERN = 0xA5  # not 0xFF: absent instance ids are 0xFFFFFFFF
_SLOTS = 128
_MOST_SLOTS = 1 << 16
_PID_AND_MEMORY = struct.Struct("=I4xQ")
_NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE: WDDM, WSL, some vGPUs
_MOST_PIDS = 1 << 22  # PID_MAX_LIMIT of 64-bit Linux

_GARBLED = Refusal(UNREADABLE, "unreadable: the driver's entries make no sense in any known form")


@dataclass(frozen=True, slots=True)
class Listed:
    """A process as NVML lists it."""

    pid: int
    used_bytes: int | None
    kind: Kind


def running_processes(
    nvml: Nvml, handle: Handle, total_bytes: int | None
) -> tuple[Listed, ...] | Refusal:
    """All processes on one GPU; one that computes and draws is listed once, as computing."""
    compute = list_kind(nvml, handle, "compute", total_bytes)
    if isinstance(compute, Refusal):
        return compute
    graphics = list_kind(nvml, handle, "graphics", total_bytes)
    if isinstance(graphics, Refusal):
        # MIG slices and some data-centre drivers know no graphics; anything else hides somebody.
        if graphics.code not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
            return graphics
        graphics = ()
    computing = {process.pid for process in compute}
    return (*compute, *(process for process in graphics if process.pid not in computing))


def list_kind(
    nvml: Nvml, handle: Handle, kind: Kind, total_bytes: int | None
) -> tuple[Listed, ...] | Refusal:
    """The processes of one kind on one GPU."""
    refusal = Refusal(FUNCTION_NOT_FOUND, "this driver has no process list")
    for version in ("_v3", "_v2", ""):
        symbol = f"nvmlDeviceGet{kind.capitalize()}RunningProcesses{version}"
        filled = _fill(nvml, handle, symbol)
        processes = filled if isinstance(filled, Refusal) else _decode(filled, kind, total_bytes)
        if not isinstance(processes, Refusal):
            return processes
        refusal = processes
        if not (refusal.is_missing or refusal.code == UNREADABLE):
            break
    return refusal


@dataclass(frozen=True, slots=True)
class Filled:
    """The buffer as the driver left it, and how many entries it says are in it."""

    raw: bytes
    count: int


def _fill(nvml: Nvml, handle: Handle, symbol: str) -> Filled | Refusal:
    slots = _SLOTS
    for _ in range(4):  # the list can grow between the answer "too small" and the next call
        buffer = (ctypes.c_char * (slots * max(_STRIDES)))()
        ctypes.memset(buffer, _PATTERN, len(buffer))
        count = ctypes.c_uint(slots)
        refusal = nvml.call_gpu(handle, symbol, ctypes.byref(count), buffer)
        if refusal is None:
            return Filled(buffer.raw, count.value) if count.value <= slots else _GARBLED
        if refusal.code != INSUFFICIENT_SIZE:
            return refusal
        slots = min(max(count.value, slots) * 2, _MOST_SLOTS)
    return nvml.refuse(INSUFFICIENT_SIZE)


def _decode(filled: Filled, kind: Kind, total_bytes: int | None) -> tuple[Listed, ...] | Refusal:
    raw, count = filled.raw, filled.count
    if not count:
        return ()
    exact = [stride for stride in _STRIDES if _ends_at(raw, stride * count)]
    # A driver may clear the whole buffer first; then only the sense of the entries decides.
    for stride in exact or _STRIDES:
        entries = [_PID_AND_MEMORY.unpack_from(raw, i * stride) for i in range(count)]
        if all(0 < pid <= _MOST_PIDS for pid, _ in entries) and (
            exact or all(_can_be(memory, total_bytes) for _, memory in entries)
        ):
            return tuple(_merge(entries, kind, total_bytes))
    return _GARBLED


def _ends_at(raw: bytes, end: int) -> bool:
    """Did the driver write just so many bytes?"""
    is_rest_untouched = raw[end:] == bytes([_PATTERN]) * (len(raw) - end)
    return is_rest_untouched and raw[end - 1] != _PATTERN


def _can_be(memory: int, total_bytes: int | None) -> bool:
    return memory == _NOT_AVAILABLE or memory <= (total_bytes or 1 << 48)


def _merge(entries: list[Any], kind: Kind, total_bytes: int | None) -> list[Listed]:
    """One entry per pid: a process may be listed once per MIG instance that it uses."""
    used: dict[int, int | None] = {}
    for pid, memory in entries:
        so_far = used.get(pid, 0)
        is_known = memory != _NOT_AVAILABLE and _can_be(memory, total_bytes)
        used[pid] = so_far + memory if is_known and so_far is not None else None
    return [Listed(pid, used_bytes, kind) for pid, used_bytes in used.items()]
