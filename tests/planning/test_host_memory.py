"""Offload takes memory of the host: as much as there is, and the answer says how much."""

from __future__ import annotations

from pathlib import Path

import pytest

import oomph
from oomph.errors import UsageError
from oomph.records.plan import Plans
from planning.test_offers import EXACT, TRAIN

WITH_OFFLOAD = tuple(name for name in EXACT if name != "offload-optimizer")


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("offloaded") / "train.py"
    path.write_text(TRAIN)
    return f"{path}:workload"


def planned(workload: str, host_memory: int | str | None) -> Plans:
    """The optimizer's state, 537 MB, has to leave the GPU."""
    return oomph.plan(
        workload,
        gpu="a100-40gb",
        gpu_memory="1450MiB",
        forbid=WITH_OFFLOAD,
        host_memory=host_memory,
    )


def test_unknown_host_memory_is_said_to_be_unknown(workload: str) -> None:
    plans = planned(workload, None)
    assert plans.best is not None
    assert plans.best.variant.offload_optimizer
    (said,) = (one for one in plans.caveats if "host memory" in one)
    assert "is unknown: --host-memory" in said


def test_a_plan_that_needs_no_more_than_the_host_has_is_recommended(workload: str) -> None:
    plans = planned(workload, "64GiB")
    assert plans.best is not None
    assert plans.best.variant.offload_optimizer
    (said,) = (one for one in plans.caveats if "host memory" in one)
    assert said.endswith("64.0 GiB is free")


def test_a_plan_that_needs_more_than_the_host_has_is_none_and_the_answer_says_so(
    workload: str,
) -> None:
    plans = planned(workload, "256MiB")
    assert plans.best is None
    assert not any(offer.variant.offload_optimizer for offer in plans.offers)
    (why,) = (one.why for one in plans.rejected if "variants with offload" in one.what)
    assert "of host memory or more, and 256.0 MiB is free" in why
    assert plans.shortfall is not None
    assert plans.shortfall.variant is not None
    assert not plans.shortfall.variant.offload_optimizer


@pytest.mark.parametrize("size", ["64", 0, -1])
def test_a_size_that_no_host_has_is_refused(workload: str, size: int | str) -> None:
    with pytest.raises(UsageError, match="no host has"):
        planned(workload, size)
