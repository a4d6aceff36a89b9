"""Every loss of torch, with its options: backward works in place where torch's own does.

A dispatch mode makes backward formulas copy. Where the rule that undoes this takes a tensor of the
user's for one of backward's own, a rehearsal fails, and the emulated GPU spoils the tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from rehearsing import real_run
from rehearsing.zoo.kind import Kind
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import oomph
from oomph.pretending import ops

pytestmark = pytest.mark.filterwarnings("ignore:reduction.*mean")  # of KLDivLoss

N, C = 6, 5
Case = tuple[nn.Module, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


def numbers(*shape: int) -> torch.Tensor:
    return torch.linspace(-2, 2.5, torch.Size(shape).numel()).sin().reshape(shape)


def shares(*shape: int) -> torch.Tensor:
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel()).reshape(shape)


def classes(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % C


def weighted(reduction: str, weight: torch.Tensor | None) -> Iterator[tuple[str, Case]]:
    how: dict[str, Any] = {"reduction": reduction, "weight": weight}
    yield "bce", (nn.BCELoss(**how), (shares(N, C),), (shares(N, C),))
    for pos_weight in (None, shares(C), shares(N, C), shares(1)):
        of_what = "" if pos_weight is None else f" of {tuple(pos_weight.shape)}"
        loss: nn.Module = nn.BCEWithLogitsLoss(pos_weight=pos_weight, **how)
        yield f"bce with logits{of_what}", (loss, (numbers(N, C),), (shares(N, C),))
    for smoothing, ignored in product((0.0, 0.1), (-100, 2)):
        loss = nn.CrossEntropyLoss(label_smoothing=smoothing, ignore_index=ignored, **how)
        name = f"cross entropy {smoothing} {ignored}"
        yield name, (loss, (numbers(N, C),), (classes(N),))
        yield f"{name} of images", (loss, (numbers(N, C, 4, 3),), (classes(N, 4, 3),))
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, **how)
    yield "cross entropy of shares", (loss, (numbers(N, C),), (shares(N, C).softmax(1),))
    yield "nll", (nn.NLLLoss(**how), (numbers(N, C).log_softmax(1),), (classes(N),))
    for p in (1, 2):
        loss = nn.MultiMarginLoss(p=p, **how)
        yield f"multi margin {p}", (loss, (numbers(N, C),), (classes(N),))
    loss = nn.MultiLabelSoftMarginLoss(**how)
    yield "multi label soft", (loss, (numbers(N, C),), (shares(N, C).round(),))


def unweighted(reduction: str) -> Iterator[tuple[str, Case]]:
    how: dict[str, Any] = {"reduction": reduction}
    signs = numbers(N, C).sign()
    for kind in (nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.SoftMarginLoss):
        yield kind.__name__, (kind(**how), (numbers(N, C) / 2,), (signs,))
    yield "hinge", (nn.HingeEmbeddingLoss(**how), (numbers(N, C),), (signs,))
    yield "multi label", (nn.MultiLabelMarginLoss(**how), (numbers(N, C),), (classes(N, C) - 1,))
    for first, second in product((False, True), repeat=2):
        loss: nn.Module = nn.PoissonNLLLoss(log_input=first, full=second, **how)
        yield f"poisson {first} {second}", (loss, (shares(N, C),), (shares(N, C) * 3,))
    for is_so in (False, True):
        loss = nn.KLDivLoss(log_target=is_so, **how)
        yield f"kl {is_so}", (loss, (numbers(N, C).log_softmax(1),), (shares(N, C),))
        loss = nn.GaussianNLLLoss(full=is_so, **how)
        yield f"gaussian {is_so}", (loss, (numbers(N, C),), (numbers(N, C) / 3, shares(N, C)))
        three = (numbers(N, C), shares(N, C), numbers(N, C) * 2)
        yield f"triplet {is_so}", (nn.TripletMarginLoss(swap=is_so, **how), three, ())
        loss = nn.CTCLoss(zero_infinity=is_so, **how)
        lengths = (torch.full((N,), 12), torch.full((N,), 4))
        targets = (classes(N, 4).clamp(1), *lengths)
        yield f"ctc {is_so}", (loss, (numbers(12, N, C).log_softmax(2),), targets)
    two = (numbers(N, C), shares(N, C))
    yield "cosine", (nn.CosineEmbeddingLoss(margin=0.1, **how), two, (numbers(N).sign(),))
    two = (numbers(N), shares(N))
    yield "ranking", (nn.MarginRankingLoss(margin=0.1, **how), two, (numbers(N).sign(),))


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for reduction in ("mean", "sum"):  # what "none" leaves to the user is a sum here
        for name, case in unweighted(reduction):
            found[f"{name}, {reduction}"] = case
        for weight in (None, shares(C)):
            for name, case in weighted(reduction, weight):
                found[f"{name}, {reduction}, {'plain' if weight is None else 'weighted'}"] = case
    return found


CASES = cases()


def gradients(case: Case, device: str = "cpu") -> list[torch.Tensor]:
    loss, inputs, others = case
    leaves = [each.detach().clone().to(device).requires_grad_() for each in inputs]
    moved: Any = loss.to(device)
    out: Any = moved(*[leaf * 1 for leaf in leaves], *[other.to(device) for other in others])
    out.sum().backward()
    return [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]


OF_BACKWARD = {*ops.IN_PLACE, *ops.IN_PLACE.values()}


def done_in_truth(case: Case) -> Counter[str]:
    """The ops that backward's formulas and the engine call, as torch's profiler counts them."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        gradients(case)
    found: Counter[str] = Counter()
    for event in profiled.events() or ():
        name, parent = event.name.removeprefix("aten::"), event.cpu_parent
        while parent is not None and not parent.name.startswith(("aten::", "autograd::engine")):
            parent = parent.cpu_parent
        is_direct = parent is not None and parent.name.startswith("autograd::engine")
        if is_direct and event.name.startswith("aten::") and name in OF_BACKWARD:
            found[name] += 1
    return found


class Ruled(TorchDispatchMode):
    """Counts what the rule makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.partition("::")[2]
        if torch._C._current_autograd_node() is None:
            return function(*args, **(kwargs or {}))
        if name in ops.IN_PLACE and ops.is_in_place(name, args):
            self.done[ops.IN_PLACE[name]] += 1
            return getattr(torch.ops.aten, ops.IN_PLACE[name])(*args, **(kwargs or {}))
        if name in OF_BACKWARD:
            self.done[name] += 1
        return function(*args, **(kwargs or {}))


def test_all_losses_of_torch_are_here_but_those_that_call_another() -> None:
    losses = {name for name in dir(nn.modules.loss) if name.endswith("Loss")}
    of_others = {"LinearCrossEntropyLoss", "TripletMarginWithDistanceLoss"}
    tried = {type(loss).__name__ for loss, _, _ in CASES.values()}
    assert {name for name in losses if not name.startswith("_")} - of_others == tried


@pytest.mark.parametrize("name", CASES)
def test_backward_works_in_place_where_it_does_without_a_dispatch_mode(name: str) -> None:
    ops.calibrate()
    truth = done_in_truth(CASES[name])
    with Ruled() as ruled:
        gradients(CASES[name])
    assert ruled.done == truth


@pytest.mark.parametrize("name", CASES)
def test_the_emulated_gpu_has_the_gradients_of_the_cpu_and_spoils_nothing(name: str) -> None:
    plain = gradients(CASES[name])
    before = {key: tensor.clone() for key, tensor in CASES[name][0].named_buffers()}
    with oomph.emulated_gpu("64MiB"):
        emulated = [gradients(CASES[name], "cuda") for _ in range(2)]
        after = {key: tensor.cpu() for key, tensor in CASES[name][0].named_buffers()}
        CASES[name][0].to("cpu")
    assert all(torch.equal(plain[at], one[at]) for one in emulated for at in range(len(plain)))
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("shape", [(N, C), (C,), (1,)])
def test_a_loss_with_pos_weight_is_recorded_without_memory_as_with_memory(
    shape: tuple[int, ...],
) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(C, C)
            self.loss = nn.BCEWithLogitsLoss(pos_weight=torch.ones(shape))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return self.loss(self.linear(x), y)

    kind = Kind(Weighted, lambda n: {"x": torch.zeros(n, C), "y": torch.zeros(n, C)})
    both = [real_run.train(kind, device, examples=N) for device in ("cpu", "meta")]
    assert real_run.first_difference(*both) is None


@pytest.mark.parametrize("how", ["kept", "passed on", "made anew"])
@pytest.mark.parametrize("shape", [(N, C), (C,)])
def test_a_pos_weight_that_hooks_hand_back_is_not_written_to(
    how: str, shape: tuple[int, ...]
) -> None:
    pos_weight = shares(*shape)
    before = pos_weight.clone()
    hooks: dict[str, Any] = {
        "kept": (lambda tensor: (tensor,), lambda packed: packed[0]),
        "passed on": (lambda tensor: tensor, lambda tensor: tensor),
        "made anew": (lambda tensor: tensor.clone(), lambda tensor: tensor.clone()),
    }
    ops.calibrate()
    case = nn.BCEWithLogitsLoss(pos_weight=pos_weight), (numbers(N, C),), (shares(N, C),)
    plain = gradients(case)
    with Ruled(), torch.autograd.graph.saved_tensors_hooks(*hooks[how]):
        assert torch.equal(gradients(case)[0], plain[0])
    assert torch.equal(pos_weight, before)


@pytest.mark.parametrize("key", [(slice(None), [0, 2]), ([1, 1], slice(None)), (None, [0, 2])])
def test_rows_and_columns_that_are_picked_have_their_gradients_on_the_emulated_gpu(
    key: Any,
) -> None:
    def gradient(device: str) -> torch.Tensor:
        table = numbers(4, C).to(device).requires_grad_()
        picks = tuple(torch.tensor(k).to(device) if isinstance(k, list) else k for k in key)
        (table * 1)[picks].square().sum().backward()
        assert table.grad is not None
        return table.grad.cpu()

    plain = gradient("cpu")
    with oomph.emulated_gpu("64MiB"):
        assert torch.equal(gradient("cuda"), plain)
