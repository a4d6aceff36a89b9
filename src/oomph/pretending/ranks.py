"""Pretend to be one rank of several, and record what it gathers, sends and holds.

FSDP2 is torch's own, on torch's fake process group, whose collectives change nothing. DDP's reducer
is written in C++ and refuses that group, so its buckets are built in `Buckets` below.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import _disable_current_modes

from oomph.predicting.links import IN_LAYERS
from oomph.pretending.factories import move_of
from oomph.pretending.patches import Patches
from oomph.pretending.streams import Now
from oomph.pretending.tensors import (
    HOST,
    Disguise,
    Recorder,
    hosted_like,
    is_pretended,
    note_transfer,
    suspended,
)
from oomph.records.trace import Op
from oomph.units import MIB

GATHERED = "gathered parameters"  # the op name of their allocations


@contextlib.contextmanager
def one_of(num_ranks: int, recorder: Recorder, *, is_on_host: bool = False) -> Iterator[None]:
    """Set up a world of `num_ranks` ranks, with this process as the first.

    With `is_on_host`, FSDP keeps its shards on the host.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(local_parts_are_seen(recorder))
            if is_on_host:
                stack.enter_context(_moved_to_the_host(recorder))
            yield
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def local_parts_are_seen(recorder: Recorder) -> Iterator[None]:
    """Unwrap DTensors, so that the recorder sees ops on their local part, and note resizes.

    FSDP frees gathered parameters by resizing their storage, not by an op.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate: Any = ShardingPropagator._propagate_tensor_meta_non_cached
    resize: Any = torch.UntypedStorage.resize_

    def propagate_unseen(*args: Any, **kwargs: Any) -> Any:
        # Torch only asks for shapes here, with fake tensors. They take no memory and must see
        # `meta`.
        with _disable_current_modes(), suspended():
            return propagate(*args, **kwargs)

    def resize_and_note(storage: Any, size_bytes: int) -> Any:
        answer = resize(storage, size_bytes)
        if recorder.counts_storage(storage):
            recorder.track_storage(storage, GATHERED)
        return answer

    patches = Patches()
    patches.put(ShardingPropagator, _propagate_tensor_meta_non_cached=propagate_unseen)
    patches.put(torch.UntypedStorage, resize_=resize_and_note)
    recorder.unfolded = frozenset({DTensor, AsyncCollectiveTensor})
    try:
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def _moved_to_the_host(recorder: Recorder) -> Iterator[None]:
    """Let tensors that FSDP moves to the host stand for host memory, and those it moves back.

    Elsewhere what a script copies to the host becomes real, so that it can be read.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor import DTensor

    base: Any = torch.Tensor
    to_before, device_before, is_cuda_before = base.to, base.device, base.is_cuda

    def is_on_host(tensor: torch.Tensor) -> bool:
        part = local_part(tensor)
        return is_pretended(part) and part.untyped_storage()._cdata in Disguise.hosted

    def moved(tensor: torch.Tensor, to_host: bool) -> Any:
        if is_on_host(tensor) == to_host:
            return tensor
        if to_host:
            with _disable_current_modes():  # no request to the GPU's allocator
                made = hosted_like(recorder, tensor)
        else:  # `empty_like` of what is on the host would be on the host
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
        return made.copy_(tensor)

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _ = move_of(args, kwargs)
        is_move = device is not None and dtype is None and not Disguise.suspended
        if is_move and str(device).startswith("cpu") and is_on_host(tensor):
            return tensor
        if not is_move or isinstance(tensor, DTensor) or not is_pretended(tensor):
            return to_before(tensor, *args, **kwargs)
        return moved(tensor, to_host=str(device).startswith("cpu"))

    def device(tensor: torch.Tensor) -> Any:
        is_hosted_part = isinstance(tensor, DTensor) and not Disguise.suspended
        return HOST if is_hosted_part and is_on_host(tensor) else device_before.__get__(tensor)

    def is_cuda(tensor: torch.Tensor) -> Any:
        is_hosted_part = isinstance(tensor, DTensor) and is_on_host(tensor)
        return False if is_hosted_part else is_cuda_before.__get__(tensor)

    patches = Patches()
    patches.put(
        torch.Tensor,
        to=to,
        cpu=lambda tensor, *_, **__: moved(tensor, to_host=True),
        device=property(device),
        is_cuda=property(is_cuda),
    )
    # It would find the wrapper of a shard on `meta`.
    patches.put(FSDPParamGroup, _validate_cpu_offload_params=lambda _: None)
    try:
        yield
    finally:
        patches.undo()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    # What a collective has not yet brought is wrapped once more.
    arrived: torch.Tensor = getattr(part, "elem", part)
    return arrived


# ---- communication ---------------------------------------------------------------------------


def note_communication(recorder: Recorder, name: str, sent_bytes: int, dtype: torch.dtype) -> None:
    """Record the start of communication; it overlaps with kernels until something waits for it."""
    if recorder.computes:
        Now.num_begun += 1
        note_transfer(recorder, name, sent_bytes, dtype)


def note_wait(recorder: Recorder, num_pending: int) -> None:
    """Record that the GPU waits for all pending communication except the last `num_pending`."""
    if recorder.computes and recorder.ops:
        recorder.ops.append(
            Op(
                name="wait",
                phase=recorder.phase,
                flops=0,
                moved_bytes=0,
                dtype="",
                num_pending=num_pending,
            )
        )


def sent_by_all_reduce(size_bytes: int, num_ranks: int) -> int:
    """Return the bytes sent in a ring: each part passes every rank twice, to sum, then to share."""
    return 2 * size_bytes * (num_ranks - 1) // num_ranks


def _exchange(name: str) -> Callable[..., Any]:
    """Return the rule of an op between a whole tensor and this rank's part of it."""

    def rule(recorder: Recorder, _: Any, function: Any, args: Any, kwargs: Any) -> Any:
        to, source = args[0], args[1]
        note_communication(recorder, name, abs(to.nbytes - source.nbytes), source.dtype)
        return _run(function, args, kwargs)

    return rule


def _all_reduce(recorder: Recorder, _: Any, function: Any, args: Any, kwargs: Any) -> Any:
    tensors, group = args[0], args[1]
    num_ranks = distributed.ProcessGroup.unbox(group).size()
    sent = sent_by_all_reduce(sum(tensor.nbytes for tensor in tensors), num_ranks)
    note_communication(recorder, "all_reduce", sent, tensors[0].dtype)
    return _run(function, args, kwargs)


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    with suspended():
        return function(*args, **kwargs)


# ---- the collectives of DTensors: gathered before a layer, reduced and scattered after it --------
# They return new tensors, and the next kernel waits for them. torch.ops._c10d_functional


def _collective(name: str) -> Callable[..., Any]:
    """Return the rule of a collective that makes its result."""

    def rule(recorder: Recorder, behaviour: Any, function: Any, args: Any, kwargs: Any) -> Any:
        given = args[0]
        if not is_pretended(given):
            return NotImplemented
        out = _run(function, args, kwargs)
        recorder.track(out, behaviour.label)
        sent = max(given.nbytes, out.nbytes) - min(given.nbytes, out.nbytes)
        if name == IN_LAYERS["all_reduce"]:
            sent = sent_by_all_reduce(given.nbytes, _size_of_group(args[-1]))
        if recorder.computes:
            note_transfer(recorder, name, sent, given.dtype)
        return out

    return rule


def _size_of_group(name: Any) -> int:
    from torch.distributed import distributed_c10d

    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return int(resolve(name).size())


def _same(_: Recorder, __: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Return the tensor itself: waiting makes no new one, and a copy would outlive it."""
    return args[0] if is_pretended(args[0]) else function(*args, **kwargs)


RULES = {
    "all_gather_into_tensor": _collective(IN_LAYERS["all_gather"]),
    "reduce_scatter_tensor": _collective(IN_LAYERS["reduce_scatter"]),
    "all_reduce": _collective(IN_LAYERS["all_reduce"]),
    "wait_tensor": _same,
    "_wrap_tensor_autograd": _same,
    "_allgather_base_": _exchange("all_gather"),
    "_reduce_scatter_base_": _exchange("reduce_scatter"),
    "allreduce_": _all_reduce,
}


# ---- DDP's buckets, as torch's reducer (torch/csrc/distributed/c10d/reducer.cpp) makes them ------
# Until the first backward is over, one bucket holds everything. After that there are many, in the
# order in which gradients arrived, and each is all-reduced as soon as it is full.

# torch.nn.parallel.DistributedDataParallel: bucket_cap_mb, and
# distributed._DEFAULT_FIRST_BUCKET_BYTES for the bucket that is sent last, so that little is left
# when backward ends.
_CAP_BYTES = 25 * MIB
_FIRST_CAP_BYTES = MIB


_assign: Any = distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]


class Buckets:
    """The flat tensors in which gradients are sent, and the gradients that are views of them."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], num_ranks: int, recorder: Recorder
    ) -> None:
        self.is_in_sync = True  # False inside DDP's no_sync: all micro-steps but the last
        self.numbers: set[int] = set()  # numbers of the buckets' allocations
        self._num_ranks, self._recorder = num_ranks, recorder
        self._parameters = parameters
        self._arrived: list[int] = []
        self._is_rebuilt = False
        self._buckets: list[Any] = []
        indices, _ = _assign(parameters, [sys.maxsize])
        self._allocate(list(reversed(indices)))
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(index))

    def before_forward(self) -> None:
        """After the first backward, build buckets in the order in which gradients arrive."""
        if self._is_rebuilt or not self._arrived:
            return
        self._is_rebuilt = True
        arrived = [self._parameters[index] for index in self._arrived]
        indices, _ = _assign(arrived, [_FIRST_CAP_BYTES, _CAP_BYTES], [], self._arrived)
        self._allocate(indices)

    def after_backward(self) -> None:
        if self.is_in_sync:
            note_wait(self._recorder, 0)
            self._left = [len(indices) for indices in self._members]

    def _allocate(self, members: list[list[int]]) -> None:
        self._buckets.clear()
        self._views: dict[int, Any] = {}
        self._bucket_of: dict[int, int] = {}
        self._members = members
        self._left = [len(indices) for indices in members]
        for number, indices in enumerate(members):
            self._buckets.append(self._bucket(number, indices))

    def _bucket(self, number: int, indices: list[int]) -> Any:
        parameters = [self._parameters[index] for index in indices]
        bucket = torch.empty(
            sum(parameter.numel() for parameter in parameters),
            dtype=parameters[0].dtype,
            device=parameters[0].device,
        )
        found = self._recorder.number_of(bucket)
        if found is not None:
            self.numbers.add(found)
        offset = 0
        for index, parameter in zip(indices, parameters, strict=True):
            flat = bucket.narrow(0, offset, parameter.numel())
            self._views[index] = flat.view_as(parameter)
            self._bucket_of[index] = number
            offset += parameter.numel()
        return bucket

    def _hook(self, index: int) -> Any:
        def arrived(parameter: Any) -> None:
            if self.is_in_sync:
                self._arrive(index, parameter)

        return arrived

    def _arrive(self, index: int, parameter: Any) -> None:
        view = self._views[index]
        if parameter.grad is not view:  # it is the view unless zero_grad dropped it
            view.copy_(parameter.grad)
            parameter.grad = view
        if not self._is_rebuilt:
            self._arrived.append(index)
        number = self._bucket_of[index]
        self._left[number] -= 1
        if not self._left[number]:
            bucket = self._buckets[number]
            sent = sent_by_all_reduce(bucket.nbytes, self._num_ranks)
            note_communication(self._recorder, "all_reduce", sent, bucket.dtype)
