"""The text of an out-of-memory error -> which library said it, and every figure in it.

The grammar does not depend on order, line breaks or spaces: blanks are removed before anything is
looked for, so that a message that a terminal or a logger has wrapped reads like any other. One
pattern names the library; each figure has a pattern of its own, in the words that torch has used
from 1.0 to 2.13 (c10/cuda/CUDACachingAllocator.cpp, CUDAMallocAsyncAllocator.cpp,
c10/xpu/XPUCachingAllocator.cpp, aten/src/ATen/mps/MPSAllocator.mm, c10/core/impl/alloc_cpu.cpp).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from oomph.units import GIB, KIB, MIB, TIB

# "workers": processes of a DataLoader, "shared": /dev/shm. A smaller batch brings neither back.
Memory = Literal["gpu", "host", "workers", "shared"]

Family = Literal[
    "cuda",
    "hip",
    "xpu",
    "npu",
    "mps",
    "accelerator",  # another device of torch's
    "cuda-malloc-async",
    "cuda-runtime",
    "cuda-driver",
    "thc",
    "math-library",
    "cudnn",
    "nccl",
    "third-party",
    "cpu",
    "numpy",
    "killed",
    "workers",
    "shared-memory",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Another process on the GPU, as a message names it."""

    pid: int
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OomMessage:
    """One out-of-memory message. None: the message does not say."""

    family: Family
    memory: Memory
    text: str  # on one line, at most 500 characters
    device: int | None = None
    requested_bytes: int | None = None
    capacity_bytes: int | None = None  # of the GPU
    free_bytes: int | None = None  # of the GPU, for anybody
    allocated_bytes: int | None = None  # in tensors
    reserved_bytes: int | None = None  # by torch: tensors and cache
    private_pools_bytes: int | None = None  # of CUDA graphs
    process_bytes: int | None = None  # of the process that failed, with its CUDA context
    others: tuple[Process, ...] = ()
    other_allocations_bytes: int | None = None  # MPS: outside its allocator
    allowed_bytes: int | None = None  # a limit below the capacity
    is_corrupt: bool = False  # the requested size cannot be a size ("more than 1EB")
    # What torch proposes by reflex, whether it is on already or not.
    hint: Literal["max_split_size_mb", "expandable_segments"] | None = None
    torch_version: str | None = None  # the versions that use these words
    rank: str | None = None
    line: int | None = None  # of the log, from 1
    where: str | None = None  # the last place in the user's own code: file:line in function
    num_seen: int = 1  # how often the log has it

    @property
    def cached_bytes(self) -> int | None:
        """Return what torch holds and no tensor uses."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(self.reserved_bytes - self.allocated_bytes, 0)

    @property
    def has_figures(self) -> bool:
        return self.requested_bytes is not None and self.capacity_bytes is not None


# ---- text without blanks -------------------------------------------------------------------------

_BLANKS = re.compile(r"\s+")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)")
_LONGEST = 20_000  # characters that are read of one text


def squeeze(text: str) -> str:
    """Return a text without blanks and terminal colours.

    >>> squeeze("CUDA out of\\n  memory")
    'CUDAoutofmemory'
    """
    return _BLANKS.sub("", _ESCAPES.sub("", text))


# ---- who said it ---------------------------------------------------------------------------------

# What is left of a message whose beginning was cut off.
_REST_OF_ONE = (
    r"Triedtoallocate(?:morethan1EB|[\d.]+[KMGT]i?B)|reservedintotalbyPyTorch"
    r"|isreservedbyPyTorchbutunallocated"
    r"|max_split_size_mbtoavoidfragmentation|expandable_segments:Truetoavoidfragmentation"
)
# In the order in which they are tried: the more specific first. Distances are bounded, so that no
# text takes longer than a multiple of its length.
_FAMILIES: tuple[tuple[Family, Memory, str], ...] = (
    (
        "workers",
        "workers",
        (
            r"DataLoaderworker\(pid[^)]{0,40}\)iskilledbysignal:(?:Killed|Buserror)"
            r"|Unexpectedbuserrorencounteredinworker"
        ),
    ),
    (
        "shared-memory",
        "shared",
        (
            r"unabletoallocatesharedmemory\(shm\)|unabletowritetofile<?/torch_"
            r"|insufficientsharedmemory\(shm\)|unabletoopensharedmemoryobject"
        ),
    ),
    ("mps", "gpu", r"MPSbackendoutofmemory|Invalidbuffersize:[\d.]+[KMGT]i?B"),
    (
        "cuda-malloc-async",
        "gpu",
        r"Allocationondevice[^.]{0,20}wouldexceedallowedmemory",
    ),
    ("hip", "gpu", r"HIPoutofmemory|HIPerror:outofmemory|hipErrorOutOfMemory"),
    (
        "xpu",
        "gpu",
        (
            r"XPUoutofmemory|XPUerror:outofmemory|canNOTallocatememoryblockwithsizelarger"
            r"|Allocationisoutofdevicememory"
            r"|(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)"
        ),
    ),
    ("npu", "gpu", r"NPUoutofmemory"),
    ("cuda", "gpu", r"CUDAoutofmemory"),
    ("accelerator", "gpu", r"[A-Z][A-Za-z0-9]{1,15}outofmemory\.Triedtoallocate"),
    ("thc", "gpu", r"cudaruntimeerr(?:or)?\(2\):outofmemory|THCudaCheckFAIL.{0,300}outofmemory"),
    (
        "nccl",
        "gpu",
        r"Cudafailure(?:2)?'outofmemory'|NCCL.{0,200}outofmemory",
    ),
    (
        "cudnn",
        "gpu",
        (
            r"CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
            r"|UnabletofindavalidcuDNNalgorithm|miopenStatusAllocFailed"
        ),
    ),
    (
        "math-library",
        "gpu",
        (
            r"(?:CUBLAS|CUSOLVER|CUSPARSE|HIPBLAS|HIPSPARSE)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
            r"|rocblas_status_memory_error"
        ),
    ),
    (
        "third-party",
        "gpu",
        r"cudafailedwitherror2outofmemory|Erroroutofmemoryatline\d+",
    ),
    ("cuda-driver", "gpu", r"CUDAdrivererror:outofmemory|CUDA_ERROR_OUT_OF_MEMORY"),
    ("cuda-runtime", "gpu", r"CUDAerror:outofmemory|cudaErrorMemoryAllocation"),
    (
        "cpu",
        "host",
        (
            r"DefaultCPUAllocator:(?:can'tallocate|notenough)memory"
            r"|enforcefailat.{0,200}alloc.{0,60}posix_memalign"
            r"|unabletommap\d+bytes|\[Errno12\]Cannotallocatememory"
        ),
    ),
    ("numpy", "host", r"Unabletoallocate[\d.]+[KMGTP]?i?B(?:ytes)?foranarray"),
    (
        "killed",
        "host",
        (
            r"Outofmemory:Kill(?:ed)?process|outofmemory:Killedprocess|oom-kill:constraint"
            r"|Detected\d+oom.kill|OOMKilled|invokedoom-killer"
        ),
    ),
    ("cuda", "gpu", _REST_OF_ONE),
    (
        "cuda",
        "gpu",
        (
            r"(?:CUDA|GPU).{0,30}(?:内存不足|显存不足|内存溢出|显存溢出|記憶體不足|メモリ不足"
            r"|メモリが不足|메모리부족|메모리가부족)"
            r"|(?:内存|显存)溢出错误|CUDA(?:senmemoria|sinmemoria|àcourtdemémoire|hatkeinenSpeicher)"
            r"|memoria(?:insuficiente|agotada).{0,20}CUDA|CUDA.{0,20}(?:нехваткапамяти|нехватаетпамяти)"
        ),
    ),
)
_FAMILY = tuple(
    (re.compile(pattern, re.IGNORECASE if family != "accelerator" else 0), family, memory)
    for family, memory, pattern in _FAMILIES
)

# An old driver says this if memory runs out with expandable segments. Without them it is another
# fault: torch's CUDACachingAllocator.cpp maps memory only for them.
DRIVER_WITH_EXPANDABLE = re.compile(r"CUDAdrivererror:invalidargument", re.IGNORECASE)

# ---- the figures ---------------------------------------------------------------------------------

# torch writes "B", "bytes", KiB, MiB, GiB; for MPS "GB" with the same meaning (MPSAllocator.h).
_SIZE = r"(\d[\d,]*\.?\d*)(bytes?|[KMGTPE]i?B|B)"
_UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB, "P": 1024 * TIB, "E": 1024 * 1024 * TIB}
_TOO_MUCH_BYTES = 1 << 62  # a limit of this size is none; a request of it is nonsense

_FIGURES: tuple[tuple[str, str], ...] = (
    ("requested_bytes", rf"triedtoallocate{_SIZE}"),
    ("requested_bytes", rf"Requested:{_SIZE}"),
    ("requested_bytes", rf"Unabletoallocate{_SIZE}foranarray"),
    ("requested_bytes", rf"Invalidbuffersize:{_SIZE}"),
    ("requested_bytes", rf"unabletommap{_SIZE}"),
    ("capacity_bytes", rf"{_SIZE}totalcapac"),
    ("capacity_bytes", rf"totalcapaci?tyof{_SIZE}"),
    ("capacity_bytes", rf"Devicelimit:{_SIZE}"),
    ("free_bytes", rf"{_SIZE}free[;)]"),
    ("free_bytes", rf"ofwhich{_SIZE}isfree"),
    ("free_bytes", rf"Free\(accordingtoCUDA\):{_SIZE}"),
    ("allocated_bytes", rf"{_SIZE}alreadyallocated"),
    ("allocated_bytes", rf"{_SIZE}isallocatedbyPyTorch"),
    ("allocated_bytes", rf"Currentlyallocated:{_SIZE}"),
    ("allocated_bytes", rf"MPSallocated:{_SIZE}"),
    ("reserved_bytes", rf"{_SIZE}reservedintotal"),
    ("private_pools_bytes", rf"with{_SIZE}allocatedinprivatepools"),
    ("process_bytes", rf"thisprocesshas{_SIZE}memoryinuse"),
    ("other_allocations_bytes", rf"otherallocations:{_SIZE}"),
    ("allowed_bytes", rf"{_SIZE}allowed;"),
    ("allowed_bytes", rf"maxallowed:{_SIZE}"),
    ("allowed_bytes", rf"PyTorchlimit\(setbyuser-suppliedmemoryfraction\):{_SIZE}"),
)
_FIGURE = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _FIGURES)
# What torch holds beside its tensors. 1.0 to 1.3 called that "cached": the difference, not the sum.
_UNALLOCATED = re.compile(
    rf"{_SIZE}isreservedbyPyTorchbutunallocated|{_SIZE}cached(?:\)|$)", re.IGNORECASE
)
_PROCESS = re.compile(rf"Process(\d{{1,10}})has{_SIZE}memoryinuse", re.IGNORECASE)
_DEVICE = re.compile(
    r"\((?:GPU|NPU|XPU|MUSA|MLU|device)(\d{1,3})[;)]"
    r"|(?:GPU|NPU|XPU|MUSA|MLU)(\d{1,3})(?:hasatotal|的总)|Allocationondevice(\d{1,3})would",
    re.IGNORECASE,
)
_CORRUPT = re.compile(r"morethan1EB", re.IGNORECASE)
_KILLED = re.compile(r"anon-rss:(\d{1,15})kB", re.IGNORECASE)


def _bytes(number: str, unit: str) -> int | None:
    digits = number.replace(",", "")
    if len(digits) > 25:
        return None
    prefix = "" if unit.lower() in ("b", "byte", "bytes") else unit[0].upper()
    return round(float(digits) * _UNITS[prefix])


def printed_error_bytes(size_bytes: int) -> int:
    """Return by how much a size that torch printed with two decimals may be off."""
    unit = next((unit for unit in (GIB, MIB, KIB) if size_bytes >= unit), 0)
    return unit // 200


# ---- translated by a browser ---------------------------------------------------------------------
# Such a message is cut into clauses; the nearest of these words says what a clause's size is.

_CLAUSES = re.compile(r"[\u3002\uff0c,\uff1b;\u3001\uff1a:\uff08(\uff09)]|\.(?!\d)")
_TRANSLATED: tuple[tuple[str, str], ...] = (
    (
        "requested_bytes",
        (
            r"尝试分配|試圖分配|嘗試分配|试图分配|割り当てようと|할당하려|intentóasignar"
            r"|essayéd'allouer|versucht|попытка(?:выделить|выделения)"
        ),
    ),
    (
        "capacity_bytes",
        (
            r"总(?:内存)?容量|總(?:記憶體)?容量|总显存|総容量|合計容量|총용량|capacidadtotal"
            r"|capacitétotale|Gesamtkapazität|общ(?:ая|ую|ей)[её]мкость"
        ),
    ),
    ("free_bytes", r"空闲|空閒|可用|空き|여유|libres?|frei|свободно"),
    ("cached", r"未分配|未割り当て|미할당|sinasignar|nonallou|nichtzugewiesen|нераспредел"),
    ("process_bytes", r"此进程|该进程|本进程|此行程|このプロセス|이프로세스|esteproceso"),
    ("allocated_bytes", r"已分配|已由|由PyTorch分配|割り当て済み|할당됨|asignados?|alloués?"),
)
_TRANSLATION = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _TRANSLATED)
_ANY_SIZE = re.compile(rf"{_SIZE}", re.IGNORECASE)
_TRANSLATED_PROCESS = re.compile(rf"(?:进程|行程|プロセス|프로세스)(\d{{1,10}}).{{0,12}}?{_SIZE}")


def _translated(squeezed: str) -> tuple[dict[str, int], tuple[Process, ...]]:
    found: dict[str, int] = {}
    others = []
    cached = None
    for clause in _CLAUSES.split(squeezed):
        size = _ANY_SIZE.search(clause)
        if size is None:
            continue
        size_bytes = _bytes(*size.groups())
        process = _TRANSLATED_PROCESS.search(clause)
        name = next((name for name, words in _TRANSLATION if words.search(clause)), None)
        if size_bytes is None:
            continue
        if process is not None:
            others.append(Process(pid=int(process.group(1)), held_bytes=size_bytes))
        elif name == "cached":
            cached = size_bytes
        elif name is not None:
            found.setdefault(name, size_bytes)
    if cached is not None and "allocated_bytes" in found:
        found["reserved_bytes"] = found["allocated_bytes"] + cached
    return found, tuple(others)


# ---- one message ---------------------------------------------------------------------------------


def parse(text: str, *, has_expandable_segments: bool = False) -> OomMessage | None:
    """Return the out-of-memory message in a text; None if it is about anything else.

    `has_expandable_segments`: an old driver's "invalid argument" then means that memory ran out.
    """
    squeezed = squeeze(text[:_LONGEST])
    found = _family_of(squeezed)
    if found is None and has_expandable_segments and DRIVER_WITH_EXPANDABLE.search(squeezed):
        found = "cuda-driver", "gpu"
    if found is None:
        return None
    family, memory = found
    figures = _figures(squeezed)
    others = tuple(
        Process(pid=int(pid), held_bytes=held)
        for pid, number, unit in _PROCESS.findall(squeezed)
        if (held := _bytes(number, unit)) is not None
    )
    if not squeezed.isascii() and not figures:
        figures, others = _translated(squeezed)
    message = OomMessage(
        family=family,
        memory=memory,
        text=_shortened(text),
        device=_device(squeezed),
        others=others,
        is_corrupt=_CORRUPT.search(squeezed) is not None,
        hint=_hint(squeezed),
        requested_bytes=figures.get("requested_bytes"),
        capacity_bytes=figures.get("capacity_bytes"),
        free_bytes=figures.get("free_bytes"),
        allocated_bytes=figures.get("allocated_bytes"),
        reserved_bytes=figures.get("reserved_bytes"),
        private_pools_bytes=figures.get("private_pools_bytes"),
        process_bytes=figures.get("process_bytes"),
        other_allocations_bytes=figures.get("other_allocations_bytes"),
        allowed_bytes=figures.get("allowed_bytes"),
    )
    return replace(message, torch_version=_torch_version(message, squeezed))


def _family_of(squeezed: str) -> tuple[Family, Memory] | None:
    for pattern, family, memory in _FAMILY:
        if pattern.search(squeezed):
            return family, memory
    return None


def _figures(squeezed: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, pattern in _FIGURE:
        match = None if name in found else pattern.search(squeezed)
        size_bytes = None if match is None else _bytes(*match.groups())
        if size_bytes is not None and size_bytes < _TOO_MUCH_BYTES:
            found[name] = size_bytes
    unallocated = _UNALLOCATED.search(squeezed)
    if unallocated is not None and "allocated_bytes" in found:
        size_bytes = _bytes(*filter(None, unallocated.groups()))
        if size_bytes is not None:
            found["reserved_bytes"] = found["allocated_bytes"] + size_bytes
    killed = _KILLED.search(squeezed)
    if killed is not None:
        found["process_bytes"] = int(killed.group(1)) * KIB
    if found.get("process_bytes") == 0:  # the driver cannot see the process in a container
        del found["process_bytes"]
    return found


def _device(squeezed: str) -> int | None:
    match = _DEVICE.search(squeezed)
    return None if match is None else int(next(filter(None, match.groups())))


def _hint(squeezed: str) -> Literal["max_split_size_mb", "expandable_segments"] | None:
    if re.search(r"expandable_segments:Truetoavoid", squeezed):
        return "expandable_segments"
    return "max_split_size_mb" if re.search(r"max_split_size_mbtoavoid", squeezed) else None


def _torch_version(message: OomMessage, squeezed: str) -> str | None:
    """Return which versions of torch use these words (knowledge of its source, by release)."""
    if message.family != "cuda":
        return None
    if "PYTORCH_ALLOC_CONF" in squeezed:
        return "2.9 or newer"
    if message.hint == "expandable_segments":
        return "2.2 or newer"
    if "totalcapactyof" in squeezed:
        return "2.1"
    if "reservedintotal" in squeezed:
        return "1.11 to 2.0" if message.hint else "1.4 to 2.0"
    return "1.0 to 1.3" if re.search(r"cached\)", squeezed) else None


_MOST_CHARACTERS = 500


def _shortened(text: str) -> str:
    line = " ".join(_ESCAPES.sub("", text[:_LONGEST]).split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:_MOST_CHARACTERS]


# ---- a log, line by line -------------------------------------------------------------------------

_REST = re.compile(_REST_OF_ONE, re.IGNORECASE)
_OPENING = re.compile(
    "|".join(pattern for _, _, pattern in _FAMILIES if pattern != _REST_OF_ONE), re.IGNORECASE
)


def is_about_memory(squeezed: str) -> bool:
    """Return whether a squeezed text holds an out-of-memory message, or a part of one."""
    return _OPENING.search(squeezed) is not None or _REST.search(squeezed) is not None


def opens(squeezed: str) -> bool:
    """Return whether an out-of-memory message begins in a squeezed text."""
    return _OPENING.search(squeezed) is not None
