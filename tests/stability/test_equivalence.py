"""The check of accumulation: its verdict, its reason and its place, for losses of many kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from oomph.records.check import AccumulationCheck
from oomph.stability.coupling import fitted
from oomph.stability.equivalence import check_accumulation
from oomph.stability.examples import take
from stability.accumulations import CASES, CLASSES, WIDTH, Case, cross_entropy, mlp, rows

NUM = 8


def check(case: Case, num: int = NUM) -> AccumulationCheck:
    return check_accumulation(case.workload, take(case.workload.batch, num))


@pytest.mark.filterwarnings("ignore:std")  # of one example, as Barlow Twins takes it
@pytest.mark.parametrize("name", CASES)
def test_what_a_split_batch_does_to_training_is_known_and_where(name: str) -> None:
    case = CASES[name]
    found = check(case)
    assert found.normaliser == case.normaliser, found
    assert found.verdict == ("fails" if case.normaliser is None else "passes")
    assert found.confidence == "high", found.limits
    told = " ".join([found.conclusion, *(f.what for f in found.findings)])
    assert case.said in told
    assert found.residual_ratio is not None
    if case.normaliser is None:
        assert found.findings[0].module == case.module
        assert found.findings[0].do
        assert found.residual_ratio > 1e-4
    else:
        assert found.residual_ratio < 1e-11


def test_the_weights_are_those_that_give_the_gradient_of_the_whole() -> None:
    assert check(CASES["an MLP"]).weights == pytest.approx((3 / 8, 5 / 8))
    assert check(CASES["a sum over words"]).weights == pytest.approx((1, 1))
    words = check(CASES["a mean over words that are not ignored"])
    torch.manual_seed(0)
    counts = (CASES["a mean over words that are not ignored"].batch(NUM)["y"] != -100).sum(1)
    share = float(counts[:3].sum() / counts.sum())
    assert words.weights == pytest.approx((share, 1 - share))


def test_dividing_by_the_number_of_pieces_is_said_to_be_wrong_by_its_size() -> None:
    found = check(CASES["an MLP"])
    assert found.divided_ratio is not None
    assert found.divided_ratio > 0.05


def test_any_number_of_examples_from_3_on_will_do() -> None:
    for num in (3, 4, 5, 9):
        found = check(CASES["an MLP with dropout"], num)
        assert (found.verdict, found.normaliser) == ("passes", "mean"), (num, found)
        assert sum(found.piece_sizes) == num


def test_a_loss_that_takes_only_even_numbers_is_split_evenly() -> None:
    def in_halves(model: Any, batch: Any) -> Any:
        one, other = model(batch["x"]).unflatten(0, (-1, 2)).unbind(1)
        return (one - other).square().mean()

    found = check(replace(CASES["an MLP"], loss=in_halves))
    assert (found.verdict, found.normaliser, found.piece_sizes) == ("passes", "mean", (2, 6))


def test_a_loss_that_takes_only_the_whole_batch_is_uncertain_and_says_what_it_raised() -> None:
    def of_eight(model: Any, batch: Any) -> Any:
        assert len(batch["x"]) == NUM, "eight or nothing"
        return model(batch["x"]).mean()

    found = check(replace(CASES["an MLP"], loss=of_eight))
    assert found.verdict == "uncertain"
    assert "eight or nothing" in found.conclusion


def test_packed_sentences_that_cannot_be_split_are_uncertain_and_named() -> None:
    def packed(n: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(3 * n, WIDTH), "starts": 3 * torch.arange(n + 1)}

    def of_packed(model: Any, batch: Any) -> Any:
        return model(batch["x"]).mean()

    found = check(Case(mlp(), packed, of_packed))
    assert found.verdict == "uncertain"
    assert "batch['starts']" in found.conclusion


def test_noise_that_no_seed_reaches_is_uncertain_and_not_called_coupling() -> None:
    unseeded = np.random.default_rng()

    def noisy(model: Any, batch: Any) -> Any:
        return model(batch["x"] * float(unseeded.random())).square().mean()

    found = check(replace(CASES["an MLP"], loss=noisy))
    assert found.verdict == "uncertain"
    assert "same seed" in found.conclusion


def test_a_piece_without_any_target_is_uncertain_and_not_passed() -> None:
    def late(n: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(n, WIDTH), "y": torch.tensor([-100] * 3 + [1] * (n - 3))}

    found = check(Case(mlp(), late, cross_entropy()))
    assert found.verdict == "uncertain"
    assert "all targets ignored" in found.conclusion


def test_a_gradient_of_zero_is_uncertain() -> None:
    def flat(model: Any, batch: Any) -> Any:
        return 0 * model(batch["x"]).mean()

    assert check(replace(CASES["an MLP"], loss=flat)).verdict == "uncertain"


def test_a_model_that_does_not_take_fp64_is_compared_in_fp32_and_that_is_said() -> None:
    class Single(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype != torch.float32:
                raise TypeError("a kernel for float32")
            return super().forward(x)

    found = check(Case(lambda: nn.Sequential(Single(WIDTH, CLASSES)), rows, cross_entropy()))
    assert (found.verdict, found.normaliser) == ("passes", "mean")
    assert found.confidence == "fair"
    assert "a kernel for float32" in found.limits[0]


def test_what_is_sent_to_a_gpu_stays_on_the_cpu() -> None:
    def to_gpu(model: Any, batch: Any) -> Any:
        x = batch["x"].cuda() + torch.zeros(WIDTH, device="cuda") + batch["x"].to("cuda:0")
        return nn.functional.cross_entropy(model(x), batch["y"].to(torch.device("cuda")))

    assert check(replace(CASES["an MLP"], loss=to_gpu)).normaliser == "mean"


def test_a_model_that_is_built_already_is_not_changed_by_the_check() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    workload = replace(CASES["an MLP"].workload, model=model)
    assert check_accumulation(workload, take(rows, NUM)).verdict == "fails"
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_least_squares_find_the_weights_and_what_they_leave_over() -> None:
    pieces = [torch.tensor([1.0, 0.0, 0.0]).double(), torch.tensor([0.0, 1.0, 0.0]).double()]
    weights, residual = fitted(2 * pieces[0] + 3 * pieces[1], pieces)
    assert weights == pytest.approx([2, 3])
    assert residual < 1e-15
    whole = torch.tensor([0.0, 3.0, 4.0]).double()
    assert fitted(whole, pieces)[1] == pytest.approx(0.8)
    parallel = [pieces[0], 2 * pieces[0]]
    assert fitted(pieces[0], parallel)[0] is None
