"""Where pieces would leave other processes waiting: refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oomph.errors import UsageError
from oomph.training.ranks import Ranks, ranks_of


def ranks_for(
    model: Any, optimizers: Iterable[Any], num_processes: int, *, is_engine: bool, library: str
) -> Ranks | None:
    """Those that a library's model is replicated on; None for one process.

    Raises UsageError where an error of one process would leave others waiting.
    """
    ranks = None if is_engine else ranks_of(model, optimizers)
    if is_engine or (num_processes > 1 and ranks is None):
        what = "an engine that accumulates by itself" if is_engine else f"{num_processes} processes"
        raise UsageError(
            f"out-of-memory errors are not recovered from in {library} with {what}",
            because="all have to agree on the error of one, in the middle of their backward",
            attempt="DistributedDataParallel, one process, or a plan (oomph plan --gpus) that fits",
        )
    return ranks
