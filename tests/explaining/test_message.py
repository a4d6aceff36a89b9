"""The figures of a message -> the verdict, by arithmetic, and what would have helped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.explaining.log import read_log
from oomph.explaining.message import explain_log
from oomph.records.explanation import Explanation
from oomph.units import GIB, MIB


def text(
    *, requested: int, capacity: int = 24 * GIB, free: int, live: int, cached: int, more: str = ""
) -> str:
    def size(size_bytes: int) -> str:
        return f"{size_bytes / MIB:.2f} MiB"

    return (
        f"CUDA out of memory. Tried to allocate {size(requested)}. GPU 0 has a total capacity of"
        f" {size(capacity)} of which {size(free)} is free. {more}Of the allocated memory"
        f" {size(live)} is allocated by PyTorch, and {size(cached)} is reserved by PyTorch but"
        " unallocated. If reserved but unallocated memory is large try setting"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def explained(log: str, **options: Any) -> Explanation:
    found = explain_log(read_log([log.encode()]), source="log", **options)
    assert found is not None
    return found


def remedies(found: Explanation) -> dict[str, bool | None]:
    return {one.name: one.helps for one in found.remedies}


FULL = text(requested=2 * GIB, free=1 * GIB, live=22 * GIB, cached=100 * MIB)
IN_PIECES = text(requested=2 * GIB, free=100 * MIB, live=18 * GIB, cached=5 * GIB)


def test_a_full_gpu_is_capacity_and_the_proposed_setting_cannot_help() -> None:
    found = explained(FULL)
    assert found.verdict == "capacity"
    assert found.sentence.startswith("too much at once")
    assert any("fragmentation is impossible" in reason for reason in found.reasons)
    assert remedies(found)["expandable_segments:True"] is False
    assert found.next_command == "oomph plan train.py --gpu-memory 24.00GiB"


def test_enough_memory_in_pieces_is_fragmentation() -> None:
    found = explained(IN_PIECES)
    assert found.verdict == "fragmentation"
    assert "5.1 GiB were there in pieces" in found.sentence
    assert remedies(found)["expandable_segments:True"] is None
    assert found.next_command == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py"


def test_a_setting_that_is_on_is_not_advised() -> None:
    given_settings = explained(IN_PIECES, settings="expandable_segments:True")
    in_the_log = explained(f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n{IN_PIECES}")
    for found in (given_settings, in_the_log):
        assert "expandable_segments:True" not in remedies(found)
        assert "expandable_segments" not in (found.next_command or "")
        assert any("it is on already" in caveat for caveat in found.caveats)


def test_another_process_is_named_with_what_it_holds() -> None:
    more = (
        "Process 4711 has 20480.00 MiB memory in use. Including non-PyTorch memory, this process"
        " has 3500.00 MiB memory in use. "
    )
    found = explained(text(requested=1 * GIB, free=500 * MIB, live=3000 * MIB, cached=0, more=more))
    assert found.verdict == "outside"
    assert "process 4711 held 20.0 GiB" in found.reasons
    assert remedies(found)["end the other processes"] is True
    assert found.next_command == "oomph gpus"


NOT_SEEN = "Including non-PyTorch memory, this process has 0 bytes memory in use. "


def test_in_a_container_the_failed_process_is_not_taken_for_another() -> None:
    # There it has another number than the driver's: torch lists it, and finds none of its own.
    own = "Process 4711 has 23040.00 MiB memory in use. " + NOT_SEEN
    found = explained(text(requested=4 * GIB, free=1 * GIB, live=22 * GIB, cached=0, more=own))
    assert found.verdict == "capacity"
    assert "end the other processes" not in remedies(found)
    assert not [share for share in found.budget if share.name == "other process"]
    assert any("process 4711 is this one" in caveat for caveat in found.caveats)


def test_in_a_container_other_processes_are_told_from_the_failed_one() -> None:
    both = (
        "Process 11 has 15360.00 MiB memory in use. Process 12 has 7680.00 MiB memory in use. "
        + NOT_SEEN
    )
    sizes = {"requested": 4 * GIB, "free": 1536 * MIB, "live": 7 * GIB, "cached": 0}
    found = explained(text(**sizes, more=both))
    assert found.verdict == "outside"
    assert found.reasons == ("process 11 held 15.0 GiB",)
    alike = both.replace("7680.00", "15360.00").replace("Process 12", "Process 13")
    found = explained(text(requested=1 * GIB, free=0, live=14 * GIB, cached=0, more=alike))
    assert not [share for share in found.budget if share.name == "other process"]


def test_a_request_beyond_the_gpu_is_a_mistake_in_a_shape() -> None:
    found = explained(text(requested=2000 * GIB, free=10 * GIB, live=1 * GIB, cached=0))
    assert found.verdict == "request"
    assert "83 times its memory" in found.sentence
    assert any("shape" in reason for reason in found.reasons)


def test_memory_that_was_free_and_refused_is_a_limit() -> None:
    more = "8192.00 MiB allowed; "
    found = explained(text(requested=2 * GIB, free=12 * GIB, live=7 * GIB, cached=0, more=more))
    assert found.verdict == "limit"
    assert found.sentence.startswith("a memory limit of 8.0 GiB refused 2.0 GiB")


def test_the_last_message_of_the_first_rank_is_explained() -> None:
    log = f"[rank1]: {FULL}\n\n[rank0]: {FULL}\n\n[rank1]: {IN_PIECES}\n"
    found = explained(log)
    assert found.message is not None
    assert (found.message.rank, found.verdict) == ("0", "capacity")
    assert any("2 ranks report it (0, 1)" in caveat for caveat in found.caveats)


def test_workers_without_shared_memory_get_more_of_it() -> None:
    found = explained(
        "RuntimeError: DataLoader worker (pid 11) is killed by signal: Bus error. It is possible"
        " that dataloader's workers are out of shared memory."
    )
    assert found.verdict == "shared-memory"
    assert remedies(found)["a larger /dev/shm"] is True


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("train.sh: line 3: 4711 Killed                  python train.py", "a process was killed"),
        ("  exitcode  : -9 (pid: 4711)", "a process was killed"),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0", "the kernel killed"),
        ("Memory cgroup out of memory: Killed process 12 (python)", "the kernel killed"),
    ],
)
def test_a_process_that_was_killed_is_the_hosts_memory(text: str, sentence: str) -> None:
    found = explained(f"step 7\n{text}\n")
    assert found.verdict == "host"
    assert found.sentence.startswith(sentence)


def test_20_mib_is_the_size_of_a_segment_and_not_of_the_tensor() -> None:
    found = explained(text(requested=20 * MIB, free=3 * MIB, live=23 * GIB, cached=0))
    assert any("the tensor had 1 to 10 MiB" in caveat for caveat in found.caveats)


MIBS = st.integers(0, 100_000).map(lambda mib: mib * MIB)


SOME = st.integers(1, 100_000).map(lambda mib: mib * MIB)


@given(SOME, MIBS, MIBS, MIBS, SOME)
def test_fragmentation_is_never_claimed_where_the_sum_is_too_small(
    requested: int, free: int, live: int, cached: int, capacity: int
) -> None:
    found = explained(
        text(requested=requested, capacity=capacity, free=free, live=live, cached=cached)
    )
    if found.verdict == "fragmentation":
        assert free < requested <= free + cached
    if any("fragmentation is impossible" in reason for reason in found.reasons):
        assert free + cached < requested
        assert remedies(found)["expandable_segments:True"] is False
    assert found.next_command
