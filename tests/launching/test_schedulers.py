"""Jobs of real Slurm and Grid Engine daemons: submitted, watched, cancelled, and refused.

They need root and Debian's packages: `make test-schedulers` installs them. Elsewhere they are
skipped. The GPUs are those of the test machine (tests/nvml), so that Grid Engine's jobs can lock
them; Slurm hands out device files that are not GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli.test_launch import HOSTILE, TRAIN
from cli.watched import OOMPH, gone
from nvml.machine import Gpu, NvmlMachine

from launching import schedulers
from launching.schedulers import HAS_GRID_ENGINE, HAS_SLURM, NUM_GPUS, wait_for
from oomph.launching.taking import LOCKS
from oomph.monitoring.diary_reader import read_run

pytestmark = [pytest.mark.schedulers, pytest.mark.slow]
NEEDS = {
    "slurm": pytest.mark.skipif(not HAS_SLURM, reason="needs root, slurmctld, slurmd and munge"),
    "sge": pytest.mark.skipif(not HAS_GRID_ENGINE, reason="needs root and gridengine-master"),
}
BOTH = [pytest.param(name, marks=needs) for name, needs in NEEDS.items()]


@dataclass
class Cluster:
    """A scheduler, and a directory with a training script."""

    via: str
    client: dict[str, str]
    directory: Path
    machine: NvmlMachine

    @property
    def environment(self) -> dict[str, str]:
        own = {"OOMPH_RUNS": str(self.runs), LOCKS: str(self.directory)}
        return {**self.client, **self.machine.env(), **own}

    @property
    def runs(self) -> Path:
        return self.directory / "runs"

    def oomph(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*OOMPH, "launch", *words],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def submit(self, *words: str) -> str:
        """Submit a job and return its run's id."""
        done = self.oomph("--via", "--json", *words)
        assert done.returncode == 0, done.stderr
        found: str = json.loads(done.stdout)["id"]
        return found

    def script(self, text: str) -> str:
        """Write a script of the user's own."""
        (self.directory / "submit_train.sh").write_text(text)
        return "submit_train.sh"

    def state(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.oomph("--status", run, "--json").stdout)
        return found

    def file(self, name: str) -> str:
        """Return a file's content, once a job has written it."""
        path = self.directory / name
        wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
        return path.read_text().strip()


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    """The daemons, started when the first test needs them."""
    with ExitStack() as stack:
        found = _Clients(stack, tmp_path_factory)
        yield found


class _Clients(dict[str, dict[str, str]]):
    def __init__(self, stack: ExitStack, directories: pytest.TempPathFactory) -> None:
        super().__init__()
        self._stack, self._directories = stack, directories

    def __missing__(self, via: str) -> dict[str, str]:
        here = self._directories.mktemp(via)
        starting = schedulers.start_slurm if via == "slurm" else schedulers.start_grid_engine
        self[via] = self._stack.enter_context(starting(here))
        return self[via]


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest, clients: dict[str, dict[str, str]], tmp_path: Path
) -> Cluster:
    (tmp_path / "train.py").write_text(TRAIN)
    machine = NvmlMachine(tmp_path, [Gpu() for _ in range(NUM_GPUS)], log=False)
    return Cluster(request.param, clients[request.param], tmp_path, machine)


both = pytest.mark.parametrize("cluster", BOTH, indirect=True)
only_slurm = pytest.mark.parametrize("cluster", BOTH[:1], indirect=True)
only_grid_engine = pytest.mark.parametrize("cluster", BOTH[1:], indirect=True)


@both
def test_a_job_trains_with_its_ranks_its_gpus_and_its_arguments(cluster: Cluster) -> None:
    words = ["--via", "--nproc", "2", "--cpus-per-gpu", "1", "--wait"]
    done = cluster.oomph(*words, "--", "train.py", "well", *HOSTILE)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        told = json.loads((cluster.directory / f"told-{rank}.json").read_text())
        assert told["world"] == 2
        assert told["arguments"] == ["well", *HOSTILE]
        assert len(told["CUDA_VISIBLE_DEVICES"].split(",")) == 2
    (directory,) = cluster.runs.iterdir()
    assert (directory / "exit-code").read_text() == "0\n"
    run = read_run(directory)  # recorded by the job itself, beside its script
    assert run.id == directory.name
    assert {span.rank for span in run.step_spans} == {0, 1}
    assert "steps: rank 1" in done.stdout
    status = cluster.oomph("--status", "last")
    assert f"{directory.name}: ended with exit code 0" in status.stdout


# It says which GPUs it has, and holds them until it is told to go.
HOLDING = 'echo "$CUDA_VISIBLE_DEVICES" > "has-$1"\nuntil [ -e go ]; do sleep 0.1; done\n'


@both
def test_two_jobs_at_once_have_different_gpus_and_a_third_waits(cluster: Cluster) -> None:
    script = cluster.script(HOLDING)
    asked = ["--nproc", "2", "--cpus-per-gpu", "1", "--script", script]
    jobs = [cluster.submit(*asked, "--", name) for name in "ab"]
    gpus = [cluster.file(f"has-{name}").split(",") for name in "ab"]
    assert len({*gpus[0], *gpus[1]}) == 4, gpus
    third = cluster.submit(*asked, "--", "c")
    assert cluster.state(third)["state"] == "waiting"
    assert cluster.oomph("--cancel", third).returncode == 0
    wait_for(lambda: cluster.state(third)["state"] == "killed")
    assert "cancelled" in cluster.oomph("--status", third).stdout
    (cluster.directory / "go").touch()
    for job in jobs:
        assert cluster.oomph("--follow", job).returncode == 0
    assert not (cluster.directory / "has-c").exists()


@both
def test_the_exit_code_is_the_jobs_own(cluster: Cluster) -> None:
    script = cluster.script('echo "$M processes for $1"\nexit 7\n')
    done = cluster.oomph("--via", "--nproc", "1", "--wait", "--script", script, "--", "a b")
    assert done.returncode == 7
    assert "1 processes for a b" in done.stdout
    assert cluster.oomph("--status", "last").returncode == 7


@both
def test_a_dead_rank_is_named_in_the_jobs_output(cluster: Cluster) -> None:
    words = ["--via", "--nproc", "2", "--cpus-per-gpu", "1", "--wait"]
    done = cluster.oomph(*words, "--", "train.py", "kill")
    assert done.returncode == 137
    assert "rank 1 failed first: ended by SIGKILL" in done.stdout


@both
def test_a_cancelled_job_leaves_no_rank_behind_and_an_exit_code(cluster: Cluster) -> None:
    job = cluster.submit("--nproc", "2", "--cpus-per-gpu", "1", "--", "train.py", "forever")
    pids = []
    for rank in (0, 1):
        path = cluster.directory / f"told-{rank}.json"
        wait_for(path.exists)
        pids.append(json.loads(path.read_text())["pid"])
    assert cluster.state(job)["state"] == "running"
    assert cluster.oomph("--cancel", job).returncode == 0
    wait_for(lambda: cluster.state(job)["state"] in ("ended", "killed"))
    for pid in pids:
        wait_for(lambda pid=pid: gone(pid))  # type: ignore[misc]
    state = cluster.state(job)
    assert state["exit_code"] not in (None, 0), state
    assert "cancelled" in cluster.oomph("--status", job).stdout
    # Its GPUs are free again.
    script = cluster.script("exit 0\n")
    words = ["--via", "--nproc", str(NUM_GPUS), "--cpus-per-gpu", "1", "--wait"]
    assert cluster.oomph(*words, "--script", script).returncode == 0


@both
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc", "9"], "no machine here has 9 GPUs"),
        (["--nproc", "1", "--name", "gpu=4"], "only names the job"),
        (["--nproc", "4", "--cpus-per-gpu", "9"], "refuses this job"),
        (["--nproc", "1", "--queue", "nowhere"], "refuses this job"),
        (["--nproc", "1", "--gpu-resource", "gpux"], "no machine here has 1 GPUs"),
    ],
)
def test_what_could_never_run_is_refused_and_not_queued(
    cluster: Cluster, words: list[str], said: str
) -> None:
    done = cluster.oomph("--via", *words, "--", "train.py")
    assert done.returncode == 2
    assert said in done.stderr
    assert not list(cluster.runs.glob("*")), "nothing is left behind"


@both
def test_directives_of_the_users_script_are_kept(cluster: Cluster) -> None:
    directive = {"slurm": "#SBATCH --comment=mine", "sge": "#$ -l h_rt=0:5:0"}[cluster.via]
    script = cluster.script(f"#!/bin/bash\n{directive}\nexit 0\n#SBATCH --nonsense\n")
    job = cluster.submit("--nproc", "1", "--script", script)
    assert cluster.oomph("--follow", job).returncode == 0
    text = (cluster.runs / job / "job.sh").read_text()
    assert directive in text
    assert "nonsense" not in text


@only_grid_engine
def test_gpus_that_are_counted_for_each_slot_are_not_multiplied(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A site where `qconf -sc` says YES: `-l gpu=4 -pe smp 4` would be 16, and wait for ever."""
    complexes = schedulers.run(["qconf", "-sc"], cluster.client)
    rows = [row for row in complexes.splitlines() if not row.startswith("#")]
    before = tmp_path / "before"
    before.write_text("\n".join(rows) + "\n")
    changed = [row.replace("JOB", "YES") if row.startswith("gpu ") else row for row in rows]
    (tmp_path / "changed").write_text("\n".join(changed) + "\n")
    schedulers.run(["qconf", "-Mc", tmp_path / "changed"], cluster.client)
    try:
        script = cluster.script('[ "$(tr , "\\n" <<< "$CUDA_VISIBLE_DEVICES" | wc -l)" = 4 ]\n')
        words = ["--via", "--nproc", "4", "--cpus-per-gpu", "1", "--script", script]
        assert "#$ -l gpu=1\n" in cluster.oomph(*words, "--dry-run").stdout
        done = cluster.oomph(*words, "--wait")
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        schedulers.run(["qconf", "-Mc", before], cluster.client)


@only_slurm
def test_a_time_limit_is_asked_for(cluster: Cluster) -> None:
    """Slurm takes minutes, so the limit is looked at rather than waited for."""
    script = cluster.script("exit 0\n")
    job = cluster.submit("--nproc", "1", "--time", "90m", "--script", script)
    assert cluster.oomph("--follow", job).returncode == 0
    number = cluster.state(job)["job"]["number"]
    said = schedulers.prints(["scontrol", "show", "job", number], cluster.client)
    assert "TimeLimit=01:30:00" in said


def test_nothing_is_submitted_where_no_scheduler_answers(tmp_path: Path) -> None:
    environment = {**os.environ, "OOMPH_RUNS": str(tmp_path / "runs")}
    environment |= {"SLURM_CONF": "/nowhere", "SGE_ROOT": str(tmp_path)}
    done = subprocess.run(
        [*OOMPH, "launch", "--nproc", "1", "--via", "--", "train.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no scheduler answers here" in done.stderr
