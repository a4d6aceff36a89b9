"""One GPU -> what it answers while it is watched, through buffers that are kept.

The number of NVML calls is the cost on a real machine, and the making of their arguments the
cost on this side: here each question has its arguments ready. The driver keeps samples of the
kernel-active share in a buffer; they are fetched every few seconds and none is missed.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field

from oomph.sensing.nvml import NOT_FOUND, Handle, Nvml, Refusal
from oomph.sensing.occupancy import read_memory

# nvml.h: nvmlSamplingType_t, and the fields of nvmlDeviceGetFieldValues.
_GPU_UTILIZATION_SAMPLES = 1
_ENERGY, _POWER, _SENT, _RECEIVED = 83, 186, 197, 198  # mJ; mW of this moment; bytes over PCIe
_FIELDS = (_ENERGY, _POWER, _RECEIVED, _SENT)
# nvmlFieldValue_t: field, scope, two times; type of the value; result; value.
_FIELD_VALUE = struct.Struct("=II16xIiQ")
# PCI Express Base Specification: of one lane, after its encoding, by generation.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_LEAST_SLOTS = 128  # the driver is said to keep about 100 samples of kernel-active time

# nvml.h: nvmlClocksEventReason*. Idle, a clock that somebody has set, and boosting in step with
# other GPUs are no trouble.
_CAUSES = {0x04: "power", 0x80: "power", 0x20: "heat", 0x40: "heat"}
_HARDWARE = 0x08 | 0x200 | 0x400  # a slowdown, a limit of the board, reliability


@dataclass(frozen=True, slots=True)
class Counters:
    """What only grows, and the power of this moment."""

    energy_mj: int | None = None
    power_w: float | None = None
    received_bytes: int | None = None
    sent_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Percents:
    """Samples of kernel-active time, oldest first, and how much time they cover.

    Each with its time since the newest of the last fetch: the driver's clock is its own.
    """

    values: list[tuple[float, int]] = field(default_factory=list)
    covered_s: float | None = None  # None: there was no fetch before


class Looks:
    """The questions of one handle."""

    def __init__(self, nvml: Nvml, handle: Handle) -> None:
        self.nvml = nvml
        self.handle = handle
        self._prepare_memory()
        self._prepare_samples()
        self._prepare_fields()
        self._reasons = ctypes.c_ulonglong()
        self._reasons_symbol = "nvmlDeviceGetCurrentClocksEventReasons"

    # ---- memory

    def _prepare_memory(self) -> None:
        first = read_memory(self.nvml, self.handle)
        self.first_memory = first
        self._memory_symbol = ""
        if isinstance(first, Refusal):
            return
        if first.source == "nvml-v2":
            version = self.nvml.constant("nvmlMemory_v2")
            self._memory = self.nvml.constant("c_nvmlMemory_v2_t")(version=version)
            self._memory_symbol = "nvmlDeviceGetMemoryInfo_v2"
        else:
            self._memory = self.nvml.constant("c_nvmlMemory_t")()
            self._memory_symbol = "nvmlDeviceGetMemoryInfo"
        self._memory_pointer = ctypes.byref(self._memory)

    def used_bytes(self) -> int | Refusal | None:
        """What everybody holds; None where the driver's figure makes no sense."""
        if not self._memory_symbol:
            memory = read_memory(self.nvml, self.handle)
            return memory if isinstance(memory, Refusal) else memory.used_bytes
        refusal = self.nvml.call_gpu(self.handle, self._memory_symbol, self._memory_pointer)
        if refusal:
            return refusal
        used: int = self._memory.used
        return used if used <= self._memory.total else None

    # ---- kernel-active time

    def _prepare_samples(self) -> None:
        self._newest_us = ctypes.c_ulonglong(0)
        self._value_type, self._count = ctypes.c_uint(), ctypes.c_uint()
        refusal = self._ask_samples(None)
        self.has_samples = refusal is None or refusal.code == NOT_FOUND
        self._slots = max(self._count.value, _LEAST_SLOTS)
        self._samples = (ctypes.c_ulonglong * (2 * self._slots))()
        if self.has_samples:
            self.busy_percents()  # those of before: only what follows is of this watch

    def _ask_samples(self, buffer: object) -> Refusal | None:
        return self.nvml.call_gpu(
            self.handle,
            "nvmlDeviceGetSamples",
            _GPU_UTILIZATION_SAMPLES,
            self._newest_us,
            ctypes.byref(self._value_type),
            ctypes.byref(self._count),
            buffer,
        )

    def busy_percents(self) -> Percents:
        """The driver's samples since the last time."""
        self._count.value = self._slots
        if self._ask_samples(self._samples):  # NOT_FOUND: there is none yet
            return Percents()
        before_us = newest_us = self._newest_us.value
        flat, values = self._samples[: 2 * self._count.value], []
        for stamp_us, value in zip(flat[::2], flat[1::2], strict=True):
            percent = value & 0xFFFFFFFF  # an unsigned int in a union of eight bytes
            if stamp_us > newest_us and percent <= 100:
                values.append(((stamp_us - before_us) / 1e6, percent))
                newest_us = stamp_us
        self._newest_us.value = newest_us
        return Percents(values, (newest_us - before_us) / 1e6 if before_us else None)

    def busy_percent_now(self) -> int | None:
        """The last sample alone, for drivers that give no buffer."""
        rates = self.nvml.ask_gpu(self.handle, "nvmlDeviceGetUtilizationRates")
        if isinstance(rates, Refusal):
            return None
        percent: int = rates.gpu
        return percent if 0 <= percent <= 100 else None

    # ---- counters

    def _prepare_fields(self) -> None:
        self._fields = ctypes.create_string_buffer(len(_FIELDS) * _FIELD_VALUE.size)
        for place, number in enumerate(_FIELDS):
            _FIELD_VALUE.pack_into(self._fields, place * _FIELD_VALUE.size, number, 0, 0, 0, 0)

    def counters(self) -> Counters:
        """Energy, power and PCIe traffic in one call."""
        refusal = self.nvml.call_gpu(
            self.handle, "nvmlDeviceGetFieldValues", len(_FIELDS), self._fields
        )
        if refusal:
            return Counters()
        energy_mj, milliwatts, received_bytes, sent_bytes = (
            None if code else value
            for _, _, _, code, value in _FIELD_VALUE.iter_unpack(self._fields.raw)
        )
        # An unsigned int, of which the other half of the union is not written.
        power_w = None if milliwatts is None else (milliwatts & 0xFFFFFFFF) / 1000
        return Counters(energy_mj, power_w, received_bytes, sent_bytes)

    def link_bytes_per_s(self) -> float | None:
        """What the PCIe link carries at most, each way: of this GPU in this machine."""
        generation = self.nvml.ask_gpu(self.handle, "nvmlDeviceGetMaxPcieLinkGeneration")
        width = self.nvml.ask_gpu(self.handle, "nvmlDeviceGetMaxPcieLinkWidth")
        if isinstance(generation, Refusal) or isinstance(width, Refusal):
            return None
        lane = _LANE_BYTES_PER_S.get(generation)
        return lane * width if lane and width else None

    # ---- clocks

    def held_down_by(self) -> tuple[str, ...] | None:
        """What holds the clocks down at this moment; () is nothing."""
        refusal = self.nvml.call_gpu(self.handle, self._reasons_symbol, ctypes.byref(self._reasons))
        if refusal and refusal.is_missing:  # drivers before R535 have the old name
            self._reasons_symbol = "nvmlDeviceGetCurrentClocksThrottleReasons"
        if refusal:
            return None
        reasons = self._reasons.value
        if not reasons:
            return ()
        causes = {cause for bit, cause in _CAUSES.items() if reasons & bit}
        # A hardware slowdown is told beside its cause, where that is known.
        if reasons & _HARDWARE and not causes:
            causes = {"hardware"}
        return tuple(sorted(causes))
