"""What a kernel takes below the dispatcher: no dispatch mode sees it, the memory profiler does.

The rehearsal's rules say what CUDA's kernels take beside their results. Where the CPU's kernels
take the same, the CPU's own profiler is the witness. What only they take is named here, with the
reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from oomph.pretending import ops
from oomph.rehearsing.self_test import Counting

MIN_BYTES = 1 << 12  # smaller blocks are scalars and bookkeeping


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.5


def requested(work: Callable[[], Any]) -> Counter[int]:
    """The blocks that torch's allocator on the CPU was asked for, by size."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = work()
    del kept
    events = profiled.profiler.kineto_results.events()
    sizes = (event.nbytes() for event in events if event.name() == "[memory]")
    return Counter(size for size in sizes if size >= MIN_BYTES)


class Beside(Counting):
    """Counts what ops return, as a rehearsal does, and what its rules add inside kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        behaviour = ops.Behaviour(function)
        if behaviour.temporaries is not None:
            blocks = behaviour.temporaries(args, kwargs or {})
            self.inside += [block for block in blocks if isinstance(block, int)]
        return super().__torch_dispatch__(function, types, args, kwargs)


def ruled(work: Callable[[], Any]) -> Counter[int]:
    with Beside() as counting:
        kept = work()
    del kept
    return Counter(size for size in (*counting.sizes, *counting.inside) if size >= MIN_BYTES)


def backward_of(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    given = torch.rand(64, 64, requires_grad=True)

    def work() -> Any:
        made = make(given)
        return torch.autograd.grad(made, given, torch.ones_like(made))

    return work


LEFT, RIGHT = torch.rand(64, 64), torch.rand(64, 64)
MASK, INDEX = mask(64, 64), torch.randint(64, (64, 64))
SHORT = INDEX.to(torch.int32)

HALF = LEFT.to(torch.bfloat16)
BYTES = 4 * LEFT.numel()

ALIKE: dict[str, Callable[[], Any]] = {
    "a product": lambda: LEFT @ RIGHT,
    "a mask is summed": lambda: MASK.sum(1),
    "all of a mask is summed": lambda: MASK.sum(),
    "a mask is counted": lambda: MASK.count_nonzero(0),
    "small integers are summed": lambda: SHORT.sum(0),
    "integers are summed": lambda: INDEX.sum(0),
    "a sum in another dtype": lambda: LEFT.sum(0, dtype=torch.float64),
    "a mask in floats": lambda: MASK.sum(0, dtype=torch.float32),
    "a mean of integers": lambda: SHORT.mean(0, dtype=torch.float32),
    "a product of small integers": lambda: SHORT.prod(0),
    "a mean": lambda: LEFT.mean(0),
    "a norm": lambda: torch.linalg.vector_norm(LEFT, 2, 0),
    "a variance": lambda: LEFT.var(0),
    "is any": lambda: MASK.any(0),
    "a maximum with its place": lambda: LEFT.max(0),
    "where the maximum is": lambda: LEFT.argmax(0),
    "the gradient of logsumexp": backward_of(lambda x: x.logsumexp(1)),
    "the gradient of log softmax": backward_of(lambda x: x.log_softmax(1)),
    "the gradient of a norm": backward_of(lambda x: torch.linalg.vector_norm(x, 2, 0)),
    "the gradient of a variance": backward_of(lambda x: x.var(0)),
    "the gradient of gelu": backward_of(functional.gelu),
    "the gradient of layer norm": backward_of(lambda x: functional.layer_norm(x, (64,))),
    "the gradient of rms norm": backward_of(lambda x: functional.rms_norm(x, (64,))),
    "the gradient of gathering": backward_of(lambda x: x.gather(1, INDEX)),
    "cross-entropy": backward_of(lambda x: functional.cross_entropy(x, INDEX[0])),
    "smoothed": backward_of(lambda x: functional.cross_entropy(x, INDEX[0], label_smoothing=0.1)),
    "squared errors": backward_of(lambda x: functional.mse_loss(x, RIGHT)),
    "absolute errors": backward_of(lambda x: functional.l1_loss(x, RIGHT)),
    "huber": backward_of(lambda x: functional.huber_loss(x, RIGHT)),
    "divergence": backward_of(lambda x: functional.kl_div(x, RIGHT, reduction="batchmean")),
    "cosines": backward_of(lambda x: functional.cosine_similarity(x, RIGHT)),
}

# What only the CPU's kernels take, by size, and why CUDA's do not.
ONLY_ON_THE_CPU: dict[str, tuple[Callable[[], Any], dict[int, int]]] = {
    # Elementwise kernels of CUDA convert a mask as they read it (Loops.cuh, dynamic casting).
    "the gradient of amax": (backward_of(lambda x: x.amax(1)), {BYTES: 1}),
    "the gradient of amin": (backward_of(lambda x: x.amin(0)), {BYTES: 1}),
    # CUDA adds half precision up in fp32 without a copy (ReduceOps.cpp, gpu_lowp_to_f32).
    "a sum of halves": (lambda: HALF.sum(0, dtype=torch.float32), {BYTES: 1}),
    # A buffer that CUDA's log_sigmoid leaves empty (Activation.cpp, log_sigmoid_forward_cuda).
    "binary cross-entropy": (
        backward_of(lambda x: functional.binary_cross_entropy_with_logits(x, RIGHT)),
        {BYTES: 1},
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_the_rules_know_what_the_profiler_sees(name: str) -> None:
    work = ALIKE[name]
    work()  # what is cached at the first call
    assert requested(work) == ruled(work)


@pytest.mark.parametrize("name", ONLY_ON_THE_CPU)
def test_no_more_is_missing_than_what_is_of_the_cpu_alone(name: str) -> None:
    work, only = ONLY_ON_THE_CPU[name]
    work()
    assert requested(work) - ruled(work) == Counter(only)
    assert ruled(work) <= requested(work)


def test_the_witness_sees_what_no_dispatch_mode_does() -> None:
    def work() -> Any:
        return MASK.sum(1)

    with Counting() as counting:
        work()
    copy_bytes = 8 * MASK.numel()
    assert copy_bytes not in counting.sizes
    assert requested(work)[copy_bytes] == 1
