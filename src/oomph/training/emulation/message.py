"""A shortage -> the text that torch.OutOfMemoryError has in torch 2.9 and later.

The words are those of c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator::malloc), the
figures those of its format_size.
"""

from __future__ import annotations

from oomph.units import GIB, KIB, MIB


def out_of_memory_text(
    *,
    wanted_bytes: int,
    total_bytes: int,
    free_bytes: int,
    allocated_bytes: int,
    reserved_bytes: int,
    allowed_bytes: int | None = None,
) -> str:
    """The whole message. `wanted_bytes` is the segment that CUDA did not give."""
    allowed = "" if allowed_bytes is None else f"{format_size(allowed_bytes)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {format_size(wanted_bytes)}. "
        f"GPU 0 has a total capacity of {format_size(total_bytes)} "
        f"of which {format_size(free_bytes)} is free. "
        "Including non-PyTorch memory, this process has "
        f"{format_size(total_bytes - free_bytes)} memory in use. {allowed}"
        f"Of the allocated memory {format_size(allocated_bytes)} is allocated by PyTorch, "
        f"and {format_size(reserved_bytes - allocated_bytes)} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
        "for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def format_size(size_bytes: int) -> str:
    """As c10's format_size has it.

    >>> format_size(512), format_size(20 * 2**20), format_size(3 * 2**29)
    ('512 bytes', '20.00 MiB', '1.50 GiB')
    """
    if size_bytes <= KIB:
        return f"{size_bytes} bytes"
    if size_bytes <= MIB:
        return f"{size_bytes / KIB:.2f} KiB"
    if size_bytes <= GIB:
        return f"{size_bytes / MIB:.2f} MiB"
    return f"{size_bytes / GIB:.2f} GiB"
