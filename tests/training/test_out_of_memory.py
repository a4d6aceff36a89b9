"""Which errors say that memory has run out, in the words of every library, and which do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from oomph.out_of_memory import is_out_of_memory, which_memory

# One for each family of wordings, as people have posted them in issues on GitHub.
ON_GPU = [
    (
        "CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB"
        " already allocated; 9.28 GiB free; 4.68 MiB cached)"
    ),  # pytorch#16417
    (
        "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB"
        " already allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch)"
    ),  # pytorch#59778
    "Tried to allocate 20.00 MiB (GPU 0; 1.96 GiB total capacity; 1.24 GiB already allocated",
    "CUDA out of memory. Tried to allocate more than 1EB memory",
    "HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB",
    "XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.11 GiB.",
    "Allocation is out of device memory on current platform.",
    "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "Invalid buffer size: 24.00 GB",
    "Current platform can NOT allocate memory block with size larger than 4GB!",
    "NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity;",
    (
        "MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max"
        " allowed: 6.80 GB). Tried to allocate 768.00 MB on private pool."
    ),  # ComfyUI#2489
    "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other",
    "CUDA error:out of memory",
    "CUDA driver error: out of memory",
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
    "cuda failed with error 2 out of memory. use CUDA_LAUNCH_BLOCKING=1 to get correct traceback.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'",
    "enqueue.cc:43 NCCL WARN Cuda failure 'out of memory'",
    "Error out of memory at line 88 in file /csrc/ops.cu",
]
ON_HOST = [
    (
        "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory:"
        " you tried to allocate 132426121216 bytes. Error code 12 (Cannot allocate memory)"
    ),
    (
        "[enforce fail at alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you tried"
        " to allocate 1981808640 bytes."
    ),
    "[enforce fail at CPUAllocator.cpp:56] posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
]
OTHERS = [
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA driver error: invalid argument",
    "out of resource: shared memory, Required: 147456, Hardware limit: 101376",  # Triton's
    "mat1 and mat2 shapes cannot be multiplied (4x8 and 16x4)",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "NCCL error: unhandled system error",
    "index 10 is out of bounds for dimension 0 with size 4",
    "Trying to backward through the graph a second time",
    "Pin memory thread exited unexpectedly",
    "Invalid buffer size",
    "The size of tensor a (4) must match the size of tensor b (8) at non-singleton dimension 1",
    "CUDA error: invalid device ordinal",
    "cuBLAS error: CUBLAS_STATUS_EXECUTION_FAILED",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "NCCL communicator was aborted on rank 0",
    "stack expects each tensor to be equal size",
    "UR_RESULT_ERROR_DEVICE_LOST",
    "the allocator ran out of its configured retries",
    "Allocation of the port failed",
]


@pytest.mark.parametrize("text", ON_GPU)
def test_every_librarys_words_for_the_gpus_memory_are_known(text: str) -> None:
    assert which_memory(RuntimeError(text)) == "gpu"
    assert is_out_of_memory(RuntimeError("Caught in replica 0", text))


@pytest.mark.parametrize("text", ON_HOST)
def test_the_hosts_memory_is_told_apart(text: str) -> None:
    assert which_memory(RuntimeError(text)) == "host"


@pytest.mark.parametrize("text", OTHERS)
def test_other_errors_are_none(text: str) -> None:
    assert which_memory(RuntimeError(text)) is None


def test_torchs_own_class_needs_no_words() -> None:
    assert which_memory(torch.OutOfMemoryError("?")) == "gpu"
    assert which_memory(MemoryError()) == "host"


def test_an_error_of_another_class_that_quotes_one_is_none() -> None:
    assert which_memory(ValueError(ON_GPU[0])) is None
    assert which_memory(KeyboardInterrupt(ON_GPU[0])) is None


def test_killed_workers_of_a_loader_are_not_brought_back_by_smaller_pieces() -> None:
    killed = RuntimeError("DataLoader worker (pid 19597) is killed by signal: Killed.")
    assert which_memory(killed) == "workers"
    assert not is_out_of_memory(killed)


def test_what_old_drivers_say_of_expandable_segments_counts_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("CUDA driver error: invalid argument")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert which_memory(error) == "gpu"


def test_a_real_error_of_the_cpus_allocator_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert which_memory(caught.value) == "host"


# ---- errors that pass another one on -------------------------------------------------------------


def raised(outer: BaseException, inner: BaseException, how: str) -> BaseException:
    try:
        try:
            raise inner
        except BaseException:  # noqa: BLE001 - it is raised below
            if how == "from it":
                raise outer from inner
            if how == "from None":
                raise outer from None
            raise outer  # noqa: B904 - what is tested
    except BaseException as error:  # noqa: BLE001
        return error


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, Exception])
def test_an_error_raised_from_a_shortage_is_one(kind: type[Exception]) -> None:
    passed_on = raised(kind("training step failed"), torch.OutOfMemoryError("?"), "from it")
    assert which_memory(passed_on) == "gpu"
    twice = raised(kind("epoch failed"), passed_on, "from it")
    assert is_out_of_memory(twice)


def test_a_bare_runtime_error_in_an_except_block_passes_the_shortage_on() -> None:
    shortage = torch.OutOfMemoryError("?")
    assert is_out_of_memory(raised(RuntimeError("forward failed"), shortage, "no from"))
    mistakes = [AttributeError("x"), KeyError("x"), RecursionError("x"), NotImplementedError("x")]
    for mistake in mistakes:
        assert not is_out_of_memory(raised(mistake, shortage, "no from"))


def test_from_none_cuts_the_connection() -> None:
    cut = raised(RuntimeError("shapes do not match"), torch.OutOfMemoryError("?"), "from None")
    assert which_memory(cut) is None
    assert cut.__context__ is not None


def test_leaving_the_program_is_no_shortage() -> None:
    shortage = torch.OutOfMemoryError("?")
    assert which_memory(raised(SystemExit(1), shortage, "from it")) is None
    assert which_memory(raised(KeyboardInterrupt(), shortage, "from it")) is None


def test_errors_that_are_each_others_cause_are_looked_at_once() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert which_memory(one) is None


# ---- what people have posted ---------------------------------------------------------------------

_POSTED = Path(__file__).parents[3] / "shared" / "data" / "oom_messages.jsonl"
_ON_HOST = {"cpu": "host", "host_oom_killer": "workers", "host_shm": "workers"}
# A browser translated one; the other is a shortage only with expandable segments.
_NOT_RAISED = {"cuda_v5_translated", "cuda_driver"}


@pytest.mark.skipif(not _POSTED.exists(), reason="the messages are not here")
def test_all_posted_messages_are_known() -> None:
    posted = [json.loads(line) for line in _POSTED.read_text().splitlines()]
    wrong = [
        (one["family"], one["message"])
        for one in posted
        if one["family"] not in _NOT_RAISED
        and which_memory(RuntimeError(one["message"])) != _ON_HOST.get(one["family"], "gpu")
    ]
    assert len(posted) >= 100
    assert wrong == []
