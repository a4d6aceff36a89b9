"""`oomph launch`: real torchrun with gloo, on GPUs of the test machine."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from nvml.machine import Gpu, NvmlMachine
from planning.plans import plan_of

from cli.watched import OOMPH, gone, told, wait_for
from oomph.launching.taking import LOCKS
from oomph.monitoring.diary import META
from oomph.monitoring.diary_reader import read_run

# Small, and without an import that torch does not need itself. torch 2.13 with gloo sometimes
# aborts a process while C++ tears down, under bare torchrun too (docs/tried.md): this leaves before
# that, after everything that Python does at its end.
TRAIN = """
import atexit, json, os, signal, sys, time

code = 0
atexit.register(lambda: os._exit(1 if hasattr(sys, "last_value") else code))
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, what = dist.get_rank(), sys.argv[1]
seen = torch.ones(1)
dist.all_reduce(seen)
names = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "M",
         "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
told = {"world": int(seen), "arguments": sys.argv[1:], "pid": os.getpid(),
        **{name: os.environ.get(name) for name in names}}
with open(f"rank-{rank}.json", "w") as file:
    json.dump(told, file)
os.rename(f"rank-{rank}.json", f"told-{rank}.json")
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, place):
        time.sleep(0.05 if what == "slow" and rank == 1 else 0)
        return torch.ones(4)
loader = torch.utils.data.DataLoader(Examples(), batch_size=4)
for number, batch in enumerate(loader):
    if rank == 1 and number == 2:
        if what == "raise":
            raise ValueError("rank 1 has had enough")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            code = 7
            sys.exit(code)
    while what == "forever":
        time.sleep(0.05)
    (weight * batch).sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
HOSTILE = ["a b", "it's", '"', "$HOME", "`id`", "*", "\\", "ü\n", "", "--nproc-per-node=9", "-m"]


class Desk:
    """A machine with GPUs, a training script, and directories for runs and locks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.machine = NvmlMachine(directory, [Gpu() for _ in range(4)])
        self.runs = directory / "runs"
        (directory / "locks").mkdir()
        (directory / "train.py").write_text(TRAIN)

    @property
    def environment(self) -> dict[str, str]:
        own = {"OOMPH_RUNS": str(self.runs), LOCKS: str(self.directory / "locks")}
        environment = {**os.environ, **self.machine.env(), **own}
        return {name: environment[name] for name in environment.keys() - {"OMP_NUM_THREADS"}}

    def launch(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*OOMPH, "launch", *words],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            check=False,
        )

    def told(self, rank: int) -> dict[str, Any]:
        path = self.directory / f"told-{rank}.json"
        wait_for(path.exists)
        found: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        return found

    def run_directory(self) -> Path:
        (meta,) = self.runs.glob(f"*/{META}")
        return meta.parent


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_plan_decides_processes_environment_and_gpus(desk: Desk) -> None:
    plan = desk.directory / "plan.json"
    plan_of(num_gpus=2, micro_batch=2, expandable_segments=True).save(plan)
    done = desk.launch(str(plan), "--", "train.py", "slow", *HOSTILE)
    assert done.returncode == 0, done.stderr.decode()
    for rank in (0, 1):
        seen = desk.told(rank)
        assert seen["world"] == 2
        assert seen["arguments"] == ["slow", *HOSTILE]
        assert seen["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        gpus = [desk.machine.uuid(0), desk.machine.uuid(1)]
        assert seen["CUDA_VISIBLE_DEVICES"] == ",".join(gpus)
        assert seen["M"] == "2"
        assert int(seen["OMP_NUM_THREADS"]) >= 1
        assert seen["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    # Every rank has kept its diary, though the script knows nothing of oomph.
    run = read_run(desk.run_directory())
    assert run.command[0] == "torchrun"  # as a person would type it
    assert {span.rank for span in run.step_spans} == {0, 1}
    assert all(span.data_wait_s is not None for span in run.step_spans)
    assert b"steps: rank 1:" in done.stderr
    assert b"rank 1 keeps the other ranks waiting" in done.stderr


@pytest.mark.parametrize(
    ("what", "code", "first"),
    [
        ("raise", 1, "rank 1 failed first: ValueError: rank 1 has had enough"),
        ("kill", 137, "rank 1 failed first: ended by SIGKILL"),
        pytest.param(
            "exit",
            7,
            "rank 1 failed first: exit code 7; what it printed is above",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dead_rank_ends_the_others_and_its_error_comes_first(
    desk: Desk, what: str, code: int, first: str
) -> None:
    done = desk.launch("--nproc", "2", "--", "train.py", what)
    assert done.returncode == code, done.stderr.decode()
    assert told(done)[0] == first
    assert b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError" not in done.stderr
    assert all(gone(desk.told(rank)["pid"]) for rank in (0, 1))


def test_ctrl_c_ends_all_ranks_and_frees_the_gpus(desk: Desk) -> None:
    command = [*OOMPH, "launch", "--nproc", "4", "--", "train.py", "forever"]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(desk.directory)
        os.execve(command[0], command, desk.environment)  # noqa: S606
    pids = [desk.told(rank)["pid"] for rank in range(4)]
    refused = desk.launch("--nproc", "1", "--", "train.py", "well")
    assert refused.returncode == 1
    assert "GPU 0 is locked by process" in refused.stderr.decode()
    os.write(terminal, b"\x03")
    printed = b""
    try:
        while piece := os.read(terminal, 65536):
            printed += piece
    except OSError:  # what Linux says when the last process has closed the terminal
        pass
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.WIFSIGNALED(status), printed.decode()
    assert os.WTERMSIG(status) == signal.SIGINT
    for pid in pids:
        wait_for(lambda pid=pid: gone(pid))  # type: ignore[misc]
    script = desk.directory / "all.sh"
    script.write_text('test "$M" = 4\n')
    assert desk.launch("--nproc", "4", "--script", "all.sh").returncode == 0


def test_ranks_end_with_torchrun_even_if_it_is_killed(desk: Desk) -> None:
    words = [*OOMPH, "launch", "--nproc", "2", "--gpus", "none", "--", "train.py", "forever"]
    launcher = subprocess.Popen(
        words, cwd=desk.directory, env=desk.environment, stderr=subprocess.DEVNULL
    )
    pids = [desk.told(rank)["pid"] for rank in (0, 1)]
    agent = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    assert launcher.wait() == -signal.SIGKILL
    for pid in pids:
        wait_for(lambda pid=pid: gone(pid))  # type: ignore[misc]


def test_two_machines_of_a_job_meet_and_leave_one_run(desk: Desk) -> None:
    """As srun starts them: the second machine's diary is a part of the first one's."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    job = desk.runs / "20261119-061203-7f3a"
    job.mkdir(parents=True)
    words = [*OOMPH, "launch", "--nproc", "1", "--gpus", "none", "--nodes", "2"]
    words += ["--meet", f"127.0.0.1:{port}", "--meet-as", "41", "--", "train.py", "well"]
    machines = [
        subprocess.Popen(
            words,
            cwd=desk.directory,
            env={**desk.environment, "OOMPH_JOB": str(job), "SLURM_NODEID": node},
            stderr=subprocess.PIPE,
        )
        for node in "01"
    ]
    for machine in machines:
        _, complained = machine.communicate()
        assert machine.returncode == 0, complained.decode()
    assert [desk.told(rank)["world"] for rank in (0, 1)] == [2, 2]
    run = read_run(job)
    assert run.id == job.name
    assert {span.rank for span in run.step_spans} == {0, 1}


# ---- without torch -------------------------------------------------------------------------------


def test_the_users_own_script_finds_the_number_of_gpus_in_m(desk: Desk) -> None:
    (desk.directory / "submit_train.sh").write_text(
        'printf "%s\\0" "$M" "$CUDA_VISIBLE_DEVICES" "$@" > words\nexit 5\n'
    )
    done = desk.launch("--nproc", "2", "--script", "submit_train.sh", "--", *HOSTILE)
    assert done.returncode == 5
    words = (desk.directory / "words").read_bytes().decode().split("\0")[:-1]
    assert words == ["2", f"{desk.machine.uuid(0)},{desk.machine.uuid(1)}", *HOSTILE]


def test_a_dry_run_prints_the_command_and_starts_nothing(desk: Desk) -> None:
    done = desk.launch("--nproc", "2", "--gpus", "none", "--dry-run", "--", "train.py", "a b")
    assert done.returncode == 0
    assert done.stdout.decode().splitlines()[-1].strip() == (
        "torchrun --standalone --nproc-per-node=2 train.py 'a b'"
    )
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in done.stdout.decode()
    assert not desk.runs.exists()
    as_json = desk.launch("--nproc", "2", "--dry-run", "--json", "--", "train.py")
    assert "2 free GPUs" in json.loads(as_json.stdout)["would_run"]


def test_the_allocators_own_settings_are_kept(desk: Desk) -> None:
    plan = desk.directory / "plan.json"
    plan_of(num_gpus=2, micro_batch=2, expandable_segments=True).save(plan)
    environment = {
        **desk.environment,
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:False",
        "OMP_NUM_THREADS": "3",
    }
    done = subprocess.run(
        [*OOMPH, "launch", str(plan), "--dry-run", "--", "train.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "PYTORCH_ALLOC_CONF=max_split_size_mb:128,expandable_segments:True" in done.stdout
    assert "OMP_NUM_THREADS=3" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc", "2"], "there is no script to start"),
        (["--", "train.py"], "neither a plan nor --nproc was given"),
        (["--nproc", "2", "--", "python", "train.py", "--lr", "1"], "-- train.py --lr 1"),
        (["--nproc", "2", "--", "torchrun", "train.py"], "starts a script by torchrun itself"),
        (["--nproc", "2", "--gpus", "0,1,2", "--", "train.py"], "names 3 GPUs for 2 processes"),
        (["--nproc", "2", "--", "submit.sh", "--lr", "1"], "--script submit.sh -- --lr 1"),
        (["--nproc", "2", "--", "trian.py"], "there is no script 'trian.py' here"),
        (["--nproc", "2", "--script", "none.sh"], "there is no script 'none.sh' here"),
        (["--nproc", "2", "--time", "1h", "--", "train.py"], "--time is for a job"),
        (["--nproc", "2", "--via", "slrum", "--", "train.py"], "--via 'slrum' is no scheduler"),
        (["--via", "plan.json", "--", "train.py"], "oomph launch plan.json --via"),
        (["--nproc", "2", "--via", "sge", "--gpus", "0", "--", "train.py"], "without --gpus"),
        (["--nproc", "2", "--via", "pbs", "--wait", "--", "train.py"], "cannot wait for it"),
        (["--status", "last"], "there is no job 'last'"),
        (["--gpus", "1,1", "--", "train.py"], "names a GPU twice"),
        (["--nproc", "0", "--", "train.py"], "not a whole number above 0"),
        (["--nproc", "2", "--nodes", "2", "--", "train.py"], "each machine would train alone"),
        (["--nproc", "2", "--nodes", "2", "--meet", ":29500", "--", "t.py"], "need a host"),
        (["no-plan.json", "--", "train.py"], "no-plan.json cannot be read"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_starts(
    desk: Desk, words: list[str], said: str
) -> None:
    done = desk.launch(*words)
    assert done.returncode in (2, 4)
    assert said in done.stderr.decode()
    assert not desk.runs.exists()


def test_json_says_which_rank_failed(desk: Desk) -> None:
    (desk.directory / "submit_train.sh").write_text("exit 5\n")
    words = ["--nproc", "1", "--json", "--quiet", "--script", "submit_train.sh"]
    done = desk.launch(*words)
    assert done.returncode == 5
    assert json.loads(done.stderr)["exit_code"] == 5
    assert json.loads(done.stderr)["failure"] is None


def test_a_job_of_kubernetes_is_printed(desk: Desk) -> None:
    words = ["--nproc", "1", "--via", "kubernetes", "--image", "mine:1", "--", "in-the-image.py"]
    done = desk.launch(*words)
    assert done.returncode == 0
    assert "kind: Job\n" in done.stdout.decode()


def test_too_few_gpus_is_a_no(desk: Desk) -> None:
    done = desk.launch("--nproc", "5", "--", "train.py")
    assert done.returncode == 1
    assert "4 of the 5 GPUs" in done.stderr.decode()
