"""What more public training scripts do that none before did: each is a few lines of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.errors import UserCodeError
from oomph.records.script import Overrides, Script
from oomph.rehearsing.script.rehearsal import CLOSURES, WAITING
from oomph.rehearsing.script.run import rehearse_script
from rehearsing.rehearsals import mistakes
from rehearsing.script.rehearsed import GPU, LOOP, rehearsed

_HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
"""


def test_a_batch_is_what_came_to_a_backward_and_not_what_a_sample_is_written_from(
    tmp_path: Path,
) -> None:
    writes = """
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    model.train()
    tokens = torch.randint(50, (8, 12)).cuda()
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step(); optimizer.zero_grad()
    model.eval()
    text = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    for _ in range(20):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
"""
    _, seen = rehearsed(tmp_path, _HEAD + writes)
    assert (seen.micro_batch, seen.longest_sequence, seen.num_batches) == (8, 12, 2)


def test_a_batch_is_not_the_one_state_that_an_action_is_chosen_in(tmp_path: Path) -> None:
    acts = """
model.cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    for _ in range(4):
        action = model(torch.randn(1, 16).cuda()).argmax()
    loss = model(torch.randn(32, 16).cuda()).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    _, seen = rehearsed(tmp_path, _HEAD + acts)
    assert seen.micro_batch == 32


_BY_EQUATION = """
model.cuda()
points = torch.rand(64, 16, requires_grad=True)
here = POINTS
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    values = model(here)
    (slope,) = torch.autograd.grad(values.sum(), here, create_graph=True)
    loss = (slope.square().mean() + values.square().mean())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_a_gradient_goes_back_to_a_tensor_of_the_host(tmp_path: Path) -> None:
    """Networks for equations differentiate by points that were made on the host."""
    from_host = _BY_EQUATION.replace("POINTS", "points.cuda()")
    trace, seen = rehearsed(tmp_path, _HEAD + from_host)
    assert (seen.has_stepped, seen.micro_batch) == (True, 64)
    assert mistakes(trace) == []
    checked = "assert points.grad.device.type == 'cpu' and points.grad.shape == (64, 16)\n"
    once = _HEAD + from_host.replace("range(3)", "range(1)") + checked
    assert rehearsed(tmp_path, once)[1].num_optimizer_steps == 1


def test_figures_of_the_gpu_in_a_list_are_read(tmp_path: Path) -> None:
    lists = """
model.cuda()
counts = torch.arange(4, device="cuda")
assert torch.tensor([counts[1], counts[3]]).tolist() == [1, 3]
assert torch.tensor([[counts[2], 7]], device="cuda").tolist() == [[2, 7]]
assert torch.as_tensor((counts[1].float(), 0.5)).tolist() == [1.0, 0.5]
assert counts.new_tensor([counts[3], 1]).tolist() == [3, 1]
assert torch.LongTensor([[counts[3]], [5]]).tolist() == [[3], [5]]
assert torch.LongTensor(2, 3).shape == (2, 3) and torch.FloatTensor([1, 2]).tolist() == [1, 2]
assert isinstance(torch.zeros(2), torch.FloatTensor)
assert not isinstance(torch.zeros(2), torch.LongTensor) and not isinstance(5, torch.LongTensor)
assert not isinstance(torch.zeros(2).cuda(), torch.FloatTensor)
assert torch.ones(2).type(torch.LongTensor).dtype is torch.LongTensor.dtype is torch.int64
means = torch.tensor([model(torch.randn(8, 16).cuda()).mean() for _ in range(3)])
assert means.shape == (3,) and not means.is_cuda
"""
    _, seen = rehearsed(tmp_path, _HEAD + lists + LOOP)
    assert seen.has_stepped


def test_type_as_moves_to_where_the_other_is(tmp_path: Path) -> None:
    """Also where the other is of the GPU's making and stands on the host."""
    moved = """
model.cuda()
there = torch.randn(8, 8, device="cuda")
assert torch.ones(3).long().type_as(there).device == there.device
on_host = torch.linalg.eigvalsh((there @ there.t()).cpu())
mask = on_host.ge(0).type_as(on_host)
assert mask.device.type == "cpu" and (on_host * mask).type_as(there).is_cuda
"""
    _, seen = rehearsed(tmp_path, _HEAD + moved + LOOP)
    assert seen.has_stepped


def test_gradients_that_are_zeroed_between_are_no_accumulation(tmp_path: Path) -> None:
    """Sharpness-aware: around another optimizer, with two backwards of one batch."""
    around = """
class Twice(torch.optim.Optimizer):
    def __init__(self, parameters, **options):
        super().__init__(parameters, options)
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

model.cuda()
optimizer = Twice(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    x = torch.randn(8, 16).cuda()
    model(x).mean().backward(); optimizer.zero_grad()
    model(x).mean().backward(); optimizer.base.step(); optimizer.zero_grad()
"""
    _, seen = rehearsed(tmp_path, _HEAD + around)
    assert (seen.micro_batch, seen.accumulation) == (8, 1)
    assert (seen.optimizer, seen.num_optimizers, seen.num_optimizer_steps) == ("Twice", 1, 2)
    assert WAITING not in seen.approximations


def test_two_backwards_of_one_forward_are_no_accumulation(tmp_path: Path) -> None:
    two_losses = """
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for _ in range(3):
        out = model(torch.randn(8, 16).cuda())
        out.mean().backward(retain_graph=True); out.square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    _, seen = rehearsed(tmp_path, _HEAD + two_losses)
    assert seen.accumulation == 3


def test_an_optimizer_that_is_never_content_gives_a_lower_bound(tmp_path: Path) -> None:
    one_step = """
model.cuda()
x = torch.randn(8, 16).cuda()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50000, line_search_fn="strong_wolfe")

def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss

optimizer.step(closure)
"""
    _, seen = rehearsed(tmp_path, _HEAD + one_step)
    assert not seen.has_stepped
    assert CLOSURES in seen.approximations


def test_a_model_with_a_call_of_its_own_is_seen(tmp_path: Path) -> None:
    """Gaussian processes and Keras: `__call__` goes to `forward` by itself."""
    own = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def __call__(self, x):
        return self.forward(x)

    def forward(self, x):
        return self.inner.forward(x)

model = Own().cuda()
"""
    _, seen = rehearsed(tmp_path, _HEAD + own + LOOP)
    assert (seen.model, seen.micro_batch, seen.num_parameters) == ("Own", 8, 68)


def test_classes_of_several_models_are_named_once(tmp_path: Path) -> None:
    parts = """
model = nn.Sequential(nn.Linear(16, 4)).cuda()
critics = [nn.Linear(4, 1).cuda() for _ in range(2)]
optimizer = torch.optim.SGD([*model.parameters(), *(p for c in critics for p in c.parameters())])
for _ in range(3):
    out = model(torch.randn(8, 16).cuda())
    loss = sum(critic(out).mean() for critic in critics)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    _, seen = rehearsed(tmp_path, _HEAD + parts)
    assert seen.model == "Sequential + 2 Linear"


def test_a_script_that_leaves_before_training_tells_its_last_words(tmp_path: Path) -> None:
    leaves = """
import sys
sys.stdout.write("\\rtraining:   0%|    | 0/10 [00:00<?, ?it/s]")
print("a newer compiler must be installed")
sys.stdout.write("\\rtraining:   0%|    | 0/10 [00:00<?, ?it/s]\\n")
sys.exit()
"""
    with pytest.raises(UserCodeError) as caught:
        rehearsed(tmp_path, _HEAD + leaves)
    assert "ended itself" in str(caught.value)
    assert "a newer compiler must be installed" in str(caught.value)


def test_what_torch_counts_and_compiles_beside_is_answered(tmp_path: Path) -> None:
    asked = """
model.cuda()
assert torch.cuda.memory_stats()["num_device_alloc"] == 0
assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > 0
assert "GPU:0" in torch.cuda.list_gpu_processes()
torch.compiler.cudagraph_mark_step_begin()
"""
    _, seen = rehearsed(tmp_path, _HEAD + asked + LOOP)
    assert seen.has_stepped


def test_what_a_library_compiles_is_said_where_it_is_called(tmp_path: Path) -> None:
    decorated = """
@torch.compile
def doubled(x):
    return x * 2

model.cuda()
"""
    _, seen = rehearsed(tmp_path, _HEAD + decorated + LOOP)
    assert not seen.uses_compile
    called = _HEAD + decorated + "doubled(torch.ones(2, device='cuda'))\n" + LOOP
    assert rehearsed(tmp_path, called)[1].uses_compile


def test_lines_of_an_installed_package_that_is_asked_for_by_name_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "trainer_of_others"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(_HEAD + "model.cuda()" + LOOP + "\n")
    (package / "broken.py").write_text("from trainer_of_others import train_nothing\n")
    monkeypatch.syspath_prepend(str(package.parent))
    here = str(tmp_path)
    of_train = Script(module="trainer_of_others.train", directory=here)
    seen = rehearse_script(of_train, GPU, Overrides()).seen
    assert {Path(line.file).name for line in seen.lines} == {"train.py"}
    of_broken = Script(module="trainer_of_others.broken", directory=here)
    with pytest.raises(UserCodeError) as caught:
        rehearse_script(of_broken, GPU, Overrides())
    assert "broken.py:1" in str(caught.value)


def test_a_loader_that_is_made_of_another_has_its_workers(tmp_path: Path) -> None:
    """As frameworks do that put a sampler of theirs in: they read what the first was given."""
    again = """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
first = DataLoader(data, 8, num_workers=3, pin_memory=True, prefetch_factor=4)
assert (first.num_workers, first.pin_memory) == (3, True)
names = ("dataset", "num_workers", "pin_memory", "batch_sampler", "collate_fn")
loader = DataLoader(**{name: getattr(first, name) for name in names})
model.cuda()
optimizer = torch.optim.Adam(model.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x.cuda()), y.cuda())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    _, seen = rehearsed(tmp_path, _HEAD + again)
    assert seen.loader is not None
    assert (seen.loader.num_workers, seen.loader.pin_memory) == (3, True)
    assert seen.loader.batch_size == seen.micro_batch == 8


def test_optimizers_that_step_together_share_their_batches(tmp_path: Path) -> None:
    together = """
model.cuda()
weights, biases = [p for p in model.parameters() if p.dim() > 1], [
    p for p in model.parameters() if p.dim() == 1
]
optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(biases)]
for _ in range(3):
    for _ in range(2):
        model(torch.randn(8, 16).cuda()).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
"""
    _, seen = rehearsed(tmp_path, _HEAD + together)
    assert (seen.num_optimizers, seen.micro_batch, seen.accumulation) == (2, 8, 2)


def test_optimizers_by_turns_have_batches_of_their_own(tmp_path: Path) -> None:
    by_turns = """
other = torch.nn.Linear(16, 1).cuda()
model.cuda()
first, second = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(other.parameters())
for _ in range(3):
    first.zero_grad(); second.zero_grad()
    model(torch.randn(8, 16).cuda()).mean().backward(); first.step()
    other(torch.randn(8, 16).cuda()).mean().backward(); second.step()
"""
    _, seen = rehearsed(tmp_path, _HEAD + by_turns)
    assert (seen.num_optimizers, seen.micro_batch, seen.accumulation) == (2, 8, 1)
