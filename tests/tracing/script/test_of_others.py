"""What public training scripts do that none of ours did: each is a few lines of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.tracing.script.refusals import JIT
from tracing.rehearsals import mistakes
from tracing.script.rehearsed import rehearsed, second_step

_HEAD = """
import copy, pickle, torch, torch.nn as nn, torch.nn.functional as F
from concurrent.futures import ThreadPoolExecutor
from torch.distributions import Categorical
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
"""
_LOOP = """
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    loss = F.cross_entropy(model(torch.randn(8, 16).cuda()), torch.randint(4, (8,)).cuda())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
MECHANISMS: dict[str, str] = {
    "a GPU by its number alone": _HEAD
    + """
model = model.to(0)
model.to(device=0)
gpu = torch.device(0)
assert gpu == torch.device("cuda:0") and isinstance(gpu, torch.device)
assert {torch.device: 1}[torch.device] == 1 and torch.device("cpu").type == "cpu"
assert copy.deepcopy(gpu) == pickle.loads(pickle.dumps(gpu)) == gpu
assert torch.zeros(2, device=0).is_cuda and torch.zeros(2).to(0).is_cuda
"""
    + _LOOP,
    "factories that torch does not list": _HEAD
    + """
noise = torch.normal(mean=0.0, std=1.0, size=(8, 4), device="cuda", generator=None)
assert noise.is_cuda and torch.normal(0.0, 1.0, (2,)).device.type == "cpu"
assert torch.fft.fftfreq(8, device="cuda").is_cuda
model.cuda()
"""
    + _LOOP,
    "a product with a dtype of its own": _HEAD
    + """
model.cuda()
low = torch.ones(8, 16, device="cuda", dtype=torch.bfloat16)
total = torch.zeros(8, 8, device="cuda")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    torch.addmm(total, low, low.t(), out_dtype=torch.float32, out=total)
    loss = model(torch.randn(8, 16).cuda()).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
}


@pytest.mark.parametrize("name", list(MECHANISMS))
def test_it_is_rehearsed_up_to_its_second_step(tmp_path: Path, name: str) -> None:
    trace, seen = rehearsed(tmp_path, MECHANISMS[name])
    assert seen.has_stepped
    assert mistakes(trace) == []
    assert {"parameters", "gradients", "optimizer"} <= {one.category for one in trace.allocations}


def test_what_torch_jit_compiles_runs_as_it_is_written(tmp_path: Path) -> None:
    compiled = """
@torch.jit.script
def shifted(x: torch.Tensor, n: int) -> torch.Tensor:
    return x + torch.zeros((n,), device=x.device)

@torch.jit.script
class Holder:
    def __init__(self, n: int):
        self.empty = torch.empty((n,))

model = nn.Sequential(torch.jit.script(nn.Linear(16, 4))).cuda()
assert shifted(torch.ones(3, device="cuda"), 3).is_cuda
"""
    _, seen = rehearsed(tmp_path, _HEAD + compiled + _LOOP)
    assert JIT in seen.approximations
    _, plain = rehearsed(tmp_path, _HEAD + "model.cuda()" + _LOOP)
    assert JIT not in plain.approximations


def test_figures_that_autograd_makes_beside_tensors_of_the_host_stay_there(tmp_path: Path) -> None:
    on_host = """
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    chances = Categorical(F.softmax(model(torch.randn(1, 16)), -1))
    loss = -(chances.log_prob(chances.sample()) * torch.tensor(2.0)).sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    trace, seen = rehearsed(tmp_path, _HEAD + on_host)
    assert seen.has_stepped
    assert trace.events == []


def test_gradients_of_torch_func_are_training_too(tmp_path: Path) -> None:
    of_examples = """
from torch.func import functional_call, grad, vmap
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def loss_of(parameters, x, y):
    return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

for _ in range(3):
    own = {name: p.detach() for name, p in model.named_parameters()}
    x, y = torch.randn(8, 16).cuda(), torch.randint(4, (8,)).cuda()
    of_each = vmap(grad(loss_of), in_dims=(None, 0, 0))(own, x, y)
    for name, p in model.named_parameters():
        assert of_each[name].shape == (8, *p.shape)
        p.grad = of_each[name].mean(0)
    optimizer.step()
"""
    trace, seen = rehearsed(tmp_path, _HEAD + of_examples)
    assert seen.has_stepped
    assert seen.num_optimizer_steps == 2
    assert mistakes(trace) == []
    weights = 8 * 16 * 32 * 4  # of each example, those of the first layer
    assert weights in {one.size_bytes for one in trace.allocations}


def test_threads_that_move_weights_do_not_disturb_each_other(tmp_path: Path) -> None:
    in_threads = """
model.cuda()
def moved(i):
    for _ in range(40):
        one = torch.full((4, 4), i).to(0)
        assert one.device == torch.device("cuda:0"), one.device
        assert one.tolist()[0][0] == i
        assert (one.float() @ one.float()).is_cuda and torch.ones(2).device.type == "cpu"
    return True
with ThreadPoolExecutor(4) as pool:
    assert all(pool.map(moved, range(8)))
"""
    trace, seen = rehearsed(tmp_path, _HEAD + in_threads + _LOOP)
    assert seen.has_stepped
    assert mistakes(trace) == []
    alone, _ = rehearsed(tmp_path, _HEAD + "model.cuda()" + _LOOP)
    assert second_step(trace) == second_step(alone)
