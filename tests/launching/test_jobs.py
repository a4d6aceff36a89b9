"""Job scripts that run `oomph launch`: words come through, and mistakes are refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning.plans import plan_of, whatever_it_takes

from oomph.errors import OomphError, UsageError
from oomph.launching import jobs
from oomph.launching.grid_engine import GridEngine
from oomph.launching.job_body import launch_words
from oomph.launching.jobs import Order, find_job, render, state_of, submit
from oomph.launching.own_script import directives_of, refuse_named_gpus
from oomph.launching.requests import here_of, order_of
from oomph.launching.slurm import Slurm
from oomph.monitoring.diary import RUNS
from oomph.records.launch import Request, Training, Wanted

words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)

STUB = """#!{python}
import json, os, sys
with open({record!r}, "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


def order(via: str = "slurm", **wanted: Any) -> Order:
    settings = {"words": ("train.py",), "num_processes": 2, "via": via, **wanted}
    return order_of(Wanted(**settings), None)


class Commands:
    """A PATH of commands that stand in for the cluster's."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.record = directory, directory / "record"

    def has(self, name: str, text: str | None = None) -> None:
        path = self.directory / name
        path.write_text(text or STUB.format(python=sys.executable, record=str(self.record)))
        path.chmod(0o755)

    def called(self) -> list[list[str]]:
        if not self.record.exists():
            return []
        return [json.loads(line) for line in self.record.read_text().splitlines()]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    monkeypatch.setenv(RUNS, str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return Commands(directory)


def bash(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", "-s"],
        input=script,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# ---- the words of the training -------------------------------------------------------------------


@whatever_it_takes
@given(
    st.lists(words.filter(bool), min_size=1, max_size=1),
    st.lists(words, max_size=3),
    st.sampled_from(["script", "module", "own"]),
)
def test_every_word_comes_through_the_shell(
    script: list[str], arguments: list[str], kind: str
) -> None:
    training = Training(
        arguments=tuple(arguments),
        script=script[0] if kind == "script" else None,
        module=script[0] if kind == "module" else None,
        own_script=script[0] if kind == "own" else None,
    )
    line = launch_words(training, Request(gpus_each=2))
    called = line.replace(line.split()[0], "oomph", 1)
    text = f"oomph() {{ printf '%s\\0' \"$@\"; }}\n{called}"
    done = subprocess.run(["/bin/bash", "-s"], input=text.encode(), capture_output=True, check=True)
    found = done.stdout.decode().split("\0")[:-1]
    assert found[:3] == ["launch", "--nproc", "2"]
    flag = {"script": [], "module": ["-m", script[0]], "own": ["--script", script[0]]}[kind]
    rest = [*script, *arguments] if kind == "script" else arguments
    assert found[3:] == [*flag, "--", *rest]


def test_the_job_itself_writes_how_it_ended(tmp_path: Path) -> None:
    for via in ("slurm", "sge"):
        text = render(order(via)) if via == "slurm" else _grid_engine_script()
        head, _, last = text.rstrip().rpartition("\n")
        assert last.endswith("launch --nproc 2 -- train.py")
        job = tmp_path / via
        job.mkdir()
        lines = [
            f"export OOMPH_JOB={job}" if "OOMPH_JOB=" in line else line
            for line in head.splitlines()
        ]
        done = bash("\n".join([*lines, "sh -c 'exit 7'", "echo never"]))
        assert done.returncode == 7, done.stderr
        assert (job / "exit-code").read_text() == "7\n"
        assert (job / "started").read_text().strip()


def _grid_engine_script() -> str:
    made = order("sge")
    return GridEngine().script(made.training, made.request, None, Path("/runs/RUN"))


# ---- what is asked of Slurm ----------------------------------------------------------------------


def directives(text: str, prefix: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(prefix)]


@pytest.mark.usefixtures("commands")
def test_slurm_is_asked_for_what_the_plan_needs(tmp_path: Path) -> None:
    plan = plan_of(num_gpus=4, expandable_segments=True)
    wanted = Wanted(
        words=("train.py",),
        via="slurm",
        time="90m",
        memory="64GiB",
        queue="gpu",
        cpus_per_gpu=6,
        options=("--account=nlp", "--exclusive"),
    )
    text = render(order_of(wanted, plan))
    assert directives(text, "#SBATCH") == [
        "#SBATCH --job-name=train",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gres=gpu:4",
        "#SBATCH --cpus-per-task=24",
        "#SBATCH --time=01:30:00",
        "#SBATCH --mem=65536M",
        "#SBATCH --partition=gpu",
        f"#SBATCH --output={tmp_path}/runs/RUN/output.txt",
        "#SBATCH --account=nlp",
        "#SBATCH --exclusive",
    ]
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True\n" in text
    assert "export OMP_NUM_THREADS=6\n" in text
    assert f"x 4 GPUs = {plan.batch_size} for each step" in text


def test_several_machines_meet_at_the_first_one(commands: Commands) -> None:
    commands.has("srun")
    commands.has("scontrol", '#!/bin/bash\n[ "$3" = "node[3-4]" ] && printf "node3\\nnode4\\n"\n')
    text = render(order_of(Wanted(words=("a b.py", "$x"), via="slurm"), plan_of(num_gpus=16)))
    assert "#SBATCH --nodes=2" in text
    job = commands.directory
    path = f"{commands.directory}:/usr/bin:/bin"
    lines = [
        f"export OOMPH_JOB={job}" if "OOMPH_JOB=" in line else line for line in text.splitlines()
    ]
    environment = {"PATH": path, "SLURM_JOB_ID": "123456", "SLURM_CPUS_PER_TASK": "8"}
    done = bash("\n".join(lines), SLURM_JOB_NODELIST="node[3-4]", **environment)
    assert done.returncode == 0, done.stderr
    ((name, _, *rest),) = commands.called()
    assert name == "srun"
    meeting = ["--nodes", "2", "--meet", "node3:23456", "--meet-as", "123456"]
    assert rest == ["launch", "--nproc", "8", *meeting, "--", "a b.py", "$x"]
    # Without a first machine the job fails, and does not train on each alone.
    commands.has("scontrol", "#!/bin/bash\n")
    commands.record.unlink()
    done = bash("\n".join(lines), SLURM_JOB_NODELIST="", **environment)
    assert done.returncode != 0
    assert "no host in SLURM_JOB_NODELIST" in done.stderr
    assert not commands.called()


@pytest.mark.parametrize(
    ("said", "most"),
    [
        ("gpu:4\n", 4),
        ("gpu:a100:8(S:0-1)\ngpu:4\n(null)\n", 8),
        ("shard:32,gpu:tesla:2\n", 2),
        ("(null)\n", 0),
        ("", None),
    ],
)
def test_the_largest_machine_is_found(commands: Commands, said: str, most: int | None) -> None:
    commands.has("sinfo", f"#!/bin/bash\nprintf '{said}'\n")
    assert Slurm().most_gpus(Request()) == most


def test_the_time_comes_from_the_plans_estimate() -> None:
    plan = plan_of(num_gpus=2)
    timed = dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, step_s=2.0))
    wanted = Wanted(words=("train.py",), via="slurm", steps=10_000)
    # Half as much again for what no plan knows, and a quarter of an hour for the start.
    assert "--time=08:35:00" in render(order_of(wanted, timed))
    unknown = dataclasses.replace(
        plan, prediction=dataclasses.replace(plan.prediction, step_s=None)
    )
    with pytest.raises(UsageError, match="needs a plan that estimates"):
        order_of(wanted, unknown)
    with pytest.raises(UsageError, match="needs a plan that estimates"):
        order_of(dataclasses.replace(wanted, num_processes=2), None)


# ---- what is asked of Grid Engine ----------------------------------------------------------------

COMPLEXES = """\
#name               shortcut   type        relop requestable consumable default  urgency
#---------------------------------------------------------------------------------------
gpu                 gpu        INT         <=    YES         {counted}  0        0
slots               s          INT         <=    YES         YES        1        1000
"""
QCONF = """#!/bin/bash
case "$1" in
  -sc) cat <<'END'
{complexes}END
  ;;
  -spl) printf 'mpi\\nsmp\\n' ;;
  -sp) [ "$2" = smp ] && echo 'allocation_rule    $pe_slots' || echo 'allocation_rule $fill_up' ;;
esac
"""


@pytest.mark.parametrize(("counted", "asked"), [("JOB", "gpu=4"), ("YES", "gpu=1")])
def test_grid_engines_gpus_are_not_multiplied_by_the_slots(
    commands: Commands, counted: str, asked: str
) -> None:
    commands.has("qconf", QCONF.format(complexes=COMPLEXES.format(counted=counted)))
    text = render(order("sge", num_processes=4, cpus_per_gpu=1, memory="64GiB", time="2h"))
    lines = directives(text, "#$")
    assert f"#$ -l {asked}" in lines
    assert "#$ -pe smp 4" in lines
    assert "#$ -l mem_free=16384M" in lines  # of each slot
    assert "#$ -l h_rt=02:00:00" in lines


def test_grid_engine_jobs_stay_on_one_machine() -> None:
    with pytest.raises(UsageError, match="16 GPUs are 2 machines of 8"):
        render(order_of(Wanted(words=("train.py",), via="sge"), plan_of(num_gpus=16)))


def test_an_unknown_resource_is_refused(commands: Commands) -> None:
    commands.has("qconf", QCONF.format(complexes=COMPLEXES.format(counted="JOB")))
    with pytest.raises(UsageError, match="knows no resource 'cuda'"):
        render(order("sge", cpus_per_gpu=1, gpu_resource="cuda"))


def test_the_library_path_that_qsub_leaves_out_is_in_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cuda lib")
    assert "export LD_LIBRARY_PATH='/opt/cuda lib'\n" in render(order("sge"))
    assert "LD_LIBRARY_PATH" not in render(order("slurm"))


# ---- wrong requests ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["-N gpu=4", "#$ -N gpu=$M", "--job-name=gpu=4", "#$ -cwd -N GPUS=2", "-N gpu=$M"]
)
def test_a_name_is_no_request(text: str) -> None:
    with pytest.raises(UsageError, match="only names the job") as error:
        refuse_named_gpus(text)
    assert "-l gpu=" in str(error.value)


@pytest.mark.parametrize("text", ["-N train", "-l gpu=4", "#$ -N gpu-test", "--job-name=gpt=4"])
def test_other_names_are_fine(text: str) -> None:
    refuse_named_gpus(text)


def test_directives_of_the_users_script_are_taken_until_its_first_command(tmp_path: Path) -> None:
    script = tmp_path / "submit.sh"
    script.write_text(
        "#!/bin/bash\n#$ -l h_rt=1:0:0\n# a remark\n#$ -l gpu=4,mem=2G\n\nmodule load cuda\n"
        "#$ -N no\n"
    )
    request = Request(gpus_each=4)
    assert directives_of(str(script), "#$", request) == ("#$ -l h_rt=1:0:0",)
    with pytest.raises(UsageError, match="asks for 4 GPUs, and the plan for 2"):
        directives_of(str(script), "#$", Request(gpus_each=2))
    script.write_text("#SBATCH --gres=gpu:a100:2\n#SBATCH --gpus 2\n#SBATCH --mem=0\n")
    assert directives_of(str(script), "#SBATCH", Request(gpus_each=2)) == ("#SBATCH --mem=0",)
    with pytest.raises(OomphError, match="cannot be read"):
        directives_of(str(tmp_path / "none.sh"), "#$", request)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"name": "gpu=4"}, "only names the job"),
        ({"name": "a b"}, "cannot stand in a job script"),
        ({"options": ("--gres=gpu:8",)}, "--option asks for 8 GPUs, and the plan for 2"),
        ({"options": ("--mail-user=a b; rm",)}, "cannot stand in a job script"),
        ({"options": ("-N gpu=2",)}, "only names the job"),
        ({"queue": "x\n#SBATCH --exclusive"}, "cannot stand in a job script"),
        ({"time": "1h", "steps": 5}, "both given"),
        ({"num_processes": None}, "neither a plan nor --nproc"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        render(order("slurm", **wanted))


def test_a_job_name_has_plain_letters() -> None:
    for script, name in [("code/train v2.py", "trainv2"), ("7b.py", "job-7b"), ("ü.py", "train")]:
        assert order(words=(script,)).request.name == name


def test_a_plan_and_a_number_contradict_each_other() -> None:
    wanted = Wanted(words=("train.py",), num_nodes=2)
    for one in (wanted, dataclasses.replace(wanted, num_processes=2)):
        with pytest.raises(UsageError, match="both given"):
            here_of(one, plan_of(num_gpus=2))


# ---- jobs on disk --------------------------------------------------------------------------------


def test_a_refused_job_leaves_nothing_behind(commands: Commands, tmp_path: Path) -> None:
    commands.has("sinfo", "#!/bin/bash\necho gpu:4\n")
    commands.has("sbatch", "#!/bin/bash\necho 'invalid partition' >&2\nexit 1\n")
    with pytest.raises(UsageError, match="Slurm refuses this job") as error:
        submit(order())
    assert error.value.because == "invalid partition"
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_job_is_found_by_its_run_its_number_or_as_the_last(commands: Commands) -> None:
    commands.has("sinfo", "#!/bin/bash\necho gpu:4\n")
    commands.has("sbatch", '#!/bin/bash\n[ "$1" = --test-only ] || echo "41;rig"\n')
    commands.has("squeue", "#!/bin/bash\necho 'PENDING Resources'\n")
    job = submit(order())
    assert job.number == "41"
    for name in (job.id, job.id[-4:], "41", "last"):
        assert find_job(name) == job
    with pytest.raises(UsageError, match="there is no job 'x'"):
        find_job("x")
    assert (state_of(job).state, state_of(job).scheduler_says) == ("waiting", "PENDING Resources")
    commands.has("squeue", "#!/bin/bash\nexit 1\n")
    commands.has("scontrol", "#!/bin/bash\nexit 1\n")
    assert state_of(job).state == "killed"
    # What the job wrote goes before what the scheduler has forgotten.
    Path(job.directory, "exit-code").write_text("3\n")
    assert (state_of(job).state, state_of(job).exit_code) == ("ended", 3)


def test_cancelling_a_job_that_has_ended_asks_nobody(commands: Commands) -> None:
    commands.has("sinfo", "#!/bin/bash\necho gpu:4\n")
    commands.has("sbatch", '#!/bin/bash\n[ "$1" = --test-only ] || echo 41\n')
    job = submit(order())
    Path(job.directory, "exit-code").write_text("0\n")
    assert jobs.cancel(job).state == "ended"  # there is no scancel on PATH
    assert not find_job("41").is_cancelled
