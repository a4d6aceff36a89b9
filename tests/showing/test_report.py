"""What `oomph report` and `oomph compare` print."""

from __future__ import annotations

import io
import re
import sys

import pytest
from explaining.runs import event, gpu, peak, run_of, span, spans, steps
from explaining.test_any_run import RUNS
from hypothesis import HealthCheck, given, settings
from web.report_sample import sample

from oomph.explaining.compare import compare
from oomph.explaining.diagnose import diagnose
from oomph.records.run import Run
from oomph.showing.compare import print_comparison
from oomph.showing.report import print_report
from oomph.units import GIB


def shown(run: Run, capsys: pytest.CaptureFixture[str]) -> str:
    print_report(diagnose(run), run)
    return capsys.readouterr().out


def test_out_of_memory_or_not_stands_first_then_the_causes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(sample(), capsys).splitlines()
    assert lines[0] == (
        "20261116-0612-train-7f3a: torchrun --nproc-per-node 2 train.py --config base.yaml"
    )
    assert lines[3] == "did not run out of memory in 25 min; it ended well [measured]"
    causes = [line for line in lines if line.endswith(("[measured]", "[inferred]"))]
    assert causes[1] == (
        "GPU 3: the GPU was shared for 8% of the time: its figures mix jobs [measured]"
    )
    assert causes[2] == "both GPUs: the GPU waits for data for 40% of each step [measured]"
    assert "  do: more loader workers" in "\n".join(lines)


def test_figures_come_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(sample(), capsys)
    assert re.search(r"40\.0 GiB of 80\.0 GiB \(50%\) +torch, exact", text)
    assert "kernel-active time: while it worked 47% (p10" in text
    assert "38.4 samples a second, waits for data 40% of the time" in text
    assert "6.1 of 8 CPUs busy" in text
    assert "neighbour: bob: python infer.py" in text


def test_what_polling_can_miss_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(run_of(spans((60, 0.9)), gpus=[gpu(busy_source="polled")]), capsys)
    assert "a peak shorter than 200 ms can have been missed" in text
    assert "polled: short bursts can be missed" in text


def test_unknown_is_written_as_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    unread = {"used_bytes": None, "most_used_bytes": None, "run_bytes": None, "power_w": None}
    text = shown(run_of(spans((60, None), **unread)), capsys)
    assert re.search(r"0 +\S.* unknown +unknown +unknown", text)
    assert "0%" not in text


def test_sparklines_show_when_memory_and_work_came(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of([*spans((30, 0.0), (30, 1.0)), *(span(t, None) for t in range(60, 120))])
    text = shown(run, capsys)
    (busy,) = re.findall(r"GPU 0 kernel-active (.*)", text)
    assert re.fullmatch(r"▁{14,15}█{15,17} *", busy)


def test_of_gpus_that_were_not_used_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(run_of(spans((60, 0.0)), gpus=[gpu(is_used=False)]), capsys)
    assert "the run was not seen to use a GPU" in text
    assert "▁" not in text


def test_without_a_unicode_terminal_it_is_drawn_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    run = sample(num_gpus=1)
    print_report(diagnose(run), run)
    sys.stdout.flush()
    assert b"=====" in raw.getvalue()


def test_escape_sequences_of_others_are_neutralised(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2Jevil"
    run = run_of(
        spans((60, 0.9)),
        command=("python", evil),
        events=[event(1, "neighbour", evil), event(2, "phase", evil)],
        gpus=[gpu(name=evil), gpu(1, name=evil)],
        host=evil,
        user=evil,
    )
    assert "\x1b" not in shown(run, capsys)


@pytest.mark.parametrize("columns", [20, 40, 80, 120])
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, lines_to_read(shown(sample(), capsys)))) <= columns
    one, other = diagnose(sample()), diagnose(run_of(spans((60, 0.9))))
    print_comparison(compare(one, other))
    assert max(map(len, lines_to_read(capsys.readouterr().out))) <= columns


def lines_to_read(printed: str) -> list[str]:
    """All but the command to copy, which stays whole."""
    return [line for line in printed.splitlines() if not line.startswith("next: ")]


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(run=RUNS)
def test_any_report_can_be_printed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(run, capsys)


def test_a_comparison_has_both_figures_and_what_came_and_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = run_of(spans((60, 0.25)), step_spans=[steps(0.4, step_s=1.0)], peaks=[peak(70 * GIB)])
    fast = run_of(spans((60, 0.95)), step_spans=[steps(0.0, step_s=0.5)], peaks=[peak(75 * GIB)])
    print_comparison(compare(diagnose(slow), diagnose(fast)))
    text = capsys.readouterr().out
    assert re.search(r"time of a step +1 s +500 ms +-50% +better", text)
    assert re.search(r"waiting for data +40% +0% +-40 points +better", text)
    assert re.search(r"peak memory +70\.0 GiB +75\.0 GiB +\+7%\s", text)
    assert "gone: the GPU waits for data" in text
    assert "new: the GPU was kept busy" in text
