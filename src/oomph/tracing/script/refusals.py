"""What cannot be rehearsed in a script, refused where it happens; and what is passed over."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import torch
from torch import distributed, multiprocessing

from oomph.errors import UserCodeError
from oomph.tracing.compiled import pass_over
from oomph.tracing.script.users_line import in_words, users_line

JIT = "torch.jit: rehearsed without it; what it fuses takes other memory, mostly less"
FAST_PATH = "nn.TransformerEncoder: evaluated in its parts, which takes more than its fast path"
ONE_PROCESS = "torch.distributed: rehearsed as one process, without the buckets of its gradients"

Approximate = Callable[[str], None]
Fail = Callable[[UserCodeError], NoReturn]


def refused(what: str, because: str, attempt: str) -> UserCodeError:
    return UserCodeError(
        f"{what} cannot be rehearsed, at {in_words(users_line())}", because=because, attempt=attempt
    )


def install(approximate: Approximate, fail: Fail) -> None:
    """Patch torch.compile, launchers of processes, and compilers of kernels."""
    pass_over(approximate)
    _patch_jit(approximate)
    _patch_inference()
    _patch_fast_path(approximate)
    # The process is a fork, which has one thread of torch's pool.
    vars(torch)["set_num_threads"] = lambda _: None
    # Whether probabilities add up to 1 is asked of values that do not exist.
    torch.distributions.Distribution.set_default_validate_args(False)
    _patch_launchers(fail)
    _patch_group(approximate, fail)
    _patch_parallel()
    _patch_extensions(fail)
    _patch_graphs(fail)


def _patch_jit(approximate: Approximate) -> None:
    """As PYTORCH_JIT=0 does: its compiler does not know functions of torch that are patched."""
    torch.jit._state.disable()
    module: Any = torch.jit
    for name in ("script", "trace"):
        setattr(module, name, _noting(getattr(module, name), approximate))


def _noting(original: Callable[..., Any], approximate: Approximate) -> Callable[..., Any]:
    def passed_over(what: Any, *args: Any, **kwargs: Any) -> Any:
        if not str(getattr(what, "__module__", "")).startswith("torch."):
            approximate(JIT)
        return original(what, *args, **kwargs)

    return passed_over


def _patch_inference() -> None:
    """As no_grad: nothing is kept for backward, either, and ops come in their parts."""

    class inference_mode(torch.no_grad):  # noqa: N801 - torch's name
        def __init__(self, mode: Any = True) -> None:
            super().__init__()
            self.mode = mode

        def __new__(cls, mode: Any = True) -> Any:
            return cls()(mode) if callable(mode) else super().__new__(cls)

        def __enter__(self) -> None:
            self.prev = torch.is_grad_enabled()
            torch.set_grad_enabled(not self.mode and self.prev)

        def clone(self) -> Any:
            return self.__class__(self.mode)

    module: Any = torch
    module.inference_mode = module.autograd.grad_mode.inference_mode = inference_mode
    module.autograd.inference_mode = inference_mode


def _patch_fast_path(approximate: Approximate) -> None:
    """In evaluation it packs what is not padding, so that values decide shapes."""

    def is_enabled() -> bool:
        if not torch.is_grad_enabled():
            approximate(FAST_PATH)
        return False

    module: Any = torch.backends.mha
    module.get_fastpath_enabled = is_enabled


# ---- several processes -----------------------------------------------------------------------


def _patch_launchers(fail: Fail) -> None:
    def spawned(function: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        if nprocs > 1:
            fail(_of_many(f"a script that starts {nprocs} processes"))
        function(0, *args)

    module: Any = multiprocessing
    module.spawn = spawned
    kind: Any = BaseProcess
    start = kind.start

    def started(process: Any) -> None:
        Started.num += 1
        start(process)

    kind.start = started


class Started:
    """Processes that the script has started itself: what they do is not seen."""

    num = 0


def _of_many(what: str) -> UserCodeError:
    return refused(
        what,
        "one process on one GPU is rehearsed",
        "the script without its launcher, or a Workload with --num-gpus",
    )


def _patch_group(approximate: Approximate, fail: Fail) -> None:
    original: Any = distributed.init_process_group

    def begin(*_: Any, **kwargs: Any) -> None:
        asked = kwargs.get("world_size")
        num_ranks = int(os.environ.get("WORLD_SIZE", 1)) if asked in (-1, None) else asked
        if num_ranks > 1:
            fail(_of_many(f"a script in a group of {num_ranks} processes"))
        from torch.testing._internal.distributed.fake_pg import FakeStore

        approximate(ONE_PROCESS)
        original("fake", rank=0, world_size=1, store=FakeStore())

    module: Any = distributed
    module.init_process_group = module.distributed_c10d.init_process_group = begin
    module.is_nccl_available = lambda: True


class _Alone(torch.nn.parallel.DistributedDataParallel):
    """A model in a world of one: nothing is exchanged."""

    def __init__(self, module: Any, *_: Any, **__: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def train(self, mode: bool = True) -> Any:
        return torch.nn.Module.train(self, mode)

    def __getstate__(self) -> Any:
        return self.__dict__


def _patch_parallel() -> None:
    """One GPU: data parallelism has nothing to divide."""
    _Alone.__name__ = _Alone.__qualname__ = "DistributedDataParallel"
    parallel: Any = torch.nn.parallel
    parallel.DistributedDataParallel = parallel.distributed.DistributedDataParallel = _Alone
    replicas: Any = torch.nn.DataParallel
    replicas.forward = lambda self, *args, **kwargs: self.module(*args, **kwargs)


# ---- kernels ---------------------------------------------------------------------------------


def _patch_extensions(fail: Fail) -> None:
    from torch.utils import cpp_extension

    def built(name: Any = "", *_: Any, **__: Any) -> None:
        fail(
            refused(
                f"the extension {str(name)!r:.60} in C++ or CUDA",
                "what its kernels allocate is not seen",
                "a stand-in in plain torch while rehearsing, or a Workload",
            )
        )

    module: Any = cpp_extension
    module.load = module.load_inline = built


def _patch_graphs(fail: Fail) -> None:
    class Graph:  # a class: annotations such as `CUDAGraph | None` use it
        def __init__(self, *_: Any, **__: Any) -> None:
            fail(
                refused(
                    "a CUDA graph",
                    "its memory is of a pool of its own",
                    "the script without CUDA graphs",
                )
            )

    module: Any = torch.cuda
    module.CUDAGraph = module.graph = module.make_graphed_callables = Graph
