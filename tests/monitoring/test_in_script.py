"""`with oomph.watching()` in a plain loop: alone, inside `oomph watch`, and with all that fails."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OnMachine
from nvml.machine import GIB, Gpu, NvmlMachine, Proc
from torch.utils.data import DataLoader, Dataset

import oomph
from oomph.monitoring.in_script import Watching
from oomph.monitoring.step_log import StepLog
from oomph.records.run import Run
from oomph.sensing.ownership import RUN_DIRECTORY
from oomph.sensing.sampling import Sampler
from oomph.verbs.watch import load_run, runs


@pytest.fixture(autouse=True)
def kept_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this test's runs are kept; it has no launcher."""
    for name in (RUN_DIRECTORY, "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def the_run() -> Run:
    """The only one that was kept."""
    (summary,) = runs()
    return load_run(summary.id)


def phases(run: Run) -> list[str]:
    return [event.text for event in run.events if event.kind == "phase"]


class Sleepy:
    """A loader that sleeps before each batch, and knows for how long it did."""

    def __init__(self, num_batches: int, sleep_s: float) -> None:
        self._num_batches, self._sleep_s = num_batches, sleep_s
        self.slept_s = 0.0

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self._num_batches):
            began = time.perf_counter()
            time.sleep(self._sleep_s)
            self.slept_s += time.perf_counter() - began
            yield torch.zeros(8, 3)


# ---- what is measured ----------------------------------------------------------------------------


def test_a_loader_that_sleeps_is_reported_as_waiting() -> None:
    loader, worked_s = Sleepy(20, 0.03), 0.0
    with oomph.watching(prints=False) as run:
        started = time.perf_counter()
        for _ in run.steps(loader):
            began = time.perf_counter()
            time.sleep(0.02)
            worked_s += time.perf_counter() - began
        elapsed_s = time.perf_counter() - started
        scalars = run.scalars()
    # Between what is measured here the scheduler may take any time: of the step, or of the wait.
    stepped_s = 20 * scalars["time/step_s"]
    assert loader.slept_s + worked_s <= stepped_s <= elapsed_s
    told_s = scalars["time/data_wait_ratio"] * stepped_s
    assert loader.slept_s <= told_s + 1e-9
    assert told_s <= stepped_s - worked_s + 1e-9
    spans = the_run().step_spans
    assert sum(span.num_steps for span in spans) == 20
    assert sum(span.num_samples or 0 for span in spans) == 160
    assert sum(span.data_wait_s or 0 for span in spans) == pytest.approx(told_s)


def test_batches_that_are_accumulated_are_one_step_and_the_rest_is_one_too() -> None:
    with oomph.watching(prints=False) as run:
        for _ in run.steps([torch.zeros(3, 1)] * 7, accumulate=3):
            time.sleep(0.001)
    spans = the_run().step_spans
    assert sum(span.num_steps for span in spans) == 3
    assert sum(span.num_samples or 0 for span in spans) == 21


def test_samples_are_as_many_as_the_script_says_where_it_says_so() -> None:
    with oomph.watching(prints=False) as run:
        for _ in run.steps([torch.zeros(100, 4)] * 5, num_samples=4):  # the batch is the second
            pass
    assert sum(span.num_samples or 0 for span in the_run().step_spans) == 20


def test_an_evaluation_between_or_within_steps_is_of_no_step() -> None:
    with oomph.watching(prints=False) as run:
        started = time.monotonic()
        for number, _ in enumerate(run.steps([torch.zeros(2)] * 4)):
            time.sleep(0.01)
            if number == 1:
                with run.phase("evaluation"):
                    began = time.monotonic()
                    time.sleep(0.1)
                    evaluated_s = time.monotonic() - began
        elapsed_s = time.monotonic() - started
        with run.phase("evaluation"):
            time.sleep(0.1)
    run_seen = the_run()
    stepped_s = sum(span.num_steps * span.step_s for span in run_seen.step_spans)
    assert 0.04 <= stepped_s <= elapsed_s - evaluated_s
    assert phases(run_seen) == [
        "start-up",
        "training",
        "evaluation",
        "training",
        "epoch 1 ended",
        "evaluation",
        "training",
    ]


def test_a_loop_without_a_loader_tells_its_steps_and_no_wait_that_nobody_measured() -> None:
    with oomph.watching(prints=False) as run:
        for _ in range(5):
            time.sleep(0.005)
            run.step(num_samples=4)
    (span,) = the_run().step_spans
    assert (span.num_steps, span.num_samples) == (4, 16)  # the first call starts the clock
    assert span.data_wait_s is None


def test_a_loop_without_a_loader_can_measure_its_own_waits() -> None:
    waited_s = 0.0
    with oomph.watching(prints=False) as run:
        waiting = run.waiting()  # made once or for each wait
        for number in range(5):
            with waiting if number % 2 else run.waiting():
                began = time.monotonic()
                time.sleep(0.02)
                waited_s += time.monotonic() - began
            run.step(num_samples=1)
    (span,) = the_run().step_spans
    assert span.num_steps == 5
    assert (span.data_wait_s or 0) >= waited_s - 1e-9


def test_the_end_of_a_loader_is_an_epoch_and_saying_so_too_counts_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with oomph.watching() as run:
        for _ in range(2):
            for _ in run.steps([torch.zeros(4)] * 3):
                pass
            run.epoch()
    assert phases(the_run())[2:] == ["epoch 1 ended", "epoch 2 ended"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0].rpartition(" of ")[0] for line in lines] == [
        "epoch 1: 3 steps",
        "epoch 2: 3 steps",
    ]


def test_a_loop_that_is_left_is_no_epoch_and_its_steps_are_told_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with oomph.watching() as run:
        for number, _ in enumerate(run.steps([torch.zeros(4)] * 9)):
            if number == 5:
                break
    assert phases(the_run()) == ["start-up", "training"]
    assert capsys.readouterr().out.startswith("training: 5 steps of ")


def test_steps_are_as_long_as_their_loader_and_its_errors_are_its_own() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("of the loader")

    with oomph.watching(prints=False) as run:
        assert len(run.steps(Sleepy(7, 0))) == 7
        with pytest.raises(TypeError, match="has no len"):
            len(run.steps(broken()))
        with pytest.raises(ZeroDivisionError, match="of the loader"):
            list(run.steps(broken()))


# ---- the GPU -------------------------------------------------------------------------------------


def until(is_so: Any) -> None:
    while not is_so():
        time.sleep(0.1)


def test_alone_it_watches_its_gpu_once_a_second_and_tells_eight_figures(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Proc(os.getpid(), 20 * GIB)
    machine = on_machine([Gpu(util=60, architecture=9, sm_active=37, processes=[mine])])
    with oomph.emulated_gpu("2GiB") as card, oomph.watching() as run:
        held = torch.zeros(1 << 20, device="cuda")
        for _ in run.steps([torch.zeros(8, 3)] * 3):
            spike = torch.zeros(50 << 20, device="cuda")
            del spike
        until(lambda: any(span.sm_active_ratio for span in run._run.spans()))
        for _ in run.steps([torch.zeros(8, 3)] * 2):
            pass
        scalars = run.scalars()
        peaks = card.peak_allocated_bytes, card.peak_reserved_bytes
        del held
    assert len(scalars) == 8
    assert scalars["gpu/util"] == pytest.approx(0.6)
    assert scalars["gpu/sm_active"] == 0.37
    assert scalars["gpu/mem_used_ratio"] == 0.25
    assert scalars["gpu/mem_peak_reserved_gib"] == peaks[1] / GIB
    (torchs,) = [peak for peak in the_run().peaks if peak.source == "torch"]
    assert (torchs.allocated_bytes, torchs.used_bytes) == peaks
    assert torchs.before_steps_bytes == 4 << 20
    assert torchs.gpu == 0
    second = capsys.readouterr().out.splitlines()[1]
    assert "GPU 0 = cuda:0 NVIDIA A100-SXM4-80GB: kernel-active 60%, 20.0 GiB of 80.0 GiB" in second
    _at_most_once_a_second(machine, the_run())


def test_torchs_peak_is_in_the_report_where_no_driver_knows_its_gpu() -> None:
    with oomph.emulated_gpu("2GiB") as card, oomph.watching(prints=False) as run:
        for _ in run.steps([torch.zeros(8, 3)] * 3):
            held = torch.zeros(50 << 20, device="cuda")
        peaks = card.peak_allocated_bytes, card.peak_reserved_bytes
        del held
    (figures,) = oomph.report().gpus
    assert (figures.memory.allocated_bytes, figures.memory.peak_bytes) == peaks
    assert figures.memory.peak_source == "torch"
    assert figures.memory.total_bytes == 2 << 30
    assert (figures.is_used, figures.cuda_index, figures.rank) == (True, 0, 0)
    assert all(found.kind != "no-gpu" for found in oomph.report().findings)
    assert "exact" in oomph.report().findings[0].evidence[0]


def _at_most_once_a_second(machine: NvmlMachine, run: Run) -> None:
    looks = machine.calls("nvmlDeviceGetMemoryInfo_v2")
    assert run.ending is not None
    assert len(looks) <= run.ending.at_s + 4  # one when it is found, one at each end


def test_one_of_several_ranks_watches_its_own_gpu_and_no_other(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine([Gpu(), Gpu(), Gpu()])
    ranks = {"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with oomph.watching() as run:
        until(lambda: run._run.spans())
        assert [gpu.index for gpu in run._run.gpus()] == [1]


def test_inside_oomph_watch_it_asks_no_driver_and_reads_what_that_has_seen(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from oomph.monitoring.command import run_start
    from oomph.monitoring.diary import Diary

    machine = on_machine([Gpu(util=30, processes=[Proc(os.getpid(), 8 * GIB)])])
    directory = tmp_path / "of oomph watch"
    directory.mkdir()
    monkeypatch.setenv(RUN_DIRECTORY, str(directory))
    looks = Sampler("visible")
    looks.start()
    diary = Diary(directory, run_start(["python"]))
    until(lambda: looks._spans)
    diary.add_spans(looks.take().spans, [])
    diary.add_gpus(looks.gpus())
    diary.flush()
    looks.stop()
    machine.clear_calls()
    with oomph.watching(prints=False) as run:
        for _ in run.steps([torch.zeros(8, 3)] * 3):
            pass
        scalars = run.scalars()
    assert machine.calls() == []
    assert (scalars["gpu/util"], scalars["gpu/mem_used_ratio"]) == (0.3, 0.1)
    assert runs() == ()
    told = load_run(str(directory))
    assert sum(span.num_steps for span in told.step_spans) == 3
    assert phases(told)[-1] == "after training"  # so that an export is not taken for a hang


# ---- memory that runs out ------------------------------------------------------------------------


def test_an_out_of_memory_error_is_noted_and_leaves_the_block_untouched() -> None:
    caught: Any = None
    with oomph.emulated_gpu("64MiB"):
        try:
            with oomph.watching(prints=False) as run:
                for _ in run.steps([torch.zeros(2)]):
                    torch.zeros(100 << 20, device="cuda")
        except torch.OutOfMemoryError as error:
            caught = error
    assert "Tried to allocate 400.00 MiB" in str(caught)
    assert caught.__cause__ is None
    assert caught.__context__ is None
    run_seen = the_run()
    (event,) = [event for event in run_seen.events if event.kind == "out-of-memory"]
    assert "Tried to allocate 400.00 MiB" in event.text
    assert run_seen.ending is not None
    assert (run_seen.ending.exit_code, run_seen.ending.out_of_memory) == (1, "gpu")


@pytest.mark.parametrize(
    ("error", "code", "signal"),
    [
        (ValueError("CUDA out of memory, says a ValueError"), 1, None),
        (KeyboardInterrupt(), 130, "SIGINT"),
        (SystemExit(3), 3, None),
        (SystemExit("no more"), 1, None),
        (SystemExit(), 0, None),
    ],
)
def test_another_error_is_no_shortage_and_ends_the_run_as_python_would(
    error: BaseException, code: int, signal: str | None
) -> None:
    with pytest.raises(type(error)), oomph.watching():
        raise error
    run = the_run()
    assert run.ending is not None
    assert (run.ending.exit_code, run.ending.signal) == (code, signal)
    assert run.ending.out_of_memory is None


# ---- what must not disturb -----------------------------------------------------------------------


def test_a_fault_in_the_watching_is_told_once_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the log is broken")

    monkeypatch.setattr(StepLog, "steps", broken)
    seen = 0
    with oomph.watching() as run:
        for _ in range(2):
            for _ in run.steps([torch.zeros(2)] * 5):
                seen += 1
            run.epoch()
            with run.phase("evaluation"):
                seen += 1
        assert run.scalars() == {}
    assert seen == 12
    told = [line for line in capsys.readouterr().err.splitlines() if "no longer" in line]
    assert told == ["oomph: the training is no longer watched (RuntimeError: the log is broken)"]
    ending = the_run().ending
    assert ending is not None
    assert ending.exit_code == 0


def test_a_place_that_cannot_be_written_costs_a_line_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path / "file" / "runs"))
    with oomph.watching(prints=False) as run:
        assert len(list(run.steps([torch.zeros(2)] * 5))) == 5
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "driver" not in line] == [
        "oomph: not everything of this run can be recorded: Not a directory"
    ]


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> torch.Tensor:
        host = Watching.current()
        assert host is None  # a worker is no part of the training
        return torch.full((3,), float(number))


def test_the_forked_workers_of_a_loader_tell_nothing(kept_in: Path) -> None:
    with oomph.watching(prints=False) as run:
        loader = DataLoader(Numbers(), 4, num_workers=2)
        for _ in range(2):
            assert len(list(run.steps(loader))) == 8
    files = [path.name for path in kept_in.rglob("steps-*")]
    assert files == [f"steps-0-{os.getpid()}.jsonl"]
    assert sum(span.num_steps for span in the_run().step_spans) == 16


def test_a_process_that_is_forked_off_within_the_block_leaves_the_run_alone() -> None:
    with oomph.watching(prints=False) as run:
        pid = os.fork()
        if pid == 0:  # as the user's own fork would go on, to the end of the block
            for _ in run.steps([1, 2, 3]):
                pass
            run.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        list(run.steps([torch.zeros(2)] * 4))
    assert sum(span.num_steps for span in the_run().step_spans) == 4


def test_switched_off_it_keeps_nothing_and_the_loop_is_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OOMPH_WATCHING", "off")
    with oomph.watching() as run:
        assert list(run.steps([1, 2, 3])) == [1, 2, 3]
        with run.phase("evaluation"), run.waiting():
            run.step()
        assert run.scalars() == {}
    assert runs() == ()
    assert capsys.readouterr() == ("", "")


def test_a_rehearsal_of_a_script_that_is_watched_predicts_what_it_would_without(
    tmp_path: Path,
) -> None:
    watched = """
        import torch, oomph
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        with oomph.watching() as run:
            for batch in run.steps([torch.randn(32, 64)] * 5):
                model(batch.cuda()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        """
    bare = watched.replace("with oomph.watching() as run", "if True").replace("run.steps(", "(")
    predictions = []
    for name, text in (("watched", watched), ("bare", bare)):
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        predictions.append(oomph.predict(str(path), gpu="v100-16gb"))
    assert predictions[0].reserved_bytes == predictions[1].reserved_bytes
    assert predictions[0].by_category == predictions[1].by_category
    assert predictions[0].notes == predictions[1].notes
    assert runs() == ()


def test_a_block_within_a_block_is_of_the_same_run() -> None:
    with oomph.watching(prints=False) as outer:
        with oomph.watching(prints=False) as inner:
            list(inner.steps([torch.zeros(2)] * 3))
        list(outer.steps([torch.zeros(2)] * 2))
    run = the_run()
    assert sum(span.num_steps for span in run.step_spans) == 5


def test_without_torch_and_without_a_driver_it_works_and_says_what_it_cannot_tell(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import oomph
        with oomph.watching() as run:
            for batch in run.steps([[1, 2], [3, 4]]):
                pass
        assert "torch" not in sys.modules
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("epoch 1: 2 steps of ")
    assert "GPU unknown (" in done.stdout
    assert "no peak: CUDA does not run in this process" in done.stdout
    assert "watching without GPU figures" in done.stderr
    assert f"oomph: recorded as {the_run().id}; to see it: oomph report" in done.stderr
    assert the_run().command == (sys.executable, str(script))


def test_a_script_that_never_leaves_the_block_is_ended_as_python_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import oomph
        run = oomph.watching(prints=False).start()
        for batch in run.steps([[1, 2], [3, 4]]):
            pass
        raise MemoryError("no more")
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    run = the_run()
    assert run.ending is not None
    assert run.ending.exit_code == 1
    assert "out of host memory: no more" in [event.text for event in run.events]
