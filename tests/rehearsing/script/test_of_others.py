"""What public training scripts do that none of ours did: each is a few lines of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oomph.errors import UserCodeError
from oomph.records.script import Overrides, Script
from oomph.rehearsing.script.refusals import FLEX, JIT
from oomph.rehearsing.script.run import rehearse_script
from rehearsing.rehearsals import mistakes
from rehearsing.script.rehearsed import GPU, LOOP, rehearsed, second_step

_HEAD = """
import copy, pickle, torch, torch.nn as nn, torch.nn.functional as F
from concurrent.futures import ThreadPoolExecutor
from torch.distributions import Categorical
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
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
    + LOOP,
    "factories that torch does not list": _HEAD
    + """
noise = torch.normal(mean=0.0, std=1.0, size=(8, 4), device="cuda", generator=None)
assert noise.is_cuda and torch.normal(0.0, 1.0, (2,)).device.type == "cpu"
assert torch.fft.fftfreq(8, device="cuda").is_cuda
model.cuda()
"""
    + LOOP,
    "data that only a worker can read": _HEAD
    + """
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Read(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        self.file.seek(0)
        assert get_worker_info().id == 0 and get_worker_info().num_workers == 1
        return torch.ones(16)

def begin(number):
    info = get_worker_info()
    assert number == info.id and not hasattr(info.dataset, "file")
    info.dataset.file, _ = open(__file__), info.seed

model.cuda()
for x in DataLoader(Read(), 8, num_workers=2, worker_init_fn=begin):
    assert get_worker_info() is None and x.shape == (8, 16) and not x.is_shared()
for x in DataLoader([torch.ones(16)], worker_init_fn=begin):
    assert get_worker_info() is None
"""
    + LOOP,
    "what pickle makes of tensors": _HEAD
    + """
model = pickle.loads(pickle.dumps(model.cuda()))
assert all(one.is_cuda and one.requires_grad for one in model.parameters())
there, here = pickle.loads(pickle.dumps((torch.ones(3, 2).cuda().t(), torch.ones(2))))
assert there.is_cuda and there.stride() == (1, 2) and here.tolist() == [1, 1]
"""
    + LOOP,
    "streams of any device, and their devices by name": _HEAD
    + """
gpu = torch.device("cuda")
side, event = torch.cuda.Stream(device=gpu, priority=-1), torch.Event(device="cuda")
assert torch.cuda.current_stream(device=gpu) == torch.cuda.default_stream(device=gpu)
assert torch.Stream(device="cuda") != side and side.device == torch.device("cuda:0")
with torch.cuda.stream(side):
    model.cuda()
event.record(side)
torch.cuda.current_stream(gpu).wait_event(event)
"""
    + LOOP,
    "an encoder that is evaluated with padding": _HEAD
    + """
layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
encoder = nn.TransformerEncoder(layer, 2).cuda().eval()
with torch.no_grad():
    padding = (torch.arange(6) > 3).expand(2, 6).cuda()
    assert encoder(torch.ones(2, 6, 16).cuda(), src_key_padding_mask=padding).shape == (2, 6, 16)
model.cuda()
"""
    + LOOP,
    "ranges for a profiler": _HEAD
    + """
torch.cuda.nvtx.range_push("build")
with torch.cuda.nvtx.range("{} of {}", 1, 2), torch.autograd.profiler.emit_nvtx(enabled=False):
    model.cuda()
torch.cuda.nvtx.mark("built"); torch.cuda.nvtx.range_pop()
torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("train"))
"""
    + LOOP,
    "a list of modules with a gap": _HEAD
    + """
class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        pairs = [nn.ModuleList([nn.LayerNorm(16), nn.Linear(16, 16), None]) for _ in range(3)]
        self.layers, self.last = nn.ModuleList(pairs), nn.Linear(16, 4)

    def forward(self, x):
        for norm, linear, gap in self.layers:
            x = linear(norm(x))
        return self.last(x)

model = Layers().cuda()
"""
    + LOOP,
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


def test_a_model_is_not_drawn_by_what_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard's `add_graph` asks torch.jit for a graph: a writer of that name stands for it."""
    package = tmp_path / "tensorboardX"
    package.mkdir()
    (package / "__init__.py").write_text("from .writer import SummaryWriter\n")
    writer = """
import torch
class SummaryWriter:
    def add_graph(self, model, given):
        return torch.jit.trace(model, given).graph
"""
    (package / "writer.py").write_text(writer)
    monkeypatch.delitem(sys.modules, "tensorboardX", raising=False)
    drawn = """
from tensorboardX import SummaryWriter
SummaryWriter().add_graph(model.cuda(), torch.ones(2, 16).cuda())
"""
    _, seen = rehearsed(tmp_path, _HEAD + drawn + LOOP)
    assert seen.has_stepped


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
    _, seen = rehearsed(tmp_path, _HEAD + compiled + LOOP)
    assert JIT in seen.approximations
    _, plain = rehearsed(tmp_path, _HEAD + "model.cuda()" + LOOP)
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
    trace, seen = rehearsed(tmp_path, _HEAD + in_threads + LOOP)
    assert seen.has_stepped
    assert mistakes(trace) == []
    alone, _ = rehearsed(tmp_path, _HEAD + "model.cuda()" + LOOP)
    assert second_step(trace) == second_step(alone)


def test_a_fused_attention_that_is_compiled_is_rehearsed_as_the_one_of_torch(
    tmp_path: Path,
) -> None:
    by = """
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
import torch, torch.nn as nn, torch.nn.functional as F
BODY
to_three = nn.Linear(64, 192).cuda()
optimizer = torch.optim.Adam(to_three.parameters())
for _ in range(3):
    parts = to_three(torch.randn(2, 256, 64, device="cuda")).view(2, 256, 3, 4, 16)
    loss = attend(*parts.permute(2, 0, 3, 1, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    flex = """
fast = torch.compile(flex_attention)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cuda")
attend = lambda q, k, v: fast(q, k, v, block_mask=mask)
def figures(**asked):
    one = torch.ones(1, 2, 128, 16, device="cuda")
    return flex_attention(one, one, one, **asked)
assert figures(return_lse=True)[1].shape == (1, 2, 128)
assert figures(return_aux=AuxRequest(lse=True))[1].max_scores is None
del figures
"""
    trace, seen = rehearsed(tmp_path, by.replace("BODY", flex))
    assert FLEX in seen.approximations
    same, _ = rehearsed(tmp_path, by.replace("BODY", "attend = F.scaled_dot_product_attention"))
    assert second_step(trace) == second_step(same)


@pytest.mark.parametrize(
    ("gpu", "answers"),
    [((7, 5), (True, False, False)), ((8, 9), (True, True, True))],
)
def test_a_script_hears_of_bf16_what_torch_says_on_that_gpu(
    tmp_path: Path, gpu: tuple[int, int], answers: tuple[bool, ...]
) -> None:
    """Of this version: that bf16 is supported where it is emulated, too."""
    asked = f"""
model.cuda()
cuda = torch.cuda
said = (cuda.is_bf16_supported(), cuda.is_bf16_supported(False), cuda.is_tf32_supported())
assert said == {answers}, said
with torch.autocast("cuda", torch.bfloat16):
    assert model(torch.ones(2, 16, device="cuda")).dtype is torch.bfloat16
"""
    (tmp_path / "train.py").write_text(_HEAD + asked + LOOP)
    script = Script(path="train.py", directory=str(tmp_path))
    pretended = replace(GPU, capability=gpu)
    assert rehearse_script(script, pretended, Overrides()).seen.has_stepped


def test_rows_of_a_graph_are_no_sequences_and_doubles_are_named(tmp_path: Path) -> None:
    of_graph = """
class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x, edges):
        return torch.zeros_like(x[:, :4]).index_add_(0, edges[1], self.linear(x)[edges[0]])

model = Conv().double().cuda()
x, edges = torch.randn(30, 16).double().cuda(), torch.randint(30, (2, 90)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    optimizer.zero_grad(); model(x, edges).mean().backward(); optimizer.step()
"""
    _, seen = rehearsed(tmp_path, _HEAD + of_graph)
    assert seen.longest_sequence is None
    assert (seen.micro_batch, seen.precision) == (30, "fp64")


def test_a_library_whose_part_is_missing_is_not_told_by_a_name_that_there_is_none_of(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserCodeError) as caught:
        rehearsed(tmp_path, "raise ModuleNotFoundError('Could not import AutoProcessor')\n")
    assert "pip install" not in str(caught.value)
    assert "by itself" in str(caught.value)
