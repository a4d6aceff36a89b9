"""A job takes GPUs that nobody uses and no other job holds, and lets them go however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import OnMachine
from nvml.machine import Gpu, Mig, NvmlMachine, Proc

from oomph.errors import Unreadable, UsageError
from oomph.launching.taking import LOCKS, NotEnoughGpus, lock_path, taking


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of locks that no other test has."""
    directory = tmp_path / "locks"
    directory.mkdir()
    monkeypatch.setenv(LOCKS, str(directory))
    for name in ("SLURM_JOB_ID", "SGE_HGR_gpu", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    return directory


HOLDING = """
import sys
from oomph.launching.taking import taking
with taking(int(sys.argv[1])) as taken:
    print(*taken.names, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold() -> Callable[[int], subprocess.Popen[str]]:
    """Start another job, which holds so many GPUs until its input is closed."""

    def start(num_gpus: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", HOLDING, str(num_gpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


def names_of(job: subprocess.Popen[str]) -> list[str]:
    assert job.stdout is not None
    return job.stdout.readline().split()


def test_free_gpus_are_taken_and_named_by_uuid(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(processes=[Proc(4100)]), Gpu(), Gpu(), Gpu()])
    with taking(2) as taken:
        assert taken.names == (machine.uuid(1), machine.uuid(2))


def test_the_next_job_takes_others_and_the_one_after_it_none(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(), Gpu(), Gpu()])
    with taking(2), taking(1) as second:
        assert second.names == (machine.uuid(2),)
        with pytest.raises(NotEnoughGpus, match="0 of the 1 GPUs") as error, taking(1):
            pass
        assert f"GPU 0 is locked by process {os.getpid()}" in str(error.value)
    with taking(3) as taken:
        assert len(taken.names) == 3


def test_a_job_that_cannot_have_all_keeps_none(on_machine: OnMachine) -> None:
    on_machine([Gpu(), Gpu()])
    with taking(1):
        with pytest.raises(NotEnoughGpus, match="1 of the 2"), taking(2):
            pass
        with taking(1) as taken:
            assert len(taken.names) == 1


def test_jobs_that_start_together_share_no_gpu(
    on_machine: OnMachine, hold: Callable[[int], subprocess.Popen[str]]
) -> None:
    machine = on_machine([Gpu() for _ in range(8)])
    jobs = [hold(2) for _ in range(4)]
    taken = [name for job in jobs for name in names_of(job)]
    assert sorted(taken) == sorted(machine.uuid(gpu) for gpu in range(8))
    for job in jobs:
        job.communicate()


def test_the_locks_of_a_killed_job_are_free(
    on_machine: OnMachine, hold: Callable[[int], subprocess.Popen[str]]
) -> None:
    machine = on_machine([Gpu()])
    job = hold(1)
    assert names_of(job) == [machine.uuid(0)]
    with pytest.raises(NotEnoughGpus, match=f"locked by process {job.pid}"), taking(1):
        pass
    job.send_signal(signal.SIGKILL)
    job.communicate()
    assert lock_path(machine.uuid(0)).exists()  # the file stays, and locks nothing
    with taking(1) as taken:
        assert taken.names == (machine.uuid(0),)


def test_a_training_that_outlives_its_launcher_keeps_its_gpus(on_machine: OnMachine) -> None:
    on_machine([Gpu()])
    with taking(1):
        training = subprocess.Popen(["sleep", "600"], close_fds=False)
    try:
        with pytest.raises(NotEnoughGpus), taking(1):
            pass
    finally:
        training.kill()
        training.wait()
    with taking(1):
        pass


def test_a_gpu_by_its_number_or_uuid_is_taken_even_if_somebody_uses_it(
    on_machine: OnMachine,
) -> None:
    machine = on_machine([Gpu(), Gpu(processes=[Proc(4100)])])
    with taking(2, ["1", machine.uuid(0)[:20]]) as taken:
        assert taken.names == (machine.uuid(1), machine.uuid(0))
        with pytest.raises(NotEnoughGpus, match="GPU 1 is locked"), taking(1, ["1"]):
            pass
    with pytest.raises(UsageError, match="'7', which is 0 GPUs"), taking(1, ["7"]):
        pass


def test_only_visible_gpus_are_taken(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = on_machine([Gpu(), Gpu(), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    with taking(2) as taken:
        assert taken.names == (machine.uuid(2), machine.uuid(1))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "2,3"}, ("2", "3")),
        ({"JOB_ID": "7", "SGE_HGR_gpu": "0 3"}, ("0", "3")),
    ],
)
def test_what_a_scheduler_gave_is_taken_as_it_is(
    variables: dict[str, str], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with taking(2) as taken:
        assert taken.names == expected
    with pytest.raises(NotEnoughGpus, match="this job has 2 of the 3 GPUs"), taking(3):
        pass


def test_a_grid_engine_job_does_not_trust_the_variable_of_the_shell_that_submitted_it(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = on_machine([Gpu(), Gpu()])
    monkeypatch.setenv("JOB_ID", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with taking(1) as taken:
        assert taken.names == (machine.uuid(0),)
        with pytest.raises(NotEnoughGpus, match="GPU 0 is locked"), taking(1):
            pass


def test_gpus_in_slices_give_one_process_one_slice(on_machine: OnMachine) -> None:
    machine = on_machine([Gpu(migs=[Mig(), Mig()])])
    with taking(1) as taken:
        assert taken.names == (machine.uuid(0, 0),)
    with pytest.raises(NotEnoughGpus, match="MIG slices"), taking(2):
        pass


def test_without_a_gpu_nothing_is_taken(on_machine: OnMachine) -> None:
    on_machine([])
    with pytest.raises(Unreadable, match="no GPU here"), taking(1):
        pass


def test_a_lock_is_never_written_through_a_link(on_machine: OnMachine, tmp_path: Path) -> None:
    machine: NvmlMachine = on_machine([Gpu()])
    aim = tmp_path / "precious"
    aim.write_text("content")
    lock_path(machine.uuid(0)).symlink_to(aim)
    with pytest.raises(Unreadable, match="cannot be opened"), taking(1):
        pass
    assert aim.read_text() == "content"
