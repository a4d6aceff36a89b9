"""Loaders that would have workers, read without: what a worker is told, one is told here.

Data sets open their files and seed themselves by it. It is the only worker, so that none of the
data is left to others. Torch's own code is told the truth: it would put batches in shared memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import data as torch_data
from torch.utils.data import _utils

_OF_TORCH = str(Path(torch_data.__file__).parent)


class Workers:
    """The loaders that were made with workers, and the worker that is at work."""

    def __init__(self) -> None:
        self._info: Any = None

    def install(self) -> None:
        def info() -> Any:
            is_of_torch = sys._getframe(1).f_code.co_filename.startswith(_OF_TORCH)
            return None if is_of_torch else self._info

        modules: Any = torch_data, _utils.worker
        for module in modules:
            module.get_worker_info = info

    @contextlib.contextmanager
    def at_work(self, loader: Any) -> Iterator[None]:
        """While a loader is read. The first time, its worker is begun."""
        if not getattr(loader, "oomph_has_workers", False):
            yield
            return
        is_new = not hasattr(loader, "oomph_worker")
        if is_new:
            seed = torch.initial_seed()
            loader.oomph_worker = _utils.worker.WorkerInfo(
                id=0, num_workers=1, seed=seed, dataset=loader.dataset
            )
        before, self._info = self._info, loader.oomph_worker
        try:
            if is_new and loader.worker_init_fn is not None:
                loader.worker_init_fn(0)
            yield
        finally:
            self._info = before
