"""Pieces of batches in a library's loop."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import oomph
from oomph.errors import UsageError
from oomph.training.adapters.window import Window, ranks_for, total_loss


def run(model: nn.Module, said: list[str], **options: Any) -> Any:
    window = Window(model, [torch.optim.SGD(model.parameters(), 0.1)], said.append, **options)

    def work(piece: Any) -> Any:
        loss = model(piece.data).square().mean()
        (loss * piece.share).backward()
        return loss.detach()

    loss = total_loss(window.run(torch.arange(24.0).reshape(8, 3), work))
    window.close()
    return loss


def test_a_norm_over_the_batch_is_told_of_once_it_is_split() -> None:
    for model, num in (
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), 1),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval()), 0),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), 0),
    ):
        said: list[str] = []
        run(model, said)
        assert said == []
        run(model, said, micro_batch=4)
        assert len(said) == num


def test_pieces_that_count_nothing_are_not_run() -> None:
    rows: list[int] = []

    def weight(part: Any) -> Any:
        rows.append(len(part))
        return (part[:, 0] > 9).sum()

    model = nn.Linear(3, 1)
    loss = run(model, [], micro_batch=2, weight=weight, on_difference="ignore")
    with torch.no_grad():
        late = torch.arange(24.0).reshape(8, 3)[4:]
        expected = model(late).square().mean()
    assert rows == [2, 2, 2, 2]
    assert torch.allclose(loss, expected)


@pytest.mark.parametrize(("num", "is_engine"), [(2, False), (1, True)])
def test_what_would_have_to_agree_is_refused(num: int, is_engine: bool) -> None:
    ranks = ranks_for(nn.Linear(3, 3), (), 1, is_engine=False, library="a library")
    assert not ranks.is_replicated
    with pytest.raises(UsageError, match="a library"):
        ranks_for(nn.Linear(3, 3), (), num, is_engine=is_engine, library="a library")


def test_recoveries_leave_no_memory_behind() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(2)]
    with oomph.emulated_gpu("64MiB") as gpu:
        model = nn.Sequential(*blocks).cuda()
        window = Window(model, [torch.optim.SGD(model.parameters(), 0.1)], lambda _: None)
        batch = torch.randn(24576, 32).cuda()

        def work(piece: Any) -> Any:
            loss = model(piece.data).square().mean()
            (loss * piece.share).backward()
            return loss.detach()

        def recover(count: int) -> tuple[int, int]:
            for _ in range(count):
                window.forget_sizes()
                window.run(batch, work)
                window.close()
                model.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()
            return gpu.allocated_bytes, gpu.reserved_bytes

        before = recover(3)
        after = recover(30)
    assert window.num_ooms >= 33
    assert after <= before


def test_a_batch_that_is_run_again_after_a_check_has_its_loss_once() -> None:
    """Memory is short until the batch has been run: its first split is checked only then."""

    sizes: list[int] = []

    class Narrow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            if len(x) > 1 and sizes.count(1) < 8:
                raise torch.OutOfMemoryError
            return super().forward(x)

    model = Narrow(3, 1)
    with torch.no_grad():
        expected = nn.functional.linear(torch.arange(24.0).reshape(8, 3), model.weight, model.bias)
    loss = run(model, [], weight="mean")
    assert sizes.count(1) > 8
    assert torch.allclose(loss, expected.square().mean())
