"""What a probe of a running command counts, and what is told while it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from explaining.runs import gpu
from explaining.runs import span as gpu_span

from monitoring.diaries import add_step
from oomph.explaining.diagnose import diagnose
from oomph.monitoring.command import run_start
from oomph.monitoring.diary import Diary
from oomph.monitoring.diary_reader import read_run
from oomph.monitoring.recording import Alerts, Recorder
from oomph.monitoring.run_lines import object_line
from oomph.monitoring.step_log import StepLog
from oomph.records.run import Event, Probe
from oomph.units import GIB


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_five_minutes_are_five_minutes_of_running_however_long_it_was_halted(
    tmp_path: Path,
) -> None:
    clock = Clock()
    diary = Diary(tmp_path, run_start(["python"]))
    recorder = Recorder(None, None, diary, Probe(time_s=300.0), clock=clock)

    def is_enough_at(now_s: float) -> bool:
        clock.now_s = now_s
        recorder._record()
        return recorder.stopping.is_wanted

    assert not is_enough_at(200)
    recorder.note("halted", "SIGTSTP")
    assert not is_enough_at(500)  # and still is
    recorder.note("resumed", "SIGCONT")
    assert not is_enough_at(599)
    assert is_enough_at(600)


# ---- alerts --------------------------------------------------------------------------------------


class Watched:
    """A recorder whose time and steps are made by hand."""

    def __init__(self, directory: Path, *, alerts: bool = True) -> None:
        self.clock = Clock()
        start = run_start(["python"])
        self.directory, self._clock_s = directory, start.clock_s
        self._recorder = Recorder(
            os.getpid(),
            None,
            Diary(directory, start),
            Probe(),
            clock=self.clock,
            alerts=alerts,
        )
        self._log = StepLog(directory)

    def train(self, until_s: float, step_s: float = 0.5) -> None:
        """Steps, and the recorder's look each second."""
        while self.clock.now_s < until_s:
            began_s = self._clock_s + self.clock.now_s
            add_step(self._log, began_s, began_s + step_s, num_samples=8, data_wait_s=0.0)
            self.clock.now_s += step_s
            self._recorder._record()

    def wait(self, until_s: float) -> None:
        while self.clock.now_s < until_s:
            self.clock.now_s += 5.0
            self._recorder._record()

    def say(self, name: str) -> None:
        at_s = self._clock_s + self.clock.now_s
        self._log._write(object_line(Event(at_s=at_s, kind="phase", text=name, rank=0)))

    def alerts(self) -> list[str]:
        self._recorder._diary.flush()
        return [event.text for event in read_run(self.directory).events if event.kind == "alert"]


def test_steps_that_stop_are_told_once_while_it_runs_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Watched(tmp_path)
    run.train(100)
    run.wait(200)
    assert run.alerts() == []  # not yet: the log of a long run is written once a minute
    run.wait(900)
    (alert,) = run.alerts()
    assert alert.startswith("it may hang: no step finished in the last 2 min")
    assert "until then a step took 0.5 s" in alert
    assert capsys.readouterr().err == f"oomph: {alert}\n"
    (mark,) = [mark for mark in diagnose(read_run(tmp_path)).marks if mark.kind == "alert"]
    assert mark.text == alert


def test_long_steps_and_a_phase_that_is_named_are_no_hang(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    run.train(1000, step_s=50)
    run.wait(1500)
    assert run.alerts() == []
    run.say("evaluation")
    run.wait(9000)
    assert run.alerts() == []
    run.say("training")
    run.wait(9500)
    assert run.alerts() == []
    run.wait(11000)
    assert len(run.alerts()) == 1


def test_who_wants_no_lines_gets_none_and_the_alert_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Watched(tmp_path, alerts=False)
    run.train(100)
    run.wait(900)
    assert len(run.alerts()) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("grows", "kinds"), [(True, ["GPU memory keeps growing"]), (False, [])])
def test_memory_that_grows_is_told_before_it_runs_out(
    tmp_path: Path, grows: bool, kinds: list[str]
) -> None:
    alerts, told = Alerts(run_start(["python"]), tmp_path), list[str]()
    for second in range(7200):
        used = (30 + second / 400 if grows else 30) * GIB
        span = gpu_span(second, 0.97, used_bytes=int(used), most_used_bytes=int(used))
        alerts.add([span], [], [])
        told += alerts.new(float(second), [gpu()])
    assert [text.partition(":")[0] for text in told] == kinds
    assert all(len(one.all()) <= 128 + 301 for one in alerts._gpus.values())


def test_a_fault_of_the_alerts_costs_the_alerts_and_not_the_diary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Alerts, "new", broken)
    run = Watched(tmp_path)
    run.train(10)
    texts = [event.text for event in read_run(tmp_path).events if event.kind == "warning"]
    assert [text for text in texts if "alerts" in text] == ["no alerts (ZeroDivisionError: )"]
