"""What a probe of a running command counts."""

from __future__ import annotations

from pathlib import Path

from oomph.records.probe import Probe
from oomph.running.diary import Diary
from oomph.verbs.recording import Recorder
from oomph.verbs.watching import run_start


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_five_minutes_are_five_minutes_of_running_however_long_it_was_halted(
    tmp_path: Path,
) -> None:
    clock = Clock()
    diary = Diary(tmp_path, run_start(["python"]))
    recorder = Recorder(None, None, diary, clock, Probe(time_s=300.0))

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
