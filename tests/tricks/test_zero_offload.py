"""ZeRO-Offload: the update is that of fp32 weights, and the GPU computes with them rounded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from planning.plans import plan_of
from torch import nn

import oomph
from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks.offload_optimizer import optimizer_on_host, scaler_on_host
from oomph.tricks.trick import contradiction_in
from oomph.tricks.zero_offload import lower

pytestmark = pytest.mark.filterwarnings("ignore")
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
NUM_STEPS = 4


class Model(nn.Module):
    """With tied weights, a frozen one, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norm(self.frozen(torch.tanh(self.one(x))))
        return self.head(torch.tanh(self.two(x)))


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def batches(num: int = NUM_STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=generator) for _ in range(num)]


def loss_of(model: Any, batch: torch.Tensor) -> Any:
    return (model(batch).float() - 1).pow(2).mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def planned(precision: str = "bf16", **settings: Any) -> Any:
    usual = {"micro_batch": 4, "accumulation": 1, "zero_offload": True}
    return plan_of(**{**usual, "precision": precision, **settings})


def stepped(plan: Any, num: int = NUM_STEPS, **options: Any) -> tuple[Any, Any]:
    """The model and the optimizer after some steps of a Stepper."""
    model, optimizer = oomph.apply(plan, made(), adamw)
    step = oomph.Stepper(model, optimizer, loss_of, plan, on_difference="ignore", **options)
    for batch in batches(num):
        step(batch)
    return model, optimizer


def by_hand(precision: str, clip: float | None = None) -> list[torch.Tensor]:
    """fp32 weights, updated with gradients of their rounded copies."""
    low_model = made()
    lower(low_model, Variant(micro_batch=4, precision=precision, zero_offload=True))  # type: ignore[arg-type]
    here = [p for p in low_model.parameters() if p.requires_grad]
    there = [p.detach().clone().requires_grad_() for p in made().parameters() if p.requires_grad]
    optimizer = adamw(there)
    scale = 2.0**16 if precision == "fp16" else 1.0
    for batch in batches():
        with torch.autocast("cpu", LOW[precision]):
            loss = loss_of(low_model, batch)
        (loss * scale).backward()
        for low, master in zip(here, there, strict=True):
            assert low.grad is not None
            master.grad = low.grad.float() / scale
            low.grad = None
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(there, clip)
        optimizer.step()
        with torch.no_grad():
            for low, master in zip(here, there, strict=True):
                low.copy_(master)
    return [p.detach() for p in there]


def masters_of(optimizer: Any) -> list[torch.Tensor]:
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def assert_equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(ones) == len(others)
    assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("precision", LOW)
def test_the_gpu_has_16_bits_of_the_weights_and_the_host_32(precision: str) -> None:
    model, optimizer = oomph.apply(planned(precision), made(), adamw)
    low = LOW[precision]
    names = {name: p.dtype for name, p in model.named_parameters()}
    assert {names[name] for name in names if "norm" not in name} == {low}
    assert {names[name] for name in names if "norm" in name} == {torch.float32}
    assert model.norm.running_mean.dtype == torch.float32
    assert model.head.weight is model.one.weight
    before = [p.detach() for p in made().parameters() if p.requires_grad]
    assert_equal(masters_of(optimizer), before)  # not rounded


@pytest.mark.parametrize("precision", LOW)
def test_a_stepper_updates_the_fp32_weights_with_the_gradients_of_the_rounded(
    precision: str,
) -> None:
    model, optimizer = stepped(planned(precision))
    assert_equal(masters_of(optimizer), by_hand(precision))
    here = [p.detach() for p in model.parameters() if p.requires_grad]
    rounded = [m.to(h.dtype) for m, h in zip(masters_of(optimizer), here, strict=True)]
    assert_equal(here, rounded)


def test_clipping_measures_the_unscaled_gradients() -> None:
    _, optimizer = stepped(planned("fp16"), clip_grad_norm=0.1)
    found, wanted = masters_of(optimizer), by_hand("fp16", clip=0.1)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_trains_as_autocast_does_up_to_rounding(precision: str, accumulation: int) -> None:
    """Against fp32 weights, in sizes of the whole: AdamW's first steps follow any small sign."""
    size = 4 // accumulation
    tricked, _ = stepped(planned(precision, micro_batch=size, accumulation=accumulation))
    plain = plan_of(precision=precision, micro_batch=size, accumulation=accumulation)
    untricked, _ = stepped(plain)
    start = made()
    for one, other, first in zip(
        tricked.parameters(), untricked.parameters(), start.parameters(), strict=True
    ):
        apart = (one.float() - other).abs().mean()
        assert apart <= 0.02 * first.abs().mean() + 2e-3


def test_updates_smaller_than_16_bits_are_not_lost() -> None:
    """What pure bf16 loses without stochastic rounding."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    plan = planned()
    model, optimizer = oomph.apply(plan, model, lambda p: torch.optim.SGD(p, lr=1e-4))
    step = oomph.Stepper(model, optimizer, lambda m, x: m(x).mean(), plan, on_difference="ignore")
    for _ in range(100):
        step(torch.ones(4, 1))
    assert float(model.weight) == pytest.approx(0.99, abs=2**-8)


def test_a_step_that_overflows_is_skipped() -> None:
    plan = planned("fp16")
    model, optimizer = oomph.apply(plan, made(), adamw)
    before = [m.clone() for m in masters_of(optimizer)]
    step = oomph.Stepper(
        model, optimizer, lambda m, x: loss_of(m, x) * 1e4, plan, on_difference="ignore"
    )
    step(batches()[0])  # its gradients times 2 ** 16 are infinite
    assert_equal(masters_of(optimizer), before)
    for _ in range(12):
        step(batches()[0])
    assert not torch.equal(masters_of(optimizer)[0], before[0])
    assert all(m.isfinite().all() for m in masters_of(optimizer))


def test_a_checkpoint_has_the_fp32_weights() -> None:
    plan = planned()
    model, optimizer = stepped(plan)
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = copy.deepcopy(both)  # torch does not copy states that it loads
    torch.manual_seed(5)
    other, again = oomph.apply(plan, Model(), adamw)
    again.load_state_dict(saved["optimizer"])
    other.load_state_dict(saved["model"])
    for one, its in ((model, optimizer), (other, again)):
        step = oomph.Stepper(one, its, loss_of, plan, on_difference="ignore")
        step(batches()[0])
    assert_equal(masters_of(again), masters_of(optimizer))


@pytest.mark.parametrize("trick", ["zero_offload", "offload_optimizer"])
def test_weights_that_are_loaded_later_are_trained(trick: str) -> None:
    """The host's copies do not overwrite them."""
    plan = plan_of(micro_batch=4, accumulation=1, precision="bf16", **{trick: True})
    model, optimizer = oomph.apply(plan, made(), lambda p: torch.optim.SGD(p, lr=1e-6))
    torch.manual_seed(5)
    model.load_state_dict(Model().state_dict())
    loaded = model.two.weight.detach().clone()
    step = oomph.Stepper(model, optimizer, loss_of, plan, on_difference="ignore")
    step(batches()[0])
    torch.testing.assert_close(model.two.weight.detach(), loaded, rtol=1e-3, atol=1e-3)


def test_an_offloaded_optimizer_works_with_the_loss_scaler_of_fp16() -> None:
    usual = {"micro_batch": 4, "accumulation": 1, "precision": "fp16"}
    found = [
        stepped(plan_of(**usual, offload_optimizer=is_on_host), clip_grad_norm=0.1)[0]
        for is_on_host in (False, True)
    ]
    assert_equal(*([p.detach() for p in one.parameters()] for one in found))


def test_the_usual_scaler_is_refused() -> None:
    plan = planned("fp16")
    model, optimizer = oomph.apply(plan, made(), adamw)
    with pytest.raises(UsageError, match="finds no gradients"):
        oomph.Stepper(model, optimizer, loss_of, plan, scaler=torch.amp.GradScaler("cpu"))
    assert oomph.Stepper(model, optimizer, loss_of, plan, scaler=scaler_on_host("cpu"))


def test_an_optimizer_that_is_made_already_is_too_late() -> None:
    model = made()
    with pytest.raises(UsageError, match="can no longer be applied"):
        oomph.Stepper(model, adamw(model.parameters()), loss_of, planned())
    assert model.one.weight.dtype == torch.float32


def test_the_host_steps_in_one_pass_unless_told_otherwise() -> None:
    _, optimizer = oomph.apply(planned(), made(), lambda p: torch.optim.AdamW(p, lr=1e-2))
    assert all(group["fused"] for group in optimizer.param_groups)
    _, optimizer = oomph.apply(planned(), made(), adamw)
    assert not any(group["fused"] for group in optimizer.param_groups)
    assert optimizer_on_host(optimizer) is not None


def test_a_model_alone_would_be_trained_in_16_bits() -> None:
    model = made()
    with pytest.raises(UsageError, match="cannot be applied to a model alone"):
        oomph.apply(planned(), model)
    assert model.one.weight.dtype == torch.float32


def test_on_several_gpus_all_ranks_begin_with_the_same_weights() -> None:
    """DDP sends the rounded weights of the first rank; what another rank had before is dropped."""
    model = made()
    lower(model, Variant(micro_batch=2, precision="bf16", zero_offload=True, num_gpus=2))
    assert not any("_oomph_master" in vars(p) for p in model.parameters())


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(UsageError, match="sparse gradients"):
        oomph.apply(planned(), model, adamw)
    with pytest.raises(UsageError, match="sparse gradients"):
        oomph.apply(plan_of(offload_optimizer=True), model)


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"precision": "fp32"}, "bf16 or fp16"),
        ({"precision": "pure-bf16"}, "bf16 or fp16"),
        ({"offload_optimizer": True}, "both move the optimizer"),
        ({"optimizer_in_backward": True}, "on the host"),
        ({"adapters": "lora"}, "adapters"),
        ({"sharding": "fsdp", "num_gpus": 2}, "FSDP"),
        ({"accumulation": 65}, "added up in bf16"),
        ({"precision": "fp16", "accumulation": 513}, "added up in fp16"),
    ],
)
def test_what_cannot_go_together_is_told(changes: Any, because: str) -> None:
    settings = {"micro_batch": 1, "precision": "bf16", "zero_offload": True, **changes}
    found = contradiction_in(Variant(**settings), clips_gradients=False)
    assert found is not None
    assert because in str(found)


def test_clipping_accumulation_and_ddp_go_with_it() -> None:
    variant = Variant(
        micro_batch=1,
        accumulation=64,
        precision="bf16",
        zero_offload=True,
        sharding="ddp",
        num_gpus=2,
    )
    assert contradiction_in(variant, clips_gradients=True) is None
