"""Refuse what cannot be rehearsed, where it happens; skip what a rehearsal can do without."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import torch
from torch import distributed, multiprocessing
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from oomph.errors import UserCodeError
from oomph.pretending.branches import pass_over
from oomph.pretending.patches import put, wrap
from oomph.rehearsing.fault import in_words, users_line

JIT = "torch.jit: rehearsed without it; what it fuses takes other memory, mostly less"
FAST_PATH = "nn.TransformerEncoder: evaluated in its parts, which takes more than its fast path"
ONE_PROCESS = "torch.distributed: rehearsed as one process, without the buckets of its gradients"

Approximate = Callable[[str], None]
Refuse = Callable[[str, str, str], NoReturn]  # what, because of what, what to try


def refused(what: str, because: str, attempt: str) -> UserCodeError:
    return UserCodeError(
        f"{what} cannot be rehearsed, at {in_words(users_line())}", because=because, attempt=attempt
    )


def install(approximate: Approximate, fail: Callable[[UserCodeError], NoReturn]) -> None:
    """Patch torch.compile, process launchers, kernel compilers and drawings of models."""

    def refuse(what: str, because: str, attempt: str) -> NoReturn:
        fail(refused(what, because, attempt))

    pass_over(approximate)
    _patch_jit(approximate)
    _patch_inference()
    _patch_fast_path(approximate)
    # The process is a fork, which has only one thread of torch's pool.
    put(torch, set_num_threads=lambda _: None)
    # The check that probabilities add up to 1 would read unknown values.
    torch.distributions.Distribution.set_default_validate_args(False)
    _patch_launchers(refuse)
    _patch_group(approximate, refuse)
    _patch_parallel()
    _patch_kernels(refuse)
    _patch_flex_attention(approximate)
    _patch_drawings()


def _patch_jit(approximate: Approximate) -> None:
    """Disable torch.jit like PYTORCH_JIT=0: its compiler does not know the patched functions."""
    torch.jit._state.disable()

    def noted(original: Any, what: Any, *args: Any, **kwargs: Any) -> Any:
        if not str(getattr(what, "__module__", "")).startswith("torch."):
            approximate(JIT)
        return original(what, *args, **kwargs)

    for name in ("script", "trace"):
        wrap(name, torch.jit)(noted)


def _patch_inference() -> None:
    """Replace it by no_grad, which also keeps nothing for backward but shows every op."""

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

    for module in (torch, torch.autograd, torch.autograd.grad_mode):
        put(module, inference_mode=inference_mode)


def _patch_fast_path(approximate: Approximate) -> None:
    """Disable the fast path: in evaluation it drops padding, so values would decide shapes."""

    def is_enabled() -> bool:
        if not torch.is_grad_enabled():
            approximate(FAST_PATH)
        return False

    put(torch.backends.mha, get_fastpath_enabled=is_enabled)


# ---- several processes -----------------------------------------------------------------------


_ONE_RANK = "one process on one GPU is rehearsed"
_NO_LAUNCHER = "the script without its launcher, or a Workload with --gpus"


def _patch_launchers(refuse: Refuse) -> None:
    def spawned(function: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        if nprocs > 1:
            refuse(f"a script that starts {nprocs} processes", _ONE_RANK, _NO_LAUNCHER)
        function(0, *args)

    put(multiprocessing, spawn=spawned)

    @wrap("start", BaseProcess)
    def started(original: Any, process: Any) -> None:
        Started.num += 1
        original(process)


class Started:
    """Processes that the script started itself; oomph does not see their work."""

    num = 0


def _patch_group(approximate: Approximate, refuse: Refuse) -> None:
    @wrap("init_process_group", distributed, distributed.distributed_c10d)
    def begin(original: Any, *_: Any, **kwargs: Any) -> None:
        asked = kwargs.get("world_size")
        num_ranks = int(os.environ.get("WORLD_SIZE", 1)) if asked in (-1, None) else asked
        if num_ranks > 1:
            refuse(f"a script in a group of {num_ranks} processes", _ONE_RANK, _NO_LAUNCHER)
        from torch.testing._internal.distributed.fake_pg import FakeStore

        approximate(ONE_PROCESS)
        original("fake", rank=0, world_size=1, store=FakeStore())

    put(distributed, is_nccl_available=lambda: True)


class _Alone(torch.nn.parallel.DistributedDataParallel):
    """DistributedDataParallel with one process: nothing is exchanged."""

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
    """Patch data parallelism for one GPU: there is nothing to divide."""
    _Alone.__name__ = _Alone.__qualname__ = "DistributedDataParallel"
    for module in (torch.nn.parallel, torch.nn.parallel.distributed):
        put(module, DistributedDataParallel=_Alone)
    put(torch.nn.DataParallel, forward=_Alone.forward)


# ---- kernels ---------------------------------------------------------------------------------


def _patch_kernels(refuse: Refuse) -> None:
    from torch.utils import cpp_extension

    def built(name: Any = "", *_: Any, **__: Any) -> None:
        refuse(
            f"the extension {str(name)!r:.60} in C++ or CUDA",
            "what its kernels allocate is not seen",
            "a stand-in in plain torch while rehearsing, or a Workload",
        )

    class Graph:  # a class, because annotations such as `CUDAGraph | None` use it
        def __init__(self, *_: Any, **__: Any) -> None:
            refuse(
                "a CUDA graph",
                "its memory is of a pool of its own",
                "the script without CUDA graphs",
            )

    put(cpp_extension, load=built, load_inline=built)
    put(torch.cuda, CUDAGraph=Graph, graph=Graph, make_graphed_callables=Graph)


# `SummaryWriter.add_graph` draws the model with torch.jit; it does nothing here. It is patched when
# its library is imported, which a script may never do.

_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


class _WithoutDrawing:
    """An import finder that makes a writer's `add_graph` do nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WRITERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            module.SummaryWriter.add_graph = lambda *_, **__: None

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def _patch_drawings() -> None:
    """Install the finder, before the script imports anything."""
    sys.meta_path.insert(0, _WithoutDrawing())
    for name in _WRITERS:
        if name in sys.modules:
            sys.modules[name].SummaryWriter.add_graph = lambda *_, **__: None


# `flex_attention`, whose kernel torch.compile writes -> torch's fused attention. Both keep their
# inputs, their output and one number per query, and neither ever holds the scores. The inputs of a
# `score_mod` or a mask get no gradient this way.

FLEX = "flex_attention: rehearsed as scaled_dot_product_attention, which keeps as much"


def _patch_flex_attention(approximate: Approximate) -> None:
    """Patch the name, so that a script that compiles it compiles this function."""

    def attention(query: Any, key: Any, value: Any, *_: Any, **options: Any) -> Any:
        approximate(FLEX)
        out = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            scale=options.get("scale"),
            enable_gqa=bool(options.get("enable_gqa")),
        )
        return _with_figures(out, query, options)

    put(flex, flex_attention=attention)


def _with_figures(out: Any, query: Any, options: dict[str, Any]) -> Any:
    """Return the output with the extra values per query that the script asked for."""
    asked = options.get("return_aux")
    if asked is None and not options.get("return_lse"):
        return out
    figures = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    if asked is None:
        return out, figures
    most = torch.empty_like(figures) if asked.max_scores else None
    return out, flex.AuxOutput(lse=figures if asked.lse else None, max_scores=most)
