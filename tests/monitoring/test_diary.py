"""The run directory: what is written is read again, torn, spoilt, full and for weeks."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitoring.diaries import (
    CLOCK_S,
    add_step,
    gpu,
    gpu_span,
    host_span,
    new_diary,
    start_of,
)
from oomph.errors import Unreadable
from oomph.monitoring import run_lines
from oomph.monitoring.diary import find_directory, make_directory, new_id, runs_directory, this_host
from oomph.monitoring.diary_reader import read_ending, read_run, read_start, summarise
from oomph.monitoring.run_lines import GPU_SPANS, LONGEST_LINE_BYTES, object_line, read_object
from oomph.monitoring.step_log import StepLog
from oomph.records.run import Ending, Event, Peak, TorchGpu
from oomph.verbs.watch import runs

DAY_S = 86_400


def warnings_of(directory: Path) -> list[str]:
    return [event.text for event in read_run(directory).events if event.kind == "warning"]


def test_what_is_written_is_read_again_before_the_diary_is_closed(tmp_path: Path) -> None:
    diary = new_diary(tmp_path)
    event = Event(at_s=1.5, kind="neighbour", text="process 7 of alice", gpu=0)
    peak = Peak(source="accounting", gpu=0, pid=7, used_bytes=30)
    diary.add_spans([gpu_span(0), gpu_span(1)], [host_span(0), host_span(1)])
    diary.add(event)
    diary.add(peak)
    assert diary.flush()
    run = read_run(tmp_path)
    assert run.gpu_spans == (gpu_span(0), gpu_span(1))
    assert run.host_spans == (host_span(0), host_span(1))
    assert run.events == (event,)
    polled = Peak(source="polled", gpu=0, used_bytes=20)
    assert run.peaks == (peak, polled)
    assert (run.ending, run.last_seen_s, run.gpus) == (None, 2.0, (gpu(),))
    ending = Ending(at_s=3.0, exit_code=137, signal="SIGKILL", out_of_memory="host")
    diary.add(ending)
    diary.close()
    assert read_run(tmp_path).ending == read_ending(tmp_path) == ending


def test_a_gpu_that_is_used_later_is_the_same_gpu(tmp_path: Path) -> None:
    diary = new_diary(tmp_path)
    diary.add_gpus([gpu(is_used=False), gpu(1)])
    diary.add_gpus([gpu(is_used=True), gpu(1)])
    diary.close()
    assert [(g.index, g.is_used) for g in read_run(tmp_path).gpus] == [(0, True), (1, True)]


@pytest.mark.slow
def test_a_run_of_days_stays_small_and_has_no_gap(tmp_path: Path) -> None:
    diary = new_diary(tmp_path)
    num_seconds = 3 * DAY_S  # longer than all but the coarsest files are kept
    # The load alternates by the second: a mean survives merging, a sample would not.
    rows = [gpu_span(0, busy_ratio=0.0), gpu_span(0, busy_ratio=1.0, most_used_bytes=70)]
    for second in range(0, num_seconds, 2):
        for offset, row in enumerate(rows):
            at = float(second + offset)
            diary.add_spans([replace(row, began_s=at, ended_s=at + 1)], [])
        if second % 600 == 0:
            diary.flush()
    diary.close()
    size_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size_bytes < 8 << 20
    spans = read_run(tmp_path).gpu_spans
    assert (spans[0].began_s, spans[-1].ended_s) == (0.0, num_seconds)
    assert all(a.ended_s == b.began_s for a, b in pairwise(spans))
    assert {span.most_used_bytes for span in spans if span.ended_s - span.began_s > 1} == {70}
    busy_s = sum((span.busy_ratio or 0) * (span.ended_s - span.began_s) for span in spans)
    assert busy_s == pytest.approx(num_seconds / 2)
    newest = [span for span in spans if span.began_s > num_seconds - 6 * 3600]
    assert all(span.ended_s - span.began_s == 1 for span in newest)


def test_a_process_that_is_killed_leaves_what_it_flushed(tmp_path: Path) -> None:
    code = f"""
    import sys, time
    from pathlib import Path
    from monitoring.diaries import gpu_span, host_span, new_diary
    diary = new_diary(Path({str(tmp_path)!r}))
    for second in range(5):
        diary.add_spans([gpu_span(second)], [host_span(second)])
        diary.flush()
    diary.add_spans([gpu_span(5)], [])
    print("ready", flush=True)
    time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run = read_run(tmp_path)
    assert (len(run.gpu_spans), run.last_seen_s, run.ending) == (5, 5.0, None)
    assert run.events == ()


# ---- a disk that does not take it ----------------------------------------------------------------


def test_what_a_full_disk_did_not_take_is_written_when_there_is_room_again(tmp_path: Path) -> None:
    diary = new_diary(tmp_path)
    diary.flush()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))
    try:
        for second in range(20):
            diary.add_spans([gpu_span(second)], [host_span(second)])
            is_whole = diary.flush()
        assert not is_whole
        assert diary.problem == "File too large"
        assert len(read_run(tmp_path).gpu_spans) < 20
        assert read_run(tmp_path, diary.start, diary.unwritten()).gpu_spans[-1] == gpu_span(19)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert diary.flush()
    assert read_run(tmp_path).gpu_spans == tuple(gpu_span(second) for second in range(20))


def test_a_diary_without_a_directory_is_kept_in_memory(tmp_path: Path) -> None:
    diary = new_diary(tmp_path / "never made")
    diary.add_spans([gpu_span(0)], [host_span(0)])
    assert not diary.flush()
    assert diary.problem == "No such file or directory"
    run = read_run(diary.directory, diary.start, diary.unwritten())
    assert (run.gpu_spans, run.host_spans) == ((gpu_span(0),), (host_span(0),))


# ---- what somebody else may have written ---------------------------------------------------------


def spoilt(tmp_path: Path, name: str, content: bytes) -> Path:
    """A good run of three seconds, and something at the end of one of its files."""
    diary = new_diary(tmp_path)
    diary.add_spans([gpu_span(second) for second in range(3)], [])
    diary.close()
    with (tmp_path / name).open("ab") as file:
        file.write(content)
    return tmp_path


def test_a_torn_last_line_is_no_line_and_no_complaint(tmp_path: Path) -> None:
    directory = spoilt(tmp_path, "gpu-1s-0.jsonl", b"[0,3.0,4.0,1")
    assert len(read_run(directory).gpu_spans) == 3
    assert warnings_of(directory) == []


ROW = GPU_SPANS.row(gpu_span(3)).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"not json\n",
        b"\xff\xfe\n",
        b"{}\n",
        b"[1]\n",
        ROW.replace(b"0.5", b"NaN"),
        ROW.replace(b"0.5", b"Infinity"),
        ROW.replace(b"0.5", b"1e999"),
        ROW.replace(b"0.5", b'"0.5"'),
        ROW.replace(b"0.5", b"true"),
        ROW.replace(b"250.5", b"9" * 5000),
        ROW.replace(b"60", b"60.5"),
        ROW.replace(b"3.0,4.0", b"4.0,3.0"),
        ROW.replace(b"3.0,4.0", b"-4.0,3.0"),
        ROW.replace(b'["heat","power"]', b'"heat"'),
        b"[" * 60_000 + b"\n",
        b"9" * (LONGEST_LINE_BYTES * 3) + b"\n",
        ROW.replace(b"[0,", b"[9,"),  # a GPU that nobody knows
    ],
    ids=range(18),
)
def test_a_line_that_makes_no_sense_is_left_out_and_named_once(tmp_path: Path, line: bytes) -> None:
    directory = spoilt(tmp_path, "gpu-1s-0.jsonl", line + GPU_SPANS.row(gpu_span(4)).encode())
    run = read_run(directory)
    assert [span.began_s for span in run.gpu_spans] == [0, 1, 2, 4]
    (warning,) = warnings_of(directory)
    assert warning.startswith("1 line of ")


@pytest.mark.parametrize(
    "line",
    [
        b'{"gpu": {"index": 0}}\n',
        b'{"event": {"at_s": NaN, "kind": "lost", "text": "", "gpu": null, "rank": null}}\n',
        b'{"event": {"at_s": 1e999, "kind": "lost", "text": "", "gpu": null, "rank": null}}\n',
        b'{"event": {"at_s": 1.0, "kind": "party", "text": "", "gpu": null, "rank": null}}\n',
        b'{"__class__": "os.system"}\n',
        b"[]\n",
    ],
    ids=range(6),
)
def test_an_event_that_makes_no_sense_is_left_out(tmp_path: Path, line: bytes) -> None:
    directory = spoilt(tmp_path, "events.jsonl", line)
    assert len(read_run(directory).gpu_spans) == 3
    assert len(warnings_of(directory)) == 1


def test_a_run_has_no_more_than_so_many_bytes(tmp_path: Path) -> None:
    directory = spoilt(tmp_path, "gpu-1s-0.jsonl", ROW * 1000)
    complaints = run_lines.Complaints(left_bytes=2000)
    lines = list(run_lines.whole_lines(directory / "gpu-1s-0.jsonl", complaints))
    assert sum(map(len, lines)) <= 2000
    assert len(complaints.texts()) == 1


def test_a_pipe_or_a_link_in_place_of_a_file_is_not_opened(tmp_path: Path) -> None:
    directory = spoilt(tmp_path, "events.jsonl", b"")
    os.mkfifo(directory / "steps-0-1.jsonl")
    (directory / "steps-1-1.jsonl").symlink_to("/dev/zero")
    run = read_run(directory)
    assert len(run.gpu_spans) == 3
    assert len(warnings_of(directory)) == 2


def test_a_directory_that_is_no_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="there is no run in"):
        read_run(tmp_path)
    (tmp_path / "meta.json").write_text('{"schema": 1, "id": 7}')
    with pytest.raises(Unreadable, match="is not a run that this version of oomph can read"):
        read_run(tmp_path)


@given(st.binary(max_size=300), st.sampled_from(["gpu-1s-0", "host-10s-4", "events", "steps-0-1"]))
def test_no_content_of_a_file_is_more_than_a_warning(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    directory = tmp_path_factory.mktemp("run")
    new_diary(directory).close()
    (directory / f"{name}.jsonl").write_bytes(content)
    read_run(directory)


def test_a_long_text_is_cut_and_never_makes_a_line_that_is_too_long() -> None:
    event = Event(at_s=1.0, kind="warning", text="\U0001f600" * 100_000)
    line = object_line(event)
    assert len(line) < LONGEST_LINE_BYTES
    assert read_object(line.encode()) == replace(event, text=event.text[:4000])


# ---- what the script tells -----------------------------------------------------------------------


def test_steps_of_the_script_are_joined_in_the_runs_own_time(tmp_path: Path) -> None:
    now = time.monotonic()
    diary = new_diary(tmp_path, clock_s=now)
    diary.close()
    log = StepLog(tmp_path, rank=3)
    for number in range(10):
        add_step(log, now + number, now + number + 0.5, num_samples=4, data_wait_s=0.1)
    log.event("out-of-memory", "CUDA out of memory")
    log.peak(Peak(source="torch", gpu=None, used_bytes=11, allocated_bytes=9), gpu_uuid="0")
    log.peak(Peak(source="torch", gpu=None, used_bytes=22, allocated_bytes=9), gpu_uuid="0")
    log.close()
    run = read_run(tmp_path)
    assert sum(span.num_steps for span in run.step_spans) == 10
    assert sum(span.num_samples or 0 for span in run.step_spans) == 40
    assert sum(span.data_wait_s or 0 for span in run.step_spans) == pytest.approx(1.0)
    assert run.step_spans[0].began_s == pytest.approx(0.0, abs=1e-3)
    assert run.step_spans[-1].ended_s == pytest.approx(9.5, abs=1e-3)
    assert {span.rank for span in run.step_spans} == {3}
    assert [(p.source, p.gpu, p.rank, p.used_bytes) for p in run.peaks] == [("torch", 0, 3, 22)]
    assert [(e.kind, e.rank) for e in run.events] == [("out-of-memory", 3)]


def test_a_gpu_that_becomes_known_only_later_has_one_peak_and_not_two(tmp_path: Path) -> None:
    new_diary(tmp_path).close()
    gpu = TorchGpu(cuda_index=0, name="an A100", total_bytes=80 << 30)
    log = StepLog(tmp_path)
    log.peak(Peak(source="torch", gpu=None, used_bytes=11), gpu=gpu)
    log.peak(Peak(source="torch", gpu=None, used_bytes=22), gpu=gpu, gpu_uuid="0")
    log.close()
    run = read_run(tmp_path)
    assert [(peak.gpu, peak.used_bytes) for peak in run.peaks] == [(0, 22)]
    assert all(gpu.uuid for gpu in run.gpus)


def test_steps_of_another_machine_are_placed_by_the_wall_clock(tmp_path: Path) -> None:
    started_at = time.time() - 50
    new_diary(tmp_path, host="elsewhere", clock_s=CLOCK_S, started_at=started_at).close()
    log = StepLog(tmp_path)
    now = time.monotonic()
    passed_s = time.time() - started_at
    add_step(log, now, now + 1)
    log.close()
    (span,) = read_run(tmp_path).step_spans
    assert 50 - 0.01 <= span.began_s <= passed_s + 0.01


def test_steps_that_are_told_together_are_kept_by_the_second(tmp_path: Path) -> None:
    now = time.monotonic()
    new_diary(tmp_path, clock_s=now).close()
    log = StepLog(tmp_path)
    log.steps([(now + 0.05 * number, 0.05, 0.01, 8) for number in range(1, 101)])
    log.close()
    spans = read_run(tmp_path).step_spans
    assert len(spans) in (5, 6)  # a span is full a moment before its second is over
    assert sum(span.num_steps for span in spans) == 100
    for before, after in pairwise(spans):
        assert after.began_s == pytest.approx(before.ended_s)


def test_a_gpu_of_an_older_run_was_looked_at_five_times_a_second() -> None:
    told = json.loads(object_line(gpu()))
    del told["gpu"]["looks_apart_s"]
    assert read_object(json.dumps(told).encode()) == replace(gpu(), looks_apart_s=0.2)


def test_steps_of_weeks_take_few_lines(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    now = time.monotonic()
    for second in range(7 * DAY_S // 20):
        add_step(log, now + 20 * second, now + 20 * second + 19.0)
    log.close()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 4 << 20


def test_a_fork_of_the_script_writes_nothing(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    add_step(log, 0.0, 5.0)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    pid = os.fork()
    if pid == 0:
        add_step(log, 5.0, 15.0)
        log.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert path.read_bytes() == before


def test_a_log_whose_directory_is_gone_costs_the_script_nothing(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "gone")
    add_step(log, 0.0, 5.0)
    log.epoch_ended(1)
    log.close()


# ---- where runs are ------------------------------------------------------------------------------


def test_runs_are_kept_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert runs_directory() == tmp_path / "oomph" / "runs"
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path / "mine"))
    directory = make_directory(new_id(time.time()))
    assert directory.parent == tmp_path / "mine"
    assert directory.stat().st_mode & 0o777 == 0o700
    new_diary(directory).close()
    assert find_directory("last") == find_directory(directory.name[:8]) == directory
    assert find_directory(str(directory)) == directory


def test_a_summary_says_whether_a_run_goes_on(tmp_path: Path) -> None:
    diary = new_diary(tmp_path)
    diary.flush()
    summary = summarise(tmp_path)
    assert summary is not None
    assert summary.state == "running"
    later = summarise(tmp_path, now=time.time() + 3600)
    assert later is not None
    assert later.state == "unknown"  # nobody writes, and its process is no oomph
    diary.add(Ending(at_s=9.0, exit_code=3))
    diary.close()
    ended = summarise(tmp_path)
    assert ended is not None
    assert (ended.state, ended.exit_code, ended.duration_s) == ("ended", 3, 9.0)
    assert summarise(tmp_path / "nothing") is None


def test_a_run_of_before_the_newest_columns_is_read_without_a_complaint(tmp_path: Path) -> None:
    diary = new_diary(tmp_path)
    diary.add_spans([gpu_span(0), gpu_span(1)], [host_span(0), host_span(1)])
    diary.close()
    newer = {
        "gpu-1s-0.jsonl": {"sent_bytes"},
        "host-1s-0.jsonl": {"others_cpu_cores", "stolen_cpu_cores", "throttled_ratio"}
        | {"swapped_in_bytes"},
    }
    for name, columns in newer.items():
        header, *rows = map(json.loads, (tmp_path / name).read_text().splitlines())
        kept = [n for n, column in enumerate(header["columns"]) if column not in columns]
        assert len(kept) == len(header["columns"]) - len(columns)
        header["columns"] = [header["columns"][n] for n in kept]
        lines = [header, *([row[n] for n in kept] for row in rows)]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = (tmp_path / "events.jsonl").read_text()
    assert '"link_bytes_per_s":null' in events
    (tmp_path / "events.jsonl").write_text(events.replace(',"link_bytes_per_s":null', ""))
    run = read_run(tmp_path)
    assert warnings_of(tmp_path) == []
    assert run.gpu_spans == (replace(gpu_span(0), sent_bytes=None), gpu_span(1))
    assert run.host_spans == (host_span(0), host_span(1))
    assert run.gpus == (gpu(),)


def test_a_run_is_summed_up_from_its_start_and_its_last_line(tmp_path: Path) -> None:
    later = time.time() + 3600
    diary = new_diary(tmp_path)
    for number in range(2000):  # more than the end that is read
        diary.add(Event(at_s=number, kind="warning", text="x" * 100))
    diary.flush()
    killed = summarise(tmp_path, now=later)
    assert killed is not None
    assert killed.state == "unknown"
    assert summarise(tmp_path, now=later) == killed  # to be summed up is no sign of life
    leftover = tmp_path / "summary.json"  # of an older version's `oomph runs`
    leftover.touch()
    os.utime(leftover, (later, later))
    assert summarise(tmp_path, now=later) == killed
    diary.add(Ending(at_s=9.0, exit_code=3))
    diary.close()
    ended = summarise(tmp_path, now=later)
    assert ended is not None
    assert (ended.state, ended.exit_code, ended.duration_s) == ("ended", 3, 9.0)


@pytest.mark.parametrize("spoilt", ["", "nonsense\n", "[]\n", '{"ending": 1}\n', "x" * 100_000])
def test_a_spoilt_end_is_a_run_without_an_ending(tmp_path: Path, spoilt: str) -> None:
    new_diary(tmp_path).close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(spoilt)
    found = summarise(tmp_path, now=time.time() + 3600)
    assert found is not None
    assert found.state == "unknown"


def test_the_newest_runs_are_found_without_a_look_at_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path))
    for number in range(30):
        directory = tmp_path / f"20260101-0000{number:02}-abcd"
        directory.mkdir()
        new_diary(directory, id=directory.name).close()
    (tmp_path / "20269999-no-run").mkdir()  # which holds none, and is newer
    read = list[str]()

    def noted(directory: Path) -> Any:
        read.append(directory.name)
        return read_start(directory)

    monkeypatch.setattr("oomph.monitoring.diary_reader.read_start", noted)
    newest = [f"20260101-0000{number:02}-abcd" for number in (29, 28, 27)]
    assert [run.id for run in runs(last=3)] == newest
    assert read == newest
    assert len(runs()) == 30
    assert runs(last=0) == ()


def test_an_id_that_begins_another_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path))
    for name in ("20260101-000000-abcd", "20260101-000000-abcd2"):
        (tmp_path / name).mkdir()
        new_diary(tmp_path / name, id=name).close()
    assert find_directory("20260101-000000-abcd").name == "20260101-000000-abcd"
    assert find_directory("abcd2").name == "20260101-000000-abcd2"


def test_a_script_that_watches_itself_and_is_halted_still_runs(tmp_path: Path) -> None:
    script = subprocess.Popen(["sleep", "600"])
    while b"600" not in Path(f"/proc/{script.pid}/cmdline").read_bytes():
        time.sleep(0.01)  # a process takes a moment to have its name
    new_diary(tmp_path, command=("sleep", "600"), pid=script.pid, host=this_host()).close()
    later = summarise(tmp_path, now=time.time() + 3600)
    script.kill()
    script.wait()
    gone = summarise(tmp_path, now=time.time() + 3600)
    assert later is not None
    assert gone is not None
    assert (later.state, gone.state) == ("running", "unknown")


def test_the_start_of_a_run_is_readable_only_to_its_user(tmp_path: Path) -> None:
    new_diary(tmp_path, command=("train", "--token", "secret")).close()
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    assert start_of().command
