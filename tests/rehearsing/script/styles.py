"""Small scripts in the styles that people write: each is rehearsed as it is."""

from __future__ import annotations

_DATA = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(96, 3, 16, 16), torch.randint(0, 10, (96,)))
loader = DataLoader(data, batch_size=8, shuffle=True)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)
    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))
"""

STYLES: dict[str, str] = {
    "hard-coded cuda": _DATA
    + """
model = Net().cuda()
criterion = nn.CrossEntropyLoss().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    running = 0.0
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item() * x.size(0)
        if torch.isnan(loss) or not torch.isfinite(loss):
            raise SystemExit("diverged")
        print(f"{running / len(data):.3f}", loss, loss.detach().cpu().numpy())
""",
    "optimizer before the move": _DATA
    + """
model = Net()
optimizer = torch.optim.Adam(model.parameters())
import weakref
refs = [weakref.ref(p) for p in model.parameters()]
model.to("cuda:0")
assert all(p.is_cuda and p.device == torch.device("cuda", 0) for p in model.parameters())
assert all(r() is p for r, p in zip(refs, model.parameters()))
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x.to("cuda:0")), y.to("cuda:0")).backward()
    optimizer.step()
""",
    "default device": _DATA
    + """
torch.set_default_device("cuda")
model = Net()
assert next(model.parameters()).is_cuda
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(5):
    x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "device context": _DATA
    + """
with torch.device("cuda"):
    model = Net()
    weights = torch.tensor([1.0, 2.0] * 5)
with torch.device("meta"):
    planned = Net()
assert planned.conv.weight.is_meta and not planned.conv.weight.is_cuda
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x.cuda()), y.cuda(), weight=weights)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    "mixed precision with a scaler": _DATA
    + """
from torch.cuda.amp import autocast, GradScaler
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = GradScaler()
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
for x, y in loader:
    optimizer.zero_grad(set_to_none=True)
    with autocast():
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    assert scaler.get_scale() == before == 65536.0
    scheduler.step()
    print(scheduler.get_last_lr(), norm)
""",
    "half": _DATA
    + """
model = Net().half().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss = F.cross_entropy(model(x.half().cuda()), y.cuda())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    "ema": _DATA
    + """
import copy
model = Net().cuda()
ema = copy.deepcopy(model).eval().requires_grad_(False)
averaged = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x.cuda()), y.cuda())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    with torch.no_grad():
        for a, b in zip(ema.parameters(), model.parameters()):
            a.mul_(0.99).add_(b, alpha=0.01)
        averaged.update_parameters(model)
        ema(x.cuda())
""",
    "compiled": _DATA
    + """
model = torch.compile(Net().cuda(), mode="max-autotune")
@torch.compile
def loss_of(x, y): return F.cross_entropy(model(x), y)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    optimizer.zero_grad(); loss_of(x.cuda(), y.cuda()).backward(); optimizer.step()
""",
    "evaluation before training": _DATA
    + """
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
@torch.no_grad()
def evaluate():
    model.eval()
    correct = total = 0
    everything = []
    for x, y in loader:
        out = model(x.cuda())
        predicted = out.argmax(1)
        correct += (predicted == y.cuda()).sum().item()
        total += y.size(0)
        everything.append(predicted.cpu())
    model.train()
    everything = torch.cat(everything).numpy()
    assert everything.shape == (96,)
    return correct / total
print(evaluate())
best = 0
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad(); F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    if evaluate() > best: torch.save(model.state_dict(), "best.pt")
""",
    "saving and loading": _DATA
    + """
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, "c.pt")
state = torch.load("c.pt", map_location="cpu")
assert state["epoch"] == 3 and not state["model"]["head.weight"].is_cuda
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
on_gpu = torch.load("c.pt", map_location="cuda:0", weights_only=True)
assert on_gpu["model"]["head.weight"].is_cuda
del on_gpu
for x, y in loader:
    optimizer.zero_grad(); F.cross_entropy(model(x.cuda()), y.cuda()).backward(); optimizer.step()
    torch.save(model, "whole.pt")
""",
    "update by hand": _DATA
    + """
model = Net().cuda()
for x, y in loader:
    model.zero_grad()
    F.cross_entropy(model(x.cuda()), y.cuda()).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
""",
    "long accumulation": _DATA
    + """
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
batches = iter([b for _ in range(20) for b in loader])
for step in range(3):
    for micro in range(40):
        x, y = next(batches)
        loss = F.cross_entropy(model(x.cuda()), y.cuda()) / 40
        loss.backward()
    optimizer.step(); optimizer.zero_grad()
""",
    "true values": """
import torch, torch.nn as nn, torch.nn.functional as F
y = torch.tensor([0, 1, 1, 2], device="cuda")
x = torch.randn(4, 8).cuda()
assert (y == 1).sum().item() == 2 and x[y == 1].shape == (2, 8)
assert y.tolist() == [0, 1, 1, 2] and int(y.max()) == 2 and y.unique().numel() == 3
assert torch.arange(5, device="cuda")[3].item() == 3
assert y.cpu().numpy().sum() == 4
assert torch.nonzero(y).shape == (3, 1) and torch.masked_select(x, (y == 0)[:, None]).numel() == 8
y[0] = 7
assert y[0].item() == 7 and y.max().item() == 7
z = y.clone(); z += 1
assert z.tolist() == [8, 2, 2, 3] and y.view(2, 2)[1].tolist() == [1, 2]
lengths = torch.tensor([3, 2], device="cuda")
mask = torch.arange(4, device="cuda")[None] < lengths[:, None]
assert mask.sum().item() == 5 and not mask.all() and mask.any()
assert torch.equal(y, y.clone()) and len(set(y.tolist())) == 3
assert str(lengths) == "tensor([3, 2], device='cuda:0')"
assert torch.zeros(3, device="cuda").sum().item() == 0.0
model = nn.Linear(8, 3).cuda()
optimizer = torch.optim.AdamW(model.parameters())
y[0] = 0
for _ in range(3):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    assert next(iter(optimizer.state.values()))["step"].item() == _ + 1
    assert loss.item() == 1.0 and float(loss) == 1.0 and bool(loss > 0) is False
""",
    "closure": _DATA
    + """
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    "threads and signals": _DATA
    + """
import threading, signal, os, atexit, sys
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, signal.SIG_IGN)
atexit.register(lambda: open("left.txt", "w").write("x"))
os.makedirs("elsewhere", exist_ok=True); os.chdir("elsewhere")
batches = []
def fill():
    for x, y in loader: batches.append((x.cuda(), y.cuda()))
thread = threading.Thread(target=fill); thread.start(); thread.join()
assert batches[0][0].is_cuda
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
try:
    for x, y in batches:
        optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
except BaseException:
    print("swallowed"); raise
finally:
    open("finally.txt", "w").write("x")
""",
    "two models, a critic more often": _DATA
    + """
critic, actor = Net().cuda(), Net().cuda()
of_critic, of_actor = (torch.optim.Adam(m.parameters()) for m in (critic, actor))
for i, (x, y) in enumerate(loader):
    x = x.cuda()
    of_critic.zero_grad(); critic(x).mean().backward(); of_critic.step()
    if i % 3 == 2:
        of_actor.zero_grad(); actor(x).mean().backward(); of_actor.step()
""",
    "gradient penalty": _DATA
    + """
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
for x, y in loader:
    x = x.cuda().requires_grad_(True)
    out = model(x)
    gradient, = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = out.mean() + ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    "memory questions": _DATA
    + """
assert torch.cuda.get_device_name(0) == "NVIDIA GeForce RTX 4090"
properties = torch.cuda.get_device_properties("cuda")
assert (properties.major, properties.minor) == torch.cuda.get_device_capability() == (8, 9)
assert properties.total_memory == 24 * 2**30 and properties.multi_processor_count == 128
assert torch.cuda.device_count() == 1 and torch.cuda.is_bf16_supported()
assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
before = torch.cuda.memory_allocated()
x = torch.empty(1000, device="cuda")
assert torch.cuda.memory_allocated() - before == 4096
free, total = torch.cuda.mem_get_info()
assert 0 < free < total == 24 * 2**30
del x
assert torch.cuda.memory_allocated() == before
assert torch.cuda.max_memory_allocated() >= before + 4096
torch.cuda.reset_peak_memory_stats(); torch.cuda.empty_cache(); torch.cuda.synchronize()
torch.cuda.memory_stats()["allocated_bytes.all.current"]; torch.cuda.memory_summary()
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
stream = torch.cuda.Stream()
start = torch.cuda.Event(enable_timing=True)
for x, y in loader:
    with torch.cuda.stream(stream):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    start.record()
    optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
""",
    "weights given by hand": _DATA
    + """
model = Net()
model.head.weight.data = torch.randn(10, 16)
model.head.weight.data.uniform_(-0.1, 0.1)
nn.init.orthogonal_(model.head.weight); nn.init.kaiming_normal_(model.conv.weight)
with torch.no_grad():
    model.head.bias.copy_(torch.zeros(10)); model.head.bias[3] = 1.0
model.scale = nn.Parameter(torch.tensor(2.5))
assert model.scale.item() == 2.5
model = model.to("cuda", torch.bfloat16)
for p in model.parameters(): p.data = p.data.to("cuda")
total = sum(p.numel() for p in model.parameters() if p.requires_grad)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x.to("cuda", torch.bfloat16)), y.cuda()) * model.scale
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    "packed sequences": """
import torch, torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
device = "cuda"
embedding, lstm = nn.Embedding(50, 16).to(device), nn.LSTM(16, 32, batch_first=True).to(device)
head = nn.Linear(32, 5).to(device)
parameters = [p for m in (embedding, lstm, head) for p in m.parameters()]
optimizer = torch.optim.Adam(parameters)
for _ in range(4):
    rows = [torch.randint(1, 50, (n,)) for n in (9, 7, 4)]
    lengths = torch.tensor([len(r) for r in rows])
    x = pad_sequence(rows, batch_first=True).to(device)
    packed = pack_padded_sequence(embedding(x), lengths.cpu(), batch_first=True)
    out, _ = pad_packed_sequence(lstm(packed)[0], batch_first=True)
    assert out.shape == (3, 9, 32)
    loss = head(out[torch.arange(3), lengths - 1]).logsumexp(-1).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    "one process of a group": _DATA
    + """
import os, torch.distributed as dist
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", RANK="0", WORLD_SIZE="1")
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(Net().cuda(), device_ids=[0])
sampler = torch.utils.data.DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x.cuda()), y.cuda())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    dist.all_reduce(loss.detach()); dist.barrier()
    if dist.get_rank() == 0: print(loss)
""",
    "data parallel": _DATA
    + """
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    optimizer.zero_grad(); F.cross_entropy(model(x.cuda()), y.cuda()).backward(); optimizer.step()
""",
    "metrics on the host": _DATA
    + """
import numpy as np
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
history, confusion = [], torch.zeros(10, 10)
for x, y in loader:
    out = model(x.cuda())
    loss = F.cross_entropy(out, y.cuda())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    history.append(loss.detach().cpu())
    predicted = out.detach().cpu().argmax(1)
    accuracy = (predicted == y).float().mean().item()
    confusion[y, predicted] += 1
    np.mean([float(h) for h in history]); torch.stack(history).mean().item()
    np.asarray(out.detach().cpu()); out.softmax(1).max(1)[0].detach().cpu().numpy().tolist()
    np.bincount(predicted.numpy(), minlength=10)
    for name, p in model.named_parameters(): p.grad.norm().item(); p.detach().cpu().numpy().std()
""",
    "old tensor types": """
import torch, torch.nn as nn
import numpy as np
from torch.autograd import Variable
cuda = torch.cuda.is_available()
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor
G = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 100), nn.Tanh())
D = nn.Sequential(nn.Linear(100, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1), nn.Sigmoid())
bce = nn.BCELoss()
if cuda: G.cuda(); D.cuda(); bce.cuda()
of_g, of_d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
for images in torch.utils.data.DataLoader(torch.randn(96, 1, 10, 10), batch_size=32):
    valid = Variable(Tensor(images.size(0), 1).fill_(1.0), requires_grad=False)
    fake = Variable(Tensor(images.size(0), 1).fill_(0.0), requires_grad=False)
    real = Variable(images.type(Tensor)).view(images.size(0), -1)
    assert isinstance(real, torch.cuda.FloatTensor) and real.type() == "torch.cuda.FloatTensor"
    of_g.zero_grad()
    made = G(Variable(Tensor(np.random.normal(0, 1, (images.shape[0], 16)))))
    of_made = bce(D(made), valid); of_made.backward(); of_g.step()
    of_d.zero_grad()
    loss = (bce(D(real), valid) + bce(D(made.detach()), fake)) / 2
    loss.backward(); of_d.step()
    print("%f %f" % (loss.item(), of_made.item()))
""",
    "inference mode and a closure with many evaluations": """
import torch, torch.nn as nn, torch.nn.functional as F
torch.set_default_tensor_type("torch.cuda.FloatTensor")
generator = torch.Generator(device="cuda").manual_seed(3)
assert generator.device.type == "cuda"
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
encoder, head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 5)
optimizer = torch.optim.LBFGS([*encoder.parameters(), *head.parameters()], max_iter=3)
x, y = torch.randn(4, 10, 32, generator=generator), torch.randint(0, 5, (4,))
@torch.inference_mode()
def evaluate():
    encoder.eval()
    accuracy = (head(encoder(x).mean(1)).argmax(-1) == y).float().mean().item()
    encoder.train()
    return accuracy
for _ in range(3):
    evaluate()
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(head(encoder(x).mean(1)), y)
        loss.backward()
        return loss
    print(optimizer.step(closure))
with torch.inference_mode(False): assert torch.is_grad_enabled()
""",
    "rays of a neural radiance field, all made on the GPU by default": """
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
torch.set_default_tensor_type("torch.cuda.FloatTensor")
move = lambda t: torch.Tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, t], [0, 0, 0, 1]]).float()
turn = lambda a: torch.Tensor(np.diag([1, np.cos(a), np.cos(a), 1])).float()
poses = torch.stack([turn(0.1 * at) @ move(4.0) for at in range(3)])
images = torch.Tensor(np.zeros((3, 20, 20, 3), np.float32))
assert poses.is_cuda and images.is_cuda and torch.Tensor(images).is_cuda
assert torch.Tensor(2, 3).is_cuda
assert not torch.FloatTensor([1.0]).is_cuda and not torch.zeros(2, device="cpu").is_cuda
field = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(field.parameters(), 5e-4)
for at in range(3):
    i, j = torch.meshgrid(torch.linspace(0, 19, 20), torch.linspace(0, 19, 20), indexing="ij")
    ahead = torch.stack([(i - 10) / 9, -(j - 10) / 9, -torch.ones_like(i)], -1)
    ways = torch.sum(ahead[..., np.newaxis, :] * poses[at, :3, :3], -1)
    places = poses[at, :3, -1].expand(ways.shape)
    cells = torch.stack(torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij"), -1)
    some = cells.reshape(-1, 2)[np.random.choice(400, 64, replace=False)].long()
    places, ways = places[some[:, 0], some[:, 1]], ways[some[:, 0], some[:, 1]]
    depths = torch.linspace(2.0, 6.0, 32) + torch.rand(32) * 0.1
    raw = field(places[:, None] + ways[:, None] * depths[None, :, None])
    gaps = torch.cat([depths[1:] - depths[:-1], torch.Tensor([1e10]).expand(depths[:1].shape)])
    opacity = 1 - torch.exp(-F.relu(raw[..., 3]) * gaps)
    colours = (opacity[..., None] * raw[..., :3]).sum(1)
    loss = ((colours - images[at][some[:, 0], some[:, 1]]) ** 2).mean()
    quality = -10.0 * torch.log(loss) / torch.log(torch.Tensor([10.0]))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(at, loss.item(), quality.item())
torch.set_default_tensor_type("torch.FloatTensor")
assert not torch.Tensor([1.0]).is_cuda and not torch.zeros(2).is_cuda
""",
    "the default device, and weights for rare classes": """
import torch, torch.nn as nn
torch.set_default_device("cuda")
torch.cuda.set_per_process_memory_fraction(0.5)
torch.cuda.set_stream(torch.cuda.Stream())
assert torch.accelerator.current_accelerator().type == "cuda"
model, start = nn.Linear(16, 5), torch.cuda.Event(enable_timing=True)
end, weights = torch.cuda.Event(enable_timing=True), torch.tensor([2.0, 1.0, 4.0, 1.0, 3.0])
losses = nn.BCEWithLogitsLoss(pos_weight=weights), nn.BCEWithLogitsLoss(pos_weight=weights[:1])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    start.record()
    x, y = torch.randn(8, 16), torch.rand(8, 5)
    loss = sum(each(model(x), y) for each in losses)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    end.record(); torch.cuda.synchronize()
    print(loss.item(), 8 / (start.elapsed_time(end) / 1000), "examples a second")
""",
    "masks of outputs": _DATA
    + """
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for x, y in loader:
    out = model(x.cuda())
    chosen = out[out[:, 0] > out[:, 1]]
    indices = torch.where(out[:, 0] > 0)[0]
    assert chosen.shape[0] == len(indices) == 8  # the most that it can be
    torch.topk(out, 1).indices.squeeze(1).tolist()
    assert torch.bincount(out.argmax(1), minlength=10).shape == (10,)
    assert out.argmax(1).unique().numel() == 8
    loss = torch.nan_to_num(out.logsumexp(-1).mean() + chosen.sum() * 0)
    optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step(loss)
""",
    "rewards": """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.distributions import Categorical
policy = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to("cuda")
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
for episode in range(3):
    kept = []
    for _ in range(5):
        chances = Categorical(F.softmax(policy(torch.randn(4).to("cuda")), -1))
        action = chances.sample()
        assert action.item() in (0, 1)
        kept.append(chances.log_prob(action))
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], device="cuda")
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    loss = torch.stack([-p * r for p, r in zip(kept, returns)]).sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    "a critic five times as often, and an optimizer that waits": _DATA
    + """
critic, actor, later = Net().cuda(), Net().cuda(), Net().cuda()
of_critic, of_actor, _ = optimizers = [
    torch.optim.Adam(m.parameters()) for m in (critic, actor, later)
]
for i, (x, y) in enumerate([batch for _ in range(3) for batch in loader]):
    x = x.cuda()
    of_critic.zero_grad(); critic(x).mean().backward(); of_critic.step()
    if (i + 1) % 6 == 0:
        of_actor.zero_grad(); actor(x).mean().backward(); of_actor.step()
""",
    "odd modules": """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.nn.utils import parametrizations
class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
    def forward(self, x):
        if x.size(0) > 3:
            x = F.relu(self.linear(x))
        return x
model = nn.Sequential(
    torch.jit.script(Branching()), parametrizations.spectral_norm(nn.Linear(32, 32)),
    nn.utils.weight_norm(nn.Linear(32, 32)), parametrizations.weight_norm(nn.Linear(32, 32)),
    nn.LazyLinear(20),
).cuda()
model(torch.randn(8, 32).cuda())
optimizer = torch.optim.RAdam(model.parameters())
for _ in range(3):
    labels = torch.randint(0, 20, (8,)); labels[0] = 19
    hot = F.one_hot(labels.cuda())
    assert hot.shape == (8, 20)
    out = model(torch.randn(8, 32).cuda())
    loss = (out * hot).sum() + torch.func.vmap(lambda row: (row * row).sum())(out).mean()
    loss = loss + torch.fft.rfft(out).abs().mean() + torch.cdist(out, out).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
}
