"""However a script ends, or does not: one answer or one clear error, and nothing left behind."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from oomph.errors import OomphError, UsageError, UserCodeError
from oomph.records.script import PROGRESS, Overrides, Script
from oomph.rehearsing.script import run
from oomph.rehearsing.script.run import rehearse_script
from oomph.rehearsing.script.sandboxed import limit_s
from rehearsing.script.rehearsed import GPU, LOOP, rehearsed

HEAD = """\
import os, sys, time, torch
from torch import nn
model = nn.Linear(8, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step():
    optimizer.zero_grad()
    model(torch.randn(6, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def refused(directory: Path, text: str, **more: Any) -> str:
    with pytest.raises(UserCodeError) as caught:
        rehearsed(directory, HEAD + textwrap.dedent(text), **more)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("step()\nundefined\n", 10, "NameError"),
        ("open('absent.csv')\n", 9, "absent.csv"),
        ("os.environ.pop('RANK', 0); os.environ['RANK']\n", 9, "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1"),
        ("import absent_module\n", 9, "pip install absent_module"),
        ("import torch.absent.part\n", 9, "another version of torch"),
        ("raise RuntimeError from ConnectionRefusedError()\n", 9, "has no network"),
        ("sys.exit('no data')\n", 9, "exit('no data')"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--x'])\n", 9, "arguments: --x"),
        ("print('no data'); sys.exit(1)\n", 9, "exit(1); its last output was: no data"),
        ("model = nn.Linear(8, 4)\nstep()\n", 7, "cuda:0 and cpu"),
        ("model(torch.randn(6, 9, device='cuda'))\n", 9, "[6, 9] X [8, 4]"),
        ("model(torch.randn(6, 8, device='cuda')).numpy()\n", 9, "can't convert cuda:0"),
        ("input('go on?')\n", 9, "EOF"),
        ("raise NotImplementedError('this space')\n", 9, "by itself"),
        (
            "torch.arange(9).split(model(torch.randn(2, 8).cuda()).argmax(1).tolist())\n",
            9,
            "that line read a value that only training would have",
        ),
    ],
)
def test_an_error_of_the_script_names_its_line(
    tmp_path: Path, text: str, line: int, why: str
) -> None:
    told = refused(tmp_path, text)
    assert f"train.py:{line}" in told
    assert why in told


X = "x = torch.randn(6, 8, device='cuda')\n"
OF_OOMPH = {
    "torch.bincount(model(x).argmax(1))": ("aten.bincount.default", "do not exist here"),
    "torch.linalg.lstsq(x, x)": ("aten.linalg_lstsq.default", "float32[6, 8]"),
    "torch.nested.nested_tensor([x, x])": ("_nested_tensor_from_tensor_list", "please report"),
    "torch.fbgemm_linear_quantize_weight(x)": ("a kernel", f"torch {torch.__version__}"),
    "with torch.no_grad(): optimizer.state[model.weight] = torch.linalg.lstsq(x, x)": (
        "aten.linalg_lstsq.default",
        "Python 3",
    ),
}


@pytest.mark.parametrize("text", list(OF_OOMPH))
def test_an_op_that_cannot_be_pretended_is_called_a_limit_of_oomph(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(OomphError) as caught:
        rehearsed(tmp_path, f"{HEAD}{X}{text}\n")
    told = str(caught.value)
    op, more = OF_OOMPH[text]
    assert f"oomph cannot rehearse {op}" in told or f"oomph cannot rehearse aten.{op}" in told
    assert "this is a limit of oomph, not an error of yours" in told
    assert more in told
    assert "train.py:10" in told
    assert "by itself" not in told


@pytest.mark.parametrize(
    "text",
    [
        "x @ x",
        "x.view(5, 7)",
        "x.t().view(-1)",
        "torch.cdist(x, x[:, :4])",
        "x.cpu() + x",
        "model(x).sum().backward(torch.ones(3, device='cuda'))",
        "nn.functional.one_hot(torch.tensor([1, 0]), 8, 3)",
        "nn.Parameter(x, True, 5)",
        "x.to('cuda', torch.float16, True, False, True)",
    ],
)
def test_what_a_gpu_would_refuse_too_is_the_scripts_own_error(tmp_path: Path, text: str) -> None:
    told = refused(tmp_path, f"{X}{text}\n")
    assert "the script failed at" in told
    assert "oomph's own" not in told
    assert "by itself" in told


def test_a_file_that_is_not_there_is_no_error_of_oomphs(tmp_path: Path) -> None:
    told = refused(tmp_path, "import os\nos.stat('/nowhere')\n")
    assert "No such file" in told
    assert "report" not in told


def test_an_error_in_oomphs_code_is_not_blamed_on_the_script_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        dict[str, str]()["a rule that is wrong"]

    monkeypatch.setattr("oomph.rehearsing.script.recorder.ScriptRecorder._decided", broken)
    with pytest.raises(OomphError) as caught:
        rehearsed(tmp_path, f"{HEAD}{X}model(x)\n")
    told = str(caught.value)
    assert "oomph cannot rehearse aten." in told
    assert "please report aten." in told


# ---- modules that are missing --------------------------------------------------------------------

WHERE = {
    "repo/lib/blocks.py": ("import blocks", "PYTHONPATH=../lib before"),
    "repo/blocks/__init__.py": ("import blocks", "PYTHONPATH=.. before"),
    "repo/src/models/vit.py": ("import src.models.vit", "PYTHONPATH=.. before"),
    "repo/src/core_net/vit.py": ("from core_net.vit import x", "PYTHONPATH=../src before"),
    "repo/scripts/inner/blocks.py": ("import blocks", "PYTHONPATH=inner before"),
    "repo/utilz.py": ("import utils", "the spelling: there is no utils near"),
    "repo/pyproject.toml": ("import my_net", "pip install -e .."),
    "repo/nothing.txt": ("import utils", "PYTHONPATH=... before the command"),
    "repo/other.txt": ("import cv2_absent", "pip install cv2_absent, if that is"),
}


@pytest.mark.parametrize("file", list(WHERE))
def test_a_module_of_the_scripts_own_is_looked_for_before_any_package(
    tmp_path: Path, file: str
) -> None:
    statement, advice = WHERE[file]
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text('[project]\nname = "My-Net"\n' if "toml" in file else "x = 1\n")
    (tmp_path / "blocks.py").write_text("")  # beyond the repository, and none of its own
    scripts = tmp_path / "repo" / "scripts"
    scripts.mkdir(exist_ok=True)
    (scripts / "run_me.py").write_text(f"{statement}\n")
    script = Script(path="run_me.py", directory=str(scripts))
    with pytest.raises(UserCodeError) as caught:
        rehearse_script(script, GPU, Overrides())
    told = str(caught.value)
    assert f"try: {advice}" in told
    assert ("pip install" in told) == ("pip install" in advice)


def test_a_file_of_a_package_is_told_how_it_is_started(tmp_path: Path) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    for name, text in {"__init__": "", "sizes": "", "train": "from . import sizes\n"}.items():
        (package / f"{name}.py").write_text(text)
    script = Script(path="trainer/train.py", directory=str(tmp_path))
    with pytest.raises(UserCodeError, match=r"try: -m trainer.train instead of its path, from \."):
        rehearse_script(script, GPU, Overrides())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("torch.multiprocessing.spawn(print, nprocs=2)", "starts 2 processes"),
        ("torch.distributed.init_process_group('nccl', rank=0, world_size=4)", "group of 4"),
        (
            "from torch.utils.cpp_extension import load\nload(name='kernels', sources=['k.cu'])",
            "the extension 'kernels'",
        ),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_even_if_the_script_swallows_it(
    tmp_path: Path, text: str, why: str
) -> None:
    swallowed = f"try:\n{textwrap.indent(text, '    ')}\nexcept BaseException: pass\n"
    told = refused(tmp_path, swallowed)
    assert why in told
    assert "train.py:1" in told  # line 10 or 11


def test_a_script_that_trains_nothing_is_an_error(tmp_path: Path) -> None:
    assert "trained nothing" in refused(tmp_path, "print(model(torch.zeros(1, 8).cuda()))\n")


def test_a_script_whose_processes_train_is_told_that_they_are_not_seen(tmp_path: Path) -> None:
    text = """\
        from torch import multiprocessing
        workers = [multiprocessing.get_context("fork").Process(target=step) for _ in range(2)]
        [one.start() for one in workers]
        [one.join() for one in workers]
        """
    told = refused(tmp_path, text)
    assert "it started 2 processes, whose work is not seen" in told
    assert "in one process" in told


def test_a_script_that_never_steps_is_ended_and_its_line_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + "while True:\n    time.sleep(0.01)\n")
    script = Script(path="train.py", directory=str(tmp_path))
    with pytest.raises(UserCodeError, match=r"no second optimizer step.*train\.py:(9|10)"):
        rehearse_script(script, GPU, Overrides(), limit_s=4)


def test_nobody_can_swallow_the_end_and_nothing_runs_after_it(tmp_path: Path) -> None:
    _, seen = rehearsed(
        tmp_path,
        HEAD
        + textwrap.dedent("""\
        import atexit
        atexit.register(lambda: open("atexit.txt", "w"))
        while True:
            try:
                step()
            except BaseException:
                open("swallowed.txt", "w")
            finally:
                open("finally.txt", "a").write("x")
        """),
    )
    assert seen.num_optimizer_steps == 2
    assert not (tmp_path / "atexit.txt").exists()
    assert not (tmp_path / "swallowed.txt").exists()
    assert (tmp_path / "finally.txt").read_text() == "x"  # after the first step only


def test_processes_that_a_script_has_started_end_with_it(tmp_path: Path) -> None:
    rehearsed(
        tmp_path,
        HEAD
        + textwrap.dedent("""\
        child = os.fork()
        if child == 0:
            time.sleep(3600)
        open("child.txt", "w").write(str(child))
        step(); step()
        """),
    )
    child = int((tmp_path / "child.txt").read_text())
    assert _ends(child)


def _ends(pid: int) -> bool:
    """It is killed; the kernel may need a moment."""
    for _ in range(600):
        if not _is_running(pid):
            return True
        time.sleep(0.1)
    return False


def _is_running(pid: int) -> bool:
    """A zombie that nobody has waited for yet does not run."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def test_a_script_that_ends_after_one_step_has_stepped(tmp_path: Path) -> None:
    trace, seen = rehearsed(tmp_path, HEAD + "step()\nsys.exit(0)\n")
    assert seen.has_stepped
    assert seen.num_optimizer_steps == 1
    assert trace.micro_batch == 6


def test_a_script_that_ends_before_a_step_gives_a_lower_bound(tmp_path: Path) -> None:
    _, seen = rehearsed(tmp_path, HEAD + "model(torch.randn(2, 8).cuda()).sum().backward()\n")
    assert not seen.has_stepped


def test_a_script_that_stays_on_the_host_says_so(tmp_path: Path) -> None:
    text = HEAD.replace(".cuda()", "").replace(', device="cuda"', "") + "step(); step()\n"
    trace, seen = rehearsed(tmp_path, text)
    assert "the script put nothing on the GPU" in seen.approximations
    assert list(trace.events) == []


def test_a_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "data.txt").write_text("data")
    _, seen = rehearsed(
        tmp_path,
        HEAD
        + textwrap.dedent("""\
        import beside, __main__
        assert beside.VALUE == 7 and open("data.txt").read() == "data"
        assert __name__ == "__main__" and __main__.model is model
        assert sys.argv[0] == __file__ and sys.argv[1:] == ["--epochs", "3"]
        assert sys.path[0] == os.path.dirname(__file__) and os.isatty(0)
        if __name__ == "__main__":
            step(); step()
        """),
        "--epochs",
        "3",
    )
    assert seen.num_optimizer_steps == 2


def test_a_module_of_a_package_runs_as_python_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("WIDTH = 8\n")
    more = "from .sizes import WIDTH\nassert sys.argv[1:] == ['x']\nstep(); step()\n"
    (package / "train.py").write_text(HEAD + more)
    script = Script(module="trainer.train", arguments=("x",), directory=str(tmp_path))
    seen = rehearse_script(script, GPU, Overrides()).seen
    assert seen.micro_batch == 6


def test_lines_that_read_what_does_not_exist_are_counted(tmp_path: Path) -> None:
    _, seen = rehearsed(
        tmp_path,
        HEAD
        + textwrap.dedent("""\
        for _ in range(3):
            out = model(torch.randn(6, 8, device="cuda"))
            if out.mean() > 0: print("positive")
            assert torch.isfinite(out).all() and not torch.isnan(out).any()
            labels = torch.tensor([1, 2], device="cuda").sum().item()
            print(f"{out.mean():.2f}")
            step()
        """),
    )
    found = {(each.line, each.what): each.count for each in seen.invented}
    assert found == {
        (11, "False"): 2,
        (12, "True"): 2,
        (12, "False"): 2,
        (14, "1.0"): 2,
    }


def test_a_process_whose_torch_has_computed_on_threads_can_ask(tmp_path: Path) -> None:
    one = torch.randn(2000, 2000)
    _ = one @ one
    text = HEAD + "torch.set_num_threads(8)\ntorch.randn(2000, 2000) @ torch.randn(2000, 2000)\n"
    _, seen = rehearsed(tmp_path, text + "step(); step()\n")
    assert seen.num_optimizer_steps == 2


def test_a_long_loop_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "TELLS_EVERY_S", 0.01)
    text = """
import time, torch
from torch import nn
import torch.nn.functional as F
cell, head = nn.GRUCell(16, 16).cuda(), nn.Linear(16, 4).cuda()
class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = cell, head
    def forward(self, x):
        state = torch.zeros_like(x)
        for _ in range(50):
            state = self.cell(x, state)
            time.sleep(0.05)  # as thousands of steps take
        return self.head(state)
model = Unrolled()
"""
    rehearsed(tmp_path, text + LOOP)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith(PROGRESS)]
    assert told
    assert all("ops so far" in line and "gives up after 600 s" in line for line in told)
    assert any("train.py:" in line for line in told)


def test_what_a_rehearsal_tells_is_passed_on_from_the_sandbox() -> None:
    from oomph.rehearsing.script.sandboxed import LazySandbox

    said: list[str] = []
    asking = LazySandbox(Script(path="train.py"), GPU, said.append, is_unprotected=False)
    asking._pass_on(f"epoch 1\n{PROGRESS}after 15 s 9 ops\nloss 1.0\n".encode())
    assert said == ["after 15 s 9 ops"]


def test_the_time_of_a_rehearsal_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OOMPH_REHEARSAL_LIMIT", raising=False)
    assert limit_s() == 600
    monkeypatch.setenv("OOMPH_REHEARSAL_LIMIT", "1h")
    assert limit_s() == 3600
    monkeypatch.setenv("OOMPH_REHEARSAL_LIMIT", "for ever")
    with pytest.raises(UsageError, match="'for ever' is not a time"):
        limit_s()
