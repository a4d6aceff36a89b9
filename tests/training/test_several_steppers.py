"""Several Steppers that train parts of one whole are the ordinary loop, with errors or without."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

import oomph
from oomph.errors import UsageError
from training.stepper_kinds import MESSAGE

NUM, STEPS = 8, 5


class Gan:
    """A generator and a discriminator with state of its own, and the losses of both."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.d = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1)
        ).double()
        self.opt_g = torch.optim.SGD(self.g.parameters(), 0.3, momentum=0.5)
        self.opt_d = torch.optim.SGD(self.d.parameters(), 0.3, momentum=0.5)
        self.both = nn.ModuleDict({"g": self.g, "d": self.d})
        self.detaches = True
        self.penalty = 0.0
        self.most = 10**9
        self.fails_after = -1  # pieces: the next backward fails

    def loss_of_d(self, batch: Any) -> Any:
        real, z = batch
        self._check(real)
        fake = self.g(z).detach() if self.detaches else self.g(z)
        loss = F.softplus(-self.d(real)).mean() + F.softplus(self.d(fake)).mean()
        if self.penalty:
            mixed = ((real + fake) / 2).detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.d(mixed).sum(), mixed, create_graph=True)
            loss = loss + self.penalty * (slope.square().sum(1) - 1).square().mean()
        return self._failing(loss)

    def loss_of_g(self, batch: Any) -> Any:
        self._check(batch[0])
        return self._failing(F.softplus(-self.d(self.g(batch[1]))).mean())

    def _check(self, rows: Any) -> None:
        if len(rows) > self.most:
            raise torch.OutOfMemoryError(MESSAGE)

    def _failing(self, loss: Any) -> Any:
        self.fails_after -= 1
        if self.fails_after == -1:
            loss.register_hook(_fail)
        return loss

    def weights(self) -> torch.Tensor:
        state = self.both.state_dict().values()
        return torch.cat([each.detach().flatten() for each in state])


def _fail(_: Any) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


def batches() -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(NUM, 4).double(), torch.randn(NUM, 3).double()) for _ in range(STEPS)]


def ordinary(order: str = "dg", **settings: Any) -> Gan:
    gan = Gan()
    vars(gan).update(settings)
    for batch in batches():
        for which in order:
            if which == "d":
                gan.opt_d.zero_grad()
                gan.loss_of_d(batch).backward()
                gan.opt_d.step()
            else:
                gan.opt_g.zero_grad()
                gan.loss_of_g(batch).backward()
                gan.opt_g.step()
    return gan


def assert_same(one: Gan, other: Gan) -> None:
    # spectral_norm's vectors move with each forward, so with each piece.
    ours, theirs = one.weights(), other.weights()
    assert (ours - theirs).abs().max() < 1e-12


def steppers(made: str, gan: Gan, **options: Any) -> tuple[Any, Any]:
    """That of the discriminator, and that of the generator."""
    of_d, of_g = (gan.d, gan.g) if made == "its own model each" else (gan.both, gan.both)
    options = {"say": lambda _: None, **options}
    return (
        oomph.Stepper(of_d, gan.opt_d, lambda _, b: gan.loss_of_d(b), **options),
        oomph.Stepper(of_g, gan.opt_g, lambda _, b: gan.loss_of_g(b), **options),
    )


STEPPERS = ("its own model each", "both models")


@pytest.mark.parametrize("detaches", [True, False])
@pytest.mark.parametrize("penalty", [0.0, 10.0])
@pytest.mark.parametrize("order", ["dg", "gd", "ddg"])
@pytest.mark.parametrize("made", STEPPERS)
def test_a_gan_with_two_steppers_is_the_ordinary_loop(
    made: str, order: str, penalty: float, detaches: bool
) -> None:
    gan = Gan()
    gan.detaches, gan.penalty = detaches, penalty
    step_d, step_g = steppers(made, gan)
    for batch in batches():
        for which in order:
            (step_d if which == "d" else step_g)(batch)
    assert_same(gan, ordinary(order, detaches=detaches, penalty=penalty))
    assert all(p.grad is None for p in gan.both.parameters())


@pytest.mark.parametrize("fails_after", range(3))
@pytest.mark.parametrize("made", STEPPERS)
def test_a_gan_with_errors_is_the_same_in_pieces_without(made: str, fails_after: int) -> None:
    """In both steps, in every piece: also what the other network writes is set back."""
    gan, other = Gan(), Gan()
    counted = {"on_difference": "ignore"}  # the check of the first split would call losses, too
    (step_d, step_g), pieces = steppers(made, gan, **counted), steppers(made, other, **counted)
    for batch in batches():
        for step, same in zip((step_d, step_g), pieces, strict=True):
            step.forget_sizes()
            gan.most, gan.fails_after = 4, fails_after
            assert step(batch).num_ooms == 1 + (fails_after < 2)
            same._recovery.sizes._first = step.micro_batch
            same(batch)
    assert torch.equal(gan.weights(), other.weights())


def test_gradients_of_one_survive_the_steps_of_the_other() -> None:
    """The discriminator accumulates two batches, the generator steps with each."""
    gan, data = Gan(), batches()[:4]
    step_d = oomph.Stepper(gan.d, gan.opt_d, lambda _, b: gan.loss_of_d(b), accumulate=2)
    step_g = oomph.Stepper(gan.g, gan.opt_g, lambda _, b: gan.loss_of_g(b))
    for batch in data:
        step_d(batch)
        step_g(batch)
    other = Gan()
    for number, batch in enumerate(data):
        for p in other.d.parameters():
            p.requires_grad_(True)
        (other.loss_of_d(batch) / 2).backward()
        if number % 2:
            other.opt_d.step()
            other.opt_d.zero_grad()
        for p in other.d.parameters():
            p.requires_grad_(False)
        other.opt_g.zero_grad()
        other.loss_of_g(batch).backward()
        other.opt_g.step()
    assert_same(gan, other)


@pytest.mark.parametrize("by_hand", ["d", "g"])
def test_one_of_two_may_be_trained_by_hand(by_hand: str) -> None:
    gan = Gan()
    said: list[str] = []
    if by_hand == "g":
        step = oomph.Stepper(gan.d, gan.opt_d, lambda _, b: gan.loss_of_d(b), say=said.append)
    else:
        step = oomph.Stepper(gan.g, gan.opt_g, lambda _, b: gan.loss_of_g(b), say=said.append)
    for batch in batches():
        if by_hand == "d":
            gan.opt_d.zero_grad()
            gan.loss_of_d(batch).backward()
            gan.opt_d.step()
        step(batch)
        if by_hand == "g":
            gan.opt_g.zero_grad()
            gan.loss_of_g(batch).backward()
            gan.opt_g.step()
    assert_same(gan, ordinary())
    assert len(said) == (by_hand == "g")
    assert not said or "keeps_gradients=True" in said[0]


def test_clipping_counts_the_gradients_of_its_own_network_only() -> None:
    gan, (batch, *_) = Gan(), batches()
    _, step_g = steppers("both models", gan)
    clipped = oomph.Stepper(gan.both, gan.opt_g, lambda _, b: gan.loss_of_g(b), clip_grad_norm=1e9)
    other = Gan()
    other.loss_of_g(batch).backward()
    expected = nn.utils.clip_grad_norm_(other.g.parameters(), 1e9)
    norm = clipped(batch).grad_norm
    assert norm is not None
    assert float(norm) == pytest.approx(float(expected), rel=1e-12)
    del step_g


def test_gradients_from_before_are_added_to_when_that_is_asked_for() -> None:
    results = []
    for keeps in (True, False):
        torch.manual_seed(0)
        model, said = nn.Linear(4, 1).double(), list[str]()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        calls: list[int] = []

        def loss(model: Any, x: Any, calls: list[int] = calls) -> Any:
            calls.append(len(x))
            value = model(x).square().mean()
            if len(calls) == 1:
                value.register_hook(_fail)
            return value

        x = torch.randn(NUM, 4).double()
        before = nn.utils.parameters_to_vector(model.parameters()).clone()
        step = oomph.Stepper(
            model, optimizer, loss, keeps_gradients=keeps, say=said.append, micro_batch=4
        )
        model.weight.square().sum().backward()  # type: ignore[no-untyped-call]
        step(x)
        results.append(before - nn.utils.parameters_to_vector(model.parameters()))
        assert sum("dropped" in each for each in said) == (not keeps)
    difference = results[0] - results[1]
    torch.manual_seed(0)
    weight = nn.Linear(4, 1).double().weight
    assert (difference[:4] - 2 * weight.flatten()).abs().max() < 1e-15
    assert difference[4].abs() < 1e-15


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 1)


def actor_loss(model: Any, batch: Any) -> Any:
    hidden = torch.tanh(model.trunk(batch[0]))
    advantage = batch[1] - model.critic(hidden).squeeze(-1).detach()
    return -(torch.log_softmax(model.actor(hidden), -1)[:, 0] * advantage).mean()


def critic_loss(model: Any, batch: Any) -> Any:
    return F.mse_loss(model.critic(torch.tanh(model.trunk(batch[0]))).squeeze(-1), batch[1])


def actor_critic() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = ActorCritic().double()
    actor = [*model.trunk.parameters(), *model.actor.parameters()]
    critic = [*model.trunk.parameters(), *model.critic.parameters()]
    return model, torch.optim.SGD(actor, 0.1), torch.optim.SGD(critic, 0.2)


def test_two_optimizers_that_share_a_trunk() -> None:
    torch.manual_seed(1)
    data = [(torch.randn(NUM, 4).double(), torch.randn(NUM).double()) for _ in range(STEPS)]
    model, *optimizers = actor_critic()
    losses = (actor_loss, critic_loss)
    steps = [
        oomph.Stepper(model, optimizer, loss, micro_batch=3)
        for optimizer, loss in zip(optimizers, losses, strict=True)
    ]
    other, *others = actor_critic()
    for batch in data:
        for step, optimizer, loss in zip(steps, others, losses, strict=True):
            step(batch)
            optimizer.zero_grad()
            loss(other, batch).backward()
            optimizer.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert (one - two).abs().max() < 1e-12


def test_two_that_accumulate_on_the_same_parameters_are_refused() -> None:
    model, *optimizers = actor_critic()
    batch = (torch.randn(NUM, 4).double(), torch.randn(NUM).double())
    first = oomph.Stepper(model, optimizers[0], actor_loss, accumulate=2)
    second = oomph.Stepper(model, optimizers[1], critic_loss)
    first(batch)
    gradient = model.trunk.weight.grad.clone()
    with pytest.raises(UsageError, match="two Steppers accumulate"):
        second(batch)
    assert torch.equal(model.trunk.weight.grad, gradient)
    first.flush()
    second(batch)


def test_one_stepper_for_two_optimizers_is_the_sum_of_their_losses() -> None:
    gan, other = Gan(), Gan()

    def both(of: Gan) -> Callable[[Any, Any], Any]:
        return lambda _, batch: of.loss_of_d(batch) + of.loss_of_g(batch)

    step = oomph.Stepper(gan.both, [gan.opt_d, gan.opt_g], both(gan))
    for batch in batches():
        step(batch)
        other.both.zero_grad()
        both(other)(None, batch).backward()
        other.opt_d.step()
        other.opt_g.step()
    assert_same(gan, other)


def test_parameters_that_no_optimizer_has_are_told_of_and_do_not_pile_up() -> None:
    said: list[str] = []
    body, head = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
    model = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(head.parameters(), 0.0)
    step = oomph.Stepper(model, optimizer, lambda m, x: m(x).mean(), say=said.append)
    x = torch.randn(NUM, 4).double()
    (expected,) = torch.autograd.grad(model(x).mean(), body.weight)
    for _ in range(3):
        step(x)
        assert body.weight.grad is not None  # for an optimizer of the user's own
        assert torch.allclose(body.weight.grad, expected)
    assert len(said) == 1
    assert "0.weight and 1 more" in said[0]


def test_the_gan_of_the_document_is_the_ordinary_loop() -> None:
    document = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    codes = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    (code,) = (each for each in codes if "step_d" in each)
    gan = Gan()
    names = {
        "oomph": oomph,
        "F": F,
        "generator": gan.g,
        "discriminator": gan.d,
        "optimizer_g": gan.opt_g,
        "optimizer_d": gan.opt_d,
        "loader": batches(),
    }
    exec(code, names)  # noqa: S102
    assert_same(gan, ordinary())
