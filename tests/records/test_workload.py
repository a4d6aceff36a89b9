"""What a Workload refuses."""

from __future__ import annotations

from typing import Any

import pytest

from oomph.errors import UsageError
from oomph.records.workload import Workload

GOOD: dict[str, Any] = {"model": dict, "batch": 0, "loss": max, "optimizer": list}


def test_a_whole_number_above_0_is_a_batch_size() -> None:
    assert Workload(**GOOD, batch_size=1).batch_size == 1


@pytest.mark.parametrize("batch_size", [-4, 0, "64", 6.4, None, True])
def test_no_other_batch_size_is_taken(batch_size: Any) -> None:
    with pytest.raises(UsageError, match="cannot have batch_size="):
        Workload(**GOOD, batch_size=batch_size)


@pytest.mark.parametrize("name", ["model", "loss", "optimizer"])
def test_what_is_made_is_given_as_a_function(name: str) -> None:
    with pytest.raises(UsageError, match=f"`{name}` is a function"):
        Workload(**{**GOOD, name: "it"}, batch_size=1)
