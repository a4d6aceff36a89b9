"""A script that makes its batches on the GPU itself can be given another batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.errors import OomphError
from oomph.predicting.timeline import find_peak
from rehearsing.script.rehearsed import rehearsed

TRAIN = """
import torch
from torch import nn

B = 8
table = torch.randn(8, 3, device="cuda")  # of as many rows, and no batch
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    x = MAKES_X
    y = MAKES_Y
    loss = nn.functional.cross_entropy(model(x) + table.sum(), y[:, 0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WAYS = {
    "a size as numbers": (
        'torch.randn(B, 16, device="cuda")',
        'torch.randint(3, (B, 1), device="cuda")',
    ),
    "a size as one": (
        'torch.rand((B, 16), device="cuda")',
        'torch.zeros([B, 1], device="cuda").long()',
    ),
    "a size by name": (
        'torch.zeros(size=(B, 16), device="cuda")',
        'torch.randint(0, 3, size=(B, 1), device="cuda")',
    ),
    "a size like another": (
        "torch.ones(B, 16, device=0)",
        "torch.zeros_like(x[:, :1]).long()",
    ),
}


@pytest.mark.parametrize("wanted", [1, 3])
@pytest.mark.parametrize("way", list(WAYS))
def test_what_the_loop_makes_on_the_gpu_has_the_batch_asked_for(
    tmp_path: Path, way: str, wanted: int
) -> None:
    makes_x, makes_y = WAYS[way]
    text = TRAIN.replace("MAKES_X", makes_x).replace("MAKES_Y", makes_y)
    _, as_it_is = rehearsed(tmp_path, text)
    assert as_it_is.micro_batch == 8
    trace, seen = rehearsed(tmp_path, text, micro_batch=wanted, first=as_it_is)
    assert (seen.micro_batch, seen.batch_doubt) == (wanted, None)
    written, _ = rehearsed(tmp_path, text.replace("B = 8", f"B = {wanted}"))
    assert find_peak(trace).live_bytes == find_peak(written).live_bytes


def test_a_batch_that_is_made_once_and_met_by_another_of_its_size_is_named(tmp_path: Path) -> None:
    once = 'torch.randn(8, 16, device="cuda") if step == 0 else x'
    text = TRAIN.replace("MAKES_X", once).replace(
        "MAKES_Y", 'torch.arange(8, device="cuda").view(8, 1) % 3'
    )
    _, as_it_is = rehearsed(tmp_path, text)
    with pytest.raises(OomphError, match="could not be varied"):
        rehearsed(tmp_path, text, micro_batch=3, first=as_it_is)


# ---- how many examples a batch has ---------------------------------------------------------------

_HEAD = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from torch.utils.data import TensorDataset
images = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(4, (64,)))
"""
_TAIL = """
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
_FLAT = """
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
optimizer = torch.optim.Adam(model.parameters())
"""
# What each of these loops calls a batch is 4 examples, whatever its tensors look like.
STYLES = {
    "detection: images of several sizes, padded into an object": """
class Scenes(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.randn(3, 8 + i % 3, 8), {"boxes": torch.rand(i % 4, 4)}
class Nested:
    def __init__(self, images):
        sizes = [max(one.shape[d] for one in images) for d in (1, 2)]
        self.tensors = torch.zeros(len(images), 3, *sizes)
        self.mask = torch.ones(len(images), *sizes, dtype=torch.bool)
    def to(self, device):
        self.tensors, self.mask = self.tensors.to(device), self.mask.to(device)
        return self
def collate(batch):
    images, targets = zip(*batch)
    return Nested(images), targets
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, nested): return self.conv(nested.tensors).mean((2, 3))
model = Detector().cuda()
optimizer = torch.optim.Adam(model.parameters())
sampler = BatchSampler(RandomSampler(Scenes()), N, drop_last=True)
for nested, targets in DataLoader(Scenes(), batch_sampler=sampler, collate_fn=collate):
    targets = [{name: one.cuda() for name, one in target.items()} for target in targets]
    loss = model(nested.to("cuda")).mean()
""",
    "detection: a list of images": """
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, images, targets): return sum(self.conv(one[None]).mean() for one in images)
model = Detector().cuda()
optimizer = torch.optim.Adam(model.parameters())
for batch in DataLoader(images, batch_size=N, collate_fn=lambda batch: tuple(zip(*batch))):
    loss = model([one.cuda() for one in batch[0]], [{"label": one} for one in batch[1]])
""",
    "graphs: a row for each node": """
class Graphs(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        num = 5 + i % 4
        return torch.randn(num, 16), torch.randint(num, (2, 3 * num)), i % 3
def collate(batch):
    starts = torch.tensor([0] + [len(x) for x, _, _ in batch]).cumsum(0)
    edges = torch.cat([edge + start for (_, edge, _), start in zip(batch, starts)], 1)
    which = torch.repeat_interleave(torch.arange(len(batch)), starts.diff())
    return torch.cat([x for x, _, _ in batch]), edges, which, torch.tensor([y for *_, y in batch])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(16, 32), nn.Linear(32, 3)
    def forward(self, x, edges, which, num):
        x = self.up(x)
        x = x.index_add(0, edges[1], x[edges[0]])
        return self.head(torch.zeros(num, 32, device=x.device).index_add(0, which, x))
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
class GraphLoader(DataLoader):
    def __init__(self, dataset, batch_size=1, shuffle=False, **kw):
        kw["collate_fn"] = collate
        super().__init__(dataset, batch_size, shuffle, **kw)
for x, edges, which, y in GraphLoader(Graphs(), batch_size=N, shuffle=True):
    loss = F.cross_entropy(model(x.cuda(), edges.cuda(), which.cuda(), len(y)), y.cuda())
""",
    "forward-forward: each layer trained, on good and on bad examples": """
layers = [nn.Linear(192, 32).cuda(), nn.Linear(32, 32).cuda()]
optimizers = [torch.optim.Adam(layer.parameters()) for layer in layers]
for x, y in DataLoader(images, N):
    good, bad = x.flatten(1).cuda(), x.flatten(1).cuda()
    for layer, optimizer in zip(layers, optimizers):
        for _ in range(2):
            both = layer(torch.cat([good, bad])).pow(2).mean(1)
            loss = (both[len(x):] - both[:len(x)]).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        good, bad = layer(good).detach(), layer(bad).detach()
    loss = layer(good).mean()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
""",
    "contrast: two views of each image": _FLAT
    + """
for x, _ in DataLoader(images, batch_size=N, shuffle=True, drop_last=True):
    z = F.normalize(model(torch.cat([x, x.flip(3)]).cuda()))
    likeness = z @ z.T - torch.eye(len(z), device="cuda")
    loss = F.cross_entropy(likeness, torch.arange(len(z), device="cuda").roll(len(x)))
""",
    "many crops of each image": _FLAT
    + """
crops = lambda batch: [torch.stack([x for x, _ in batch]) for _ in range(6)]
for views in DataLoader(images, batch_size=N, collate_fn=crops):
    loss = model(torch.cat(views).cuda()).mean()
""",
    "time first": """
class Words(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.randint(50, (12,))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 16)
    def forward(self, x): return self.lstm(self.embed(x))[0]
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
for x in DataLoader(Words(), batch_size=N, collate_fn=lambda batch: torch.stack(batch, 1)):
    loss = model(x.cuda()).mean()
""",
    "a sampler that draws batches for a loader that does not": _FLAT
    + """
class Tables(Dataset):
    def __len__(self): return 64
    def __getitem__(self, rows): return torch.randn(2 * len(rows), 192)
for x in DataLoader(Tables(), sampler=BatchSampler(RandomSampler(range(64)), N, True),
                    batch_size=None):
    loss = model(x.cuda()).mean()
""",
    "a stream that batches by itself, and says how": _FLAT
    + """
class Shards(IterableDataset):
    def __init__(self, batch_size): self.batch_size = batch_size
    def __iter__(self):
        while True: yield torch.randn(2 * self.batch_size, 192)
for x in DataLoader(Shards(N), batch_size=None):
    loss = model(x.cuda()).mean()
""",
    "two loaders, one for each domain": _FLAT
    + """
for (x, _), (z, _) in zip(DataLoader(images, N, shuffle=True), DataLoader(images, N)):
    loss = model(x.cuda()).mean() + model(z.cuda()).mean()
""",
}  # fmt: skip


@pytest.mark.parametrize("style", list(STYLES))
def test_the_batch_is_read_from_the_loader(tmp_path: Path, style: str) -> None:
    text = f"{_HEAD}N = 4\n{STYLES[style]}{_TAIL}"
    _, as_it_is = rehearsed(tmp_path, text)
    assert (as_it_is.micro_batch, as_it_is.batch_from) == (4, "loader")
    assert as_it_is.batch_doubt is None
    assert as_it_is.accumulation == 1
    trace, seen = rehearsed(tmp_path, text, micro_batch=2, first=as_it_is)
    assert seen.micro_batch == trace.micro_batch == 2
    if "graphs" not in style and "several sizes" not in style:  # chance decides their sizes
        written, _ = rehearsed(tmp_path, text.replace("N = 4", "N = 2"))
        assert find_peak(trace).live_bytes == find_peak(written).live_bytes


def test_a_script_that_cuts_the_batches_of_its_loader_trains_on_the_pieces(tmp_path: Path) -> None:
    text = f"""{_HEAD}{_FLAT}
for x, y in DataLoader(images, batch_size=16):
    optimizer.zero_grad()
    for part, truth in zip(x.split(4), y.split(4)):
        (F.cross_entropy(model(part.cuda()), truth.cuda()) / 4).backward()
    optimizer.step()
"""
    _, seen = rehearsed(tmp_path, text)
    assert (seen.micro_batch, seen.accumulation) == (4, 4)
    assert seen.loader is not None
    assert seen.loader.batch_size == 16


def test_loaders_with_batches_of_several_sizes_are_not_varied(tmp_path: Path) -> None:
    text = f"""{_HEAD}{_FLAT}
few, many = DataLoader(images, 4), DataLoader(images, 12)
for (x, y), (z, _) in zip(few, many):
    both = model(torch.cat([x, z]).cuda())
    loss = F.cross_entropy(both[:4], y.cuda()) + both[4:].mean()
{_TAIL}"""
    _, as_it_is = rehearsed(tmp_path, text)
    assert [one.batch_size for one in as_it_is.loaders_beside] == [4]
    with pytest.raises(OomphError, match=r"12 examples of the DataLoader at .* and 4 of"):
        rehearsed(tmp_path, text, micro_batch=3, first=as_it_is)


def test_an_evaluation_between_is_not_the_loader_that_feeds(tmp_path: Path) -> None:
    text = f"""{_HEAD}{_FLAT}
held_out = DataLoader(images, 32)
for x, y in DataLoader(images, 4):
    with torch.no_grad():
        for z, _ in held_out: model(z.cuda())
    loss = F.cross_entropy(model(x.cuda()), y.cuda())
{_TAIL}"""
    _, seen = rehearsed(tmp_path, text)
    assert seen.micro_batch == 4


_ROWS = _FLAT.replace("nn.Flatten(), ", "")
UNKNOWN = {
    "observations of a game, one at a time": """
for episode in range(4):
    kept = [model(torch.randn(192).cuda()).logsumexp(-1) for _ in range(5)]
    loss = torch.stack(kept).mean()
""",
    "episodes of any length": """
for length in (17, 23, 12, 9):
    loss = model(torch.randn(length, 192).cuda()).mean()
""",
    "one picture": """
for _ in range(4):
    loss = model(torch.randn(1, 192).cuda()).mean()
""",
    "batches of as many tokens": """
sizes = [list(range(n)) for n in (9, 14, 7, 11)]
for x, y in DataLoader(images, batch_sampler=sizes):
    loss = F.cross_entropy(model(x.flatten(1).cuda()), y.cuda())
""",
}


@pytest.mark.parametrize("kind", list(UNKNOWN))
def test_a_batch_that_nobody_can_tell_is_called_unknown(tmp_path: Path, kind: str) -> None:
    _, seen = rehearsed(tmp_path, _HEAD + _ROWS + UNKNOWN[kind] + _TAIL)
    assert seen.micro_batch is None
    assert seen.batch_doubt is not None
    assert not seen.is_batch_known


def test_time_comes_first_where_the_model_says_so(tmp_path: Path) -> None:
    text = f"""{_HEAD}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 16)
    def forward(self, x): return self.lstm(self.embed(x))[0]
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    loss = model(torch.randint(50, (35, 20), device="cuda")).mean()
{_TAIL}"""
    _, seen = rehearsed(tmp_path, text)
    assert (seen.micro_batch, seen.batch_from) == (20, "second dimension")
    assert seen.longest_sequence == 35
