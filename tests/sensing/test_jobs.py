"""Who launched a process, and which worker of it it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from oomph.records.machine import Owner, Process
from oomph.sensing import live
from oomph.sensing.live import Jobs, find_job, launcher_of

Start = Callable[..., int]

# Starts two sleeping workers as the launchers do, and says their PIDs.
LAUNCHER = """
import os, subprocess, sys, time
workers = [
    subprocess.Popen(["train.py", "600"], executable="/bin/sleep",
                     env={**os.environ, "RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": "2"})
    for i in range(2)
]
print(*(worker.pid for worker in workers), flush=True)
sys.stdin.read()
for worker in workers:
    worker.kill()
    worker.wait()
"""

SPAWNER = """
import multiprocessing, os, sys, time
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    worker.start()
    print(worker.pid, flush=True)
    sys.stdin.read()
    worker.kill()
    worker.join()
"""


@contextmanager
def launched(
    script: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[tuple[int, list[int]]]:
    """The PID of a launcher, and those of its workers."""
    command = [sys.executable, *arguments, str(script)]
    launcher = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert launcher.stdin
    assert launcher.stdout
    with launcher:
        workers = [int(pid) for pid in launcher.stdout.readline().split()]
        yield launcher.pid, [begun(pid) for pid in workers]
        launcher.stdin.close()


def begun(pid: int) -> int:
    """The same PID, once the process has its own environment: a moment after it was started."""
    while not Path(f"/proc/{pid}/environ").read_bytes():
        time.sleep(0.001)
    return pid


def on_a_gpu(pid: int, owner: Owner = "mine", started_at: float = 1.0) -> Process:
    return Process(
        pid=pid,
        owner=owner,
        user=None,
        command=None,
        used_bytes=None,
        started_at=started_at,
        kind="compute",
    )


def test_the_workers_of_a_launcher_carry_its_name_and_their_rank(tmp_path: Path) -> None:
    script = tmp_path / "torchrun"
    script.write_text(LAUNCHER)
    with launched(script, env={"OOMPH_RUN_ID": "r1"}) as (launcher_pid, pids):
        found = [find_job(on_a_gpu(pid)) for pid in pids]
    assert [job.launcher for job in found] == ["torchrun", "torchrun"]
    assert {job.launcher_pid for job in found} == {launcher_pid}
    assert [(job.rank, job.local_rank, job.world_size) for job in found] == [(0, 0, 2), (1, 1, 2)]
    assert {job.run_id for job in found} == {"r1"}


def test_nobody_looks_into_the_environment_of_others(tmp_path: Path) -> None:
    script = tmp_path / "torchrun"
    script.write_text(LAUNCHER)
    with launched(script) as (launcher_pid, pids):
        job = find_job(on_a_gpu(pids[0], owner="others"))
    assert (job.launcher, job.launcher_pid) == ("torchrun", launcher_pid)
    assert job.rank is None
    assert job.run_id is None


def test_a_worker_whose_launcher_has_died_is_still_torchruns(start_process: Start) -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "RANK": "3"}
    job = find_job(on_a_gpu(begun(start_process("train.py", env=environment))))
    assert (job.launcher, job.launcher_pid, job.rank) == ("torchrun", None, 3)


def test_what_python_spawned_belongs_to_the_script_that_spawned_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNER)
    with launched(script) as (parent_pid, pids):
        job = find_job(on_a_gpu(pids[0]))
    assert (job.launcher, job.launcher_pid) == ("multiprocessing", parent_pid)


def test_a_plain_script_has_no_launcher_and_names_its_parent(start_process: Start) -> None:
    job = find_job(on_a_gpu(begun(start_process("train.py"))))
    assert job.launcher is None
    assert job.parent_pid == os.getpid()


def test_a_rank_that_is_no_number_is_unknown(start_process: Start) -> None:
    environment = {**os.environ, "RANK": "first", "LOCAL_RANK": "9" * 30}
    job = find_job(on_a_gpu(begun(start_process("train.py", env=environment))))
    assert (job.rank, job.local_rank) == (None, None)


def test_a_process_that_has_ended_is_part_of_nothing(start_process: Start) -> None:
    pid = start_process("train.py")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    job = find_job(on_a_gpu(pid))
    assert (job.launcher, job.parent_pid, job.rank) == (None, None, None)


def test_each_process_is_looked_at_once_for_as_long_as_it_lives(
    start_process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []

    def find(process: Process) -> object:
        looked_at.append(process.pid)
        return find_job(process)

    monkeypatch.setattr(live, "find_job", find)
    pid, known = start_process(), Jobs()
    for started_at in (1.0, 1.0, 2.0):  # the last is another process of the same number
        known.of([on_a_gpu(pid, started_at=started_at)])
    assert looked_at == [pid, pid]


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun --nproc-per-node 4 train.py", "torchrun"),
        ("/opt/bin/python3.11 -u -W ignore /opt/bin/torchrun train.py", "torchrun"),
        ("python -m torch.distributed.run train.py", "torchrun"),
        ("python -m torch.distributed.launch train.py", "torchrun"),
        ("/usr/bin/python3 /home/u/bin/accelerate launch train.py", "accelerate"),
        ("python -m accelerate.commands.launch train.py", "accelerate"),
        ("accelerate config", None),
        ("/usr/bin/python /usr/bin/deepspeed --num_gpus 8 train.py", "deepspeed"),
        ("python -u -m deepspeed.launcher.launch --world_info=x train.py", "deepspeed"),
        ("/site-packages/ray/core/src/ray/raylet/raylet --port=1", "ray"),
        ("ray::Trainer.train()", "ray"),
        ("python train.py --launcher torchrun", None),
        ("bash torchrun", None),
        ("python", None),
        ("", None),
    ],
)
def test_launchers_are_known_by_what_they_run(command: str, launcher: str | None) -> None:
    assert launcher_of(command.split(" ")) == launcher


def test_the_ancestors_of_a_process_are_named_the_parent_first(tmp_path: Path) -> None:
    script = tmp_path / "torchrun"
    script.write_text(LAUNCHER)
    with launched(script) as (launcher_pid, pids):
        job = find_job(on_a_gpu(pids[0], owner="others"))
    assert [one.pid for one in job.ancestors[:2]] == [launcher_pid, os.getpid()]
    assert str(script) in (job.ancestors[0].command or "")
    assert 1 not in [one.pid for one in job.ancestors]
