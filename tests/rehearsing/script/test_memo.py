"""Forwards that repeat are answered, and neither the peak nor what is kept changes by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.predicting.timeline import find_peak
from oomph.records.trace import Trace
from oomph.rehearsing.script.hooks import ACCUMULATION, EVALUATION
from rehearsing.script import written_twice
from rehearsing.script.rehearsed import rehearsed

KEEPING = """
import torch
from rehearsing.script.written_twice import *
model = Transformer().cuda()
optimizer = adam(model.parameters())
for step in range(3):
    for micro_step in range(ACCUMULATION):
        x = sentences(4)["x"].cuda()
        logits = model(x)  # kept until the next micro-step has its own
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())
        (loss / ACCUMULATION).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def accumulated(directory: Path, num_micro_steps: int, text: str = KEEPING) -> Trace:
    text = text.replace("ACCUMULATION", str(num_micro_steps))
    trace, seen = rehearsed(directory, text)
    assert seen.accumulation == num_micro_steps
    assert (ACCUMULATION in seen.approximations) == (num_micro_steps > 2)
    return trace


def test_long_accumulation_takes_what_two_micro_steps_take(tmp_path: Path) -> None:
    of_two, of_many = accumulated(tmp_path, 2), accumulated(tmp_path, 30)
    assert find_peak(of_many).live_bytes == find_peak(of_two).live_bytes
    assert of_many.ops == of_two.ops
    assert len(of_many.events) < 4 * len(of_two.events)


def test_a_model_that_returns_its_loss_is_accumulated_too(tmp_path: Path) -> None:
    within = KEEPING.replace("Transformer()", "WithLoss()").replace(
        "        logits = model(x)  # kept until the next micro-step has its own\n", ""
    )
    within = within.replace(
        "nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())",
        "model(x)['loss']",
    )
    within = within.replace(
        "model = WithLoss()",
        "class WithLoss(Transformer):\n"
        "    def forward(self, x):\n"
        "        out = super().forward(x)\n"
        "        loss = nn.functional.cross_entropy(out.flatten(0, 1), x.flatten())\n"
        "        return {'loss': loss, 'logits': out, 'name': 'x'}\n"
        "model = WithLoss()",
    )
    of_two, of_many = accumulated(tmp_path, 2, within), accumulated(tmp_path, 9, within)
    assert find_peak(of_many).live_bytes == find_peak(of_two).live_bytes


def test_micro_steps_of_other_shapes_are_all_rehearsed(tmp_path: Path) -> None:
    growing = KEEPING.replace("sentences(4)", "sentences(4 + micro_step)").replace(
        "ACCUMULATION", "5"
    )
    trace, seen = rehearsed(tmp_path, growing)
    assert ACCUMULATION not in seen.approximations
    sizes = {one.size_bytes for one in trace.allocations}
    assert {(4 + n) * 32 * 1000 * 4 for n in range(5)} <= sizes  # the outputs of each


@pytest.mark.parametrize("num_batches", [2, 40])
def test_evaluation_is_rehearsed_once_for_each_shape(tmp_path: Path, num_batches: int) -> None:
    text = written_twice.script("net", "plain").replace(
        "for batch in loader:",
        "model.eval()\n"
        "with torch.no_grad():\n"
        f"    kept = [model(pictures(32)['x'].cuda()) for _ in range({num_batches})]\n"
        "model.train()\n"
        "for batch in loader:",
    )
    trace, seen = rehearsed(tmp_path, text)
    assert EVALUATION in seen.approximations
    outputs = [one for one in trace.allocations if one.size_bytes == 32 * 10 * 4]
    inside = [one for one in trace.allocations if one.size_bytes == 32 * 256 * 4]
    assert len(outputs) == num_batches  # what the script keeps is kept
    assert len(inside) < 10
