"""A script is rehearsed again if, and only if, something that it looked at may have changed."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oomph.errors import OomphError
from oomph.records.script import Overrides, PretendedGpu, Script
from oomph.rehearsing.script.answers import AnswerStore, from_answer, to_request
from oomph.rehearsing.script.files import Touching
from oomph.rehearsing.script.sandboxed import _answered, _import_what_all_need

V100 = PretendedGpu(name="Tesla V100-SXM2-16GB", total_bytes=16 << 30, capability=(7, 0))
AS_IT_IS = to_request(Overrides())
TRAIN = """
import os, sys, torch
from width import WIDTH
rows = int(open("rows.txt").read())
large = os.path.getsize("large.bin")
if os.path.exists("resume.pt"):
    rows += 1
rows += len(os.listdir("shards"))
ASK
model = torch.nn.Linear(WIDTH, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(rows, WIDTH).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with open("log.csv", "w") as log:
        log.write("1")
"""


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> Iterator[None]:
    """As the process is that serves in a sandbox."""
    _import_what_all_need()
    yield
    gc.unfreeze()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "project"
    (directory / "shards").mkdir(parents=True)
    (directory / "rows.txt").write_text("4")
    (directory / "large.bin").write_bytes(bytes(2 << 20))
    (directory / "width.py").write_text("WIDTH = 16\n")
    (directory / "train.py").write_text(TRAIN.replace("ASK", ""))
    os.utime(directory / "large.bin", (1e9, 1e9))
    _wait_for_the_clock()
    return directory


def _wait_for_the_clock() -> None:
    """What was written a moment ago counts as written while the script is rehearsed."""
    time.sleep(0.05)


class Asked:
    """One who asks for rehearsals of the project, and counts how many were made."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.script = Script(path="train.py", arguments=arguments, directory=str(directory))
        self.num_rehearsed = 0
        self.meanwhile: Callable[[], Any] = lambda: None

    def ask(self, gpu: PretendedGpu = V100, *, is_fresh: bool = False) -> bytes:
        def rehearse(request: bytes) -> bytes:
            self.num_rehearsed += 1
            self.meanwhile()
            return _answered(self.script, gpu, request)

        return AnswerStore(self.script, gpu, rehearse, is_fresh=is_fresh).ask(AS_IT_IS)


def test_the_same_question_is_answered_from_what_is_kept(project: Path) -> None:
    asked = Asked(project)
    first = asked.ask()
    assert asked.ask() == first
    assert asked.num_rehearsed == 1
    assert from_answer(first).seen.micro_batch == 4
    asked.ask(is_fresh=True)
    assert asked.num_rehearsed == 2
    (entry,) = (project.parent / "cache" / "oomph" / "scripts").iterdir()
    entry.write_bytes(entry.read_bytes()[:100])
    asked.ask()
    assert asked.num_rehearsed == 3


def _fill(path: Path) -> None:
    path.write_bytes(b"1" * path.stat().st_size)
    os.utime(path, (1e9, 1e9))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "the script": lambda at: (at / "train.py").write_text(TRAIN.replace("ASK", "rows += 2")),
    "a module of the user's": lambda at: (at / "width.py").write_text("WIDTH = 32\n"),
    "a file that was read": lambda at: (at / "rows.txt").write_text("6"),
    "the size of a large file": lambda at: (at / "large.bin").write_bytes(bytes(3 << 20)),
    "a large file, not its size and time": lambda at: _fill(at / "large.bin"),
    "a file that was not there": lambda at: (at / "resume.pt").write_text(""),
    "a name in a directory that was listed": lambda at: (at / "shards" / "1").write_text(""),
    "a module that could come before another": lambda at: (at / "tqdm.py").write_text(""),
    "the environment": lambda _: os.environ.__setitem__("OOMPH_TEST_ROWS", "8"),
    "a file that is gone": lambda at: (at / "rows.txt").unlink(),
}


def test_it_is_rehearsed_again_after_each_change(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OOMPH_TEST_ROWS", raising=False)
    asked = Asked(project)
    asked.ask()
    for number, (what, change) in enumerate(CHANGES.items(), start=1):
        change(project)
        _wait_for_the_clock()
        asked.ask()
        assert asked.num_rehearsed == number + 1, what
    monkeypatch.delenv("OOMPH_TEST_ROWS")


@pytest.mark.parametrize("place", ["beside", "inside"])
def test_a_project_near_the_python_that_runs_it_is_the_users_own(
    place: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in /usr/src/app with the system's Python, or in env-test beside a virtual `env`."""
    prefix = project.parent if place == "inside" else str(project).removesuffix("ect")
    monkeypatch.setattr(sys, "prefix", str(prefix))
    asked = Asked(project)
    asked.ask()
    (project / "width.py").write_text("WIDTH = 32\n")
    _wait_for_the_clock()
    asked.ask()
    assert asked.num_rehearsed == 2


def test_a_directory_whose_name_begins_like_a_system_one_is_the_users_own() -> None:
    found = Touching().found(("/library/train.py", "/lib64/libc.so.6", "/etc/hosts"), set())
    assert "/library/train.py" in found.looked_at
    assert not {"/lib64/libc.so.6", "/etc/hosts"} & {*found.looked_at}


def test_what_decides_nothing_may_change(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(project)
    (project / "train.py").write_text(
        TRAIN.replace("ASK", "import subprocess as s; s.run('uname')")
    )
    _wait_for_the_clock()
    asked.ask()
    (project / "plan.json").write_text("{}")
    (project / "log.csv").write_text("of a real training")
    (project / "__pycache__").mkdir()
    (project / "rows.txt").touch()
    monkeypatch.setenv("SHLVL", "7")
    asked.ask()
    assert asked.num_rehearsed == 1


def test_a_file_that_output_is_sent_to_decides_nothing(project: Path) -> None:
    asked = Asked(project)
    with (project.parent / "output.txt").open("w", buffering=1) as output:
        asked.meanwhile = lambda: output.write("rehearsing\n")
        asked.ask()
        output.write("rehearsed\n")
        asked.ask()
    assert asked.num_rehearsed == 1


def test_other_arguments_and_kinds_of_gpus_are_other_questions(project: Path) -> None:
    Asked(project).ask()
    other = Asked(project, "--epochs", "3")
    other.ask()
    other.ask(replace(V100, capability=(8, 0)))
    assert other.num_rehearsed == 2


@pytest.mark.parametrize(
    ("asks", "is_anew"),
    [
        ("", False),
        ("torch.cuda.get_device_properties(torch.cuda.is_bf16_supported())", False),
        ("rows += torch.cuda.get_device_properties(0).total_memory >> 33", True),
        ("rows += torch.cuda.mem_get_info()[1] >> 33", True),
        ("rows += torch.cuda.get_device_name() == 'other'", True),
        ("rows += torch.cuda.get_device_capability()[1]", True),
    ],
)
def test_another_gpu_of_its_kind_is_another_question_if_the_script_asks_which(
    asks: str, is_anew: bool, project: Path
) -> None:
    (project / "train.py").write_text(TRAIN.replace("ASK", asks))
    _wait_for_the_clock()
    asked = Asked(project)
    other = replace(V100, name="other", total_bytes=32 << 30, capability=(7, 5))
    first, second = asked.ask(), asked.ask(other)
    assert asked.num_rehearsed == (2 if is_anew else 1)
    assert (asked.ask(), asked.ask(other)) == (first, second)
    assert asked.num_rehearsed == (2 if is_anew else 1)


@pytest.mark.parametrize(
    "ask",
    [
        "os.system('uname')",
        "import subprocess as s; s.run('true')",
        "raise SystemExit(1)",
        "raise ValueError('of whatever')",
        "open('missing.bin')",
        "torch.load('missing.pt')",
        "import missing_package",
    ],
)
def test_what_may_be_another_next_time_is_not_kept(ask: str, project: Path) -> None:
    (project / "train.py").write_text(TRAIN.replace("ASK", ask))
    _wait_for_the_clock()
    asked = Asked(project)
    asked.ask()
    asked.ask()
    assert asked.num_rehearsed == 2


REFUSED = {
    "an op fails": ("torch.ones(3, 4).cuda() @ torch.ones(5, 6).cuda()", "train.py:9"),
    "it cannot be rehearsed": ("torch.cuda.CUDAGraph()", "cannot be rehearsed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_failure_is_kept_as_long_as_nothing_changes(name: str, project: Path) -> None:
    ask, told = REFUSED[name]
    (project / "train.py").write_text(TRAIN.replace("ASK", ask))
    _wait_for_the_clock()
    asked = Asked(project)
    first, second = _told(asked.ask()), _told(asked.ask())
    assert asked.num_rehearsed == 1
    assert told in first
    assert second.startswith(first)  # with a way to ask anew
    assert ("--fresh" in first, "--fresh" in second) == (False, True)
    assert _told(asked.ask(is_fresh=True)) == first
    assert asked.num_rehearsed == 2
    (project / "rows.txt").write_text("6")
    asked.ask()
    assert asked.num_rehearsed == 3


def _told(answer: bytes) -> str:
    with pytest.raises(OomphError) as caught:
        from_answer(answer)
    return str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        b"[]",
        b'{"error": 1, "touched": "{}"}',
        b'{"kind": "UserCodeError", "error": {"what": "x"}, "touched": null}',
    ],
)
def test_what_is_no_answer_is_not_kept(answer: bytes, project: Path) -> None:
    script = Script(path="train.py", directory=str(project))
    kept = AnswerStore(script, V100, lambda _: answer, is_fresh=False)
    assert kept.ask(AS_IT_IS) == answer
    assert not (project.parent / "cache" / "oomph" / "scripts").exists()


def test_what_changes_meanwhile_is_not_kept(project: Path) -> None:
    asked = Asked(project)
    asked.meanwhile = lambda: (project / "rows.txt").write_text("4")
    asked.ask()
    asked.ask()
    assert asked.num_rehearsed == 2
