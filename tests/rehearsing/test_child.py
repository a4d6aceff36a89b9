"""Work in a child: its result, its errors, and nothing of it in this process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import oomph
from oomph import Workload, progress
from oomph.errors import OomphError, UsageError, UserCodeError
from oomph.records.workload import Variant
from oomph.rehearsing import rehearse
from oomph.rehearsing.child import in_a_child
from rehearsing.script.rehearsed import trained


def test_the_result_comes_back_and_this_process_is_untouched() -> None:
    touched: list[int] = []

    def work() -> tuple[int, list[int]]:
        touched.append(1)
        return os.getpid(), touched

    pid, told = in_a_child(work)
    assert pid != os.getpid()
    assert told == [1]
    assert touched == []


def test_an_error_of_ours_comes_back_whole() -> None:
    def work() -> None:
        raise UsageError("what", because="why", attempt="this")

    with pytest.raises(UsageError) as raised:
        in_a_child(work)
    assert str(raised.value) == "what\n  because: why\n  try: this"


def test_an_error_of_the_users_names_their_line() -> None:
    def work() -> None:
        raise ValueError("the shapes\ndo not match")

    with pytest.raises(UserCodeError) as raised:
        in_a_child(work)
    line = work.__code__.co_firstlineno + 1
    assert str(raised.value.what) == f"the workload failed at {__file__}:{line}"
    assert raised.value.because == "ValueError: the shapes do not match"


@pytest.mark.parametrize("end", [lambda: os._exit(7), lambda: os.kill(os.getpid(), 9)])
def test_a_child_that_dies_is_an_error_and_no_hang(end: object) -> None:
    with pytest.raises(UserCodeError, match="without an answer"):
        in_a_child(end)  # type: ignore[arg-type]


def test_code_that_ends_the_program_is_an_error() -> None:
    with pytest.raises(UserCodeError, match="ended the program"):
        in_a_child(lambda: exit(3))


def test_what_the_users_code_prints_is_not_the_answer(capfd: pytest.CaptureFixture[str]) -> None:
    in_a_child(lambda: print("hello", flush=True))
    assert capfd.readouterr().out == ""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system has such a call")
def test_a_child_does_not_outlive_a_parent_that_was_killed() -> None:
    """As after kill -9 of oomph: nobody is left to end the child, nor to read its answer."""
    code = """
import time
from oomph.rehearsing.child import in_a_child
def work():
    print("begun", flush=True)
    time.sleep(30)
    print("outlived", flush=True)
in_a_child(work)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stderr is not None
        assert parent.stderr.readline() == "begun\n"
        parent.kill()
        assert parent.stderr.read() == ""  # up to its end, which comes when the child's has come


def test_a_process_whose_torch_has_computed_already_can_still_ask() -> None:
    """In a notebook, say: OpenMP's threads do not survive a fork."""
    code = """
import torch
from oomph.rehearsing.child import in_a_child
torch.set_num_threads(2)
large = torch.ones(2000, 2000)
(large @ large).sum()  # starts the threads
print(in_a_child(lambda: float((large.add(1) @ large).sum())))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert float(done.stdout) == 2 * 2000.0**3


def test_an_op_that_cannot_be_pretended_is_no_error_of_the_workload() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return torch.linalg.lstsq(model(batch), batch).solution.mean()

    workload = Workload(
        model=lambda: torch.nn.Linear(8, 8),
        batch=lambda n: torch.zeros(n, 8),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters),
        batch_size=8,
    )
    with pytest.raises(OomphError) as raised:
        oomph.predict(workload, gpu="t4")
    told = str(raised.value)
    assert "oomph cannot rehearse aten.linalg_lstsq.default" in told
    assert "please report aten.linalg_lstsq.default(float32[2, 8]" in told
    assert f"called at {__file__}:" in told


def test_a_rehearsal_that_takes_long_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a loop over time, say, of which a Workload has as many turns as it likes."""

    def loss(model: Any, batch: Any) -> Any:
        for _ in range(20):
            batch = model(batch)
            time.sleep(0.02)
        return batch.sum()

    monkeypatch.setattr(rehearse, "TELLS_EVERY_S", 0.02)
    workload = Workload(
        model=lambda: torch.nn.Linear(8, 8),
        batch=lambda n: torch.zeros(n, 8),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=2,
    )
    monkeypatch.setattr(progress, "_TICK_S", 0.01)
    monkeypatch.setattr(progress, "_BEATS_S", (0.0, 0.01))
    with progress.Progress("rehearsing"):
        trained(workload, Variant(micro_batch=2))
    assert " allocations, in forward)\n" in capfd.readouterr().err
