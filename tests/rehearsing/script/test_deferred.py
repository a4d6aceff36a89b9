"""Large figures of the host are made when they are read, and are then what they would have been."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.rehearsing.script.deferred import CUT, Draws, generator_at, words_of
from rehearsing.script.rehearsed import rehearsed

TRAINING = """
model = torch.nn.Linear(16, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.zeros(8, 16).cuda()).sum().backward()
    optimizer.step()
"""

READING = """
import copy, io, json, pickle, sys, torch
from torch import nn
torch.manual_seed(3)
found = {}
def read(name, tensor):
    found[name] = tensor.double().flatten()[::99_991].tolist() + [tensor.double().sum().item()]

drawn = torch.randn(1100, 1000)
read("drawn and scaled", torch.randn(1100, 1000) * 0.02 + 1)
read("drawn", drawn)
read("in place", torch.empty(1100, 1000).uniform_(-1, 1).mul_(3).clamp_(-2, 2))
read("cut", nn.init.trunc_normal_(torch.empty(1100, 1000), std=0.02))
read("cut twice", nn.init.trunc_normal_(torch.empty(1100, 1000), std=1.0))
read("cast", torch.randn(1100, 1000).to(torch.bfloat16))
read("of another kind", torch.rand(1100, 1000, dtype=torch.float64))
read("odd", torch.randn(1100, 1001)[3:5])
read("orthogonal", nn.init.orthogonal_(torch.empty(1100, 1000))[:2])
read("full", torch.full((1100, 1000), 0.25))

base = torch.zeros(1100, 1000)
view, turned = base[7], base.t()
base.normal_()
read("a view", view)
turned.uniform_()
read("a view of all", base)
base[3] = 5.0
read("changed in part", base)
base.fill_(2.0)
base.numpy()[4] = 9.0
read("written by numpy", base)
copied = torch.empty(1100, 1000).copy_(torch.rand(1100, 1000))
read("copied", copied)
read("deep", copy.deepcopy(torch.rand(1100, 1000)))
read("pickled", pickle.loads(pickle.dumps(torch.rand(1100, 1000))))
file = io.BytesIO()
torch.save(torch.rand(1100, 1000), file)
file.seek(0)
read("saved", torch.load(file))
source = torch.rand(1100, 1000)
later = source * 2
source.zero_()
read("taken before a change", later)
read("joined", torch.cat([torch.rand(1100, 1000), torch.rand(1100, 1000)]))
target = torch.rand(1100, 1000)
target.copy_(torch.ones(1100, 1000))
read("copied over", target)
found["bytes"] = torch.rand(1100, 1000).untyped_storage()[4_000_001]
found["typed"] = torch.rand(1100, 1000).storage()[1_000_001]
read("shared", torch.from_dlpack(torch.rand(1100, 1000)))
own = torch.Generator().manual_seed(5)
read("by a generator", torch.randn(1100, 1000, generator=own))
found["hashed"] = torch.get_rng_state().sum().item()

nn.Linear(1100, 1000)
nn.init.normal_(nn.Linear(1024, 1100).weight)
nn.Embedding(1100, 1001)
nn.init.trunc_normal_(nn.Parameter(torch.empty(1100, 1000)), std=0.02)
nn.Conv2d(3, 5, 3)
nn.init.normal_(nn.Parameter(torch.empty(3)))
nn.init.normal_(nn.Linear(2, 30).bias)
found["next"] = torch.rand(4).tolist() + torch.randperm(9).tolist() + torch.randn(3).tolist()
state = torch.get_rng_state()
torch.randn(1100, 1000)
torch.set_rng_state(state)
found["set back"] = torch.rand(4).tolist()
with torch.random.fork_rng(devices=[]):
    torch.randn(1100, 1000)
found["forked"] = torch.rand(4).tolist()
json.dump(found, open(sys.argv[1], "w"))
"""


def test_every_value_is_what_it_would_have_been(tmp_path: Path) -> None:
    file = tmp_path / "true.py"
    file.write_text(READING)
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in a rehearsal: sums have one order
    command = [sys.executable, str(file), str(tmp_path / "true.json")]
    subprocess.run(command, check=True, env=alone)
    rehearsed(tmp_path, READING + TRAINING, str(tmp_path / "found.json"))
    true = json.loads((tmp_path / "true.json").read_text())
    found = json.loads((tmp_path / "found.json").read_text())
    assert [name for name in true if found[name] != true[name]] == []


def test_many_truncated_values_are_not_drawn_and_that_is_said(tmp_path: Path) -> None:
    """Beyond a limit: drawing again until all fit takes minutes for billions of values."""
    cut = "nn.init.trunc_normal_(torch.empty(8000, 8000), std=1.0, a=-1, b=1)"
    lines = ["import torch", "from torch import nn", f"first, cut = {cut}, {cut}"]
    read = "assert cut.abs().max() <= 1 and 0.2 < cut.std() < 0.8"
    _, seen = rehearsed(tmp_path, "\n".join([*lines, read, TRAINING]))
    assert CUT in seen.approximations


def test_a_model_of_seventy_billions_is_built_on_the_host(tmp_path: Path) -> None:
    """Written with its values made first, as parameters, and by torch's own modules."""
    text = """
import torch
from torch import nn
torch.manual_seed(0)
width, table = 16384, 128256
class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(table, width)
        self.drawn = nn.ParameterList(
            nn.Parameter(nn.init.trunc_normal_(torch.empty(width, width), std=0.02))
            for _ in range(125)
        )
        self.scaled = nn.ParameterList(
            nn.Parameter(torch.randn(width, width) * 0.02) for _ in range(125)
        )
    def forward(self, tokens):
        x = self.table(tokens)
        for weight in (*self.drawn, *self.scaled):
            x = nn.functional.linear(x, weight)
        return x
model = Large()
before = model.state_dict()
model.load_state_dict(before)
print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.1f}")
model = model.to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randint(table, (1, 4)).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    trace, _ = rehearsed(tmp_path, text)
    size = sum(one.size_bytes for one in trace.allocations if one.category == "parameters")
    assert size == 4 * (128256 * 16384 + 250 * 16384**2)
    most_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert most_kib < 2 * 2**20  # of all the children of this process


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@given(
    num=st.integers(1, 40_000),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(["uniform_", "normal_"]),
    before=st.integers(0, 1300),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_words_are_counted_as_torch_draws_them(
    num: int, dtype: Any, name: str, before: int, seed: int
) -> None:
    tensor = torch.empty(num, dtype=dtype)
    num_words = words_of(name, tensor)
    if num_words is None:
        assert name == "normal_"
        return
    torch.manual_seed(seed)
    torch.rand(before)
    draws = Draws()
    moment = draws.moment()
    draws.pass_over(num_words)
    draws.catch_up()
    passed_over = torch.get_rng_state()
    getattr(tensor, name)(generator=generator_at(moment))
    torch.manual_seed(seed)
    torch.rand(before)
    true = getattr(torch.empty(num, dtype=dtype), name)()
    assert torch.equal(true, tensor)
    assert torch.equal(torch.get_rng_state(), passed_over)


@pytest.mark.parametrize("num", [2**21, 2**21 + 1, 624 * 4000, 5_000_011])
@pytest.mark.parametrize("before", [0, 1, 623, 624, 625])
def test_words_far_ahead_are_passed_over(num: int, before: int) -> None:
    torch.manual_seed(before)
    torch.rand(before)
    draws = Draws()
    draws.pass_over(num)
    state = torch.get_rng_state()
    torch.rand(num)
    true = torch.get_rng_state()
    torch.set_rng_state(state)
    draws.catch_up()
    assert torch.equal(torch.get_rng_state(), true)
