"""The sizes of a trace are affine in the batch: two traces tell all others but that of one."""

from __future__ import annotations

from typing import Any

import pytest

from rehearsing import children, rehearsals


@pytest.fixture(scope="module")
def compared() -> dict[str, dict[str, Any]]:
    return {one["model"]: one for one in children.found_by(children.start("batches"))}


@pytest.mark.parametrize("name", rehearsals.AFFINE)
def test_every_batch_has_the_same_events(name: str, compared: dict[str, dict[str, Any]]) -> None:
    assert compared[name]["has_one_structure"]


@pytest.mark.parametrize("name", rehearsals.AFFINE)
def test_batches_of_two_and_three_tell_those_of_five_and_eight(
    name: str, compared: dict[str, dict[str, Any]]
) -> None:
    assert compared[name]["wrong"] == []
