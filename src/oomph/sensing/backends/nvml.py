"""NVML -> answers. The only import of pynvml, with workarounds for what that binding lacks.

`nvidia-ml-py` raises on every refusal; here a refusal is a value. A question that a GPU will never
answer is remembered and not asked again. On a real machine NVML calls dominate the cost, then the
construction of their arguments: the meter keeps its arguments ready.

Limits: NVIDIA only; tested on Linux.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oomph.errors import Unreadable
from oomph.records.machine import MemorySource
from oomph.sensing.backends import (
    BusySamples,
    Counters,
    ListedProcess,
    Memory,
    ProcessKind,
    Refusal,
    Slices,
)

# ---- NVML's process list, for every driver's struct ----------------------------------------------
# One symbol, `nvmlDeviceGetComputeRunningProcesses_v3`, fills entries of 16, 24 or 32 bytes
# depending on the driver, and nothing in the answer says which (nvitop#79 #226, go-nvml#75). So the
# buffer is filled with a pattern first: the last byte that changed gives the size of an entry.
# Every entry must be plausible, or the list is reported as unreadable, never as empty.

PATTERN = 0xA5  # not 0xFF: absent instance ids are 0xFFFFFFFF
MAX_ENTRY_BYTES = 32

_STRIDES = (24, 32, 16)  # the most common first
_PID_AND_MEMORY = struct.Struct("=I4xQ")
_NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE: WDDM, WSL, some vGPUs
_MAX_PID = 1 << 22  # PID_MAX_LIMIT of 64-bit Linux
_MAX_MEMORY_BYTES = 1 << 48  # used if the GPU's memory is unknown; judgement: more than any GPU has


def decode(
    raw: bytes, count: int, kind: ProcessKind, total_bytes: int | None
) -> tuple[ListedProcess, ...] | None:
    """Return the processes in a buffer of `count` entries; None if they are implausible."""
    if not count:
        return ()
    exact = [stride for stride in _STRIDES if _ends_at(raw, stride * count)]
    # A driver may clear the whole buffer first; then only the plausibility of the entries decides.
    for stride in exact or _STRIDES:
        entries = [_PID_AND_MEMORY.unpack_from(raw, i * stride) for i in range(count)]
        if all(0 < pid <= _MAX_PID for pid, _ in entries) and (
            exact or all(_is_possible(memory, total_bytes) for _, memory in entries)
        ):
            return tuple(_merged(entries, kind, total_bytes))
    return None


def _ends_at(raw: bytes, end: int) -> bool:
    """Return whether the driver wrote exactly up to `end`."""
    is_rest_untouched = raw[end:] == bytes([PATTERN]) * (len(raw) - end)
    return is_rest_untouched and raw[end - 1] != PATTERN


def _is_possible(memory: int, total_bytes: int | None) -> bool:
    return memory == _NOT_AVAILABLE or memory <= (total_bytes or _MAX_MEMORY_BYTES)


def _merged(
    entries: Iterable[tuple[int, int]], kind: ProcessKind, total_bytes: int | None
) -> list[ListedProcess]:
    """Merge entries by PID: a process may be listed once per MIG instance it uses."""
    used: dict[int, int | None] = {}
    for pid, memory in entries:
        so_far = used.get(pid, 0)
        is_known = memory != _NOT_AVAILABLE and _is_possible(memory, total_bytes)
        used[pid] = so_far + memory if is_known and so_far is not None else None
    return [ListedProcess(pid, used_bytes, kind) for pid, used_bytes in used.items()]


# nvml.h, nvmlReturn_t. Repeated here because pynvml may only be imported on first use.
UNINITIALIZED = 1
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25

_MISSING = frozenset({FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH})  # an older one may answer
_FINAL = _MISSING | {NOT_SUPPORTED, NO_PERMISSION}
_DRIVER_GONE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH})

_IN_OUR_WORDS = {
    NOT_SUPPORTED: "not supported by this GPU or driver",
    NO_PERMISSION: "not allowed for this user",
    INSUFFICIENT_SIZE: "lost a race: it kept growing while it was read",
    FUNCTION_NOT_FOUND: "this driver is too old for it",
    ARGUMENT_VERSION_MISMATCH: "this driver is too old for it",
    GPU_IS_LOST: "the GPU is lost: it fell off the bus; see `dmesg | grep -i xid`, then reboot",
    RESET_REQUIRED: "the GPU must be reset: `sudo nvidia-smi --gpu-reset`, or reboot",
}


def _garbled(text: str) -> Refusal:
    """Return the Refusal for an answer that makes no sense."""
    return Refusal(text, is_final=True)


_NOT_TEXT = _garbled("unreadable: the driver's text is not UTF-8")
_USED_ABOVE_TOTAL = _garbled("the driver's figures make no sense: used is above total")
_GARBLED_LIST = _garbled("unreadable: the driver's entries make no sense in any known form")


class Nvml:
    """NVML, initialised for the process that created this object."""

    no_gpu = "the NVIDIA driver runs, but has no GPU"

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.is_stale = False
        self._gpus: dict[str, NvmlGpu] = {}
        self._refusals: dict[int, Refusal] = {}
        self.binding = _import_binding()
        try:
            self.binding.nvmlInit()
        except self.binding.NVMLError as error:
            raise _why_no_nvml(error.value, str(error)) from error

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return the answer of the binding's function, or a Refusal."""
        call = getattr(self.binding, function, None)
        if call is None:  # the binding is older than the function
            return self.refuse(FUNCTION_NOT_FOUND)
        try:
            return call(*arguments)
        except self.binding.NVMLError as error:
            return self.refuse(error.value)
        except UnicodeDecodeError:  # a name that is not text
            return _NOT_TEXT

    def refuse(self, code: int) -> Refusal:
        """NVML's return code -> a Refusal."""
        # Other code in this process has shut NVML down, or the process was forked.
        self.is_stale |= code == UNINITIALIZED
        if code not in self._refusals:
            self._refusals[code] = Refusal(
                _IN_OUR_WORDS.get(code) or f"NVML says: {self.binding.NVMLError(code)}",
                code,
                is_unsupported=code in _MISSING or code == NOT_SUPPORTED,
                is_final=code in _FINAL,
                is_driver_gone=code in _DRIVER_GONE,
            )
        return self._refusals[code]

    def driver_version(self) -> str | None:
        version: str | None = _or_none(self.ask("nvmlSystemGetDriverVersion"))
        return version

    def num_gpus(self) -> int:
        count: int | Refusal = self.ask("nvmlDeviceGetCount")
        if isinstance(count, Refusal):
            raise Unreadable("the GPUs could not be counted", because=count.text)
        return count

    def gpu(self, index: int) -> NvmlGpu | Refusal:
        return self.gpu_at(self.ask("nvmlDeviceGetHandleByIndex", index))

    def gpu_of_uuid(self, uuid: str) -> NvmlGpu | Refusal:
        return self.gpu_at(self.ask("nvmlDeviceGetHandleByUUID", uuid))

    def gpu_at(self, pointer: Any) -> NvmlGpu | Refusal:
        """NVML's pointer, or the Refusal returned instead -> the GPU."""
        if isinstance(pointer, Refusal):
            return pointer
        uuid = self.ask(*_UUID, pointer)
        if isinstance(uuid, Refusal):
            if uuid.code == GPU_IS_LOST:
                return uuid
            return NvmlGpu(self, pointer, refused={_UUID: uuid})
        gpu = self._gpus.setdefault(uuid, NvmlGpu(self, pointer, uuid))
        gpu.pointer = pointer
        return gpu

    def why_no_activity(self) -> str | None:
        """Return why GPM's shared counters are not used: DCGM's host engine runs (nvtop#483)."""
        if not any(map(_is_dcgm, Path("/proc").iterdir())):
            return None
        return "SM activity is left to DCGM, whose host engine runs here"

    def shut_down(self) -> None:
        """End our use of NVML. NVML counts its users, so others in the process keep theirs."""
        self.ask("nvmlShutdown")


_UUID = ("nvmlDeviceGetUUID",)  # the question, as `NvmlGpu` remembers it


def _or_none(answer: Any) -> Any:
    return None if isinstance(answer, Refusal) else answer


def _is_dcgm(process: Path) -> bool:
    try:
        return process.name.isdecimal() and (process / "comm").read_text() == "nv-hostengine\n"
    except OSError:  # it has ended
        return False


# ---- opening NVML -------------------------------------------------------------------------------


def _import_binding() -> Any:
    """Import pynvml from the distribution `nvidia-ml-py`; other distributions use the same name."""
    try:
        import pynvml
    except ImportError as error:
        raise Unreadable(
            "the NVML binding is not installed",
            because=str(error),
            attempt="pip install nvidia-ml-py",
        ) from error
    # nvidia-ml-py is a single module, with the v2 memory info since 2021. The old distribution
    # `pynvml` is a package of the same name; `nvidia-ml-py3` was abandoned in 2018.
    if hasattr(pynvml, "__path__") or not hasattr(pynvml, "nvmlMemory_v2"):
        raise _wrong_distribution(Path(str(pynvml.__file__)))
    return pynvml


def _wrong_distribution(path: Path) -> Unreadable:
    # Slow (it reads every installed package), so only after something went wrong.
    from importlib.metadata import packages_distributions

    wrong = sorted(set(packages_distributions().get("pynvml", [])) - {"nvidia-ml-py"})
    owner = " and ".join(wrong) or "no package"
    return Unreadable(
        f"the installed pynvml is not NVIDIA's: it belongs to {owner}",
        because=f"{path} was imported instead of the module of nvidia-ml-py",
        attempt=f"pip uninstall -y {' '.join(wrong) or 'pynvml nvidia-ml-py3'}"
        " && pip install --force-reinstall nvidia-ml-py",
    )


def _why_no_nvml(code: int, nvmls_words: str) -> Unreadable:
    """Return what is wrong with the driver, and the fix."""
    if code == LIBRARY_NOT_FOUND and Path("/etc/nv_tegra_release").exists():
        return Unreadable(
            "this is a Jetson whose driver has no NVML",
            because="libnvidia-ml.so.1 was not found",
            attempt="tegrastats",
        )
    what, because, attempt = _NO_NVML.get(
        code,
        (
            "NVML does not start",
            f"it says: {nvmls_words}",
            "nvidia-smi, which asks the same library",
        ),
    )
    return Unreadable(what, because=because, attempt=attempt)


_NO_NVML = {
    LIBRARY_NOT_FOUND: (
        "no NVIDIA driver on this machine",
        "libnvidia-ml.so.1 was not found",
        "installing the driver; in a container, starting it with --gpus all",
    ),
    DRIVER_NOT_LOADED: (
        "the NVIDIA driver is not loaded",
        "its library is here, but the kernel module does not answer",
        "sudo modprobe nvidia, then dmesg | grep -i nvidia",
    ),
    LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver's library and its kernel module are of different versions",
        "the driver was upgraded since this machine was started",
        "rebooting, or unloading and loading the nvidia kernel modules",
    ),
    NO_PERMISSION: (
        "this user may not talk to the NVIDIA driver",
        "opening it was refused",
        "ls -l /dev/nvidia*, and ask for the group that owns them",
    ),
}


# ---- one GPU ------------------------------------------------------------------------------------

# PCI Express Base Specification: bandwidth of one lane after encoding, by generation.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_LIST_SLOTS = 128  # processes per call; judgement: few GPUs have more
_MAX_LIST_SLOTS = 1 << 16


class NvmlGpu:
    """A GPU or a MIG slice, with the questions it has refused for good."""

    def __init__(
        self,
        nvml: Nvml,
        pointer: Any,
        uuid: str | None = None,
        refused: dict[tuple[Any, ...], Refusal] | None = None,
    ) -> None:
        self.nvml, self.pointer, self.uuid = nvml, pointer, uuid
        self._refused = refused or {}  # by question

    def ask(self, function: str, *arguments: Any) -> Any:
        """Ask the binding about this GPU, unless the GPU has refused this question for good."""
        question = (function, *arguments)
        if question in self._refused:
            return self._refused[question]
        answer = self.nvml.ask(function, self.pointer, *arguments)
        if isinstance(answer, Refusal) and answer.code in _FINAL:
            self._refused[question] = answer
        return answer

    def call(self, symbol: str, *arguments: Any) -> Refusal | None:
        """Call the C function directly, where the binding is too slow or unreliable."""
        if self._refused and (symbol,) in self._refused:
            return self._refused[symbol,]
        function = getattr(self.nvml.binding.nvmlLib, symbol, None)
        if function is None:
            return self.nvml.refuse(FUNCTION_NOT_FOUND)
        code = int(function(self.pointer, *arguments))
        refusal = self.nvml.refuse(code) if code else None
        if refusal and code in _FINAL:
            self._refused[symbol,] = refusal
        return refusal

    def why_no_uuid(self) -> Refusal | None:
        return self._refused.get(_UUID)

    def name(self) -> str | Refusal:
        answer: str | Refusal = self.ask("nvmlDeviceGetName")
        return answer

    def memory(self) -> Memory | Refusal:
        """Return used and total memory, from the newest function the driver has."""
        read = self.memory_struct()
        if isinstance(read, Refusal):
            return read
        info, _, source = read
        if info.used > info.total:
            return _USED_ABOVE_TOTAL
        return Memory(info.total, info.used, source)

    def memory_struct(self) -> tuple[Any, str, MemorySource] | Refusal:
        """Return the filled struct, the symbol that fills it, and which of the two it is.

        The binding's function of that name is not used: gpustat 1.1.1 replaces it, for the whole
        process, by one that takes no version.
        """
        binding = self.nvml.binding
        info = binding.c_nvmlMemory_v2_t(version=binding.nvmlMemory_v2)
        symbol = "nvmlDeviceGetMemoryInfo_v2"
        source: MemorySource = "nvml-v2"
        refusal = self.call(symbol, ctypes.byref(info))
        if refusal and refusal.code in _MISSING:
            info = binding.c_nvmlMemory_t()
            symbol, source = "nvmlDeviceGetMemoryInfo", "nvml-v1"
            refusal = self.call(symbol, ctypes.byref(info))
        if refusal is None and not info.total:  # Jetson reports success, with zeros
            refusal = self.nvml.refuse(NOT_SUPPORTED)
        return refusal or (info, symbol, source)

    def busy_percent(self) -> int | Refusal:
        rates = self.ask("nvmlDeviceGetUtilizationRates")
        return rates if isinstance(rates, Refusal) else int(rates.gpu)

    def temperature_c(self) -> int | Refusal:
        sensor = self.nvml.binding.NVML_TEMPERATURE_GPU
        answer: int | Refusal = self.ask("nvmlDeviceGetTemperature", sensor)
        if isinstance(answer, Refusal) and answer.code in _MISSING:
            # The replacement function; CUDA 14 will have only this one.
            answer = self.ask("nvmlDeviceGetTemperatureV", sensor)
        return answer

    def power_mw(self) -> int | Refusal:
        answer: int | Refusal = self.ask("nvmlDeviceGetPowerUsage")
        return answer

    def power_limit_w(self) -> float | None:
        limit = _or_none(self.ask("nvmlDeviceGetEnforcedPowerLimit"))
        return None if limit is None else limit / 1000

    def link_bytes_per_s(self) -> float | None:
        generation = _or_none(self.ask("nvmlDeviceGetMaxPcieLinkGeneration"))
        width = _or_none(self.ask("nvmlDeviceGetMaxPcieLinkWidth"))
        lane = _LANE_BYTES_PER_S.get(generation)
        return lane * width if lane and width else None

    # Processes

    def processes(
        self, kind: ProcessKind, total_bytes: int | None
    ) -> tuple[ListedProcess, ...] | Refusal:
        refusal = Refusal("this driver has no process list", FUNCTION_NOT_FOUND)
        for version in ("_v3", "_v2", ""):
            symbol = f"nvmlDeviceGet{kind.capitalize()}RunningProcesses{version}"
            filled = self._fill_list(symbol)
            if isinstance(filled, Refusal):
                refusal = filled
                if refusal.code not in _MISSING:
                    break
                continue
            processes = decode(*filled, kind, total_bytes)
            if processes is not None:
                return processes
            refusal = _GARBLED_LIST
        return refusal

    def _fill_list(self, symbol: str) -> tuple[bytes, int] | Refusal:
        """Return the buffer as the driver filled it, and the number of entries it reports."""
        slots = _LIST_SLOTS
        for _ in range(4):  # the list can grow between "too small" and the next call
            buffer = (ctypes.c_char * (slots * MAX_ENTRY_BYTES))()
            ctypes.memset(buffer, PATTERN, len(buffer))
            count = ctypes.c_uint(slots)
            refusal = self.call(symbol, ctypes.byref(count), buffer)
            if refusal is None:
                return (buffer.raw, count.value) if count.value <= slots else _GARBLED_LIST
            if refusal.code != INSUFFICIENT_SIZE:
                return refusal
            slots = min(max(count.value, slots) * 2, _MAX_LIST_SLOTS)
        return self.nvml.refuse(INSUFFICIENT_SIZE)

    def accounted_peaks(self, pids: Iterable[int]) -> dict[int, int]:
        """Return exact peaks, also of ended processes: the driver itself tracks the maximum.

        Accounting is off by default (`sudo nvidia-smi -am 1`).
        """
        if not _or_none(self.ask("nvmlDeviceGetAccountingMode")):
            return {}
        found = {}
        for pid in sorted({*(_or_none(self.ask("nvmlDeviceGetAccountingPids")) or ())} & {*pids}):
            stats = _or_none(self.nvml.ask("nvmlDeviceGetAccountingStats", self.pointer, pid))
            if stats is not None and stats.maxMemoryUsage is not None:
                found[pid] = int(stats.maxMemoryUsage)
        return found

    # Slices

    def slices(self) -> Slices:
        """Return the MIG slices. Takes one call for a GPU that is not in MIG mode."""
        mode = self.ask("nvmlDeviceGetMigMode")
        if isinstance(mode, Refusal):
            # A card without MIG support is not divided; any other refusal leaves that unknown.
            return Slices(False) if mode.is_unsupported else Slices(None, None, mode)
        if not mode[0]:
            return Slices(False)
        most = self.ask("nvmlDeviceGetMaxMigDeviceCount")
        if isinstance(most, Refusal):
            return Slices(True, None, most)
        found = ((slot, self._slice(slot)) for slot in range(most))
        return Slices(True, {slot: part for slot, part in found if part is not None})

    def _slice(self, slot: int) -> NvmlGpu | Refusal | None:
        """Return the slice in that slot; None if the slot is empty."""
        pointer = self.nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", self.pointer, slot)
        if isinstance(pointer, Refusal) and pointer.code == NOT_FOUND:
            return None
        return self.nvml.gpu_at(pointer)

    def slice_instance(self) -> tuple[int, int] | None:
        gpu_instance = _or_none(self.ask("nvmlDeviceGetGpuInstanceId"))
        compute_instance = _or_none(self.ask("nvmlDeviceGetComputeInstanceId"))
        if gpu_instance is None or compute_instance is None:
            return None
        return gpu_instance, compute_instance

    def meter(self, *, with_activity: bool) -> NvmlMeter:
        return NvmlMeter(self, _open_gpm(self) if with_activity else None)


# ---- one GPU, asked repeatedly ------------------------------------------------------------------

# nvml.h: nvmlSamplingType_t, and the fields of nvmlDeviceGetFieldValues.
_GPU_UTILIZATION_SAMPLES = 1
_ENERGY, _POWER, _SENT, _RECEIVED = 83, 186, 197, 198  # mJ; mW now; bytes over PCIe
_FIELDS = (_ENERGY, _POWER, _RECEIVED, _SENT)
# nvmlFieldValue_t: field, scope, two times; type of the value; result; value.
_FIELD_VALUE = struct.Struct("=II16xIiQ")
# nvmlProcessUtilizationSample_t: PID, time, percent of SM, memory, encoder and decoder.
_SHARE = struct.Struct("=I4xQIIII")
_MIN_SAMPLE_SLOTS = 128  # drivers are said to keep about 100 samples of kernel-active time

# nvml.h: nvmlClocksEventReason*. Idle clocks, a user-set clock and boosting in step with other
# GPUs are not problems.
_CAUSES = {0x04: "power", 0x80: "power", 0x20: "heat", 0x40: "heat"}
_HARDWARE = 0x08 | 0x200 | 0x400  # a slowdown, a limit of the board, reliability


class NvmlMeter:
    """Ask one watched GPU through reused buffers."""

    def __init__(self, gpu: NvmlGpu, gpm: Gpm | None) -> None:
        self._gpu, self._gpm = gpu, gpm
        self.has_activity = gpm is not None
        self._memory_symbol = ""
        read = gpu.memory_struct()
        if not isinstance(read, Refusal):
            self._memory, self._memory_symbol, _ = read
            self._memory_pointer = ctypes.byref(self._memory)
        self._prepare_samples()
        self._fields = ctypes.create_string_buffer(len(_FIELDS) * _FIELD_VALUE.size)
        for place, number in enumerate(_FIELDS):
            _FIELD_VALUE.pack_into(self._fields, place * _FIELD_VALUE.size, number, 0, 0, 0, 0)
        self._shares = ctypes.create_string_buffer(_LIST_SLOTS * _SHARE.size)
        self._share_count, self._share_us = ctypes.c_uint(), 0
        self._reasons = ctypes.c_ulonglong()
        self._reasons_symbol = "nvmlDeviceGetCurrentClocksEventReasons"

    def used_bytes(self) -> int | Refusal | None:
        if not self._memory_symbol:
            memory = self._gpu.memory()
            return memory if isinstance(memory, Refusal) else memory.used_bytes
        refusal = self._gpu.call(self._memory_symbol, self._memory_pointer)
        if refusal:
            return refusal
        used: int = self._memory.used
        return used if used <= self._memory.total else None

    def _prepare_samples(self) -> None:
        self._newest_us = ctypes.c_ulonglong(0)
        self._value_type, self._count = ctypes.c_uint(), ctypes.c_uint()
        refusal = self._ask_samples(None)
        self.has_samples = refusal is None or refusal.code == NOT_FOUND
        self._slots = max(self._count.value, _MIN_SAMPLE_SLOTS)
        self._samples = (ctypes.c_ulonglong * (2 * self._slots))()
        if self.has_samples:
            self.busy_samples()  # drop old samples: later ones belong to this watch

    def _ask_samples(self, buffer: object) -> Refusal | None:
        return self._gpu.call(
            "nvmlDeviceGetSamples",
            _GPU_UTILIZATION_SAMPLES,
            self._newest_us,
            ctypes.byref(self._value_type),
            ctypes.byref(self._count),
            buffer,
        )

    def busy_samples(self) -> BusySamples:
        self._count.value = self._slots
        if self._ask_samples(self._samples):  # NOT_FOUND: no samples yet
            return BusySamples()
        before_us = newest_us = self._newest_us.value
        flat, values = self._samples[: 2 * self._count.value], []
        for stamp_us, value in zip(flat[::2], flat[1::2], strict=True):
            percent = value & 0xFFFFFFFF  # an unsigned int in a union of eight bytes
            if stamp_us > newest_us and percent <= 100:
                values.append(((stamp_us - before_us) / 1e6, percent))
                newest_us = stamp_us
        self._newest_us.value = newest_us
        return BusySamples(values, (newest_us - before_us) / 1e6 if before_us else None)

    def counters(self) -> Counters:
        """Read energy, power and PCIe traffic in one call."""
        if self._gpu.call("nvmlDeviceGetFieldValues", len(_FIELDS), self._fields):
            return Counters()
        energy_mj, milliwatts, received_bytes, sent_bytes = (
            None if code else value
            for _, _, _, code, value in _FIELD_VALUE.iter_unpack(self._fields.raw)
        )
        # An unsigned int: the other half of the union is not written.
        power_w = None if milliwatts is None else (milliwatts & 0xFFFFFFFF) / 1000
        return Counters(energy_mj, power_w, received_bytes, sent_bytes)

    def throttled_by(self) -> tuple[str, ...] | None:
        refusal = self._gpu.call(self._reasons_symbol, ctypes.byref(self._reasons))
        if refusal and refusal.code in _MISSING:  # drivers before R535 have the old name
            self._reasons_symbol = "nvmlDeviceGetCurrentClocksThrottleReasons"
        if refusal:
            return None
        reasons = self._reasons.value
        if not reasons:
            return ()
        causes = {cause for bit, cause in _CAUSES.items() if reasons & bit}
        # A hardware slowdown is reported together with its cause, if that is known.
        if reasons & _HARDWARE and not causes:
            causes = {"hardware"}
        return tuple(sorted(causes))

    def process_shares(self) -> Mapping[int, float] | None:
        self._share_count.value = len(self._shares) // _SHARE.size
        before_us = self._share_us
        refusal = self._gpu.call(
            "nvmlDeviceGetProcessUtilization",
            self._shares,
            ctypes.byref(self._share_count),
            ctypes.c_ulonglong(before_us),
        )
        if refusal is not None and refusal.code == INSUFFICIENT_SIZE:
            slots = min(self._share_count.value, _MAX_LIST_SLOTS)
            if slots * _SHARE.size > len(self._shares):  # it fits the next time
                self._shares = ctypes.create_string_buffer(slots * _SHARE.size)
            return None
        if refusal is not None:
            return {} if refusal.code == NOT_FOUND else None
        found: dict[int, tuple[int, float]] = {}
        count = min(self._share_count.value, len(self._shares) // _SHARE.size)
        samples = memoryview(self._shares)[: count * _SHARE.size]
        for pid, stamp_us, percent, *_ in _SHARE.iter_unpack(samples):
            # Some drivers also return slots that they have not filled.
            if pid and percent <= 100 and stamp_us > max(before_us, found.get(pid, (0, 0.0))[0]):
                found[pid] = stamp_us, percent / 100
                self._share_us = max(self._share_us, stamp_us)
        return {pid: ratio for pid, (_, ratio) in found.items()}

    def activity(self) -> tuple[float | None, float | None]:
        return (None, None) if self._gpm is None else self._gpm.ratios()


# ---- GPM: how many multiprocessors worked, and how busy the memory was; Hopper and later --------
# The hardware counts; the difference of two samples is a mean over the time between them.

_SM_UTIL, _DRAM_BW_UTIL = 2, 10  # nvml.h: nvmlGpmMetricId_t


def _open_gpm(gpu: NvmlGpu) -> Gpm | None:
    """Return None if the GPU has no GPM, or this user may not use it."""
    support = _or_none(gpu.ask("nvmlGpmQueryDeviceSupport"))
    if support is None or not support.isSupportedDevice:
        return None
    samples = [gpu.nvml.ask("nvmlGpmSampleAlloc") for _ in range(2)]
    return None if any(isinstance(each, Refusal) for each in samples) else Gpm(gpu, samples)


class Gpm:
    """Compare alternating samples of GPM's counters."""

    def __init__(self, gpu: NvmlGpu, samples: list[Any]) -> None:
        self._gpu = gpu
        self._older, self._newer = samples
        self._num_filled = 0
        self._metrics = gpu.nvml.binding.c_nvmlGpmMetricsGet_t()
        self._metrics.version = gpu.nvml.binding.NVML_GPM_METRICS_GET_VERSION
        self._metrics.numMetrics = 2
        for metric, number in zip(self._metrics.metrics, (_SM_UTIL, _DRAM_BW_UTIL), strict=False):
            metric.metricId = number

    def ratios(self) -> tuple[float | None, float | None]:
        """Return the means for multiprocessors and memory since the last call. Two NVML calls."""
        self._older, self._newer = self._newer, self._older
        if self._gpu.call("nvmlGpmSampleGet", self._newer):
            self._num_filled = 0
            return None, None
        self._num_filled = min(self._num_filled + 1, 2)
        if self._num_filled < 2:
            return None, None
        metrics = self._metrics
        metrics.sample1, metrics.sample2 = self._older, self._newer
        if isinstance(self._gpu.nvml.ask("nvmlGpmMetricsGet", metrics), Refusal):
            return None, None
        return _ratio(metrics.metrics[0]), _ratio(metrics.metrics[1])


def _ratio(metric: Any) -> float | None:
    return metric.value / 100 if not metric.nvmlReturn and 0 <= metric.value <= 100 else None
