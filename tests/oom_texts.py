"""Out-of-memory messages in the words of torch's source, with random figures that are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from oomph.oom_message import Family
from oomph.units import GIB, KIB, MIB

_HINT = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid"
    " fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
_SPLIT_HINT = (
    "If reserved but unallocated memory is large try setting max_split_size_mb to avoid"
    " fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
_EXPANDABLE_HINT = (
    "If reserved but unallocated memory is large try setting {name}=expandable_segments:True to"
    " avoid fragmentation.  See documentation for Memory Management "
    " (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


def format_size(size: int, *, byte: str = "bytes") -> str:
    """As torch's format_size prints it."""
    if size <= 1024:
        return f"{size} {byte}"
    unit, name = next(one for one in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if size > one[0])
    return f"{size / unit:.2f} {name}"


class Written(NamedTuple):
    """A message, who says it, and the figures that it shows, before they were rounded."""

    text: str
    family: Family
    figures: dict[str, int]


Figures = dict[str, int]
SIZES = st.one_of(
    st.just(0), st.integers(1, 4 * KIB), st.integers(MIB, 900 * MIB), st.integers(GIB, 300 * GIB)
)


def _v1(f: Figures) -> str:
    s = {name: format_size(size) for name, size in f.items()}
    return (
        f"CUDA out of memory. Tried to allocate {s['requested']} (GPU 0; {s['capacity']} total"
        f" capacity; {s['allocated']} already allocated; {s['free']} free; {s['cached']} cached)"
    )


def _v2(f: Figures, *, device: str = "CUDA", hint: str = "", more: str = "") -> str:
    s = {name: format_size(size) for name, size in f.items()}
    gpu = "NPU" if device == "NPU" else "GPU"
    reserved = format_size(f["allocated"] + f["cached"])
    return (
        f"{device} out of memory. Tried to allocate {s['requested']} ({gpu} 0; {s['capacity']}"
        f" total capacity; {s['allocated']} already allocated; {more}{s['free']} free; {reserved}"
        f" reserved in total by PyTorch){hint}"
    )


def _v4(
    f: Figures, *, device: str = "CUDA", capacity: str = "capacity", hint: str = "", more: str = ""
) -> str:
    s = {name: format_size(size) for name, size in f.items()}
    return (
        f"{device} out of memory. Tried to allocate {s['requested']}. GPU 0 has a total {capacity}"
        f" of {s['capacity']} of which {s['free']} is free. {more}Of the allocated memory"
        f" {s['allocated']} is allocated by PyTorch, and {s['cached']} is reserved by PyTorch but"
        f" unallocated. {hint}"
    )


def _processes(f: Figures) -> str:
    used = format_size(f["process"])
    own = f"Including non-PyTorch memory, this process has {used} memory in use. "
    other = f"Process 4711 has {format_size(f['other'])} memory in use. "
    return other + own if f["other"] % 2 else own + other


def _async(f: Figures) -> str:
    s = {name: format_size(size) for name, size in f.items()}
    return (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        f"Currently allocated     : {s['allocated']}\nRequested               : {s['requested']}\n"
        f"Device limit            : {s['capacity']}\nFree (according to CUDA): {s['free']}\n"
        "PyTorch limit (set by user-supplied memory fraction)\n"
        "                        : 17179869184.00 GiB"
    )


def _mps(f: Figures) -> str:
    s = {name: format_size(size).replace("iB", "B") for name, size in f.items()}
    return (
        f"MPS backend out of memory (MPS allocated: {s['allocated']}, other allocations:"
        f" {s['other']}, max allowed: {s['capacity']}). Tried to allocate {s['requested']} on"
        " private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory"
        " allocations (may cause system failure)."
    )


def _cpu(f: Figures) -> str:
    return (
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory:"
        f" you tried to allocate {f['requested']} bytes. Error code 12 (Cannot allocate memory)"
    )


_USUAL = ("requested", "capacity", "allocated", "free", "reserved")
_WRITERS: tuple[tuple[Family, Callable[[Figures], str], tuple[str, ...]], ...] = (
    ("cuda", _v1, _USUAL),
    ("cuda", _v2, _USUAL),
    ("cuda", lambda f: _v2(f, hint=_HINT), _USUAL),
    ("cuda", lambda f: _v4(f, capacity="capacty", hint=_SPLIT_HINT), _USUAL),
    (
        "cuda",
        lambda f: _v4(
            f, more=_processes(f), hint=_EXPANDABLE_HINT.format(name="PYTORCH_CUDA_ALLOC_CONF")
        ),
        (*_USUAL, "process", "others"),
    ),
    (
        "cuda",
        lambda f: _v4(
            f,
            more=f"{format_size(f['allowed'])} allowed; ",
            hint=_EXPANDABLE_HINT.format(name="PYTORCH_ALLOC_CONF"),
        ),
        (*_USUAL, "allowed"),
    ),
    (
        "hip",
        lambda f: _v4(f, device="HIP", hint=_EXPANDABLE_HINT.format(name="PYTORCH_HIP_ALLOC_CONF")),
        _USUAL,
    ),
    ("xpu", lambda f: _v4(f, device="XPU"), _USUAL),
    (
        "npu",
        lambda f: _v2(
            f, device="NPU", more=f"{format_size(f['allocated'])} current active; ", hint=_HINT
        ),
        _USUAL,
    ),
    ("cuda-malloc-async", _async, ("requested", "capacity", "allocated", "free")),
    ("mps", _mps, ("requested", "allocated")),
    ("cpu", _cpu, ("requested",)),
)


@st.composite
def written(draw: Any) -> Written:
    """Any message with figures."""
    family, write, shown = draw(st.sampled_from(_WRITERS))
    names = ("requested", "capacity", "allocated", "free", "cached", "process", "other", "allowed")
    figures = {name: draw(SIZES) for name in names}
    figures["process"] += 1  # 0 means that the driver cannot see it
    expected = {
        "reserved": figures["allocated"] + figures["cached"],
        "others": figures["other"],
        **figures,
    }
    return Written(write(figures), family, {name: expected[name] for name in shown})
