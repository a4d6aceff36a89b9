"""Models by name: what is bundled is right, and a config.json is read as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oomph.cli import main
from oomph.errors import OomphError
from oomph.rehearsing.models_by_name import find, names, source, workload_file
from oomph.rehearsing.traces import load, split

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({**TINY, **changes}))
    return path


@pytest.mark.parametrize("name", names())
def test_a_bundled_model_has_as_many_parameters_as_were_published(name: str) -> None:
    workload = load(*split(workload_file(f"hf:{name}")))
    with torch.device("meta"):
        model = workload.model()
    assert sum(each.numel() for each in model.parameters()) == find(name).num_parameters


def test_the_organisation_may_be_left_out() -> None:
    assert find("llama-3.1-8b") is find("meta-llama/Llama-3.1-8B")


def test_a_directory_with_a_configuration_trains_as_asked(tmp_path: Path) -> None:
    config(tmp_path)
    workload = load(*split(workload_file(f"hf:{tmp_path}", seq_len=16, batch_size=4)))
    model, batch = workload.model(), workload.batch(4)
    assert batch["input_ids"].shape == (4, 16)
    loss = workload.loss(model, batch)
    loss.backward()
    workload.optimizer(model.parameters()).step()
    assert torch.isfinite(loss)


def test_a_model_for_images_gets_images() -> None:
    workload = load(*split(workload_file("hf:microsoft/resnet-50", batch_size=2)))
    assert workload.batch(2)["pixel_values"].shape == (2, 3, 224, 224)


def test_no_code_of_a_configuration_is_in_the_file(tmp_path: Path) -> None:
    hostile = '"""\\nimport os; os.abort()\\n"""'
    path = config(
        tmp_path, auto_map={"AutoModel": "evil.Model"}, _name_or_path=hostile, extra=hostile
    )
    text = source(find(str(path)), 16, 2)
    assert "auto_map" not in text
    names_in: dict[str, Any] = {}
    exec(compile(text, "written", "exec"), names_in)  # noqa: S102 - that nothing else runs
    assert names_in["CONFIG"].extra == hostile


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "it names no model_type"),
        ("{", "is not the configuration of a model"),
        ('{"model_type": 7}', "it names no model_type"),
        ('{"model_type": "llama"}', "cannot tell what"),
        ("[" * 100_000, "is not the configuration of a model"),
        ('{"model_type": "llama", "a": NaN}', "NaN is not a JSON number"),
    ],
)
def test_what_is_no_configuration_is_one_clear_error(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(OomphError) as refused:
        workload_file(f"hf:{path}")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hf:meta-llama/Llama-3.1-9B"], "hf:meta-llama/Llama-3.1-8B"),
        (["hf:gpt2", "--seq-len", "4096"], "its configuration has"),
        (["hf:microsoft/resnet-50", "--seq-len", "8"], "it classifies images"),
        (["train.py", "--seq-len", "8"], "--seq-len goes with a model by name"),
        (["train.py", "--batch-size", "8"], "--batch-size goes with a model by name"),
    ],
)
def test_a_wrong_question_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["predict", *arguments, "--gpu", "t4"]) == 2
    assert said in capsys.readouterr().err


def test_a_prediction_by_name_names_the_next_command_with_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    config(tmp_path)
    asked = [f"hf:{tmp_path}", "--seq-len", "16", "--batch-size", "4", "--gpu", "t4"]
    assert main(["predict", *asked]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"next: oomph plan {' '.join(asked)}")
