"""Processes below what started them."""

from __future__ import annotations

from oomph.records.machine import Ancestor, Job, Process
from oomph.showing.process_tree import branches_of
from oomph.showing.terminal import ASCII, UNICODE

SHELL, SSH = Ancestor(20, "-bash"), Ancestor(10, "sshd: ada [priv]")


def process(pid: int) -> Process:
    return Process(
        pid=pid,
        owner="mine",
        user="ada",
        command=f"train.py {pid}",
        used_bytes=1,
        started_at=1.0,
        kind="compute",
    )


def job(pid: int, *ancestors: Ancestor) -> Job:
    parent = ancestors[0].pid if ancestors else None
    return Job(pid=pid, parent_pid=parent, launcher=None, launcher_pid=None, ancestors=ancestors)


def tree(*jobs: Job) -> list[str]:
    found = branches_of([process(one.pid) for one in jobs], jobs, UNICODE)
    return [f"{one.lead}{one.names or one.pid}" for one in found]


def test_ancestors_without_branches_stand_in_one_line() -> None:
    assert tree(job(30, SHELL, SSH)) == ["sshd: > bash", "└─ 30"]


def test_workers_stand_below_their_launcher_and_others_beside_it() -> None:
    launcher = Ancestor(25, "/usr/bin/python3 /opt/bin/torchrun --nproc=2 train.py")
    assert tree(
        job(30, launcher, SHELL, SSH), job(31, launcher, SHELL, SSH), job(40, SHELL, SSH), job(50)
    ) == [
        "sshd: > bash",
        "├─ python3 torchrun",
        "│  ├─ 30",
        "│  └─ 31",
        "└─ 40",
        "50",
    ]


def test_a_process_on_a_gpu_that_started_others_is_their_branch() -> None:
    own = Ancestor(30, "train.py")
    assert tree(job(31, own, SHELL), job(30, SHELL), job(32, own, SHELL)) == [
        "bash",
        "└─ 30",
        "   ├─ 31",
        "   └─ 32",
    ]


def test_a_process_on_two_gpus_is_there_once() -> None:
    found = branches_of([process(30), process(30)], [], ASCII)
    assert [one.pid for one in found] == [30]


def test_what_cannot_be_seen_is_a_question_mark_and_no_control_character_passes() -> None:
    assert tree(job(30, Ancestor(20, None), Ancestor(10, "\x1b[2J")))[0] == "?[2J > ?"
