"""Puts each test of an adapter into a process that no other has left its traces in."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Each recovery collects garbage, and all that the tests have imported is none."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other longer than such small models take
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(num_threads)
