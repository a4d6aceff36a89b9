"""Lines below the script's model: which, where, and that training stays the same for real."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from planning.plans import plan_of

from exporting.script_stage import applied, seen_of
from oomph.exporting.rewriting.diff import script_changes
from oomph.records.script import Line, ScriptChanges
from oomph.records.workload import Possible

torch = pytest.importorskip("torch")

AS_IS: dict[str, Any] = {"micro_batch": 32, "accumulation": 1}
SCRIPT = """import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 5)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(4):
    x, y = torch.randn(8, 3, 6, 6), torch.randint(5, (8,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def _possible(**settings: Any) -> Possible:
    given: dict[str, Any] = {
        "block_names": ("blocks.0", "blocks.1", "blocks.2"),
        "attention_is": "none",
        "optimizer_class": "torch.optim.sgd.SGD",
        "batch_norm_names": ("blocks.0.norm", "blocks.1.norm", "blocks.2.norm"),
        "has_dropout": True,
        "num_parameters": 10,
        "num_trainable": 10,
        "parameter_bytes": 40,
        **settings,
    }
    return Possible(**given)


def _changed(
    text: str, possible: Possible | None = None, lines: tuple[Line, ...] = (), **plan: Any
) -> ScriptChanges:
    seen = seen_of(optimizer="SGD", lines=lines)
    plan = plan_of(**{**AS_IS, **plan})  # type: ignore[assignment]
    return script_changes({"train.py": text}, (), seen, plan, possible=possible or _possible())  # type: ignore[arg-type]


def _trained(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "train.py", "exec"), names)  # noqa: S102 # our own scripts
    return names


@pytest.mark.parametrize("checkpointing", ["blocks", "selective", "every-2", "blocks:0,2"])
@pytest.mark.parametrize("has_norms", [True, False])
def test_a_script_that_recomputes_its_blocks_ends_with_the_same_weights_and_statistics(
    checkpointing: str, has_norms: bool
) -> None:
    text = SCRIPT if has_norms else SCRIPT.replace("BatchNorm2d(4)", "Identity()")
    names = _possible().batch_norm_names if has_norms else ()
    changes = _changed(text, _possible(batch_norm_names=names), checkpointing=checkpointing)
    assert changes.by_hand == ()
    after = applied(text, changes.diff)
    assert ("statistics_kept" in after) == has_norms
    one, other = _trained(text)["model"], _trained(after)["model"]
    for (name, wanted), found in zip(
        one.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(wanted, found), name


def test_blocks_are_really_recomputed_and_only_those_that_are_named() -> None:
    after = applied(SCRIPT, _changed(SCRIPT, checkpointing="blocks:0,2").diff)
    assert 'recompute(model, ["blocks.0", "blocks.2"])' in after
    calls = after.replace(
        "        return x + self.drop",
        "        calls.append(id(self))\n        return x + self.drop",
    )
    names = _trained(calls.replace("torch.manual_seed(0)", "calls = []\ntorch.manual_seed(0)"))
    counts = [names["calls"].count(id(block)) for block in names["model"].blocks]
    assert counts == [8, 4, 8]


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    after = applied(SCRIPT, _changed(SCRIPT, checkpointing="blocks").diff)
    model = _trained(after)["model"].eval()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 6, 6)
    before = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), before)


def test_names_of_the_script_are_not_overwritten() -> None:
    text = SCRIPT.replace("torch.manual_seed(0)", "recompute = contexts = 3\ntorch.manual_seed(0)")
    after = applied(text, _changed(text, checkpointing="blocks").diff)
    assert "recompute_2(model, " in after
    names = _trained(after)
    assert (names["recompute"], names["contexts"]) == (3, 3)


def test_images_are_laid_out_below_the_model_and_the_weights_stay_the_same() -> None:
    text = SCRIPT.replace("Dropout(0.1)", "Identity()")  # drawn in the order of memory
    changes = _changed(text, channels_last=True)
    assert changes.by_hand == ()
    after = applied(text, changes.diff)
    assert "model = Net()\nmodel.to(memory_format=torch.channels_last)\n" in after
    one, other = _trained(text)["model"], _trained(after)["model"]
    for wanted, found in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(wanted, found, atol=1e-5)
    assert other.stem.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_model_from_elsewhere_is_found_by_the_parameters_of_its_optimizer() -> None:
    text = SCRIPT.replace("model = Net()", "net = make_a_net()").replace("model", "net")
    place = text.splitlines().index(
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)"
    )
    lines = (Line(what="optimizer", file="train.py", line=place + 1),)
    changes = _changed(text, lines=lines, checkpointing="blocks")
    assert 'recompute(net, [f"blocks.{n}" for n in range(3)])\n optimizer' in changes.diff.replace(
        "+recompute", "recompute"
    )


def test_a_loss_in_chunks_is_a_line_below_the_model_unless_the_script_copies_models() -> None:
    changes = _changed(SCRIPT, loss="chunked")
    line = "model = Net()\noomph.tricks.chunked_loss.chunk_loss(model)\n"
    assert line in applied(SCRIPT, changes.diff)
    copied = SCRIPT.replace("torch.manual_seed(0)", "from copy import deepcopy")
    changes = _changed(copied, loss="chunked")
    assert changes.diff == ""
    assert "a copy would compute with these weights" in changes.by_hand[0]


def test_a_model_on_several_gpus_at_once_is_left() -> None:
    text = SCRIPT.replace("model = Net()", "model = nn.DataParallel(Net())")
    changes = _changed(text, checkpointing="blocks")
    assert changes.diff == ""
    assert len(changes.by_hand) == 1


@pytest.mark.parametrize(
    ("names", "written"),
    [
        ([f"layers.{n}" for n in range(12)], '[f"layers.{n}" for n in range(12)]'),
        (["h.1.x", "h.3.x", "h.5.x"], '[f"h.{n}.x" for n in range(1, 6, 2)]'),
        (["a", "b"], '["a", "b"]'),
        (["a.0", "a.1", "a.3"], '["a.0", "a.1", "a.3"]'),
        (["layer1.0", "layer1.1", "layer2.0"], '["layer1.0", "layer1.1", "layer2.0"]'),
        (["a.00", "a.01", "a.02"], '["a.00", "a.01", "a.02"]'),
    ],
)
def test_names_of_modules_are_written_in_short(names: list[str], written: str) -> None:
    from oomph.tricks.checkpointing import in_short

    assert in_short(names) == written
    assert eval(written) == names  # noqa: S307
