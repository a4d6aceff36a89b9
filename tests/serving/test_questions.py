"""What may be asked: what is offered, and nothing else. No file is executed to find out."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.errors import UsageError
from oomph.records.machine import SeenGpu, Sighting, Totals
from oomph.serving.questions import Questions
from oomph.units import GIB
from serving.fakes import device, watched

WORKLOAD = """\
import torch
import oomph

workload = oomph.Workload(
    model=lambda: torch.nn.Linear(64, 64),
    batch=lambda n: torch.zeros(n, 64),
    loss=lambda model, batch: model(batch).sum(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=8,
)
"""
NOTHING = Sighting(number=0, at=0.0, gpus=(), problem=None, notes=())


def offered(directory: Path) -> list[str]:
    found: list[str] = Questions(directory).choices(NOTHING)["workloads"]
    return found


def test_workloads_are_found_in_the_text_of_files(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "train.py").write_text(f"raise SystemExit('executed')\n{WORKLOAD}")
    (tmp_path / "nets" / "vit.py").write_text(
        "small: Workload = Workload(\n)\n\ndef large() -> oomph.Workload:\n    ...\n"
        "    inner = Workload()\ndef with_arguments(n) -> Workload: ...\n"
    )
    (tmp_path / "other.py").write_text("import oomph\n")
    (tmp_path / "notes.txt").write_text(WORKLOAD)
    assert offered(tmp_path) == ["nets/vit.py:large", "nets/vit.py:small", "train.py:workload"]


def test_links_hidden_files_environments_and_pipes_are_not_offered(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    for directory in (outside, inside / ".git", inside / "env", inside / "node_modules"):
        directory.mkdir(parents=True)
        (directory / "a.py").write_text(WORKLOAD)
    (inside / "env" / "pyvenv.cfg").touch()
    (inside / "link.py").symlink_to(outside / "a.py")
    (inside / "linked").symlink_to(outside)
    os.mkfifo(inside / "pipe.py")
    (inside / "large.py").write_text(WORKLOAD + "#" * (1 << 20))
    (inside / "own.py").write_text(WORKLOAD)
    assert offered(inside) == ["own.py:workload"]


def test_a_directory_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        Questions(tmp_path / "nothing")


def test_the_gpus_of_this_machine_are_named() -> None:
    here = device(name="NVIDIA GeForce RTX 4090", total_bytes=24 * GIB)
    seen = SeenGpu(watched=watched(), device=here, span=None, totals=Totals())
    sighting = Sighting(number=0, at=0.0, gpus=(seen,), problem=None, notes=())
    choices = Questions().choices(sighting)
    assert choices["here"] == ["rtx4090"]
    assert choices["directory"] is None
    assert {"rtx4090", "a100-80gb"} <= {gpu["name"] for gpu in choices["gpus"]}


def test_a_question_has_the_command_line_that_answers_it(tmp_path: Path) -> None:
    directory = tmp_path / "my nets"
    directory.mkdir()
    (directory / "train.py").write_text(WORKLOAD)
    questions = Questions(directory)
    of_model = questions.question(
        {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100", "seq_len": "4096", "batch_size": "64"}
    )
    assert of_model.command == (
        "oomph plan hf:meta-llama/Llama-3.1-8B --seq-len 4096 --batch-size 64 --gpu h100-80gb"
    )
    of_file = questions.question(
        {"workload": "train.py:workload", "gpu": "v100 16", "max_gpus": "4"}
    )
    words = ["oomph", "plan", f"{directory}/train.py:workload", "--gpu", "v100-16gb"]
    assert shlex.split(of_file.command) == [*words, "--max-gpus", "4"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "it is not said what to train"),
        ({"model": "openai-community/gpt2", "workload": "train.py:workload"}, "not said what"),
        ({"model": "gpt2"}, "no model 'gpt2' is offered"),
        ({"model": "/etc/config.json"}, "no model '/etc/config.json' is offered"),
        ({"workload": "../train.py:workload"}, "no workload '../train.py:workload'"),
        ({"workload": "train.py:other"}, "no workload 'train.py:other'"),
        ({"model": "openai-community/gpt2", "gpu": "rtx"}, "rtx"),
        ({"model": "openai-community/gpt2", "gpu": ""}, ""),
        ({"model": "openai-community/gpt2", "batch_size": "0"}, "'0' is no batch size"),
        ({"model": "openai-community/gpt2", "batch_size": "9" * 400}, "is no batch size"),
        ({"model": "openai-community/gpt2", "batch_size": "²"}, "is no batch size"),
        ({"model": "openai-community/gpt2", "seq_len": "2048"}, "takes no 2048 tokens"),
        ({"model": "google/vit-base-patch16-224", "seq_len": "5"}, "has no sequence length"),
        ({"workload": "train.py:workload", "seq_len": "5"}, "goes with a model by name"),
        ({"model": "openai-community/gpt2", "allow": "lora"}, "nothing is called 'allow'"),
    ],
)
def test_what_is_not_offered_cannot_be_asked(
    tmp_path: Path, asked: dict[str, str], told: str
) -> None:
    (tmp_path / "train.py").write_text(WORKLOAD)
    with pytest.raises(UsageError) as refused:
        Questions(tmp_path).question({"gpu": "rtx4090", **asked})
    assert told in refused.value.what


@settings(deadline=None)  # the first reads the catalogue
@given(st.dictionaries(st.sampled_from(["model", "workload", "seq_len", "batch_size"]), st.text()))
def test_any_request_is_a_question_or_an_error_in_words(asked: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        Questions().question({"gpu": "rtx4090", **asked})
