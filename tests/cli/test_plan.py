"""`oomph plan`, as typed: plans that fit, what would do if none does, and one clear error."""

from __future__ import annotations

import ast
import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning.test_answer_json import PROMISED, PROMISED_OF_A_PLAN

import oomph
from oomph.cli import main
from oomph.errors import UsageError
from oomph.records.check import AccumulationCheck, Checks
from oomph.records.stored import as_json
from oomph.showing.plan import print_plans
from oomph.tricks.trick import NAMES
from oomph.verbs.gpus import catalog

# 8.4 MB of weights, and 2.5 MiB of activations an example in each block.
TRAIN = """
import torch, oomph

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

workload = oomph.Workload(
    model=lambda: torch.nn.Sequential(Block(), Block()),
    batch=lambda n: torch.zeros(n, 512, 256),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=64,
)
"""
ROOMY = ("--gpu", "v100-16gb")  # 64 examples at once take 1.2 GiB
TIGHT = (*ROOMY, "--gpu-memory", "900MiB")
HOPELESS = (*ROOMY, "--gpu-memory", "200MiB")  # the CUDA context takes more


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("planned") / "train.py"
    path.write_text(TRAIN)
    return f"{path}:workload"


@pytest.fixture
def told(train: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """What is printed for these flags, with the exit code that is expected."""

    def ask(*flags: str, code: int = 0) -> str:
        assert main(["plan", train, *flags]) == code, capsys.readouterr().err
        return capsys.readouterr().out

    return ask


def answer(told: Any, *flags: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(*flags, "--json", code=code))
    return found


# ---- what it says ------------------------------------------------------------------------------


def test_what_fits_as_it_is_says_so_first_with_the_room_that_is_left(told: Any) -> None:
    first, second, *_ = told(*ROOMY).splitlines()
    assert "train.py:workload fits as it is on v100-16gb: a batch of 64 at once" in first
    assert "1.2 GiB of 15.8 GiB" in first
    assert "GiB stay free" in first
    assert second.startswith("recommended: micro-batch 64 x 1")


def test_what_a_gpus_name_leaves_open_is_said_before_all_else_that_is_good_to_know(
    told: Any,
) -> None:
    (said,) = (line for line in told("--gpu", "v100").splitlines() if "taken as" in line)
    assert said.startswith("  assumed: V100 comes with 16 and 32 GB")
    assert not any("taken as" in line for line in told(*ROOMY).splitlines())


def test_what_does_not_fit_is_given_a_plan_that_does(told: Any) -> None:
    said = told(*TIGHT)
    assert said.splitlines()[0].endswith("a batch of 64 at once needs 1.2 GiB of 900.0 MiB")
    assert "does not fit as it is" in said
    assert "recommended: micro-batch 32 x 2" in said
    assert "accumulation makes a step" in said
    assert "\nCompared " in said


def test_the_answer_in_json_has_the_promised_fields_and_keeps_the_batch(told: Any) -> None:
    found = answer(told, *TIGHT)
    assert found.keys() >= PROMISED
    assert found["fits_as_is"] == "no"
    assert [plan["recommended"] for plan in found["plans"]] == [
        True,
        *[False] * (len(found["plans"]) - 1),
    ]
    assert len(found["plans"]) > 1
    for plan in found["plans"]:
        assert plan.keys() >= PROMISED_OF_A_PLAN
        assert plan["micro_batch"] * plan["accumulate"] * plan["gpus"] == 64
        assert plan["stability"] != "changes"
        assert plan["fits"] == "yes"
        # "yes" may rest on a cache that torch frees near the end: the bar alone may be longer.
        assert plan["low_bytes"] <= plan["device_bytes"] <= min(plan["high_bytes"], 900 << 20)
        assert plan["relative_time"] >= 1
        expected = plan["relative_time"] / found["plans"][0]["relative_time"]
        assert plan["time_ratio"] == pytest.approx(expected)
        assert plan["why"]
    assert {one["what"] for one in found["rejected"]} >= {"lora", "tf32", "ddp", "sdpa"}


def test_where_nothing_fits_it_says_by_how_much_and_what_would_do(told: Any) -> None:
    said = told(*HOPELESS, code=1)
    assert "Nothing is certain to fit. Closest: micro-batch " in said
    assert " of 200.0 MiB." in said
    assert "Its largest part: the CUDA context" in said
    assert "The smallest GPU for it: " in said
    assert "something as fast fits" not in said
    found = answer(told, *HOPELESS, code=1)
    assert found["plans"] == []
    assert 0 < found["shortfall"]["missing_bytes"] < 400 << 20
    assert found["shortfall"]["smallest_gpu"] in {model.name for model in catalog()}
    assert found["shortfall"]["device_bytes"] > 200 << 20


def test_all_tricks_forbidden_is_the_workload_as_it_is_or_nothing(told: Any) -> None:
    nothing = ("--forbid", ",".join(NAMES))
    found = answer(told, *ROOMY, *nothing)
    assert [plan["tricks"] for plan in found["plans"]] == [[]]
    assert "it fits as it is" in found["plans"][0]["why"]
    assert answer(told, *TIGHT, *nothing, code=1)["plans"] == []


def test_a_prime_batch_and_gpus_that_cannot_share_it_are_planned_for_and_told(told: Any) -> None:
    few = ("--forbid", ",".join(name for name in NAMES if name not in ("accumulation", "ddp")))
    found = answer(told, *ROOMY, *few, "--max-gpus", "3", "--batch-size", "61")
    assert found["plans"][0]["micro_batch"] == 61
    why = {one["what"]: one["why"] for one in found["rejected"]}
    assert "61 is a prime number" in why["micro-batches between 1 and 61"]
    assert why["ddp"] == "a batch of 61 cannot be divided equally among up to 3 GPUs"
    shared = answer(told, *ROOMY, *few, "--max-gpus", "3")
    assert {plan["gpus"] for plan in shared["plans"]} == {1, 2}
    assert "more than 2 GPUs" in {one["what"] for one in shared["rejected"]}


def test_what_fits_only_without_what_torch_caches_is_not_said_to_leave_room(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = oomph.plan(train, gpu="v100-16gb", forbid=NAMES)
    beyond = replace(plans.as_is, high_bytes=plans.capacity_bytes + 1)
    print_plans(replace(plans, as_is=beyond))
    first = capsys.readouterr().out.splitlines()[0]
    assert "stay free" not in first
    assert "at worst it fills the GPU and torch frees its cache" in first


def test_a_narrow_terminal_cuts_no_line_in_two(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    *lines, command = told(*TIGHT).splitlines()
    assert command.startswith("next: oomph plan ")  # whole, to be copied
    assert any(line.startswith("->") for line in lines)
    long = [line for line in lines if len(line) > 40 and " " in line.strip()]
    assert long == []
    arrow = next(place for place, line in enumerate(lines) if line.startswith("->"))
    assert lines[arrow + 1].startswith("    ")  # the tricks of the row, below its figures
    assert "fp16" in lines[arrow + 1]


# ---- files -------------------------------------------------------------------------------------


def test_the_recommended_plan_is_written_and_loads_again(told: Any, tmp_path: Path) -> None:
    found = answer(told, *TIGHT, "-o", str(tmp_path / "plan.json"))
    plan = oomph.load_plan(tmp_path / "plan.json")
    assert plan.recommended
    assert plan.micro_batch == found["plans"][0]["micro_batch"]
    assert plan.prediction.device_bytes == found["plans"][0]["device_bytes"]
    assert plan.to_hf()["per_device_train_batch_size"] == plan.micro_batch


def test_the_page_holds_the_plans(told: Any, tmp_path: Path) -> None:
    told(*TIGHT, "--html", str(tmp_path / "plan.html"))
    page = (tmp_path / "plan.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "micro_batch" in page


def test_nothing_is_written_where_nothing_fits(told: Any, tmp_path: Path) -> None:
    told(*HOPELESS, "-o", str(tmp_path / "plan.json"), code=1)
    assert list(tmp_path.iterdir()) == []


# ---- wrong questions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--allow", "magic"], "'magic': there is no such trick"),
        (["--forbid", "fp16,magic"], "'magic': there is no such trick"),
        (["--allow", "lora", "--forbid", "lora"], "lora is both allowed and forbidden"),
        (["--lora-rank", "8"], "none are allowed"),
        (["--allow", "lora", "--lora-rank", "0"], "'0' is not a whole number above 0"),
        (["--allow", "lora", "--lora-rank", "9999"], "adapters cannot have rank 9999"),
        (["--allow", "lora", "--lora-targets", "mlp"], "mlp"),
        (["--target-memory", "0"], "'0' is not a share"),
        (["--target-memory", "150%"], "'150%' is not a share"),
        (["--target-memory", "nan"], "'nan' is not a share"),
        (["--max-gpus", "0"], "'0' is not a whole number above 0"),
        (["--max-gpus", "2000"], "oomph cannot plan for 2000 GPUs"),
        (["--batch-size", "0"], "'0' is not a whole number above 0"),
        (["--batch-size", "-4"], "'-4' is not a whole number above 0"),
        (["--batch-size", "10000000000"], "'10000000000' is not a whole number"),
        (["--gpu-memory", "0"], "no GPU has 0 B of memory"),
        (["--gpu-memory", "0GiB"], "no GPU has 0 B of memory"),
        (["--gpu-memory", "16"], "no GPU has 16 B of memory"),
        (["--gpu-memory", "9999TiB"], "no GPU has 9999.0 TiB of memory"),
        (["--gpu-memory", "99999999999TiB"], "is not a size"),
        (["--gpu-memory", "12 apples"], "is not a size"),
        (["--prefer", "luck"], "luck"),
        (["--gpu", "emulated"], "an emulated GPU has no memory of its own"),
    ],
)
def test_a_wrong_question_is_one_clear_error_and_writes_nothing(
    train: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: list[str],
    said: str,
) -> None:
    files = ["-o", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]
    assert main(["plan", train, *ROOMY, *files, *flags]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
    assert told.err.startswith("oomph: ")
    assert told.err.count("oomph: ") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["-o", "--html"])
def test_a_file_that_cannot_be_written_is_noticed_before_the_work(
    train: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
) -> None:
    monkeypatch.setattr("oomph.verbs.plan.plan_with_options", _must_not_be_called)
    assert main(["plan", train, *ROOMY, flag, str(tmp_path / "nowhere" / "file")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert main(["plan", train, *ROOMY, flag, str(tmp_path)]) == 2
    assert "it is a directory" in capsys.readouterr().err


def test_a_missing_page_is_noticed_before_the_work(
    train: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oomph.verbs.plan.plan_with_options", _must_not_be_called)
    monkeypatch.setattr("oomph.showing.html_page.PAGES", tmp_path / "page")
    assert main(["plan", train, *ROOMY, "--html", str(tmp_path / "plan.html")]) == 2
    assert "the page for a plan is not in this installation" in capsys.readouterr().err


def test_the_plan_is_printed_even_if_its_page_cannot_be_written_in_the_end(
    train: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oomph.showing.html_page.check_page", lambda *_: None)
    assert main(["plan", train, *ROOMY, "--html", str(tmp_path / "nowhere" / "plan.html")]) == 2
    printed = capsys.readouterr()
    assert "fits as it is" in printed.out
    assert "cannot be written" in printed.err


def _must_not_be_called(*_: Any, **__: Any) -> None:
    raise AssertionError("the work was begun")


def test_a_gpu_must_be_named_where_there_is_none(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", train]) == 2
    assert "no GPU is named" in capsys.readouterr().err


def test_what_a_check_found_decides_whether_a_trick_is_used(told: Any, tmp_path: Path) -> None:
    path = tmp_path / "checks.json"
    coupled = AccumulationCheck(verdict="fails", conclusion="the loss is over pairs")
    nothing = dict.fromkeys(("fp16", "bf16", "checkpointing"))
    checks = Checks(workload="train.py", num_examples=8, accumulation=coupled, **nothing)
    path.write_text(as_json(checks))
    found = answer(told, *TIGHT, "--checks", str(path), code=3)  # by a hair
    assert {plan["accumulate"] for plan in found["plans"]} == {1}
    why = {one["what"]: one["why"] for one in found["rejected"]}
    assert why["accumulation"].startswith("changes this training, as oomph check found")
    path.write_text("{}")
    told(*TIGHT, "--checks", str(path), code=4)


def test_fp16_names_the_check_that_tries_it(told: Any, train: str) -> None:
    found = answer(told, *TIGHT)
    assert found["plans"][0]["precision"] == "fp16"
    (said,) = (one for one in found["caveats"] if one.startswith("fp16"))
    assert f"oomph check {train} --only fp16" in said


def test_the_check_can_run_first_and_its_verdicts_are_used(told: Any) -> None:
    found = answer(told, *TIGHT, "--check")
    assert not any("is not known" in one for one in found["caveats"])
    (said,) = (one for one in found["caveats"] if one.startswith("fp16"))
    assert "oomph check ran it" in said


def test_a_workload_too_large_to_be_checked_here_is_planned_all_the_same(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: Any, **__: Any) -> None:
        raise UsageError("this model is too large to be checked", because="it is huge")

    monkeypatch.setattr("oomph.verbs.check.check", too_large)
    found = answer(told, *TIGHT, "--check")
    assert found["plans"]
    assert "not checked: this model is too large to be checked: it is huge" in found["caveats"]


@pytest.mark.parametrize("flags", [["--check", "--checks", "checks.json"]])
def test_checks_come_from_one_place(told: Any, flags: list[str]) -> None:
    assert told(*TIGHT, *flags, code=2) == ""


# ---- asked again -------------------------------------------------------------------------------


def test_asked_twice_it_answers_the_same_without_importing_torch(train: str, told: Any) -> None:
    asks = (
        "import sys; from oomph.cli import main\n"
        f"code = main(['plan', {train!r}, *{TIGHT!r}, '--json'])\n"
        "print('torch' in sys.modules, code, file=sys.stderr)"
    )
    first = told(*TIGHT, "--json")
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["False", "0"]
    assert json.loads(done.stdout) == json.loads(first)


def test_what_was_asked_before_does_not_change_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def last_answer(name: str, *questions: tuple[str, ...]) -> Any:
        """To the last of the questions, about a file that nothing is known of."""
        path = tmp_path / name
        path.write_text(TRAIN)
        for flags in questions:
            asked = ["plan", f"{path}:workload", *TIGHT, "--batch-size", "8", "--json", *flags]
            assert main(asked) == 0
            found = json.loads(capsys.readouterr().out.replace(str(path), "train.py"))
        return found

    usual, memory = (), ("--prefer", "memory")
    assert last_answer("one.py", memory, usual) == last_answer("other.py", usual)


def test_a_changed_file_is_rehearsed_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"

    def as_is_bytes() -> int:
        forbidden = ",".join(NAMES)
        asked = ["plan", f"{path}:workload", *ROOMY, "--json", "--forbid", forbidden]
        assert main(asked) == 0
        found: int = json.loads(capsys.readouterr().out)["as_is"]["device_bytes"]
        return found

    path.write_text(TRAIN)
    before = as_is_bytes()
    path.write_text(TRAIN.replace("Block(), Block()", "Block(), Block(), Block()"))
    assert as_is_bytes() > before + (64 << 20)


# ---- while it works ----------------------------------------------------------------------------


def test_progress_is_shown_on_a_terminal_and_nowhere_else(train: str) -> None:
    question = [sys.executable, "-m", "oomph", "plan", train, *TIGHT]
    piped = subprocess.run(question, capture_output=True, text=True, check=True)
    beats = piped.stderr.splitlines()  # none, unless the machine is slow
    assert all(re.fullmatch(r"oomph: [\w ]+ s: .*", line) for line in beats)
    ours, theirs = pty.openpty()
    with subprocess.Popen(question, stdout=subprocess.PIPE, stderr=theirs) as running:
        os.close(theirs)
        shown = _read_all(ours)
        assert running.stdout is not None
        printed = running.stdout.read().decode()
    assert re.search(rb"\r\x1b\[K[^\r]* s: comparing", shown)
    assert shown.endswith(b"\r\x1b[K")  # and nothing of it stays
    assert printed == piped.stdout


def test_an_error_begins_on_a_line_of_its_own_and_nothing_of_the_progress_stays(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAIN.replace("model(batch).square().mean()", "model(batch).no_such()"))
    question = [sys.executable, "-m", "oomph", "plan", f"{path}:workload", *TIGHT]
    ours, theirs = pty.openpty()
    with subprocess.Popen(question, stdout=subprocess.PIPE, stderr=theirs) as running:
        os.close(theirs)
        shown = _read_all(ours)
    assert running.returncode == 2
    progress, _, error = shown.partition(b"oomph: ")
    assert re.search(rb"\r\x1b\[K[^\r]* s: looking at the model", progress)
    assert progress.endswith(b"\r\x1b[K")
    assert b"no_such" in error
    assert b"\x1b[K" not in error


def _read_all(terminal: int) -> bytes:
    found = b""
    while True:
        try:
            read = os.read(terminal, 4096)
        except OSError:  # its other end is closed
            break
        if not read:
            break
        found += read
    os.close(terminal)
    return found


SLOW = """
import pathlib, time

def slow(n):
    pathlib.Path(__file__).with_name("rehearsing").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("whom", ["the group", "the one that was started"])
def test_interrupted_it_leaves_neither_a_process_nor_a_file(tmp_path: Path, whom: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(SLOW + TRAIN.replace("batch=lambda n: torch.zeros(n, 512, 256)", "batch=slow"))
    question = [sys.executable, "-m", "oomph", "plan", f"{path}:workload", *ROOMY]
    question += ["-o", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]
    with subprocess.Popen(
        question,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    ) as running:
        while not (tmp_path / "rehearsing").exists():
            assert running.poll() is None
        if whom == "the group":  # as a terminal does it
            os.killpg(running.pid, signal.SIGINT)
        else:
            running.send_signal(signal.SIGINT)
        printed, complained = running.communicate()
    assert running.returncode == 130
    assert printed == b""
    assert complained == b""
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)  # nobody of its group is left
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    # That this torch has passed the self test is kept, and whole.
    passed = [path for path in files if path.parent.name == "self-tests"]
    assert {path.name for path in files if path not in passed} == {"train.py", "rehearsing"}
    assert all(json.loads(gzip.decompress(path.read_bytes())) for path in passed)


# ---- exports, and what comes next --------------------------------------------------------------


@pytest.mark.parametrize("target", ["hf", "lightning", "accelerate", "deepspeed"])
def test_an_export_of_settings_is_nothing_but_json(told: Any, target: str) -> None:
    settings = json.loads(told(*TIGHT, "--export", target))
    assert "32" in json.dumps(settings)  # its micro-batch is somewhere, or is named by hand


def test_an_export_of_code_is_python_and_one_for_a_queue_is_a_script(told: Any) -> None:
    ast.parse(told(*TIGHT, "--export", "code"))
    assert told(*TIGHT, "--export", "slurm").startswith("#!/bin/bash")
    assert "-l gpu=1" in told(*TIGHT, "--export", "sge")
    assert "torchrun" in told(*TIGHT, "--export", "torchrun")


def test_the_last_line_is_what_to_do_with_the_plan(
    told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    last = told(*TIGHT, "--allow", "lora", "--prefer", "memory").splitlines()[-1]
    assert last.startswith("next: oomph plan ")
    assert "--allow lora --prefer memory -o plan.json" in last  # the plan that is shown
    last = told(*TIGHT, "-o", str(tmp_path / "plan.json")).splitlines()[-1]
    assert f"oomph.load_plan('{tmp_path / 'plan.json'}')" in last


def test_why_tricks_were_not_considered_is_said_only_if_asked(told: Any) -> None:
    assert "not considered" not in told(*TIGHT)
    assert "--explain says why" in " ".join(told(*TIGHT).split())
    assert "changes training: --allow" in " ".join(told(*TIGHT, "--explain").split())


# ---- clusters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--tensor-parallel", "8"], "--max-gpus 8"),
        (["--max-gpus", "8", "--tensor-parallel", "3"], "3 of 8 GPUs cannot share each layer"),
        (["--nodes", "2", "--max-gpus", "8"], "have 16"),
        (["--nodes", "2", "--link", "nvlink"], "unknown link"),
        (["--price", "2.5"], "a price needs a number of tokens"),
        (["--tokens", "0"], "--tokens above 0"),
        (["--nodes", "1024"], "oomph cannot plan for 8192 GPUs"),
    ],
)
def test_an_impossible_cluster_is_one_clear_error_before_any_rehearsal(
    train: str, flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", train, *ROOMY, *flags]) == 2
    assert why in capsys.readouterr().err


LLAMA = """
import oomph, torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    hidden_size=4096, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=1024, use_cache=False,
)

def batch(n):
    tokens = torch.zeros(n, 8192, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}

workload = oomph.Workload(
    model=lambda: LlamaForCausalLM(CONFIG),
    batch=batch,
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    batch_size=2,
)
"""
# What is left: FSDP and tensor parallelism, in fp32.
FEW = (
    "fp16,tf32,bf16,chunked-loss,checkpointing,offload-optimizer,offload-activations,zero-offload,"
    "optimizer-in-backward,ddp,hybrid,sdpa,fused-optimizer,for-loop-optimizer"
)


@pytest.mark.slow
def test_layers_are_shared_where_nothing_else_fits_and_the_answer_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "llama.py"
    path.write_text(LLAMA)
    on = ["--gpu", "h100-80gb", "--nodes", "2", "--link", "infiniband-400", "--forbid", FEW]
    asked = ["plan", f"{path}:workload", *on, "--tokens", "1e9", "--price", "2.5", "--json"]
    main([*asked, "--gpu-memory", "12GiB"])
    told = json.loads(capsys.readouterr().out)
    best = told["plans"][0]
    assert best["variant"]["tensor_parallel"] == 8
    assert best["micro_batch"] * best["accumulate"] * best["gpus"] // 8 == 2
    assert any("needs tensor parallelism" in caveat for caveat in told["caveats"])
    bill = best["bill"]
    assert bill["gpu_hours"] == pytest.approx(bill["hours"] * best["gpus"])
    assert bill["cost"] == pytest.approx(2.5 * bill["gpu_hours"])
    assert best["tokens_per_s"] == pytest.approx(2 * 8192 / best["step_s"])
    # Where the model fits, no layer is shared.
    main([*asked, "--gpu-memory", "79GiB", "--tensor-parallel", "1"])
    roomy = json.loads(capsys.readouterr().out)
    assert all(plan["variant"]["tensor_parallel"] == 1 for plan in roomy["plans"])
