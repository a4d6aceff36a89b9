"""The text of an out-of-memory error, in any wording and however it was wrapped -> its figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oom_texts import Written, written

from oomph.oom_message import OomMessage, parse, printed_error_bytes
from oomph.units import GIB, MIB

DATA = Path(os.environ.get("OOMPH_RECORDINGS", "../shared/data/recordings")).parent
POSTED = DATA / "oom_messages.jsonl"


def assert_figures(message: OomMessage, expected: dict[str, int]) -> None:
    for name, size_bytes in expected.items():
        if name == "others":
            (other,) = message.others
            found: int | None = other.held_bytes
        else:
            found = getattr(message, f"{name}_bytes")
        assert found is not None, name
        # "reserved" is the sum of two printed figures in some wordings
        assert abs(found - size_bytes) <= 2 * printed_error_bytes(size_bytes) + 1, name


@given(written())
def test_every_wording_gives_its_family_and_every_figure(one: Written) -> None:
    message = parse(f"RuntimeError: {one.text}")
    assert message is not None
    assert message.family == one.family
    assert_figures(message, one.figures)


@given(written(), st.integers(7, 60))
def test_lines_broken_anywhere_change_no_figure(one: Written, width: int) -> None:
    pieces = [one.text[at : at + width] for at in range(0, len(one.text), width)]
    whole, broken = parse(one.text), parse("\n   ".join(pieces))
    assert whole is not None
    assert broken is not None
    fields = ("family", "requested_bytes", "capacity_bytes", "allocated_bytes", "reserved_bytes")
    for name in (*fields, "free_bytes", "process_bytes", "others", "device", "hint"):
        assert getattr(broken, name) == getattr(whole, name), name


@given(written(), st.integers(0, 400))
def test_what_a_cut_message_still_says_is_never_wrong(one: Written, end: int) -> None:
    whole, cut = parse(one.text), parse(one.text[:end])
    assert whole is not None
    if cut is None:
        return
    for name in ("capacity_bytes", "allocated_bytes", "free_bytes", "process_bytes"):
        assert getattr(cut, name) in (None, getattr(whole, name)), name


@given(st.text(max_size=300))
def test_any_text_gives_a_message_or_none(text: str) -> None:
    message = parse(text)
    assert message is None or message.text.isprintable() or message.text == ""


def test_cached_meant_the_difference_before_torch_1_4() -> None:
    message = parse(
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 16.00 GiB total capacity;"
        " 14.00 GiB already allocated; 100.00 MiB free; 512.00 MiB cached)"
    )
    assert message is not None
    assert message.reserved_bytes == 14 * GIB + 512 * MIB
    assert message.torch_version == "1.0 to 1.3"


def test_private_pools_are_a_part_of_what_is_allocated() -> None:
    message = parse(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.00 GiB of"
        " which 1.00 GiB is free. Of the allocated memory 70.00 GiB is allocated by PyTorch, with"
        " 9.00 GiB allocated in private pools (e.g., CUDA Graphs), and 2.00 GiB is reserved by"
        " PyTorch but unallocated."
    )
    assert message is not None
    assert (message.device, message.private_pools_bytes) == (3, 9 * GIB)
    assert (message.reserved_bytes, message.cached_bytes) == (72 * GIB, 2 * GIB)


def test_a_process_that_the_driver_cannot_see_has_an_unknown_size() -> None:
    message = parse(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 80.00 GiB"
        " of which 5.00 MiB is free. Including non-PyTorch memory, this process has 0 bytes memory"
        " in use."
    )
    assert message is not None
    assert message.process_bytes is None


def test_a_limit_of_2_to_the_64_is_none() -> None:
    message = parse(
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nPyTorch limit (set by"
        " user-supplied memory fraction) : 17179869184.00 GiB"
    )
    assert message is not None
    assert message.allowed_bytes is None


def test_a_page_translated_by_a_browser_is_read() -> None:
    message = parse(
        "内存溢出错误：CUDA 内存不足。尝试分配 64.00 MiB 的内存。"  # noqa: RUF001 - as written
        "GPU 0 的总内存容量为 24.00 GiB，"  # noqa: RUF001
        "其中空闲内存为 32.00 MiB。进程 123 正在使用 2.00 GiB 的内存。"
    )
    assert message is not None
    assert (message.requested_bytes, message.capacity_bytes) == (64 * MIB, 24 * GIB)
    assert (message.free_bytes, message.device) == (32 * MIB, 0)
    assert [(other.pid, other.held_bytes) for other in message.others] == [(123, 2 * GIB)]


def test_the_kernels_own_lines_name_the_memory_of_what_it_killed() -> None:
    message = parse(
        "Out of memory: Killed process 812 (python) total-vm:9000000kB, anon-rss:4194304kB,"
        " file-rss:0kB"
    )
    assert message is not None
    assert (message.family, message.process_bytes) == ("killed", 4 * GIB)


@pytest.mark.parametrize(
    "text",
    [
        "out of resource: shared memory, Required: 147456, Hardware limit: 101376",
        "GPU memory: 12.3 GiB allocated, 14.0 GiB reserved",
        "loaded 4.00 GiB of weights",
        "CUDA driver error: invalid argument",
    ],
)
def test_what_only_sounds_like_it_is_none(text: str) -> None:
    assert parse(text) is None


# ---- what people have posted ---------------------------------------------------------------------

_FAMILIES = {
    "cuda_async_backend": "cuda-malloc-async",
    "cuda_runtime_error": "cuda-runtime",
    "cuda_thc": "thc",
    "third_party_spconv": "third-party",
    "bitsandbytes": "third-party",
    "cublas": "math-library",
    "cudnn": "cudnn",
    "nccl": "nccl",
    "cpu": "cpu",
    "host_oom_killer": "workers",
    "host_shm": "workers",
    "cuda_driver": "cuda-driver",
}


@pytest.mark.skipif(not POSTED.exists(), reason="the messages are not here")
def test_all_posted_messages_are_told_apart() -> None:
    posted = [json.loads(line) for line in POSTED.read_text().splitlines()]
    assert len(posted) >= 100
    for one in posted:
        message = parse(one["message"], has_expandable_segments=True)
        assert message is not None, one
        family = _FAMILIES.get(one["family"], one["family"].partition("_")[0])
        assert message.family == family, one
        if "Tried to allocate" in one["message"] and "1EB" not in one["message"]:
            assert message.requested_bytes is not None, one
