"""One rank of several, where there is only one: what it gathers, sends and holds is recorded.

FSDP2 is torch's own, over torch's fake process group, whose collectives leave everything as it
is. DDP's reducer is C++ and refuses that group: its buckets are made in `buckets.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomph.records.trace import Op
from oomph.tracing.pretend import suspended
from oomph.tracing.streams import Now

GATHERED = "gathered parameters"  # the op of their allocations


@contextlib.contextmanager
def one_of(num_ranks: int, recorder: Any) -> Iterator[None]:
    """A world of ranks of which this process is the first."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        with divided_tensors_unfold(recorder), resizes_are_seen(recorder):
            yield
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def divided_tensors_unfold(recorder: Any) -> Iterator[None]:
    """A DTensor is as large as its local part: ops on it are seen when they reach that part."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def honestly(*args: Any, **kwargs: Any) -> Any:
        # It asks for shapes only, with fake tensors, which are nobody's memory and must see `meta`.
        with _disable_current_modes(), suspended():
            return original(*args, **kwargs)

    ShardingPropagator._propagate_tensor_meta_non_cached = honestly  # type: ignore[method-assign]
    recorder.unfolded = frozenset({DTensor})
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]


@contextlib.contextmanager
def resizes_are_seen(recorder: Any) -> Iterator[None]:
    """FSDP frees gathered parameters by resizing their storage to nothing, and not by an op."""
    storage_class: Any = torch.UntypedStorage
    original = storage_class.resize_

    def resize(storage: Any, size_bytes: int) -> Any:
        answer = original(storage, size_bytes)
        if recorder.counts_storage(storage):
            recorder.track_storage(storage, GATHERED)
        return answer

    storage_class.resize_ = resize
    try:
        yield
    finally:
        storage_class.resize_ = original


def local_part(tensor: Any) -> Any:
    """What of a tensor this rank holds."""
    return getattr(tensor, "_local_tensor", tensor)


# ---- communication ---------------------------------------------------------------------------


def note_communication(recorder: Any, name: str, sent_bytes: int, dtype: Any) -> None:
    """Communication has begun: it goes on while kernels run, until somebody waits for it."""
    if not recorder.computes:
        return
    Now.num_begun += 1
    recorder.ops.append(
        Op(
            name=name,
            phase=recorder.phase,
            flops=0,
            moved_bytes=sent_bytes,
            dtype=str(dtype).removeprefix("torch."),
            module=recorder.current_module(),
        )
    )


def note_wait(recorder: Any, num_pending: int) -> None:
    """The GPU waits for what was begun, but for the last so many."""
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
    """In a ring each part passes every rank twice: once to be summed, once to be told."""
    return 2 * size_bytes * (num_ranks - 1) // num_ranks


def _all_gather(recorder: Any, _: Any, function: Any, args: Any, kwargs: Any) -> Any:
    gathered, part = args[0], args[1]
    note_communication(recorder, "all_gather", gathered.nbytes - part.nbytes, part.dtype)
    return _run(function, args, kwargs)


def _reduce_scatter(recorder: Any, _: Any, function: Any, args: Any, kwargs: Any) -> Any:
    part, whole = args[0], args[1]
    note_communication(recorder, "reduce_scatter", whole.nbytes - part.nbytes, part.dtype)
    return _run(function, args, kwargs)


def _all_reduce(recorder: Any, _: Any, function: Any, args: Any, kwargs: Any) -> Any:
    tensors, group = args[0], args[1]
    num_ranks = torch.distributed.ProcessGroup.unbox(group).size()
    sent = sent_by_all_reduce(sum(tensor.nbytes for tensor in tensors), num_ranks)
    note_communication(recorder, "all_reduce", sent, tensors[0].dtype)
    return _run(function, args, kwargs)


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    with suspended():
        return function(*args, **kwargs)


RULES = {
    "_allgather_base_": _all_gather,
    "_reduce_scatter_base_": _reduce_scatter,
    "allreduce_": _all_reduce,
}
