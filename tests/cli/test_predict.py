"""`oomph predict`, as typed: the answer, its exit code, and one clear error for bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomph.cli import main

TRAIN = """
import torch, oomph

def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])

workload = oomph.Workload(
    model=lambda: torch.nn.Sequential(
        torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10)
    ),
    batch=lambda n: {"x": torch.zeros(n, 1024), "y": torch.zeros(n, dtype=torch.long)},
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=64,
)

def make():
    return workload
"""
NUM_PARAMETERS = 1024 * 4096 + 4096 + 4096 * 10 + 10


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_the_answer_has_every_field_and_exit_0_if_it_fits(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", f"{train}:workload", "--gpu", "v100-16gb", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] == "yes"
    assert told["by_category"]["parameters"] == 4 * NUM_PARAMETERS
    assert told["by_category"]["optimizer"] == 8 * NUM_PARAMETERS
    assert told["allocated_bytes"] <= told["reserved_bytes"] < told["device_bytes"]
    assert told["low_bytes"] <= told["device_bytes"] <= told["high_bytes"]
    assert told["peak_at"]["step"] in (1, 2)
    assert told["samples_per_s"] > 0
    assert told["unknowns"]


def test_a_function_that_returns_the_workload_will_do(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", f"{train}:make", "--gpu", "a100-80gb", "--micro-batch", "16"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("fits on a100-80gb: micro-batch 16 x 4, fp32")


def test_a_gpu_whose_name_leaves_something_open_says_how_it_was_read(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", f"{train}:workload", "--gpu", "a100"]) == 0
    assert "assumed: A100 comes with 40 and 80 GB" in capsys.readouterr().out


def test_what_does_not_fit_is_exit_1(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", f"{train}:workload", "--gpu-memory", "64MiB"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(("import torch", "import torch; 1 / 0"), "ZeroDivisionError", id="on import"),
        pytest.param(("batch_size=64", "batch_size=0"), "cannot have batch_size=0", id="no batch"),
        pytest.param(
            (
                'return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])',
                'return model(batch["x"])',
            ),
            "not a scalar",
            id="loss is no scalar",
        ),
        pytest.param(
            ("cross_entropy(model(batch", "cross_entropy(model.nope(batch"),
            "train.py:5",
            id="the user's line",
        ),
        pytest.param(
            ("torch.zeros(n, 1024)", "torch.zeros(8, 1024)"), "train.py:5", id="batch ignores n"
        ),
        pytest.param(
            ("return torch.nn", "with torch.no_grad(): return torch.nn"),
            "needs no gradient",
            id="no gradient",
        ),
    ],
)
def test_a_workload_that_is_wrong_is_one_clear_error(
    train: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], said: str
) -> None:
    assert change[0] in TRAIN
    train.write_text(TRAIN.replace(*change))
    assert main(["predict", f"{train}:workload", "--gpu", "v100-16gb"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("oomph: ")
    assert said in told.err
    assert "Traceback" not in told.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py:workload", "--gpu", "t4"], "there is no file 'nowhere.py'"),
        (["train.py", "--gpu", "t4"], "there is no file 'train.py'"),
        (["{train}:nope", "--gpu", "t4"], "has no 'nope'"),
        (["{train}:loss", "--gpu", "t4"], "TypeError"),
        (["{train}:workload"], "no GPU is named"),
        (["{train}:workload", "--gpu", "b1000"], "no GPU 'b1000'"),
        (["{train}:workload", "--gpu", "t4", "--micro-batch", "7"], "7 does not divide"),
        (["{train}:workload", "--gpu", "t4", "--checkpointing", "some"], "unknown checkpointing"),
        (["{train}:workload", "--gpu", "t4", "--optimizer", "lion"], "not an optimizer"),
        (["{train}:workload", "--gpu-memory", "12 apples"], "is not a size"),
        (["{train}:workload", "--gpu-memory", "12"], "a size without a unit counts as bytes"),
        (["{train}", "--gpu", "t4"], "{train}:workload"),  # it holds a Workload: named to try
        (["{train}:workload", "--gpu", "t4", "--gpus", "0"], "'0' is not a whole number above 0"),
        (["{train}:workload", "--gpu", "t4", "--gpus", "3"], "does not divide the batch of 64"),
        (["{train}:workload", "--gpu", "t4", "--sharding", "fsdp"], "do not go together"),
        (
            ["{train}:workload", "--gpu", "t4", "--gpus", "2", "--sharding", "all"],
            "unknown sharding 'all'",
        ),
        (
            ["{train}:workload", "--gpu", "t4", "--gpus", "2", "--sharding", "hybrid"],
            "cannot be put into equal groups",
        ),
    ],
)
def test_a_wrong_question_is_one_clear_error(
    train: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["predict", *(word.format(train=train) for word in arguments)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said.format(train=train) in told.err


def test_the_next_command_asks_for_a_plan_of_the_same_on_the_same_gpu(
    train: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["predict", f"{train}:workload", "--gpu", "t4", "--gpu-memory", "64MiB"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"next: oomph plan {train}:workload --gpu t4 --gpu-memory 64MiB")


@pytest.mark.parametrize("asked", [["{train}:nope"], ["{train}:workload", "--gpu-memory", "12"]])
def test_under_json_an_error_is_json_too(
    train: Path, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    arguments = [word.format(train=train) for word in asked]
    assert main(["predict", *arguments, "--gpu", "t4", "--json"]) == 2
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert answer["exit_code"] == 2
    assert answer["error"]["what"] in told.err
    assert answer["error"]["try"] in told.err


def test_an_optimizer_that_runs_the_batch_itself_is_refused_by_name(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.write_text(TRAIN.replace("optim.AdamW", "optim.LBFGS"))
    assert main(["predict", f"{train}:workload", "--gpu", "t4"]) == 2
    assert "a Workload cannot be trained with LBFGS" in capsys.readouterr().err


def test_another_optimizer_is_named_and_has_its_state(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["predict", f"{train}:workload", "--gpu", "v100-16gb", "--optimizer", "sgd"]
    assert main(asked) == 0
    assert "fp32, sgd" in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["by_category"]["optimizer"] == 4 * NUM_PARAMETERS
    assert told["variant"]["optimizer"] == "sgd"


def test_eight_gpus_hold_an_eighth_of_the_states_each(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eight = [f"{train}:workload", "--gpu", "a100-80gb", "--gpus", "8", "--json"]
    assert main(["predict", *eight, "--sharding", "fsdp"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["variant"]["micro_batch"] == 8
    assert told["by_category"]["optimizer"] == pytest.approx(NUM_PARAMETERS, rel=0.01)
    assert told["samples_per_s"] == pytest.approx(64 / told["step_s"])
    assert any("NCCL" in unknown["what"] for unknown in told["unknowns"])
    assert any("NVLink" in note for note in told["notes"])


def test_several_gpus_are_ddp_and_each_holds_all_states(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [f"{train}:workload", "--gpu", "t4", "--gpus", "2", "--json"]
    assert main(["predict", *two]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["variant"]["sharding"] == "ddp"
    assert told["by_category"]["optimizer"] == 8 * NUM_PARAMETERS
    assert any("gradient_as_bucket_view" in note for note in told["notes"])


def test_what_grows_with_the_square_of_the_batch_is_not_taken_for_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    among_pairs = "(model(batch['x']) @ model(batch['x']).T)[:, :, None].expand(-1, -1, 65536)"
    path.write_text(
        TRAIN.replace(
            'torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])',
            f"{among_pairs}.relu().square().mean()",
        )
    )
    for micro_batch in (64, 32):  # the second is answered from what the first has kept
        arguments = ["--gpu", "v100-16gb", "--micro-batch", str(micro_batch), "--json"]
        assert main(["predict", f"{path}:workload", *arguments]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["allocated_bytes"] > 2 * 4 * 65536 * micro_batch**2


@pytest.mark.slow
def test_two_traces_and_a_direct_one_agree(train: Path) -> None:
    import oomph
    from oomph.predicting.scaling import affine
    from oomph.records.workload import Variant
    from oomph.rehearsing.traces import Request, trace

    place = (train, "workload")
    for micro_batch in (4, 32):
        for on in ({}, {"num_gpus": 2, "sharding": "ddp"}, {"num_gpus": 2, "sharding": "fsdp"}):
            variant = Variant(micro_batch=micro_batch, **on)  # type: ignore[arg-type]
            request = Request(tricks=variant, micro_batch=micro_batch)
            line = affine(*trace(place, request, (8, 0)).traces[:2]).at(micro_batch)
            direct = trace(place, request, (8, 0), is_linear=False).traces[0]
            assert line.allocations == direct.allocations
    assert oomph.predict(f"{train}:workload", gpu="t4", micro_batch=1).fits == "yes"


def test_a_rehearsal_leaves_no_torch_in_the_process_that_asks(train: Path) -> None:
    asks = (
        "import sys, oomph\n"
        f"told = oomph.predict('{train}:workload', gpu='t4')\n"
        "print(told.fits, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["yes", "False"]


# ---- a step that was measured ------------------------------------------------------------------


def test_a_step_measured_as_asked_for_is_the_answer(train: Path) -> None:
    import oomph

    told = oomph.predict(f"{train}:workload", gpu="v100-16gb", measured_step_s=0.45)
    assert told.step_s == pytest.approx(0.45)
    assert told.samples_per_s == pytest.approx(64 / 0.45)
    assert told.step_from == "measured step"


def test_a_step_measured_otherwise_scales_the_time_by_the_same_factor(train: Path) -> None:
    import oomph

    def step_s(micro_batch: int, **measured: Any) -> float:
        place = f"{train}:workload"
        told = oomph.predict(place, gpu="v100-16gb", micro_batch=micro_batch, **measured)
        assert told.step_s is not None
        assert told.step_low_s is not None
        assert told.step_high_s is not None
        assert told.step_low_s < told.step_s < told.step_high_s
        return told.step_s

    held = step_s(32, measured_step_s=0.45, measured_micro_batch=4)
    assert held == pytest.approx(0.45 * step_s(32) / step_s(4))


def test_a_list_of_blocks_is_one_way_of_checkpointing() -> None:
    from oomph.cli.predict import _settings

    assert _settings("checkpointing=blocks:0,3, micro-batch=4,") == {
        "measured_checkpointing": "blocks:0,3",
        "measured_micro_batch": 4,
    }


def test_a_measured_micro_batch_of_nothing_is_refused(train: Path) -> None:
    import oomph

    with pytest.raises(oomph.OomphError, match="have a micro-batch of 0"):
        oomph.predict(f"{train}:workload", gpu="t4", measured_step_s=0.45, measured_micro_batch=0)


def test_the_time_is_told_with_its_bounds_and_what_it_rests_on(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["predict", f"{train}:workload", "--gpu", "v100-16gb", "--micro-batch", "32"]
    how = "micro-batch=64, precision=fp16"
    assert main([*asked, "--measured-step", "450ms", "--measured-with", how]) == 0
    assert re.search(
        r"time: about \S+ m?s a step \(\S+ m?s to \S+ m?s\), \S+ samples a second; scaled to",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--measured-step", "0"], "a step cannot take 0.0 s"),
        (["--measured-step", "-1s"], "expected one argument"),
        (["--measured-step=-1s"], "a step cannot take -1.0 s"),
        (["--measured-step", "inf"], "a step cannot take inf s"),
        (["--measured-step", "nan"], "a step cannot take nan s"),
        (["--measured-step", "soon"], "'soon' is not a time"),
        (["--measured-with", "micro-batch=4"], "but not its time"),
        (["--measured-step", "1", "--measured-with", "batch=4"], "'batch=4' is none of"),
        (["--measured-step", "1", "--measured-with", "micro-batch"], "'' is not a whole number"),
        (["--measured-step", "1", "--measured-with", "micro-batch=7"], "7 does not divide"),
        (["--measured-step", "1", "--measured-with", "precision=fp8"], "'fp8' is none of"),
        (["--measured-step", "1", "--measured-with", "checkpointing=x"], "unknown checkpointing"),
        (
            ["--measured-step", "1", "--measured-with", "precision=fp16,precision=fp32"],
            "'precision=fp32' is none of",
        ),
    ],
)
def test_a_measured_step_that_makes_no_sense_is_one_clear_error(
    train: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["predict", f"{train}:workload", "--gpu", "v100-16gb", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err


def test_a_measured_step_on_a_gpu_without_a_name_is_refused(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["predict", f"{train}:workload", "--gpu-memory", "12GiB", "--measured-step", "1"]
    assert main(asked) == 2
    assert "needs the GPU's name" in capsys.readouterr().err


def test_tricks_are_put_on_as_they_are_typed(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--offload", "optimizer", "--offload", "activations", "--expandable-segments"]
    assert main(["predict", f"{train}:workload", "--gpu", "v100-16gb", "--json", *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "optimizer" not in told["by_category"]
    assert told["host_bytes"] >= 16 * NUM_PARAMETERS
    assert told["bus_bytes"] >= 8 * NUM_PARAMETERS
    assert told["variant"]["expandable_segments"]
    assert told["variant"]["offload_activations"]


@pytest.mark.parametrize(
    ("flags", "because"),
    [
        (["--attention", "sdpa"], "not a model of Hugging Face"),
        (["--loss", "chunked"], "not a language model"),
        (["--adapters", "lora"], "no nn.Linear is inside repeated blocks"),
        (["--optimizer-in-backward", "--micro-batch", "16"], "several micro-batches"),
        (["--adapters", "qlora"], "QLoRA computes in bf16"),
        (["--lora-rank", "8"], "those of adapters, and none are asked for"),
        (["--optimizer", "muon"], "Muon"),
    ],
)
def test_a_trick_that_cannot_be_put_on_says_why(
    train: Path, capsys: pytest.CaptureFixture[str], flags: list[str], because: str
) -> None:
    assert main(["predict", f"{train}:workload", "--gpu", "v100-16gb", *flags]) == 2
    assert because in capsys.readouterr().err.replace("\n", " ")


# ---- layers shared among GPUs, and several machines ----------------------------------------------

LLAMA = """
import oomph, torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=8, vocab_size=1024, use_cache=False,
)

def batch(n):
    tokens = torch.zeros(n, 64, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}

workload = oomph.Workload(
    model=lambda: LlamaForCausalLM(CONFIG),
    batch=batch,
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    batch_size=16,
)
"""
# of one block: 4 matrices of attention, 3 of the MLP, 2 norms; then embedding, head and a norm
DIVIDED = 2 * (4 * 256 * 256 + 3 * 256 * 512) + 2 * 1024 * 256
NORMS = 2 * 2 * 256 + 256


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "llama.py"
    path.write_text(LLAMA)
    return f"{path}:workload"


def test_sixteen_gpus_of_which_eight_share_each_layer_hold_a_sixteenth_each(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    on = ["--gpu", "h100-80gb", "--gpus", "16", "--tensor-parallel", "8"]
    assert main(["predict", llama, *on, "--link", "infiniband-400", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["variant"]["sharding"] == "fsdp"
    assert told["variant"]["micro_batch"] == 8  # of 16: two groups
    states = 8 * (DIVIDED // 16 + NORMS // 2)
    assert told["by_category"]["optimizer"] == pytest.approx(states, rel=0.001)
    assert told["samples_per_s"] == pytest.approx(16 / told["step_s"])
    assert any("infiniband-400" in note for note in told["notes"])


def test_several_machines_without_a_network_have_no_time_and_say_what_is_missing(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    on = ["--gpu", "h100-80gb", "--gpus", "8", "--gpus-per-node", "4", "--sharding", "fsdp"]
    assert main(["predict", llama, *on, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step_s"] is None
    assert any("--link" in note for note in told["notes"])
    slow, fast = (timed(llama, on, link, capsys) for link in ("ethernet-10", "infiniband-400"))
    assert slow > 2 * fast


def timed(llama: str, on: list[str], link: str, capsys: pytest.CaptureFixture[str]) -> float:
    assert main(["predict", llama, *on, "--link", link, "--json"]) == 0
    return float(json.loads(capsys.readouterr().out)["step_s"])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--gpus", "8", "--tensor-parallel", "3"], "3 of 8 GPUs cannot share each layer"),
        (["--gpus", "32", "--tensor-parallel", "16"], "on one machine"),
        (["--gpus", "8", "--tensor-parallel", "8", "--sharding", "fsdp"], "nothing to divide"),
        (["--gpus", "16", "--link", "nvlink"], "unknown link"),
        (["--gpus", "8", "--tensor-parallel", "8", "--adapters", "lora"], "tensor parallelism"),
    ],
)
def test_an_impossible_cluster_is_one_clear_error(
    llama: str, flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", llama, "--gpu", "h100-80gb", *flags]) == 2
    assert why in capsys.readouterr().err


def test_a_model_whose_layers_are_not_known_is_refused_by_its_first_one(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = ["--gpu", "h100-80gb", "--gpus", "8", "--tensor-parallel", "8"]
    assert main(["predict", f"{train}:workload", *on]) == 2
    told = capsys.readouterr().err
    assert "tensor parallelism cannot be put on this model" in told
    assert "no repeated blocks" in told
