"""Scripts with `oomph.watching()` as users start them: by oomph watch, by torchrun, by both."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from nvml.machine import GIB, Gpu, NvmlMachine, Proc

from oomph.records.run import Run
from oomph.sensing.ownership import RUN_DIRECTORY
from oomph.verbs.watch import load_run, runs

OOMPH = [sys.executable, "-m", "oomph"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.fixture(autouse=True)
def kept_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(RUN_DIRECTORY, raising=False)
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path / "runs"))


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def started(command: list[str], machine: NvmlMachine | None = None) -> Any:
    """To its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(machine.env() if machine else {})}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def the_run() -> Run:
    (summary,) = runs()
    return load_run(summary.id)


SLOW_LOADER = """
    import time
    import oomph

    def loader():
        for number in range({num_batches}):
            time.sleep(0.03)
            yield [number]

    with oomph.watching() as run:
        for epoch in range(50):
            for batch in run.steps(loader(), num_samples=4):
                time.sleep(0.02)
            print("epoch", epoch, "is over", flush=True)
"""


@pytest.mark.parametrize(
    ("amount", "num_batches", "told"),
    [("30-steps", 1000, "30 steps"), ("1-epoch", 30, "1 epoch")],
)
def test_oomph_watch_stops_after_the_steps_or_epochs_that_the_script_tells(
    tmp_path: Path, amount: str, num_batches: int, told: str
) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(util=20)])
    train = script(tmp_path, SLOW_LOADER.format(num_batches=num_batches))
    done = started([*OOMPH, "watch", "--for", amount, "--", sys.executable, train], machine)
    assert done.returncode == 0, done.stderr
    run = the_run()
    assert [e.text for e in run.events if e.kind == "stopped"] == [f"after {told}, as requested"]
    num_steps = sum(span.num_steps for span in run.step_spans)
    assert 30 <= num_steps < 50 * num_batches
    assert run.command == (sys.executable, train)


def test_the_report_of_oomph_watch_tells_the_steps_and_the_measured_wait(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(util=20)])
    train = script(tmp_path, SLOW_LOADER.format(num_batches=20).replace("range(50)", "range(2)"))
    done = started([*OOMPH, "watch", "--json", "--", sys.executable, train], machine)
    assert done.returncode == 0, done.stderr
    (steps,) = json.loads(done.stderr)["steps"]
    assert (steps["rank"], steps["num_steps"]) == (0, 40)
    assert 0 < steps["data_wait_ratio"] < 1  # test_in_script.py holds how much it is
    assert done.stdout.splitlines()[1] == "epoch 0 is over"
    assert sum(span.num_samples or 0 for span in the_run().step_spans) == 160


@pytest.mark.slow  # a verdict takes 30 s of a run
def test_a_script_that_waits_for_its_loader_is_called_input_bound_by_measurement(
    tmp_path: Path,
) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(util=20)])
    says_who = "import os\nprint(os.getpid(), flush=True)\n"
    text = says_who + textwrap.dedent(SLOW_LOADER.format(num_batches=40))
    command = [*OOMPH, "watch", "--time", "40s", "--", sys.executable, script(tmp_path, text)]
    environment = {**os.environ, **machine.env()}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watched:
        assert watched.stdout is not None
        machine.gpus[0].processes = [Proc(int(watched.stdout.readline()), 8 * GIB)]
        machine.write()
        _, told = watched.communicate()
    verdict = re.search(r"the GPU waits for data for (\d+)% of each step \[measured\]", told)
    assert verdict, told
    assert 20 <= int(verdict[1]) < 100  # 30 ms of 50, if nobody keeps either waiting for longer
    assert watched.returncode == 0


TWO_RANKS = """
    import os, time
    import torch.distributed as distributed
    import oomph

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    with oomph.watching() as run:
        for batch in run.steps([[0]] * 30, num_samples=2 + rank):
            distributed.barrier()
            time.sleep(0.05)
        distributed.barrier()
    distributed.destroy_process_group()
"""


def by_rank(run: Run) -> dict[int, tuple[int, int]]:
    """Steps and samples."""
    return {
        rank: (
            sum(span.num_steps for span in run.step_spans if span.rank == rank),
            sum(span.num_samples or 0 for span in run.step_spans if span.rank == rank),
        )
        for rank in {span.rank for span in run.step_spans}
    }


def test_ranks_of_torchrun_share_one_run_and_each_watches_its_own_gpu(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(used_bytes=GIB), Gpu(used_bytes=2 * GIB), Gpu()])
    done = started([*TORCHRUN, script(tmp_path, TWO_RANKS)], machine)
    assert done.returncode == 0, done.stderr
    run = the_run()
    assert by_rank(run) == {0: (30, 60), 1: (30, 90)}
    assert [gpu.index for gpu in run.gpus] == [0, 1]
    used = {span.gpu: span.used_bytes for span in run.gpu_spans}
    assert used == {0: GIB, 1: 2 * GIB}
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch 1: ")]
    assert len(lines) == 1  # rank 0's
    # torchrun itself and both ranks, seen by the first of them alone.
    assert max(span.num_processes or 0 for span in run.host_spans) >= 3
    assert run.ending is not None
    assert run.ending.exit_code == 0


def test_ranks_of_torchrun_inside_oomph_watch_ask_no_driver_themselves(tmp_path: Path) -> None:
    machine = NvmlMachine(tmp_path, [Gpu(), Gpu()])
    train = script(tmp_path, TWO_RANKS)
    done = started([*OOMPH, "watch", "--quiet", "--", *TORCHRUN, train], machine)
    assert done.returncode == 0, done.stderr
    run = the_run()
    assert by_rank(run) == {0: (30, 60), 1: (30, 90)}
    assert len({call.pid for call in machine.calls()}) == 1  # oomph watch
    assert not list((tmp_path / "runs").glob("*/rank-*"))
