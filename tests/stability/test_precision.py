"""The check of mixed precision: what breaks, in which module and op, in fp16 and in bf16."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from oomph.pretending.autocast import guard, known_to_models
from oomph.records.check import PrecisionCheck
from oomph.rehearsing.child import in_a_child
from oomph.stability.calls import ModuleTracker
from oomph.stability.examples import take
from oomph.stability.precision import LowPrecision, check_precision, resolved_values
from oomph.stability.trial import Trial
from stability.precisions import CASES, Case

NUM = 8
Found = dict[str, dict[str, PrecisionCheck]]


def checks_of(case: Case) -> dict[str, PrecisionCheck]:
    found = check_precision(case.workload, take(case.batch, NUM))
    return {check.dtype: check for check in found}


@pytest.fixture(scope="module")
def found() -> Found:
    """All in one child: the casts of CUDA are for a process of their own."""
    return in_a_child(lambda: {name: checks_of(case) for name, case in CASES.items()})


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_what_autocast_does_to_training_is_known_and_where(
    found: Found, name: str, dtype: str
) -> None:
    case, check = CASES[name], found[name][dtype]
    expected = getattr(case, dtype)
    assert check.verdict == expected, check
    if expected == "passes":
        assert check.gradient_error_ratio is not None
        assert check.gradient_error_ratio < 0.1
        return
    first = check.findings[0]
    assert first.module == case.module
    assert case.op in (None, first.op)
    assert case.said in first.what
    assert first.do


def test_rounding_of_good_models_is_that_of_the_dtype(found: Found) -> None:
    for name in ("an MLP", "GroupNorm", "a transformer with dropout", "24 residual layers"):
        for dtype, epsilon in (("fp16", 2.0**-11), ("bf16", 2.0**-8)):
            error = found[name][dtype].gradient_error_ratio
            assert error is not None
            assert 0.1 * epsilon < error < 20 * epsilon, (name, dtype)


def test_fp16_says_the_loss_scale_to_begin_with_and_bf16_needs_none(found: Found) -> None:
    assert found["an MLP"]["fp16"].loss_scale == 2.0**16
    assert found["an MLP"]["bf16"].loss_scale is None
    small, large = found["a loss of 1e-11"]["fp16"], found["a loss of 1e6"]["fp16"]
    assert small.loss_scale is not None
    assert large.loss_scale is not None
    assert small.loss_scale > 2.0**16
    assert f"init_scale=2.0**{round(math.log2(small.loss_scale))}" in small.conclusion
    assert large.loss_scale < 1
    assert "skips" in large.conclusion


def test_a_mask_that_becomes_minus_infinity_is_a_note_and_no_failure(found: Found) -> None:
    check = found["an fp32 mask cast down"]["fp16"]
    assert check.verdict == "passes"
    assert "harmless" in check.findings[0].what
    assert not found["a mask of -inf"]["fp16"].findings  # it is so in fp32, too


def test_an_error_names_the_users_own_line(found: Found) -> None:
    assert "precisions.py:" in found["writing into an fp32 buffer"]["fp16"].findings[0].what


def test_values_of_the_first_step_are_not_called_certain(found: Found) -> None:
    assert found["an MLP"]["fp16"].confidence == "fair"
    assert "they may grow" in found["an MLP"]["fp16"].limits[0]
    assert "cuDNN" in found["tied weights and a GRU"]["bf16"].limits[-1]


# ---- the casts of CUDA, on the CPU ---------------------------------------------------------------


def dtypes_under_autocast() -> dict[str, str]:
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    ops: dict[str, Any] = {
        "matmul": lambda: x @ weight,
        "softmax": lambda: (x @ weight).softmax(-1),
        "layer_norm": lambda: torch.layer_norm(x @ weight, (4,)),
        "exp": lambda: (x @ weight).exp(),
        "sum": lambda: (x @ weight).sum(),
        "relu": lambda: (x @ weight).relu(),
        "add": lambda: x @ weight + x,
        "cat": lambda: torch.cat([x @ weight, x]),
        "double": lambda: x.double() @ weight.double(),
        "pow": lambda: (x @ weight) ** 2,
    }
    with (
        known_to_models(),
        guard(),
        torch.autocast("cuda", dtype=torch.float16),
    ):
        found = {name: str(op().dtype) for name, op in ops.items()}
        with torch.autocast("cpu", enabled=False):  # as models ask with the device of a tensor
            found["island"] = str((x @ weight).dtype)
    found["afterwards"] = str((x @ weight).dtype)
    return found


def test_the_ops_that_cuda_casts_are_cast_to_what_cuda_casts_them_to() -> None:
    low, wide = "torch.float16", "torch.float32"
    assert in_a_child(dtypes_under_autocast) == {
        "matmul": low,
        "softmax": wide,
        "layer_norm": wide,
        "exp": wide,
        "sum": wide,
        "relu": low,
        "add": wide,
        "cat": wide,
        "double": "torch.float64",
        "pow": wide,
        "island": wide,
        "afterwards": wide,
    }


def test_products_add_up_in_fp32_as_tensor_cores_do() -> None:
    ones = torch.ones(1, 4096, dtype=torch.float16)
    with LowPrecision(ModuleTracker(torch.nn.Identity())):
        product = ones @ (ones.T + 2.0**-9)
    # In fp16, 2048 and a little would not grow any more.
    assert product.item() == torch.tensor(4096 * (1 + 2.0**-9)).half().item()


def test_a_gradient_that_fp32_does_not_agree_on_is_not_missed_when_it_becomes_zero() -> None:
    trial = Trial(CASES["an MLP"].workload, wide=False)
    first, second = (parameter.numel() for _, parameter in trial.parameters[:2])
    exact = torch.ones(sum(parameter.numel() for _, parameter in trial.parameters)).double()
    exact[-1] = 0
    narrow = exact.clone()
    narrow[: first // 2] *= -1  # where it should be 0, each precision rounds in its own way
    is_there = resolved_values(trial, exact, narrow)
    assert not is_there[:first].any()
    assert is_there[first : first + second].all()
    assert not is_there[-1]
