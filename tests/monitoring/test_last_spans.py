"""The end of what `oomph watch` is writing, and runs that are kept in parts."""

from __future__ import annotations

from pathlib import Path

from monitoring.diaries import add_step, gpu, gpu_span, new_diary
from oomph.monitoring.diary_reader import read_gpus, read_last_spans, read_run
from oomph.monitoring.step_log import StepLog


def test_where_nothing_is_written_yet_nothing_was_seen(tmp_path: Path) -> None:
    assert read_last_spans(tmp_path / "nowhere") == ()
    assert read_last_spans(tmp_path) == ()
    assert read_gpus(tmp_path) == ()
    (tmp_path / "gpu-1s-0.jsonl").write_text("")
    assert read_last_spans(tmp_path) == ()


def test_the_last_spans_are_those_at_the_end_of_the_newest_file(tmp_path: Path) -> None:
    diary = new_diary(tmp_path)
    diary.add_spans([gpu_span(second) for second in range(3590, 3605)], [])
    diary.flush()
    assert [span.began_s for span in read_last_spans(tmp_path)] == [3600, 3601, 3602, 3603, 3604]
    assert read_gpus(tmp_path) == (gpu(),)


def test_of_a_long_file_the_end_is_read_and_a_torn_line_is_none(tmp_path: Path) -> None:
    diary = new_diary(tmp_path)
    diary.add_spans([gpu_span(second) for second in range(2000)], [])
    diary.flush()
    path = tmp_path / "gpu-1s-0.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    seen = [span.began_s for span in read_last_spans(tmp_path)]
    assert 60 < len(seen) < 1000
    assert seen == [float(second) for second in range(1999 - len(seen), 1999)]


def test_a_run_in_parts_is_read_as_one_and_a_spoilt_part_costs_only_itself(tmp_path: Path) -> None:
    whole = tmp_path / "run"
    for rank in range(4):
        directory = whole if rank == 0 else whole / f"rank-{rank}"
        directory.mkdir()
        diary = new_diary(directory)
        diary.add_gpus([gpu(rank)])
        diary.add_spans([gpu_span(1)], [])
        diary.close()
        log = StepLog(directory, rank)
        add_step(log, 1001.0, 1002.0, num_samples=rank)
        log.close()
    (whole / "rank-3" / "meta.json").write_text("nonsense")
    (whole / "rank-4").symlink_to(whole)
    run = read_run(whole)
    assert [span.rank for span in run.step_spans] == [0, 1, 2]
    (warning,) = run.events
    assert warning.text.startswith("rank-3 left out: ")


def test_a_log_gathers_a_second_of_steps_into_one_line(tmp_path: Path) -> None:
    new_diary(tmp_path).close()
    log = StepLog(tmp_path)
    for number in range(25):
        began = 1000.0 + number / 10
        add_step(log, began, began + 0.1, num_samples=2, data_wait_s=0.05 if number else None)
    log.close()
    spans = read_run(tmp_path).step_spans
    assert [span.num_steps for span in spans] == [10, 10, 5]
    assert [span.num_samples for span in spans] == [20, 20, 10]
    assert spans[0].data_wait_s is None  # of one of them it is unknown
    assert abs((spans[1].data_wait_s or 0) - 0.5) < 1e-9
    assert (spans[0].began_s, round(spans[0].ended_s, 6)) == (0.0, 1.0)
