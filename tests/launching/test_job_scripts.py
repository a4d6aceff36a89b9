"""Exported command lines and job scripts: a real shell reads them, and the words come through."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning.plans import plan_of, variants, whatever_it_takes

from oomph.errors import UsageError
from oomph.launching.grid_engine import sge_script
from oomph.launching.slurm import slurm_script
from oomph.launching.torchrun import torchrun_command
from oomph.records.workload import Variant

HOSTILE = ["a b.py", "$(touch gone).py", "'; exit 7; '", "x\ny.py", "-c", "`id`", "*", "ü.py", "#"]

# What the scripts call, each of which writes down what it was called with.
STUB = """#!{python}
import json, os, sys
names = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS")
seen = {{name: os.environ.get(name) for name in names}}
with open({record!r}, "w") as file:
    json.dump([[os.path.basename(sys.argv[0]), *sys.argv[1:]], seen], file)
"""


class Machine:
    """A directory of commands that stand in for the cluster's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.record = directory / "record.json"

    def has(self, name: str, text: str | None = None) -> None:
        path = self.directory / name
        path.write_text(text or STUB.format(python=sys.executable, record=str(self.record)))
        path.chmod(0o755)

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/bash", "-s"],
            input=script,
            env={
                "PATH": f"{self.directory}:/usr/bin:/bin",
                "OOMPH_LOCKS": str(self.directory),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def called(self, script: str, **environment: str) -> tuple[list[str], dict[str, str | None]]:
        done = self.run(script, **environment)
        assert done.returncode == 0, done.stderr
        words, seen = json.loads(self.record.read_text())
        return words, seen


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.has("torchrun")
    return made


def syntax_errors(script: str) -> str:
    done = subprocess.run(
        ["/bin/bash", "-n"], input=script, capture_output=True, text=True, check=False
    )
    return done.stderr


words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


@whatever_it_takes
@given(variants(), words.filter(bool), st.lists(words, max_size=3))
def test_a_command_line_gives_the_words_back(
    variant: Variant, script: str, arguments: list[str]
) -> None:
    command = torchrun_command(variant, script, arguments)
    settings = len(command.environment)
    assert tuple(shlex.split(command.shell)[settings:]) == command.arguments
    *_, name = command.arguments[: len(command.arguments) - len(arguments)]
    assert name in (script, f"./{script}")
    assert not name.startswith("-")


@pytest.mark.parametrize("script", HOSTILE)
def test_hostile_names_come_through_a_shell(machine: Machine, script: str) -> None:
    expected = ["./-c"] if script == "-c" else [script]
    for text in (
        plan_of(num_gpus=2).to_torchrun(script, HOSTILE).shell,
        plan_of(num_gpus=2).to_slurm(script, HOSTILE),
        plan_of(num_gpus=2).to_sge(script, HOSTILE),
    ):
        words, _ = machine.called(text, CUDA_VISIBLE_DEVICES="0,1")
        assert words == ["torchrun", "--standalone", "--nproc-per-node=2", *expected, *HOSTILE]
        assert not Path("gone").exists()


@pytest.mark.parametrize("words", [("", []), ("a\0b", []), ("a", ["\0"])], ids=repr)
def test_what_is_no_word_is_refused(words: tuple[str, list[str]]) -> None:
    with pytest.raises(UsageError, match="cannot be a word"):
        plan_of().to_torchrun(*words)


def test_expandable_segments_are_set_under_both_names() -> None:
    environment = plan_of(expandable_segments=True).to_torchrun().environment
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in plan_of().to_torchrun().environment


def test_several_machines_need_a_place_to_meet() -> None:
    plan = plan_of(num_gpus=8)
    with pytest.raises(UsageError, match="need a place to meet"):
        plan.to_torchrun(gpus_per_node=4)
    command = plan.to_torchrun(gpus_per_node=4, endpoint="first:29500")
    assert command.arguments[:4] == (
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=4",
        "--rdzv-backend=c10d",
    )


def test_a_plan_says_how_many_gpus_a_machine_has() -> None:
    plan = plan_of(num_gpus=8, gpus_per_node=4)
    assert "#SBATCH --nodes=2" in plan.exported("slurm", "train.py")
    assert "#SBATCH --gres=gpu:4" in plan.exported("slurm", "train.py")
    command, todo = plan.exported("torchrun", "train.py").splitlines()[:2]
    assert "--nnodes=2 --nproc-per-node=4" in command
    assert "--rdzv-endpoint=FIRST-HOST:29500" in command
    assert "on each of the 2 machines" in todo
    assert json.loads(plan.exported("accelerate", "train.py"))["config"]["num_machines"] == 2
    lightning = json.loads(plan.exported("lightning", "train.py"))
    assert (lightning["num_nodes"], lightning["devices"]) == (2, 4)
    assert "torchrun --nnodes=2 --nproc-per-node=4" in " ".join(plan.to_code().split())
    with pytest.raises(UsageError, match="8 GPUs are 2 machines of 4"):
        plan.exported("sge", "train.py")


def test_more_gpus_than_usual_machines_have_are_several_machines() -> None:
    plan = plan_of(num_gpus=16)
    assert "#SBATCH --nodes=2" in plan.to_slurm()
    assert "#SBATCH --nodes=1" in plan.to_slurm(gpus_per_node=16)
    with pytest.raises(UsageError, match="need a place to meet"):
        plan.to_torchrun()


def test_slurm_is_asked_for_the_planned_gpus(machine: Machine) -> None:
    script = plan_of(num_gpus=4, expandable_segments=True).to_slurm(
        time="12:00:00", memory="64G", partition="gpu", name="bert", cpus_per_gpu=6
    )
    assert [line for line in script.splitlines() if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=bert",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gres=gpu:4",
        "#SBATCH --cpus-per-task=24",
        "#SBATCH --time=12:00:00",
        "#SBATCH --mem=64G",
        "#SBATCH --partition=gpu",
    ]
    _, seen = machine.called(script)
    assert seen["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert seen["OMP_NUM_THREADS"] == "6"


def test_slurm_passes_the_exit_code_on(machine: Machine) -> None:
    machine.has("torchrun", "#!/bin/bash\nexit 7\n")
    assert machine.run(plan_of().to_slurm()).returncode == 7


def test_two_machines_meet_at_the_first_of_the_job(machine: Machine) -> None:
    machine.has("srun")
    machine.has("scontrol", '#!/bin/bash\n[ "$3" = "node[3-4]" ] && printf "node3\\nnode4\\n"\n')
    script = plan_of(num_gpus=8).to_slurm("train.py", ["--lr", "0.1"], gpus_per_node=4)
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:4\n" in script
    words, _ = machine.called(script, SLURM_JOB_NODELIST="node[3-4]", SLURM_JOB_ID="123456")
    assert words == [
        "srun",
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=4",
        "--rdzv-backend=c10d",
        "--rdzv-id=123456",
        "--rdzv-endpoint=node3:23456",
        "train.py",
        "--lr",
        "0.1",
    ]


def test_without_a_first_machine_the_job_fails_at_once(machine: Machine) -> None:
    machine.has("srun")
    machine.has("scontrol", "#!/bin/bash\n")
    done = machine.run(
        plan_of(num_gpus=8).to_slurm(gpus_per_node=4), SLURM_JOB_NODELIST="", SLURM_JOB_ID="1"
    )
    assert done.returncode != 0
    assert "no host in SLURM_JOB_NODELIST" in done.stderr
    assert not machine.record.exists()


def test_grid_engine_is_asked_for_the_planned_gpus() -> None:
    script = plan_of(num_gpus=4).to_sge(
        time="12:00:00", memory="8G", queue="gpu.q", parallel_environment="smp", slots=8
    )
    assert [line for line in script.splitlines() if line.startswith("#$")] == [
        "#$ -N train",
        "#$ -S /bin/bash",
        "#$ -cwd",
        "#$ -V",
        "#$ -w e",
        "#$ -l gpu=4",
        "#$ -l h_rt=12:00:00",
        "#$ -l h_vmem=8G",
        "#$ -q gpu.q",
        "#$ -pe smp 8",
    ]


def test_gpus_that_are_counted_for_each_slot_are_divided() -> None:
    plan = plan_of(num_gpus=4)
    asked = {"parallel_environment": "smp", "gpus_counted": "per slot"}
    assert "#$ -l gpu=2\n" in plan.to_sge(slots=2, **asked)
    with pytest.raises(UsageError, match="over 3 slots"):
        plan.to_sge(slots=3, **asked)
    with pytest.raises(UsageError, match="need a parallel environment"):
        plan.to_sge(slots=4)


def test_grid_engines_own_choice_of_gpus_is_taken(machine: Machine) -> None:
    _, seen = machine.called(plan_of(num_gpus=2).to_sge(), SGE_HGR_gpu="2 3")
    assert seen["CUDA_VISIBLE_DEVICES"] == "2,3"


NVIDIA_SMI = """#!/bin/bash
case "$*" in
  *--query-gpu=uuid*) printf "GPU-%s\\n" a b c ;;
  *--id=GPU-a*) echo 4711 ;;
esac
"""


def test_idle_gpus_are_taken_where_grid_engine_names_none(machine: Machine) -> None:
    machine.has("nvidia-smi", NVIDIA_SMI)
    _, seen = machine.called(plan_of(num_gpus=2).to_sge())
    assert seen["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-c"


def test_two_jobs_on_a_machine_do_not_take_the_same_gpu(machine: Machine) -> None:
    machine.has("nvidia-smi", NVIDIA_SMI)
    # The first job starts the second while it runs itself.
    second = machine.directory / "second.sh"
    second.write_text(plan_of(num_gpus=1).to_sge("second.py"))
    machine.has(
        "torchrun",
        f'#!/bin/bash\nunset CUDA_VISIBLE_DEVICES\nmv "{machine.directory}/'
        f'again" "{machine.directory}/torchrun"\nexec /bin/bash "{second}"\n',
    )
    machine.has("again")
    words, seen = machine.called(plan_of(num_gpus=1).to_sge("first.py"))
    assert words[-1] == "second.py"
    assert seen["CUDA_VISIBLE_DEVICES"] == "GPU-c"  # b is the first's


def test_too_few_idle_gpus_end_the_job(machine: Machine) -> None:
    machine.has("nvidia-smi", NVIDIA_SMI)
    done = machine.run(plan_of(num_gpus=4).to_sge())
    assert done.returncode == 1
    assert "only 2 of the 4 GPUs needed are idle" in done.stderr


@pytest.mark.parametrize("value", ["a b", "x\n#SBATCH --exclusive", "$(id)", "-x", "a;b", "ü"])
@pytest.mark.parametrize("field", ["name", "time", "memory"])
def test_what_a_scheduler_would_misread_is_refused(field: str, value: str) -> None:
    for export in (plan_of().to_slurm, plan_of().to_sge):
        with pytest.raises(UsageError, match="cannot stand in a job script"):
            export(**{field: value})


@pytest.mark.parametrize("make", [slurm_script, sge_script])
def test_every_script_is_one_that_bash_reads(make: Any) -> None:
    scripts = [
        make(plan_of(num_gpus=gpus, expandable_segments=gpus > 2).variant, name, HOSTILE)
        for gpus in (1, 2, 8)
        for name in HOSTILE
    ]
    for script in scripts:
        assert syntax_errors(script) == ""
