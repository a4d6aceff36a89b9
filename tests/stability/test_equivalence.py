"""The check of accumulation: its verdict, its reason and its place, for losses of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stability.accumulations import CASES, Case, cross_entropy, mlp, rows, sentences
from torch import nn

from oomph.records.check import AccumulationCheck
from oomph.stability.equivalence import check_accumulation
from oomph.stability.examples import CannotBeSplit, take, with_values

NUM = 8


def check(case: Case) -> AccumulationCheck:
    examples = take(case.workload.batch, NUM)
    return check_accumulation(case.workload, examples)


@pytest.mark.parametrize("name", CASES)
def test_what_a_split_batch_does_to_training_is_known_and_where(name: str) -> None:
    case = CASES[name]
    found = check(case)
    assert found.normaliser == case.normaliser, found
    assert found.verdict == ("fails" if case.normaliser is None else "passes")
    assert found.confidence == "high", found.limits
    told = " ".join([found.conclusion, *(f.what for f in found.findings)])
    assert case.said in told
    if case.normaliser is None:
        assert found.findings[0].module == case.module
        assert found.findings[0].do
        assert found.residual_ratio is not None
        assert found.residual_ratio > 1e-4
    else:
        assert found.residual_ratio is not None
        assert found.residual_ratio < 1e-11
