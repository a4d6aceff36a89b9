"""What a kernel moves: what it reads, and what it writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.pretending.ops import Behaviour
from oomph.pretending.work import work_of

aten = torch.ops.aten
MIB = 2**20


def tensor() -> Any:
    return torch.empty(MIB // 4, device="meta")


@pytest.mark.parametrize(
    ("function", "args", "num_outputs", "moved_mib"),
    [
        pytest.param(aten.add.Tensor, (tensor(), tensor()), 1, 3, id="two read, one written"),
        pytest.param(aten.mul_.Scalar, (tensor(), 2.0), 0, 2, id="read and written again"),
        pytest.param(aten.add_.Tensor, (tensor(), tensor()), 0, 3, id="one of two written again"),
        pytest.param(aten.zero_.default, (tensor(),), 0, 1, id="written without a look"),
        pytest.param(aten.copy_.default, (tensor(), tensor()), 0, 2, id="copied"),
        pytest.param(
            aten._foreach_add_.List, ([tensor()] * 3, [tensor()] * 3), 0, 9, id="lists of tensors"
        ),
    ],
)
def test_every_byte_that_is_read_or_written_is_counted(
    function: Any, args: Any, num_outputs: int, moved_mib: int
) -> None:
    outputs = [tensor() for _ in range(num_outputs)]
    (work,) = work_of(Behaviour(function), args, {}, outputs, "step")
    assert work.moved_bytes == moved_mib * MIB


def test_a_product_of_matrices_has_two_operations_for_each_element_and_row() -> None:
    left, right = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
    (work,) = work_of(
        Behaviour(aten.mm.default),
        (left, right),
        {},
        [torch.empty(64, 16, device="meta")],
        "forward",
    )
    assert work.flops == 2 * 64 * 32 * 16


def test_what_happens_on_the_host_is_no_kernel() -> None:
    assert work_of(Behaviour(aten.zero_.default), (torch.empty(4),), {}, [], "step") == ()
