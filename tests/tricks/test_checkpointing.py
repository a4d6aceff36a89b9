"""Recomputation changes no gradient and no statistic: real runs on the CPU, with and without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rehearsing.rehearsals import models
from rehearsing.zoo.kind import Kind
from torch import nn

from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks import apply
from oomph.tricks.checkpointing import checkpoint_blocks

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = models()
WITH_BLOCKS = [name for name, kind in MODELS.items() if kind.has_blocks]
# With statistics, dropout, caches of keys and values, two stacks, experts, skips.
CHOSEN = ("resnet", "unet", "encoder", "gpt2", "llama", "t5", "mixtral", "swin", "hf resnet")


def trained(kind: Kind, checkpointing: str) -> tuple[nn.Module, float]:
    """The model after one backward."""
    torch.manual_seed(0)
    model = apply.put_on_model(
        kind.make().train(), Variant(micro_batch=1, checkpointing=checkpointing)
    )
    batch = kind.batch(3)
    torch.manual_seed(1)  # what dropout drops
    loss = kind.loss(model, batch)
    loss.backward()
    assert isinstance(model, nn.Module)
    return model, float(loss)


def assert_equally_trained(kind: Kind, checkpointing: str) -> None:
    (plain, loss), (recomputed, other_loss) = trained(kind, "none"), trained(kind, checkpointing)
    assert loss == other_loss
    assert list(plain.state_dict()) == list(recomputed.state_dict())
    for (name, one), other in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            # A cache of keys lays them out anew: equal up to rounding, and without one exactly.
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)
    for (name, mine), theirs in zip(plain.named_buffers(), recomputed.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_gradients_and_statistics_are_those_without_recomputation(name: str) -> None:
    assert_equally_trained(MODELS[name], "blocks")


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["selective", "every-2", "blocks:1"])
@pytest.mark.parametrize("name", CHOSEN)
def test_so_it_is_for_every_way_of_choosing(name: str, checkpointing: str) -> None:
    assert_equally_trained(MODELS[name], checkpointing)


class Normed(nn.Module):
    """Statistics of all kinds, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.averaged = nn.BatchNorm1d(4, momentum=None)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return x + self.dropout(self.instance(self.averaged(self.norm(self.conv(x)))))


def normed() -> Kind:
    return Kind(
        lambda: nn.Sequential(Normed(), Normed(), Normed()),
        lambda n: {"input": torch.rand(n, 4, 8)},
        lambda model, batch: model(**batch).square().mean(),
    )


@pytest.mark.parametrize("checkpointing", ["blocks", "selective"])
def test_statistics_are_updated_once_and_dropout_drops_the_same(checkpointing: str) -> None:
    assert_equally_trained(normed(), checkpointing)
    model, _ = trained(normed(), checkpointing)
    assert [int(block.norm.num_batches_tracked) for block in model] == [1, 1, 1]  # type: ignore[attr-defined]
    assert [block.norm.momentum for block in model] == [0.1] * 3  # type: ignore[attr-defined]


class Dense(nn.Module):
    """Each block is given a list that grows after it, as in a DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Joined(width) for width in (4, 8, 12)])

    def forward(self, x: Any) -> Any:
        found = [x]
        for block in self.blocks:
            found.append(block(found))
        return torch.cat(found, 1).square()


class Joined(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4), nn.Linear(4, 4)

    def forward(self, found: Any) -> Any:
        return self.second(self.first(torch.cat(found, 1)).relu())


def test_a_list_that_grows_is_recomputed_as_it_was() -> None:
    assert_equally_trained(Kind(Dense, lambda n: {"x": torch.rand(n, 4)}), "blocks")


def test_the_users_configuration_is_left_alone() -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).train()
    checkpoint_blocks(model, "blocks")
    assert config.use_cache
    ids = torch.arange(8).view(1, 8)
    assert model(input_ids=ids, labels=ids).past_key_values is None


def test_a_cache_that_is_asked_for_is_not_filled_twice() -> None:
    kind = MODELS["llama"]
    asking = Kind(kind.make, kind.batch, lambda m, b: m(**b, use_cache=True).loss)
    assert_equally_trained(asking, "blocks")


def test_a_models_own_recomputation_is_switched_off() -> None:
    model = MODELS["llama"].make().train()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    checkpoint_blocks(model, "blocks")
    assert not model.is_gradient_checkpointing


def test_a_model_is_still_copied_and_evaluated() -> None:
    model, _ = trained(MODELS["vit"], "blocks")
    twin = copy.deepcopy(model)
    x = MODELS["vit"].batch(2)["x"]
    with torch.no_grad():
        assert torch.equal(twin(x), model(x))
    twin(x).mean().backward()


def test_what_cannot_be_recomputed_is_one_clear_error() -> None:
    with pytest.raises(UsageError, match="no repeated blocks"):
        checkpoint_blocks(MODELS["mlp"].make(), "blocks")
    model = MODELS["vit"].make()
    checkpoint_blocks(model, "blocks")
    with pytest.raises(UsageError, match="recomputed already"):
        checkpoint_blocks(model, "blocks")
