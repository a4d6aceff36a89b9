"""Tricks and batches put around a script give what the same Workload gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oomph.errors import UsageError
from oomph.predicting.timeline import find_peak
from oomph.records.workload import Variant
from rehearsing.script import written_twice
from rehearsing.script.rehearsed import rehearsed, second_step, trained

WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "checkpointed": {"checkpointing": "blocks"},
    "selective": {"checkpointing": "selective"},
    "one block": {"checkpointing": "blocks:1"},
    "fused": {"optimizer": "fused"},
    "fused in fp16": {"optimizer": "fused", "precision": "fp16"},
    "for-loop": {"optimizer": "for-loop"},
    "8-bit": {"optimizer": "8-bit"},
    "adafactor": {"optimizer": "adafactor"},
    "sgd": {"optimizer": "sgd"},
    "offloaded": {"offload_activations": True},
    "many": {"precision": "bf16", "checkpointing": "blocks", "optimizer": "8-bit"},
}


def variant_of(how: Variant, micro_batch: int) -> Variant:
    return replace(how, micro_batch=micro_batch)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("loop", ["plain", pytest.param("clipped", marks=pytest.mark.slow)])
def test_a_trick_around_a_script_takes_what_it_takes_in_a_workload(
    tmp_path: Path, way: str, loop: str
) -> None:
    how = Variant(micro_batch=1, **WAYS[way])
    of_script, _ = rehearsed(tmp_path, written_twice.script("transformer", loop), how=how)
    workload = written_twice.workload("transformer", **written_twice.LOOPS[loop][1])
    of_workload = trained(workload, variant_of(how, written_twice.EXAMPLES))
    assert second_step(of_script) == second_step(of_workload)
    assert find_peak(of_script).live_bytes == find_peak(of_workload).live_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_script_that_has_autocast_is_put_into_another_precision(
    tmp_path: Path, precision: Any
) -> None:
    text = written_twice.script("net", "scaled")
    of_script, _ = rehearsed(tmp_path, text, how=Variant(micro_batch=1, precision=precision))
    variant = Variant(micro_batch=written_twice.EXAMPLES, precision=precision)
    of_workload = trained(written_twice.workload("net"), variant)
    assert second_step(of_script) == second_step(of_workload)


@pytest.mark.parametrize(
    "how",
    [
        Variant(micro_batch=1, adapters="lora"),
        Variant(micro_batch=1, sharding="fsdp", num_gpus=2),
        Variant(micro_batch=1, offload_optimizer=True),
        Variant(micro_batch=1, precision="pure-bf16"),
    ],
)
def test_what_cannot_be_put_around_a_script_is_refused(tmp_path: Path, how: Variant) -> None:
    with pytest.raises(UsageError, match="cannot be put around a script"):
        rehearsed(tmp_path, written_twice.script("net", "plain"), how=how)


@pytest.mark.parametrize("micro_batch", [8, 24, 200])
def test_the_batch_is_varied_through_the_loader(tmp_path: Path, micro_batch: int) -> None:
    text = written_twice.script("net", "plain")
    _, first = rehearsed(tmp_path, text)
    of_script, seen = rehearsed(tmp_path, text, micro_batch=micro_batch, first=first)
    assert seen.micro_batch == of_script.micro_batch == micro_batch
    of_workload = trained(written_twice.workload("net"), Variant(micro_batch=micro_batch))
    assert second_step(of_script) == second_step(of_workload)


def test_only_the_loader_that_is_trained_with_is_varied(tmp_path: Path) -> None:
    text = written_twice.script("net", "plain").replace(
        "for batch in loader:",
        "held_out = torch.utils.data.DataLoader(loader.dataset, batch_size=4)\n"
        "with torch.no_grad():\n"
        "    for batch in held_out:\n"
        "        assert model(batch['x'].cuda()).shape[0] == 4\n"
        "for batch in loader:",
    )
    _, first = rehearsed(tmp_path, text)
    _, seen = rehearsed(tmp_path, text, micro_batch=32, first=first)
    assert seen.micro_batch == 32


OWN_BATCHES = """
import torch
from rehearsing.script.written_twice import *
data = torch.arange(5000)
def get_batch():
    start = torch.randint(len(data) - 40, (12,))
    x = torch.stack([data[i:i + 32] % 1000 for i in start])
    y = torch.stack([data[i + 1:i + 33] % 1000 for i in start])
    return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda")
model = Transformer().cuda()
optimizer = adam(model.parameters())
for step in range(10):
    x, y = get_batch()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_whose_weights_are_low_cannot_be_put_into_another_precision(
    tmp_path: Path,
) -> None:
    text = OWN_BATCHES.replace("Transformer().cuda()", "Transformer().bfloat16().cuda()")
    _, first = rehearsed(tmp_path, text)
    assert first.precision == "pure-bf16"
    rehearsed(
        tmp_path,
        text,
        first=first,
        how=Variant(micro_batch=1, precision="pure-bf16", optimizer="sgd"),
    )
    with pytest.raises(UsageError, match="fp32 cannot be put around a script"):
        rehearsed(tmp_path, text, first=first, how=Variant(micro_batch=1, precision="fp32"))


BATCHED = {
    "batch sampler": """
class Buckets:
    def __iter__(self):
        for start in range(0, 60, 6):
            yield list(range(start, start + 6))
    def __len__(self): return 10
loader = torch.utils.data.DataLoader(torch.randn(60, WIDTH), batch_sampler=Buckets())
""",
    "stream": """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True: yield torch.randn(WIDTH)
loader = torch.utils.data.DataLoader(Stream(), batch_size=6)
""",
    "weighted": """
sampler = torch.utils.data.WeightedRandomSampler([1.0] * 30, 30)
loader = torch.utils.data.DataLoader(torch.randn(30, WIDTH), 6, False, sampler, drop_last=True)
""",
}


@pytest.mark.parametrize("kind", list(BATCHED))
def test_every_kind_of_loader_is_varied(tmp_path: Path, kind: str) -> None:
    text = (
        "import torch\nfrom rehearsing.script.written_twice import *\n"
        "model = Net().cuda()\noptimizer = adam(model.parameters())\n"
        + BATCHED[kind]
        + "for x in loader:\n"
        "    optimizer.zero_grad()\n"
        "    model(x.cuda()).mean().backward()\n"
        "    optimizer.step()\n"
    )
    _, first = rehearsed(tmp_path, text)
    assert first.micro_batch == 6
    _, seen = rehearsed(tmp_path, text, micro_batch=9, first=first)
    assert seen.micro_batch == 9


def test_batches_that_a_script_makes_itself_are_varied(tmp_path: Path) -> None:
    _, first = rehearsed(tmp_path, OWN_BATCHES)
    assert first.micro_batch == 12
    assert first.loader is None
    assert first.longest_sequence == 32
    varied, seen = rehearsed(tmp_path, OWN_BATCHES, micro_batch=20, first=first)
    assert seen.micro_batch == 20
    other = OWN_BATCHES.replace("(12,)", "(20,)")
    directly, _ = rehearsed(tmp_path, other)
    assert second_step(varied) == second_step(directly)


def test_a_batch_that_cannot_be_varied_is_an_error(tmp_path: Path) -> None:
    text = OWN_BATCHES.replace(
        "x, y = get_batch()",
        "x, y = [torch.randint(0, 1000, (3, 4, 32), device='cuda').flatten(0, 1) for _ in 'xy']",
    )
    with pytest.raises(UsageError, match="could not be varied to 20") as caught:
        rehearsed(tmp_path, text, micro_batch=20)
    assert "train.py:1" in str(caught.value)
