"""What a trick that was not allowed would give: true, cheap, and said only where it matters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import oomph
from oomph.planning.offers import smallest_gpu
from oomph.planning.ranking import severity_of
from oomph.predicting.overhead import usable_bytes
from oomph.records.plan import Plans
from oomph.tricks.trick import BY_NAME, NEED_CONSENT, tricks_on
from oomph.units import GIB
from oomph.verbs.gpus import catalog
from planning.plans import prediction_of, variant_of

# 268 MB of weights: with Adam four times that, and few activations.
TRAIN = """
import torch, oomph

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(2048, 8192), torch.nn.Linear(8192, 2048)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

workload = oomph.Workload(
    model=lambda: torch.nn.Sequential(Block(), Block()),
    batch=lambda n: torch.zeros(n, 2048),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=8,
)
"""
# What would make it fit without a change of training.
EXACT = (
    "offload-optimizer",
    "zero-offload",
    "offload-activations",
    "optimizer-in-backward",
    "8-bit-optimizer",
    "for-loop-optimizer",
    "fused-optimizer",
    "expandable-segments",
    "bf16",
    "tf32",
)


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("offered") / "train.py"
    path.write_text(TRAIN)
    return f"{path}:workload"


def planned(workload: str, memory: str, *, forbid: tuple[str, ...] = EXACT) -> Plans:
    return oomph.plan(workload, gpu="a100-40gb", gpu_memory=memory, forbid=forbid)


def test_where_nothing_fits_what_would_is_offered_the_mildest_change_first(workload: str) -> None:
    plans = planned(workload, "1450MiB")
    assert plans.best is None
    assert plans.shortfall is not None
    assert plans.shortfall.variant is not None
    assert plans.shortfall.missing_bytes > 0
    assert plans.offers
    severities = [severity_of(BY_NAME[offer.allow]) for offer in plans.offers]
    assert severities == sorted(severities)
    for offer in plans.offers:
        assert offer.allow in NEED_CONSENT
        assert offer.allow in {trick.name for trick in tricks_on(offer.variant)}
        assert offer.fits == "yes"
        assert offer.missing_bytes == 0
        assert offer.high_bytes <= 1450 << 20
        assert offer.price


def test_an_offer_that_is_accepted_comes_true(workload: str) -> None:
    for offer in planned(workload, "1450MiB").offers:
        accepted = oomph.plan(
            workload, gpu="a100-40gb", gpu_memory="1450MiB", forbid=EXACT, allow=[offer.allow]
        )
        assert accepted.best is not None
        assert accepted.best.fits == "yes"
        assert offer.step_s is not None
        assert (accepted.best.prediction.step_s or 0) <= offer.step_s * 1.001


def test_nothing_is_offered_where_nothing_has_to_change(workload: str) -> None:
    plans = planned(workload, "8GiB")
    assert plans.fits_as_is == "yes"
    assert plans.offers == ()


def test_what_was_forbidden_is_not_offered(workload: str) -> None:
    every = tuple(name for name in NEED_CONSENT if name != "sgd")
    plans = planned(workload, "1450MiB", forbid=(*EXACT, *every))
    assert [offer.allow for offer in plans.offers] == ["sgd"]


def test_where_not_even_consent_is_enough_the_nearest_is_offered_with_a_gpu_for_it(
    workload: str,
) -> None:
    plans = planned(workload, "600MiB")
    assert plans.best is None
    (offer,) = plans.offers
    assert offer.fits == "no"
    assert plans.shortfall is not None
    assert 0 < offer.missing_bytes < plans.shortfall.missing_bytes
    assert offer.smallest_gpu in {model.name for model in catalog()}


def test_the_smallest_gpu_fits_for_certain_and_no_smaller_one_does() -> None:
    short = replace(prediction_of(variant_of()), high_bytes=21 * GIB)
    sizes = {model.name: usable_bytes(model).low_bytes for model in catalog()}
    name = smallest_gpu(short)
    assert name is not None
    assert sizes[name] == min(size for size in sizes.values() if size >= 21 * GIB)
    assert smallest_gpu(replace(short, high_bytes=10_000 * GIB)) is None
