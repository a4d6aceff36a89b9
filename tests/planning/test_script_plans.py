"""Scripts that train in turns, or go backward several times: planned for as they are."""

from __future__ import annotations

from pathlib import Path

import oomph
from oomph.tricks.trick import NAMES

GPU = "rtx3090"
# Two generators and two discriminators, in the manner of CycleGAN.
IN_TURNS = """
import itertools, random, torch
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(32, 32, 3, padding=1), nn.InstanceNorm2d(32)

    def forward(self, x):
        return x + torch.relu(self.norm(self.one(x)))

class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        ends = nn.Conv2d(3, 32, 3, 2, 1), nn.ConvTranspose2d(32, 3, 4, 2, 1)
        self.parts = nn.Sequential(ends[0], Residual(), Residual(), ends[1], nn.Tanh())

    def forward(self, x):
        return self.parts(x)

def discriminator():
    return nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(32, 1, 4))

class Buffer:
    def __init__(self):
        self.images = []

    def __call__(self, images):
        kept = []
        for image in images.detach():
            self.images = [*self.images, image][-50:]
            kept.append(random.choice(self.images))
        return torch.stack(kept)

there, back = Generator().cuda(), Generator().cuda()
first, second = discriminator().cuda(), discriminator().cuda()
generators = torch.optim.Adam(itertools.chain(there.parameters(), back.parameters()))
discriminators = torch.optim.Adam(itertools.chain(first.parameters(), second.parameters()))
likely, same = nn.MSELoss(), nn.L1Loss()
as_real = lambda score: likely(score, torch.ones_like(score))
old_a, old_b = Buffer(), Buffer()
data = torch.utils.data.TensorDataset(torch.rand(64, 3, 64, 64), torch.rand(64, 3, 64, 64))
for a, b in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
    a, b = a.cuda(), b.cuda()
    generators.zero_grad()
    fake_b, fake_a = there(a), back(b)
    adversarial = as_real(second(fake_b)) + as_real(first(fake_a))
    (adversarial + 10 * (same(back(fake_b), a) + same(there(fake_a), b))).backward()
    generators.step()
    discriminators.zero_grad()
    for judge, real, fake in ((first, a, old_a(fake_a)), (second, b, old_b(fake_b))):
        no = judge(fake)
        (as_real(judge(real)) + likely(no, torch.zeros_like(no))).backward()
    discriminators.step()
"""
TWO_LOSSES = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
data = torch.utils.data.TensorDataset(torch.rand(512, 256))
for (x,) in torch.utils.data.DataLoader(data, batch_size=64):
    x = x.cuda()
    optimizer.zero_grad()
    y = net(x)
    y.square().mean().backward(retain_graph=True)
    (y - 1).abs().mean().backward()
    optimizer.step()
"""


def planned_as_predicted(text: str, directory: Path, memory: str) -> oomph.Plans:
    """The plan for a script as it is, which must say what a prediction of it says."""
    path = directory / "train.py"
    path.write_text(text)
    forbid = [name for name in NAMES if name not in ("accumulation", "expandable-segments")]
    plans = oomph.plan(str(path), gpu=GPU, gpu_memory=memory, forbid=forbid)
    alone = oomph.predict(str(path), gpu=GPU, gpu_memory=memory)
    assert plans.best is not None
    assert plans.best.variant == alone.variant
    assert plans.best.prediction.device_bytes == alone.device_bytes
    assert plans.best.prediction.step_s == alone.step_s
    return plans


def test_generators_and_discriminators_by_turns_are_planned(tmp_path: Path) -> None:
    plans = planned_as_predicted(IN_TURNS, tmp_path, "4GiB")
    whys = {one.what: one.why for one in plans.rejected}
    assert "2 optimizers" in whys["accumulation"]


def test_two_backwards_of_one_batch_are_not_taken_for_accumulation(tmp_path: Path) -> None:
    plans = planned_as_predicted(TWO_LOSSES, tmp_path, "2GiB")
    whys = {one.what: one.why for one in plans.rejected}
    assert "backward 2 times" in whys["accumulation"]
    assert all(plan.accumulate == 1 for plan in plans)


# BatchNorm sees eight examples at a time, and sixteen make a step.
NORMED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(
    nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(32, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
data = TensorDataset(torch.rand(64, 3, 32, 32), torch.randint(10, (64,)))
for i, (x, y) in enumerate(DataLoader(data, batch_size=8)):
    (nn.functional.cross_entropy(model(x.cuda()), y.cuda()) / 2).backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_what_batch_norm_sees_in_a_script_that_accumulates_stays_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NORMED)
    plans = oomph.plan(str(script), gpu=GPU)
    assert plans.best is not None
    assert plans.best.tricks == ()
    assert {(one.variant.micro_batch, one.variant.accumulation) for one in plans} == {(8, 2)}
    why = next(one.why for one in plans.rejected if one.what == "accumulation")
    assert "would see other than 8 examples at a time" in why
    allowed = oomph.plan(str(script), gpu=GPU, allow=["accumulation"])
    assert allowed.best is not None
    assert allowed.best.variant.micro_batch == 8
    of_others = {one.stability for one in allowed if one.variant.micro_batch != 8}
    assert of_others <= {"changes"}


# A forward before training takes cuBLAS's workspace, which optimizer steps then find there.
EVALUATED_FIRST = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.rand(256, 512), torch.randint(10, (256,)))
with torch.no_grad():
    model(torch.rand(64, 512, device="cuda"))
for x, y in torch.utils.data.DataLoader(data, batch_size=64):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    optimizer.step()
"""


def test_a_script_that_evaluates_before_it_trains_is_planned(tmp_path: Path) -> None:
    assert planned_as_predicted(EVALUATED_FIRST, tmp_path, "2GiB").best is not None
