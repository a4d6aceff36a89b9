"""What a loop keeps of the model's outputs is asked, said beside the figure, and planned with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import oomph
from oomph.cli import main
from oomph.errors import UsageError
from oomph.records.workload import Variant

TRAIN = """
import torch, oomph
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 64), nn.Linear(64, 30_000)

    def forward(self, x):
        logits = self.head(self.embed(x))
        with torch.no_grad():  # the peak is in the forward pass, before the old outputs are dropped
            (logits.softmax(-1) * logits.log_softmax(-1)).sum()
        return {"logits": logits, "loss": logits.float().logsumexp(-1).mean()}

class Keeping:
    def __call__(self, model, batch):
        self.outputs = model(batch)
        return self.outputs["loss"]

def made(loss, **more):
    return oomph.Workload(
        model=Model,
        batch=lambda n: torch.zeros(n, 64, dtype=torch.long),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters),
        batch_size=16,
        **more,
    )

dropping = made(lambda model, batch: model(batch)["loss"])
keeping = made(Keeping())
saying = made(lambda model, batch: model(batch)["loss"], keeps="outputs")
"""
LOGITS_BYTES = 16 * 64 * 30_000 * 4


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


def _has_bar(prediction: oomph.Prediction) -> bool:
    return any("outputs" in unknown.what for unknown in prediction.unknowns)


def test_who_says_what_the_loop_keeps_gets_the_figure_of_that_loop(file: Path) -> None:
    unsaid = oomph.predict(f"{file}:dropping", gpu="t4")
    kept = oomph.predict(f"{file}:keeping", gpu="t4")
    assert unsaid.outputs_bytes >= LOGITS_BYTES
    assert _has_bar(unsaid)
    for asked in (
        oomph.predict(f"{file}:dropping", gpu="t4", keeps="outputs"),
        oomph.predict(f"{file}:saying", gpu="t4"),
    ):
        assert asked.allocated_bytes == kept.allocated_bytes
        assert asked.reserved_bytes == unsaid.reserved_bytes + unsaid.outputs_bytes
        assert asked.outputs_bytes == 0
        assert not _has_bar(asked)
    for asked in (
        oomph.predict(f"{file}:dropping", gpu="t4", keeps="nothing"),
        oomph.predict(f"{file}:saying", gpu="t4", keeps="nothing"),
    ):
        assert asked.reserved_bytes == unsaid.reserved_bytes
        assert asked.high_bytes == unsaid.high_bytes - unsaid.outputs_bytes
        assert asked.outputs_bytes == 0


def test_it_is_said_beside_the_figure(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "keeps `outputs` until the next step"
    assert main(["predict", f"{file}:dropping", "--gpu", "t4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(lines) if sentence in line)
    assert place <= 3  # right under the figure, which may take two lines
    assert main(["plan", f"{file}:dropping", "--gpu", "t4"]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())
    for verb in ("predict", "plan"):
        assert main([verb, f"{file}:dropping", "--gpu", "t4", "--keeps", "outputs"]) == 0
        assert sentence not in " ".join(capsys.readouterr().out.split())


def test_every_plan_counts_what_the_loop_is_said_to_keep(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{file}:dropping"
    asked = ["plan", place, "--gpu", "t4", "--json"]
    assert main(asked) == 0
    unsaid = json.loads(capsys.readouterr().out)
    for _ in range(2):  # the second time of what is kept
        assert main([*asked, "--keeps", "outputs"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["as_is"]["device_bytes"] >= unsaid["as_is"]["device_bytes"] + LOGITS_BYTES
        for plan in told["plans"]:
            alone = oomph.predict(place, gpu="t4", keeps="outputs", **_as_asked(plan["variant"]))
            assert plan["device_bytes"] == alone.device_bytes


def _as_asked(variant: dict[str, Any]) -> dict[str, Any]:
    how = Variant(**variant)
    offload = [
        name
        for name, is_on in (
            ("activations", how.offload_activations),
            ("optimizer", how.offload_optimizer),
            ("zero", how.zero_offload),
        )
        if is_on
    ]
    names = ("micro_batch", "precision", "checkpointing", "optimizer", "attention", "loss")
    more = ("optimizer_in_backward", "adapters", "expandable_segments")
    return {"offload": offload} | {name: getattr(how, name) for name in (*names, *more)}


def test_nothing_else_can_be_kept_and_of_scripts_it_is_seen(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"keeps='.*' is unknown"):
        oomph.Workload(
            model=lambda: torch.nn.Linear(2, 2),
            batch=lambda n: torch.zeros(n, 2),
            loss=lambda model, batch: model(batch).mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters),
            batch_size=2,
            keeps="all",  # type: ignore[arg-type]
        )
    (tmp_path / "script.py").write_text("")
    script = oomph.Script(path=str(tmp_path / "script.py"))
    for verb in (oomph.predict, oomph.plan):
        with pytest.raises(UsageError, match="not to scripts"):
            verb(script, gpu="t4", keeps="outputs")
