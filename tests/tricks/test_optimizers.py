"""Other implementations compute the same update, and what makes no sense is one clear error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks import apply, eight_bit_optimizer

Make = Callable[[Any], Any]


def changed(optimizer: torch.optim.Optimizer, name: str) -> torch.optim.Optimizer:
    return apply.exchanged(optimizer, Variant(micro_batch=1, optimizer=name))


def two_groups(kind: Any, **options: Any) -> Make:
    """As most loops have it: no weight decay for vectors."""

    def make(parameters: Any) -> Any:
        every = list(parameters)
        flat = [p for p in every if p.dim() < 2]
        return kind(
            [
                {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.1},
                {"params": flat, "weight_decay": 0.0, "lr": 3e-3},
            ],
            lr=1e-2,
            **options,
        )

    return make


def trained(make: Make, how: str) -> list[torch.Tensor]:
    """The parameters after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = apply.put_on_optimizer(
        make, model.parameters(), Variant(micro_batch=1, optimizer=how)
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(4, 6)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


MAKES = {
    "AdamW": two_groups(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-6),
    "Adam, amsgrad": two_groups(torch.optim.Adam, amsgrad=True),
    "SGD": two_groups(torch.optim.SGD, momentum=0.7, nesterov=True),
    "Adagrad": two_groups(torch.optim.Adagrad, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize("how", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", MAKES)
def test_other_implementations_compute_the_same_update(name: str, how: str) -> None:
    own = trained(MAKES[name], "as-is")
    for one, other in zip(own, trained(MAKES[name], how), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "switches"),
    [("fused", (True, False)), ("foreach", (False, True)), ("for-loop", (False, False))],
)
def test_the_switches_are_set_and_the_groups_stay(how: str, switches: tuple[bool, bool]) -> None:
    made = MAKES["AdamW"](nn.Linear(3, 3).parameters())
    groups = changed(made, how).param_groups
    assert [(group["fused"], group["foreach"]) for group in groups] == [switches] * 2
    kept = ("lr", "betas", "eps", "weight_decay", "params")
    for group, own in zip(groups, made.param_groups, strict=True):
        assert {name: group[name] for name in kept} == {name: own[name] for name in kept}


@pytest.mark.parametrize(
    ("how", "kind"), [("adafactor", torch.optim.Adafactor), ("sgd", torch.optim.SGD)]
)
def test_another_optimizer_takes_the_groups_and_their_rates(how: str, kind: Any) -> None:
    made = changed(MAKES["AdamW"](nn.Linear(3, 3).parameters()), how)
    assert isinstance(made, kind)
    assert [group["lr"] for group in made.param_groups] == [1e-2, 3e-3]
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert [group.get("momentum", 0.9) for group in made.param_groups] == [0.9, 0.9]


def test_named_parameters_keep_their_names() -> None:
    make: Make = lambda named: torch.optim.AdamW(named, lr=1e-3)  # noqa: E731
    made = changed(make(nn.Linear(3, 3).named_parameters()), "fused")
    assert made.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("kind", "options", "how", "said"),
    [
        (torch.optim.RMSprop, {}, "fused", "torch's RMSprop has no fused implementation"),
        (torch.optim.LBFGS, {}, "for-loop", "torch's LBFGS has no for-loop implementation"),
        (torch.optim.AdamW, {"differentiable": True}, "fused", "cannot become fused"),
        (torch.optim.SGD, {}, "sgd", "is torch's SGD already"),
        (torch.optim.SGD, {}, "8-bit", "SGD has no 8-bit form"),
        (torch.optim.AdamW, {"amsgrad": True}, "8-bit", "no amsgrad"),
        (torch.optim.AdamW, {}, "lion", "not an optimizer that oomph knows"),
    ],
)
def test_what_cannot_be_put_on_is_one_clear_error(
    kind: Any, options: dict[str, Any], how: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        changed(kind(nn.Linear(3, 3).parameters(), lr=1e-3, **options), how)


@pytest.mark.parametrize("how", ["fused", "8-bit", "adafactor"])
def test_sparse_gradients_are_refused_before_training(how: str) -> None:
    with pytest.raises(UsageError, match="sparse gradients"):
        apply.put_on_model(nn.Embedding(5, 3, sparse=True), Variant(micro_batch=1, optimizer=how))


def test_without_a_library_there_is_no_8_bit_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "torchao"):
        monkeypatch.setitem(sys.modules, f"{name}.optim", None)
    made = torch.optim.AdamW(nn.Linear(3, 3).parameters())
    with pytest.raises(UsageError, match="no 8-bit optimizer here") as error:
        changed(made, "8-bit")
    assert error.value.attempt == "pip install bitsandbytes"


def test_a_stand_in_never_trains() -> None:
    layer = nn.Linear(3, 3)
    layer(torch.rand(2, 3)).sum().backward()
    optimizer = eight_bit_optimizer.stand_in()(
        [{"params": list(layer.parameters())}], library="bitsandbytes"
    )
    with pytest.raises(RuntimeError, match="trains nothing"):
        optimizer.step()


def test_bitsandbytes_keeps_embeddings_in_32_bits() -> None:
    pytest.importorskip("bitsandbytes")
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 128), nn.Linear(128, 2))
    how = Variant(micro_batch=1, optimizer="8-bit")
    apply.put_on_model(model, how)
    optimizer = apply.put_on_optimizer(torch.optim.AdamW, model.parameters(), how)
    model(torch.arange(9)).sum().backward()
    optimizer.step()
    dtypes = [optimizer.state[p]["state1"].dtype for p in model.parameters()]
    full, low = torch.float32, torch.uint8
    assert dtypes == [full, low, full, full, full]
