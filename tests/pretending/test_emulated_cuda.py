"""torch.cuda on the emulated GPU: each public name works, or is refused in one clear error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import oomph
from oomph.errors import OomphError
from oomph.units import MIB

CUDA: Any = torch.cuda  # some of its names are no class or function for mypy


def gpu(size: int = 4) -> torch.Tensor:
    return torch.zeros(size, device="cuda")


def made(name: str, *args: Any) -> Any:
    return getattr(CUDA, name)(*args)


def in_context(context: Any) -> None:
    with context:
        gpu()


def saved_state() -> None:
    CUDA.set_rng_state(CUDA.get_rng_state())
    CUDA.set_rng_state_all(CUDA.get_rng_state_all())


def raw_block() -> bool:
    address = CUDA.caching_allocator_alloc(5 * MIB)
    assert CUDA.memory_allocated() >= 5 * MIB
    CUDA.caching_allocator_delete(address)
    return bool(CUDA.memory_allocated() < 5 * MIB)


TENSORS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
STORAGES = (*TENSORS, "ComplexDouble", "ComplexFloat")
MODULES = (
    *("amp", "graphs", "jiterator", "memory", "nccl", "nvtx", "profiler", "random", "sparse"),
    *("streams", "tunable"),
)

WORKS: dict[str, Callable[[], Any]] = {
    **{f"{name}Tensor": partial(made, f"{name}Tensor", 2, 3) for name in TENSORS},
    **{name: partial(getattr, CUDA, name) for name in MODULES},
    "CudaError": lambda: CUDA.CudaError(2),
    "DeferredCudaCallError": lambda: CUDA.DeferredCudaCallError("x"),
    "Event": lambda: CUDA.Event(enable_timing=True).record(),
    "Stream": lambda: in_context(CUDA.Stream(priority=-1)),
    "StreamContext": lambda: in_context(CUDA.StreamContext(CUDA.Stream())),
    "caching_allocator_alloc": raw_block,
    "caching_allocator_delete": raw_block,
    "caching_allocator_enable": lambda: CUDA.caching_allocator_enable(True),
    "can_device_access_peer": lambda: CUDA.can_device_access_peer(0, 0) is False,
    "check_error": lambda: CUDA.check_error(0),
    "cudaStatus": lambda: CUDA.cudaStatus.SUCCESS == 0,
    "cudart": lambda: CUDA.cudart().cudaProfilerStart() == 0,
    "current_device": lambda: CUDA.current_device() == 0,
    "current_stream": lambda: CUDA.current_stream().synchronize(),
    "default_generators": lambda: CUDA.default_generators[0].initial_seed(),
    "default_stream": lambda: CUDA.default_stream().wait_stream(CUDA.Stream()),
    "device": lambda: in_context(CUDA.device(0)),
    "device_count": lambda: CUDA.device_count() == 1,
    "device_memory_used": lambda: CUDA.device_memory_used() == 2 * MIB,
    "device_of": lambda: in_context(CUDA.device_of(gpu())),
    "empty_cache": lambda: CUDA.empty_cache(),
    "get_allocator_backend": lambda: CUDA.get_allocator_backend() == "native",
    "get_arch_list": lambda: CUDA.get_arch_list() == ["sm_80"],
    "get_device_capability": lambda: CUDA.get_device_capability("cuda") == (8, 0),
    "get_device_name": lambda: "emulated" in CUDA.get_device_name(0),
    "get_device_properties": lambda: CUDA.get_device_properties(0).total_memory == 64 * MIB,
    "get_gencode_flags": lambda: "sm_80" in CUDA.get_gencode_flags(),
    "get_per_process_memory_fraction": lambda: CUDA.get_per_process_memory_fraction() == 1.0,
    "get_rng_state": saved_state,
    "get_rng_state_all": saved_state,
    "get_sync_debug_mode": lambda: CUDA.get_sync_debug_mode() == 0,
    "has_half": lambda: CUDA.has_half,
    "has_magma": lambda: CUDA.has_magma is not None,
    "init": lambda: CUDA.init(),
    "initial_seed": lambda: CUDA.initial_seed() is not None,
    "ipc_collect": lambda: CUDA.ipc_collect(),
    "is_available": lambda: CUDA.is_available(),
    "is_bf16_supported": lambda: CUDA.is_bf16_supported(),
    "is_current_stream_capturing": lambda: CUDA.is_current_stream_capturing() is False,
    "is_initialized": lambda: CUDA.is_initialized(),
    "is_tf32_supported": lambda: CUDA.is_tf32_supported(),
    "list_gpu_processes": lambda: "2.000 MB" in CUDA.list_gpu_processes(),
    "manual_seed": lambda: CUDA.manual_seed(0),
    "manual_seed_all": lambda: CUDA.manual_seed_all(0),
    "max_memory_allocated": lambda: CUDA.max_memory_allocated() >= 512,
    "max_memory_cached": lambda: CUDA.max_memory_cached() >= 512,
    "max_memory_reserved": lambda: CUDA.max_memory_reserved() == 2 * MIB,
    "mem_get_info": lambda: CUDA.mem_get_info("cuda:0") == (62 * MIB, 64 * MIB),
    "memory_allocated": lambda: CUDA.memory_allocated(0) == 512,
    "memory_cached": lambda: CUDA.memory_cached() == 2 * MIB,
    "memory_reserved": lambda: CUDA.memory_reserved() == 2 * MIB,
    "memory_snapshot": lambda: CUDA.memory_snapshot()[0]["total_size"] == 2 * MIB,
    "memory_stats": lambda: CUDA.memory_stats()["segment.small_pool.current"] == 1,
    "memory_stats_as_nested_dict": lambda: CUDA.memory_stats_as_nested_dict()["segment"],
    "memory_summary": lambda: "GPU reserved segments" in CUDA.memory_summary(),
    "reset_accumulated_host_memory_stats": lambda: CUDA.reset_accumulated_host_memory_stats(),
    "reset_peak_host_memory_stats": lambda: CUDA.reset_peak_host_memory_stats(),
    "reset_accumulated_memory_stats": lambda: CUDA.reset_accumulated_memory_stats(),
    "reset_max_memory_allocated": lambda: CUDA.reset_max_memory_allocated(),
    "reset_max_memory_cached": lambda: CUDA.reset_max_memory_cached(),
    "reset_peak_memory_stats": lambda: CUDA.reset_peak_memory_stats(),
    "seed": lambda: CUDA.seed(),
    "seed_all": lambda: CUDA.seed_all(),
    "set_device": lambda: CUDA.set_device(0),
    "set_per_process_memory_fraction": lambda: CUDA.set_per_process_memory_fraction(0.5),
    "set_rng_state": saved_state,
    "set_rng_state_all": saved_state,
    "set_stream": lambda: CUDA.set_stream(CUDA.current_stream()),
    "set_sync_debug_mode": lambda: CUDA.set_sync_debug_mode("warn"),
    "stream": lambda: in_context(CUDA.stream(CUDA.Stream())),
    "synchronize": lambda: CUDA.synchronize("cuda:0"),
}
REFUSED: dict[str, Callable[[], Any]] = {
    **{f"{name}Storage": partial(made, f"{name}Storage", 3) for name in STORAGES},
    "CUDAGraph": lambda: CUDA.CUDAGraph(),
    "CUDAPluggableAllocator": lambda: CUDA.CUDAPluggableAllocator("a.so", "take", "free"),
    "ExternalStream": lambda: CUDA.ExternalStream(0),
    "GreenContext": lambda: CUDA.GreenContext(),
    "MemPool": lambda: CUDA.MemPool(),
    "caching_allocator_disabled": lambda: in_context(CUDA.caching_allocator_disabled()),
    "change_current_allocator": lambda: CUDA.change_current_allocator(None),
    "clock_rate": lambda: CUDA.clock_rate(),
    "current_blas_handle": lambda: CUDA.current_blas_handle(),
    "current_solver_handle": lambda: CUDA.current_solver_handle(),
    "get_stream_from_external": lambda: CUDA.get_stream_from_external(0),
    "graph": lambda: in_context(CUDA.graph(None)),
    "graph_pool_handle": lambda: CUDA.graph_pool_handle(),
    "host_memory_stats": lambda: CUDA.host_memory_stats(),
    "host_memory_stats_as_nested_dict": lambda: CUDA.host_memory_stats_as_nested_dict(),
    "make_graphed_callables": lambda: CUDA.make_graphed_callables(torch.nn.Linear(2, 2), (gpu(),)),
    "memory_usage": lambda: CUDA.memory_usage(),
    "power_draw": lambda: CUDA.power_draw(),
    "temperature": lambda: CUDA.temperature(),
    "use_mem_pool": lambda: in_context(CUDA.use_mem_pool(None)),
    "utilization": lambda: CUDA.utilization(),
}
REFUSED_INSIDE: dict[str, Callable[[], Any]] = {
    "nccl.version": lambda: CUDA.nccl.version(),
    "nccl.all_reduce": lambda: CUDA.nccl.all_reduce([gpu()]),
    "tunable.enable": lambda: CUDA.tunable.enable(),
    "jiterator._create_jit_fn": lambda: CUDA.jiterator._create_jit_fn("template <T> T f(T x)"),
    "memory._use_uvm": lambda: in_context(CUDA.memory._use_uvm()),
}


def test_every_public_name_is_in_one_of_the_tables() -> None:
    assert set(CUDA.__all__) == WORKS.keys() | REFUSED.keys()
    assert not WORKS.keys() & REFUSED.keys()


@pytest.mark.filterwarnings("ignore:.*torch.cuda.*:FutureWarning")  # what torch calls old
@pytest.mark.parametrize("name", sorted(WORKS))
def test_a_name_that_works(name: str) -> None:
    with oomph.emulated_gpu("64MiB"):
        held = gpu()
        answer = WORKS[name]()
        assert answer is not False
        del held


@pytest.mark.parametrize("name", sorted(REFUSED | REFUSED_INSIDE))
def test_a_name_that_is_refused(name: str) -> None:
    with oomph.emulated_gpu("64MiB"):
        with pytest.raises(OomphError, match="the emulated GPU has no") as raised:
            (REFUSED | REFUSED_INSIDE)[name]()
        assert isinstance(raised.value, RuntimeError)  # as torch refuses
        assert raised.value.because
        assert raised.value.attempt


# ---- limits --------------------------------------------------------------------------------------


def test_a_process_may_have_its_fraction_and_no_more() -> None:
    with oomph.emulated_gpu("100MiB"):
        CUDA.set_per_process_memory_fraction(0.5)
        assert CUDA.get_per_process_memory_fraction() == 0.5
        held = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as raised:
            torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
        said = str(raised.value)
        assert CUDA.mem_get_info() == (60 * MIB, 100 * MIB)
        CUDA.set_per_process_memory_fraction(1.0)
        more = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
        del held, more
    assert "memory in use. 50.00 MiB allowed; Of the allocated memory 40.00 MiB is" in said
    assert re.findall(r"[\d.]+ MiB", said)[:3] == ["20.00 MiB", "100.00 MiB", "60.00 MiB"]


def test_a_fraction_in_the_environments_settings_is_told_too() -> None:
    with oomph.emulated_gpu("100MiB", allocator="per_process_memory_fraction:0.25"):
        assert CUDA.get_per_process_memory_fraction() == 0.25
        with pytest.raises(torch.OutOfMemoryError, match=r"25\.00 MiB allowed; Of"):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize(
    ("fraction", "error"), [(2.0, ValueError), (-0.1, ValueError), (1, TypeError)]
)
def test_fractions_that_make_no_sense_are_torchs_errors(fraction: Any, error: type) -> None:
    with oomph.emulated_gpu("100MiB"), pytest.raises(error):
        CUDA.set_per_process_memory_fraction(fraction)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: CUDA.set_device(1),
        lambda: CUDA.device(1),
        lambda: CUDA.get_device_properties(1),
        lambda: CUDA.mem_get_info("cuda:1"),
        lambda: CUDA.set_per_process_memory_fraction(0.5, 1),
    ],
)
def test_there_is_no_second_gpu_to_ask(ask: Callable[[], Any]) -> None:
    with oomph.emulated_gpu("100MiB"), pytest.raises(RuntimeError, match="invalid device ordinal"):
        ask()


# ---- memory --------------------------------------------------------------------------------------


def test_settings_can_be_changed_while_nothing_is_taken() -> None:
    with oomph.emulated_gpu("100MiB"):
        settle: Any = torch._C._accelerator_setAllocatorSettings
        settle("expandable_segments:True")
        held = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        assert CUDA.memory_snapshot()[0]["is_expandable"]
        with pytest.raises(OomphError, match="cannot change its allocator's settings"):
            settle("expandable_segments:False")
        del held


def test_memory_stats_has_all_of_torchs_keys() -> None:
    of_pools = (
        *("allocation", "segment", "active", "inactive_split"),
        *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes"),
        "requested_bytes",
    )
    kinds = ("current", "peak", "allocated", "freed")
    pools = ("all", "small_pool", "large_pool")
    keys = {f"{name}.{pool}.{kind}" for name in of_pools for pool in pools for kind in kinds}
    for name in ("oversize_allocations", "oversize_segments"):
        keys |= {f"{name}.{kind}" for kind in kinds}
    keys |= {"num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_oom_rejections"}
    keys |= {"num_device_alloc", "num_device_free", "max_split_size"}
    with oomph.emulated_gpu("100MiB", allocator="max_split_size_mb:24"):
        held = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        stats = CUDA.memory_stats()
        assert set(stats) == keys
        assert stats["max_split_size"] == 24 * MIB
        assert stats["oversize_allocations.current"] == stats["oversize_segments.current"] == 1
        assert stats == torch.accelerator.memory_stats()
        CUDA.reset_accumulated_memory_stats()
        assert CUDA.memory_stats()["allocated_bytes.all.allocated"] == 0
        assert CUDA.memory_stats()["allocated_bytes.all.current"] == 30 * MIB
        del held


def test_a_raw_block_that_was_never_taken_cannot_be_given_back() -> None:
    with oomph.emulated_gpu("100MiB"):
        address = CUDA.caching_allocator_alloc(100, stream=CUDA.Stream())
        CUDA.caching_allocator_delete(address)
        with pytest.raises(RuntimeError, match="invalid device pointer"):
            CUDA.caching_allocator_delete(address)
        assert CUDA.caching_allocator_alloc(0) == 0


# ---- pinned memory -------------------------------------------------------------------------------


def test_pinned_tensors_say_so() -> None:
    with oomph.emulated_gpu("100MiB"):
        plain = torch.arange(5.0)
        pinned = plain.pin_memory()
        assert not plain.is_pinned()
        assert pinned.is_pinned()
        assert pinned[1:].is_pinned()
        assert pinned.pin_memory() is pinned
        plain[0] = 7  # a copy, as on a real GPU
        assert pinned[0] == 0
        assert torch.empty(3, pin_memory=True).is_pinned()
        assert not pinned.cuda().is_pinned()
        assert not pinned.clone().is_pinned()
        with pytest.raises(RuntimeError, match=r"cannot pin 'torch\.cuda\.FloatTensor'"):
            gpu().pin_memory()
    assert not plain.is_pinned()


# ---- time ----------------------------------------------------------------------------------------


def test_events_measure_the_hosts_time() -> None:
    with oomph.emulated_gpu("100MiB"):
        start, end = CUDA.Event(enable_timing=True), CUDA.Event(enable_timing=True)
        begun_s = time.perf_counter()
        start.record()
        time.sleep(0.02)
        end.record()
        end.synchronize()
        assert 20 <= start.elapsed_time(end) <= (time.perf_counter() - begun_s) * 1e3
        with pytest.raises(ValueError, match="enable_timing=True"):
            CUDA.Event().elapsed_time(end)
        with pytest.raises(ValueError, match="must be recorded"):
            CUDA.Event(enable_timing=True).elapsed_time(end)


def test_ranges_of_nvtx_are_passed_over() -> None:
    with oomph.emulated_gpu("100MiB"):
        assert CUDA.nvtx.range_push("outer") == 0
        with CUDA.nvtx.range("batch {}", 3):
            CUDA.nvtx.mark("here")
        assert CUDA.nvtx.range_pop() == 0
        CUDA.nvtx.range_end(CUDA.nvtx.range_start("across threads"))
        with CUDA.profiler.profile():
            gpu()


def test_streams_are_current_in_their_contexts() -> None:
    with oomph.emulated_gpu("100MiB"):
        stream = CUDA.Stream()
        with stream:
            assert CUDA.current_stream() == stream
        with CUDA.stream(stream):
            assert torch.accelerator.current_stream() == stream
        assert isinstance(CUDA.stream(stream), CUDA.StreamContext)
        assert CUDA.current_stream() == CUDA.default_stream()
        CUDA.set_stream(stream)
        assert CUDA.current_stream() == stream
        CUDA.set_stream(CUDA.default_stream())


@pytest.mark.parametrize("kind", [bool, int, float, torch.half])
def test_a_tensor_is_moved_as_torch_moves_it(kind: Any) -> None:
    host = torch.tensor([0.0, 1.5])
    with oomph.emulated_gpu("100MiB"):
        there = host.to("cuda", kind, True)
        assert there.device.type == "cuda"
        assert there.dtype == host.to(kind).dtype
        assert host.cuda().to(kind).tolist() == there.to(other=there).tolist()
        assert host.cuda().to(kind).cpu().equal(host.to(kind))
        for wrong in (([1],), ("cuda", kind, True, False, True)):
            with pytest.raises(TypeError):
                there.to(*wrong)


# ---- old scripts ---------------------------------------------------------------------------------


def test_types_of_tensors_as_old_scripts_name_them() -> None:
    with oomph.emulated_gpu("100MiB"):
        made = CUDA.FloatTensor([1, 2, 3])
        assert made.is_cuda
        assert made.tolist() == [1, 2, 3]
        assert isinstance(made, CUDA.FloatTensor)
        assert not isinstance(made.cpu(), CUDA.FloatTensor)
        assert made.type() == "torch.cuda.FloatTensor"
        assert made.cpu().type() == "torch.FloatTensor"
        assert made.type("torch.cuda.LongTensor").dtype == torch.int64
        assert torch.ones(2).type(CUDA.HalfTensor).is_cuda
        assert made.type(torch.FloatTensor).device.type == "cpu"
        assert made.type(torch.float64).is_cuda
        assert CUDA.ByteTensor(2, 3).shape == (2, 3)


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_type_can_be_the_gpus_and_is_the_hosts_again_afterwards() -> None:
    with oomph.emulated_gpu("100MiB"):
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        made = [torch.Tensor([1.0, 2.0]), torch.Tensor(2, 3), torch.zeros(3), torch.tensor([1])]
        assert all(tensor.is_cuda for tensor in made)
        assert torch.nn.Linear(2, 2).weight.is_cuda
        assert not torch.FloatTensor([1.0]).is_cuda
        assert not torch.zeros(2, device="cpu").is_cuda
        torch.set_default_tensor_type("torch.FloatTensor")
        assert not torch.Tensor([1.0]).is_cuda
        assert not torch.zeros(2).is_cuda
        torch.set_default_tensor_type(CUDA.DoubleTensor)
        assert torch.Tensor([1.0]).dtype == torch.float64
    assert torch.zeros(2).dtype == torch.Tensor([1.0]).dtype == torch.float32
    assert torch.zeros(2).device.type == "cpu"
