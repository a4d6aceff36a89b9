"""DDP's buckets, as torch's reducer (torch/csrc/distributed/c10d/reducer.cpp) makes them.

Until the first backward is over there is one bucket of everything; then there are many, in the
order in which gradients came, and all-reduced as soon as they are full.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import distributed

from oomph.tracing.ranks import note_communication, note_wait, sent_by_all_reduce
from oomph.units import MIB

# torch.nn.parallel.DistributedDataParallel: bucket_cap_mb, and distributed._DEFAULT_FIRST_BUCKET_
# BYTES for the bucket that is sent last, so that little is left when backward ends.
_CAP_BYTES = 25 * MIB
_FIRST_CAP_BYTES = MIB


_assign: Any = distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]


class Buckets:
    """The flat tensors that gradients are sent in, and the gradients that are views of them."""

    def __init__(self, parameters: list[Any], num_ranks: int, recorder: Any) -> None:
        self.is_in_sync = True  # False: DDP's no_sync, for all micro-steps but the last
        self.numbers: set[int] = set()  # of the allocations
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
        """After the first backward, make buckets in the order in which gradients come."""
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
        if parameter.grad is not view:  # it is one where zero_grad has not dropped it
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
