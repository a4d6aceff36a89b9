"""A real training inside: loaders with workers, checkpoints, all that a script does."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from oomph.sandbox.conversation import read_frame, write_frame
from oomph.sandbox.sandbox import Sandbox
from sandbox.insiders import needs_namespaces


def train(requests: BinaryIO, answers: BinaryIO) -> None:
    read_frame(requests)
    torch.set_num_threads(1)  # a fork has none of the threads of its parent
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch.save(model.state_dict(), "model.pt")
    loaded = torch.load("model.pt")["weight"]
    write_frame(answers, str(bool((loaded == model.weight).all())).encode())


@needs_namespaces
def test_a_training_writes_its_checkpoints_and_none_of_them_is_there_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_text("the one that took a week")
    with Sandbox(train) as sandbox:
        assert sandbox.ask(b"") == b"True"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the one that took a week"]
