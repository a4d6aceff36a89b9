"""What a Stepper does around the pieces: once for each step, whole or not at all."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from planning.plans import plan_of
from torch import nn
from tricks import language_models as lm

import oomph
from oomph.errors import OomphError, UsageError
from oomph.records.plan import Plan
from oomph.tricks.checkpointing import checkpoint_blocks
from training.stepper_kinds import KINDS, MESSAGE, OutOfMemoryAt, mlp, of_rows, padded, rows

Batch = tuple[torch.Tensor, torch.Tensor]


class Job:
    """A model and an optimizer in fp64, and losses that fail where it is said."""

    def __init__(self, make: Any = mlp, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = make().double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.fails: list[BaseException] = []
        self.most = 10**9  # examples that fit at a time
        self.said: list[str] = []
        self.sizes: list[int] = []
        self.step = oomph.Stepper(
            self.model, self.optimizer, self.loss, say=self.said.append, **options
        )

    def loss(self, model: Any, batch: Batch) -> Any:
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError(MESSAGE)
        loss = of_rows(model, batch)
        if self.fails:
            loss.register_hook(self._fail)  # in backward
        return loss

    def _fail(self, _: Any) -> None:
        raise self.fails.pop(0)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def batches(count: int, num: int = 12) -> list[Batch]:
    torch.manual_seed(1)
    made = [rows(num) for _ in range(count)]
    return [(x.double(), y) for x, y in made]


def by_hand(data: list[Batch], *, clip: float | None = None, scheduler: Any = None) -> Job:
    """Whole batches, without a Stepper."""
    job = Job()
    rates = scheduler(job.optimizer) if scheduler else None
    for batch in data:
        of_rows(job.model, batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(job.model.parameters(), clip)
        job.optimizer.step()
        job.optimizer.zero_grad()
        if rates:
            rates.step()
    return job


def assert_same(one: Job, other: Job) -> None:
    assert (one.weights() - other.weights()).abs().max() < 1e-12


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


# ---- once for each step ------------------------------------------------------------------------


def test_clipping_and_the_scheduler_come_once_for_each_step() -> None:
    job = Job(micro_batch=5, clip_grad_norm=0.1)
    job.step = oomph.Stepper(
        job.model,
        job.optimizer,
        job.loss,
        micro_batch=5,
        on_difference="ignore",
        clip_grad_norm=0.1,
        scheduler=halved(job.optimizer),
    )
    data = batches(3)
    norms = [job.step(batch).grad_norm for batch in data]
    assert_same(job, by_hand(data, clip=0.1, scheduler=halved))
    assert job.sizes == [4, 4, 4] * 3
    assert all(norm is not None and norm > 0.1 for norm in norms)
    assert job.optimizer.param_groups[0]["lr"] == 0.01 / 8


def test_a_ragged_last_batch_counts_as_it_should() -> None:
    job, data = Job(micro_batch=4), [*batches(2), *batches(1, num=7)]
    losses = [float(job.step(batch).loss) for batch in data]
    assert_same(job, by_hand(data))
    whole = by_hand(data[:2])
    assert losses[2] == pytest.approx(of_rows(whole.model, data[2]).item(), rel=1e-12)


def test_batches_are_accumulated_to_one_step_and_weighted_by_their_examples() -> None:
    data = [*batches(2), *batches(1, num=5), *batches(1)]
    job = Job(accumulate=3, micro_batch=4)
    stepped = [job.step(batch).has_stepped for batch in data]
    assert stepped == [False, False, True, False]
    last = job.step.flush()
    assert last is not None
    assert last.has_stepped
    assert job.step.flush() is None
    whole = [tuple(torch.cat(column) for column in zip(*data[:3], strict=True)), data[3]]
    assert_same(job, by_hand(whole))  # type: ignore[arg-type]


def test_an_error_in_the_last_of_accumulated_batches_replays_all_of_them() -> None:
    data = batches(3)
    job = Job(accumulate=3)
    job.step(data[0])
    job.step(data[1])
    job.fails = [torch.OutOfMemoryError(MESSAGE)]
    assert job.step(data[2]).num_ooms == 1
    whole = [tuple(torch.cat(column) for column in zip(*data, strict=True))]
    assert_same(job, by_hand(whole))  # type: ignore[arg-type]


def test_memory_that_runs_out_while_gradients_are_scaled_is_recovered_from() -> None:
    """Batches that weigh less than the first one leave gradients to be scaled before the step."""
    (first,), (second,) = batches(1), batches(1, num=6)
    whole, job = Job(accumulate=2), Job(accumulate=2)
    scale, fails = torch._foreach_mul_, [torch.OutOfMemoryError(MESSAGE)]

    def scaled(gradients: Any, factor: Any) -> None:
        scale(gradients, factor)
        if fails:  # when the gradients have been changed
            raise fails.pop()

    for batch in (first, second):
        whole.step(batch)
    with mock.patch.object(torch, "_foreach_mul_", scaled):
        for batch in (first, second):
            result = job.step(batch)
    assert (fails, result.num_ooms, result.has_stepped) == ([], 1, True)
    torch.testing.assert_close(job.weights(), whole.weights(), rtol=0, atol=1e-12)


def test_hooks_of_the_optimizer_come_once_for_each_step() -> None:
    job = Job(micro_batch=3)
    average = torch.optim.swa_utils.AveragedModel(job.model)
    job.optimizer.register_step_post_hook(lambda *_: average.update_parameters(job.model))
    job.most = 2
    for batch in batches(4):
        job.step(batch)
    assert int(average.n_averaged) == 4


def test_hooks_of_gradients_see_what_they_would_see() -> None:
    job = Job(micro_batch=4, on_difference="ignore")
    seen: list[torch.Tensor] = []
    last = list(job.model.parameters())[-1]
    last.register_hook(lambda gradient: seen.append(gradient.clone()))
    (batch,) = batches(1)
    of_rows(job.model, batch).backward()
    job.optimizer.zero_grad()
    job.step(batch)
    assert (seen[0] - sum(seen[1:])).abs().max() < 1e-15


def test_several_optimizers_step_together() -> None:
    job, (batch,) = Job(), batches(1)
    first, second = list(job.model.parameters())[:2], list(job.model.parameters())[2:]
    optimizers = [torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(second, lr=0.01)]
    before = [p.clone() for p in job.model.parameters()]
    oomph.Stepper(job.model, optimizers, job.loss)(batch)
    assert not any(torch.equal(a, b) for a, b in zip(before, job.model.parameters(), strict=True))


def test_pieces_in_which_every_label_is_ignored_are_left_out() -> None:
    torch.manual_seed(3)
    batch = padded(6)
    batch["labels"][2] = -100
    kind = KINDS["transformer, padding and ignored labels"]
    gradients = []
    for size in (6, 1):
        model = kind.make(torch.float64)
        step = oomph.Stepper(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            kind.loss,
            weight="tokens",
            micro_batch=size,
        )
        before = nn.utils.parameters_to_vector(model.parameters())
        step(batch)
        gradients.append(before - nn.utils.parameters_to_vector(model.parameters()))
    assert (gradients[0] - gradients[1]).abs().max() < 1e-14


# ---- precision -----------------------------------------------------------------------------------


def test_a_scaler_unscales_once_and_a_skipped_step_moves_no_scheduler() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step = oomph.Stepper(
        model,
        optimizer,
        of_rows,
        scaler=scaler,
        clip_grad_norm=1e6,
        scheduler=halved(optimizer),
        micro_batch=4,
    )
    batch = rows(12)
    of_rows(model, batch).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    norm = step(batch).grad_norm
    assert norm is not None
    assert float(norm) == pytest.approx(float(torch.stack([g.norm() for g in gradients]).norm()))
    assert optimizer.param_groups[0]["lr"] == 0.05
    step((batch[0] * float("inf"), batch[1]))
    assert scaler.get_scale() == 2.0**9
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_after_an_error_in_the_update_a_scaler_can_go_on() -> None:
    job = Job(scaler=torch.amp.GradScaler("cpu"), clip_grad_norm=1.0)
    (batch,) = batches(1)
    hook = job.optimizer.register_step_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        job.step(batch)
    hook.remove()
    job.step(batch)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# ---- out of memory -------------------------------------------------------------------------------


def test_sizes_go_down_until_they_fit_and_are_remembered() -> None:
    job, data = Job(), batches(3)
    job.most = 3
    results = [job.step(batch) for batch in data]
    assert [result.num_ooms for result in results] == [2, 0, 0]
    assert [result.micro_batch for result in results] == [3, 3, 3]
    assert len(job.said) == 2
    assert "out of memory with 12 of 12 examples at a time; trying 6 at a time" in job.said[0]
    assert_same(job, by_hand(data))


def test_an_error_that_is_none_of_memory_is_raised_with_everything_as_it_was() -> None:
    job, (batch,) = Job(micro_batch=4), batches(1)
    job.step(batch)
    weights, drawn = job.weights(), torch.get_rng_state()
    job.fails = [RuntimeError("CUDA error: device-side assert triggered")]
    with pytest.raises(RuntimeError, match="device-side assert"):
        job.step(batch)
    assert torch.equal(job.weights(), weights)
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(p.grad is None for p in job.model.parameters())
    job.step(batch)
    assert_same(job, by_hand([batch, batch]))


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
        super().__init__(*blocks)


def test_when_one_example_does_not_fit_tricks_are_switched_on_and_then_it_ends() -> None:
    job, (batch,) = Job(Blocks), batches(1)
    job.step(batch)
    weights, states = job.weights(), copy.deepcopy(job.optimizer.state_dict())
    job.most = 0
    with pytest.raises(OomphError, match="one step does not fit") as caught:
        job.step(batch)
    because = caught.value.because or ""
    for tried in ("12 of 12", "1 of 12", "recomputing 3 blocks", "offloading", "CUDA out of"):
        assert tried in because
    assert torch.equal(job.weights(), weights)
    for number, state in job.optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[name], states["state"][number][name]) for name in state)
    job.most = 12
    result = job.step(batch)  # and goes on, with the tricks
    assert result.micro_batch == 1
    job.step(batch)
    other = Job(Blocks)
    for _ in range(3):
        other.step(batch)
    assert_same(job, other)


def test_after_a_trick_larger_sizes_are_tried_step_by_step() -> None:
    job, (batch,) = Job(Blocks), batches(1)
    job.most = 0
    offload = job.step._recovery.resorts.switch_on

    def freeing(memory: Any) -> str | None:
        job.most = 4
        return offload(memory)

    job.step._recovery.resorts.switch_on = freeing  # type: ignore[method-assign]
    sizes = [job.step(batch).micro_batch for _ in range(6)]
    assert sizes[:4] == [1, 2, 3, 4]
    assert max(sizes) == 4


@contextlib.contextmanager
def failing_once(job: Job, at: int) -> Iterator[OutOfMemoryAt]:
    """In the first attempt of an update, before its op of that number."""
    injector = OutOfMemoryAt()
    job.optimizer.register_step_pre_hook(
        lambda *_: None if injector.num_raised else injector.arm([at])
    )
    job.optimizer.register_step_post_hook(injector.disarm)
    with injector:
        yield injector


@pytest.mark.parametrize("at", [2, 5, 9, 14])
def test_a_first_update_that_runs_out_of_memory_is_undone_and_done_again(at: int) -> None:
    job, (batch,) = Job(), batches(1)
    with failing_once(job, at) as injector:
        job.step(batch)
        assert injector.num_raised == 1
    assert_same(job, by_hand([batch]))


def test_a_fused_update_with_a_scaler_is_done_again_parameter_by_parameter() -> None:
    torch.manual_seed(0)
    model, (batch,) = mlp().double(), batches(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step = oomph.Stepper(model, optimizer, of_rows, scaler=torch.amp.GradScaler("cpu"))
    failures = [torch.OutOfMemoryError(MESSAGE)]

    def short(*_: Any) -> None:
        if failures:
            raise failures.pop()

    optimizer.register_step_post_hook(short)
    step(batch)
    step(batch)
    expected = by_hand([batch, batch])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (weights - expected.weights()).abs().max() < 1e-9


def test_a_later_update_that_runs_out_of_memory_says_that_it_is_half_done() -> None:
    job, (batch,) = Job(), batches(1)
    job.step(batch)
    with failing_once(job, 5), pytest.raises(OomphError, match="in the middle of its step"):
        job.step(batch)


def test_with_copies_of_each_step_a_later_update_is_done_again_too() -> None:
    job, (batch,) = Job(copies="always"), batches(1)
    job.step(batch)
    with failing_once(job, 5):
        job.step(batch)
    assert_same(job, by_hand([batch, batch]))


def test_an_optimizer_that_never_fits_leaves_everything_as_it_was() -> None:
    job, (batch,) = Job(), batches(1)
    weights = job.weights()

    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError(MESSAGE)

    hook = job.optimizer.register_step_post_hook(short)
    with pytest.raises(OomphError, match="the optimizer's step does not fit"):
        job.step(batch)
    assert torch.equal(job.weights(), weights)
    assert not job.optimizer.state
    hook.remove()
    job.step(batch)
    assert_same(job, by_hand([batch]))


@pytest.mark.slow
def test_two_hundred_recoveries_leave_nothing_behind() -> None:
    job, (batch,) = Job(), batches(1)

    def recover() -> None:
        job.step.forget_sizes()
        job.fails = [torch.OutOfMemoryError(MESSAGE)]
        assert job.step(batch).num_ooms == 1

    for _ in range(3):
        recover()
    before = num_tensors()
    for _ in range(200):
        recover()
    assert num_tensors() <= before


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


# ---- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["loss", "backward"])
def test_ctrl_c_in_a_piece_goes_back_to_the_last_whole_step(where: str) -> None:
    job, data = Job(micro_batch=4, on_difference="ignore"), batches(2)
    job.step(data[0])
    weights = job.weights()
    if where == "backward":
        job.fails = [KeyboardInterrupt()]
        with pytest.raises(KeyboardInterrupt):
            job.step(data[1])
    else:
        handle = job.model.register_forward_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGINT) if len(job.sizes) == 5 else None
        )
        with pytest.raises(KeyboardInterrupt):
            job.step(data[1])
        handle.remove()
    assert torch.equal(job.weights(), weights)
    assert all(p.grad is None for p in job.model.parameters())
    job.step(data[1])
    assert_same(job, by_hand(data))


def test_ctrl_c_in_an_update_is_heard_when_the_update_is_whole() -> None:
    job, data = Job(micro_batch=4), batches(2)
    rates = halved(job.optimizer)
    job.step = oomph.Stepper(job.model, job.optimizer, job.loss, scheduler=rates)
    job.optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        job.step(data[0])
    assert signal.getsignal(signal.SIGINT) is before
    assert rates.last_epoch == 1
    assert all(p.grad is None for p in job.model.parameters())
    assert_same(job, by_hand(data[:1]))


def test_a_step_in_another_thread_works_without_signals() -> None:
    job, data = Job(), batches(1)
    thread = threading.Thread(target=lambda: job.step(data[0]))
    thread.start()
    thread.join()
    assert_same(job, by_hand(data))


# ---- a forward of one's own ----------------------------------------------------------------------


def test_pieces_for_a_forward_of_ones_own_give_the_same_step() -> None:
    job, data = Job(), batches(3)
    job.most = 5
    seen: list[int] = []
    for batch in data:
        for micro in job.step.micro(batch):
            if micro.is_first:
                seen = []
            with micro:
                micro.backward(job.loss(job.model, micro.data))
                seen += micro.data[1].tolist()
        assert seen == batch[1].tolist()
    assert job.step.result is not None
    assert job.step.num_ooms == 2
    assert_same(job, by_hand(data))


def test_a_piece_that_is_left_out_is_an_error() -> None:
    job, (batch,) = Job(micro_batch=4), batches(1)
    with pytest.raises(UsageError, match="a piece of the batch was left out"):
        list(job.step.micro(batch))


def test_a_loop_that_is_left_early_steps_nothing() -> None:
    job, (batch,) = Job(micro_batch=4), batches(1)
    weights = job.weights()
    pieces = job.step.micro(batch)
    with next(pieces) as micro:
        micro.backward(job.loss(job.model, micro.data))
    pieces.close()  # type: ignore[attr-defined]
    assert torch.equal(job.weights(), weights)
    assert all(p.grad is None for p in job.model.parameters())
    job.step(batch)
    assert_same(job, by_hand([batch]))


def test_other_errors_in_a_piece_are_the_users() -> None:
    job, (batch,) = Job(micro_batch=4), batches(1)
    pieces = job.step.micro(batch)
    micro = next(pieces)
    with pytest.raises(ZeroDivisionError), micro:
        micro.backward(1 / 0 * job.loss(job.model, micro.data))
    assert all(p.grad is None for p in job.model.parameters())


# ---- plans and options ---------------------------------------------------------------------------


def planned(**settings: Any) -> Plan:
    return plan_of(micro_batch=3, accumulation=4, **settings)


def test_a_plan_is_put_on_and_its_size_is_the_first() -> None:
    job, (batch,) = Job(Blocks), batches(1)
    step = oomph.Stepper(
        job.model, job.optimizer, job.loss, planned(checkpointing="blocks", optimizer="for-loop")
    )
    assert step(batch).micro_batch == 3
    assert job.optimizer.param_groups[0]["foreach"] is False
    other = Job(Blocks)
    other.step(batch)
    assert_same(job, other)
    with pytest.raises(UsageError, match="recomputed already"):
        checkpoint_blocks(job.model, "blocks")


def test_what_comes_before_the_optimizer_is_put_on_by_apply() -> None:
    plan = planned(optimizer="adafactor", precision="pure-bf16")
    with pytest.raises(UsageError, match="can no longer be applied") as caught:
        oomph.Stepper(nn.Linear(8, 4), torch.optim.AdamW([torch.zeros(1)]), plan=plan)
    assert "oomph.apply" in (caught.value.attempt or "")
    model, optimizer = oomph.apply(plan, mlp(), lambda p: torch.optim.AdamW(p, lr=0.01))
    assert isinstance(optimizer, torch.optim.Adafactor)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    step = oomph.Stepper(model, optimizer, of_rows, plan)
    batch = rows(12)
    step((batch[0].bfloat16(), batch[1]))


@pytest.mark.parametrize("has_too_little", [False, True])
def test_adapters_beside_weights_in_16_bits_are_trained_as_by_hand(*, has_too_little: bool) -> None:
    plan = planned(adapters="lora", lora_rank=2, precision="bf16")

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = lm.llama().float()
        found: Any = oomph.apply(plan, model, lambda p: torch.optim.SGD(p, lr=1.0))
        return found[0], found[1]

    def loss(model: nn.Module, data: Any) -> torch.Tensor:
        if has_too_little and len(data["input_ids"]) > 1:
            raise torch.OutOfMemoryError(MESSAGE)
        out: torch.Tensor = model(**data).loss
        return out

    model, optimizer = made()
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert {p.dtype for name, p in frozen.items() if "proj" in name} == {torch.bfloat16}
    batch = lm.text(4)
    step = oomph.Stepper(model, optimizer, loss, plan, weight="next-tokens")
    for _ in range(2):
        step(batch)
    assert step.micro_batch == (1 if has_too_little else 3)
    other, by_hand_one = made()
    for _ in range(2):
        by_hand_one.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            of_all = other(**batch).loss
        of_all.backward()
        by_hand_one.step()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        if name in frozen:
            assert torch.equal(one, frozen[name])
        else:  # the sums of two pieces are rounded to 16 bits one by one
            assert (one - two).norm() <= 0.02 * two.norm()
    evaluated = step.evaluate(batch, lambda model, data: model(**data).loss)
    assert torch.isfinite(evaluated)


def test_an_optimizer_that_steps_in_backward_is_not_left_in_the_middle_in_silence() -> None:
    plan = plan_of(micro_batch=12, accumulation=1, optimizer_in_backward=True)
    job, (batch,) = Job(), batches(1)
    step = oomph.Stepper(job.model, job.optimizer, job.loss, plan, last_resorts=())
    step(batch)
    assert_same(job, by_hand([batch]))
    weights = job.weights()
    job.most = 0  # in forward: nothing has been updated
    with pytest.raises(OomphError, match="one step does not fit"):
        step(batch)
    assert torch.equal(job.weights(), weights)
    job.most = 12
    job.fails = [torch.OutOfMemoryError(MESSAGE)]
    with pytest.raises(OomphError, match="in the middle of its step"):
        step(batch)
    with pytest.raises(UsageError, match="does not work with an optimizer that steps in backward"):
        next(iter(step.micro(batch)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "0 batches"),
        ({"copies": "often"}, "'often'"),
        ({"weight": "median"}, "'median'"),
        ({"on_difference": "shrug"}, "'shrug'"),
        ({"batch_dim": "first"}, "'first'"),
        ({"last_resorts": ("magic",)}, "'magic'"),
        ({"plan": planned(), "precision": "bf16"}, "contradicts the plan's"),
        ({"plan": plan_of(num_gpus=2)}, "several"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(UsageError, match=message):
        oomph.Stepper(model, torch.optim.SGD(model.parameters()), of_rows, **options)


def test_a_scheduler_that_wants_a_measure_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(UsageError, match="ReduceLROnPlateau"):
        oomph.Stepper(model, optimizer, of_rows, scheduler=plateau)
    with pytest.raises(UsageError, match="no loss"):
        oomph.Stepper(model, optimizer)(rows(2))


@pytest.mark.parametrize("loss", [{"loss": torch.ones(())}, torch.ones(3), None], ids=str)
def test_a_loss_that_is_no_number_is_named(loss: Any) -> None:
    model = mlp()
    step = oomph.Stepper(model, torch.optim.SGD(model.parameters()), lambda *_: loss)
    with pytest.raises(UsageError, match="the loss is"):
        step(rows(2))


def test_a_batch_that_nobody_could_count_is_counted_and_split_by_functions() -> None:
    """As graphs are: their tensors have rows for nodes, and not for graphs."""

    class Graphs:
        def __init__(self, nodes: list[Any]) -> None:
            self.x, self.nums = torch.cat(nodes), list(map(len, nodes))

        def cut(self, sizes: Any) -> list[Any]:
            nodes = iter(torch.split(self.x, self.nums))
            return [Graphs([next(nodes) for _ in range(size)]) for size in sizes]

    def loss(model: Any, graphs: Any) -> Any:
        return model(graphs.x).sum() / len(graphs.nums)

    torch.manual_seed(0)
    first = mlp()
    batch = Graphs([torch.randn(num, 8) for num in (1, 4, 2, 3, 2)])
    found = []
    for size in (5, 2):
        model = copy.deepcopy(first)
        step = oomph.Stepper(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            loss,
            micro_batch=size,
            split=Graphs.cut,
            count=lambda graphs: len(graphs.nums),
        )
        assert step(batch).num_pieces == -(-5 // size)
        found.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.allclose(found[0], found[1], rtol=1e-5)


def test_a_schedule_that_fails_leaves_a_whole_step() -> None:
    """The optimizer has stepped: running statistics are not those of before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    step = oomph.Stepper(model, optimizer, of_rows, scheduler=rates)
    for number in range(3):
        before = {name: each.clone() for name, each in model.state_dict().items()}
        batch = torch.randn(6, 8), torch.randint(0, 4, (6,))
        if number < 2:
            step(batch)
        else:
            with pytest.raises(ValueError, match="total steps"):
                step(batch)
        after = model.state_dict()
        assert not torch.equal(before["0.weight"], after["0.weight"])
        assert int(after["1.num_batches_tracked"]) == number + 1
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_within_another_is_refused() -> None:
    """Each would step with the gradients of both."""
    job = Job()
    first, second = batches(2)
    pieces: Any = job.step.micro(first)
    with next(pieces) as micro:
        micro.backward(of_rows(job.model, micro.data))
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    for begin in (lambda: job.step(second), lambda: next(job.step.micro(second)), job.step.flush):
        with pytest.raises(UsageError, match="while another one is being run"):
            begin()
    with pytest.raises(UsageError, match="is being run"):
        job.step.load_state_dict(Job().step.state_dict())
    pieces.close()
    pairs = zip(job.model.parameters(), before, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    job.step(second)
    assert_same(job, by_hand([second]))


def test_a_plan_whose_gpus_share_layers_is_refused_by_name() -> None:
    plan = plan_of(num_gpus=8, tensor_parallel=8, sharding="none")
    job = Job()
    with pytest.raises(UsageError, match="layers that several GPUs share"):
        oomph.Stepper(job.model, job.optimizer, lambda model, batch: model(batch).sum(), plan=plan)
