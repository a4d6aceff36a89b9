"""The first finding: out of memory or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from explaining.runs import event, gpu, host, peak, run_of, spans
from oomph.explaining.diagnose import diagnose
from oomph.records.report import Finding
from oomph.records.run import Ending, Run
from oomph.units import GIB


def first(run: Run) -> Finding:
    return diagnose(run).findings[0]


def ended(**how: Any) -> Run:
    how = {"at_s": 60.0, "exit_code": 1, **how}
    return run_of(spans((60, 0.95)), ending=Ending(**how), peaks=[peak(79 * GIB)])


def test_a_run_that_ends_well_did_not_run_out_of_memory() -> None:
    found = first(run_of(spans((60, 0.95)), peaks=[peak(60 * GIB)]))
    assert (found.kind, found.confidence) == ("no-out-of-memory", "measured")
    assert found.evidence == (
        "at most 60.0 GiB of 80.0 GiB (75%) on GPU 0, by torch's allocator: exact",
    )


def test_of_a_run_without_a_gpu_nothing_is_said_of_its_memory() -> None:
    assert first(run_of(spans((60, 0.0)), gpus=[gpu(is_used=False)])).evidence == ()
    unread = {"used_bytes": None, "most_used_bytes": None, "run_bytes": None}
    assert "could not be read" in first(run_of(spans((60, 0.9), **unread))).evidence[0]


def test_out_of_gpu_memory_as_the_script_says_it_is_measured() -> None:
    run = ended(out_of_memory="gpu")
    assert (first(run).kind, first(run).confidence) == ("out-of-memory", "inferred")
    told = replace(run, events=(event(42, "out-of-memory", "tried to allocate 2 GiB"),))
    assert first(told).sentence == "out of GPU memory after 42 s"
    assert first(told).confidence == "measured"
    assert first(told).evidence[0] == "tried to allocate 2 GiB"


def test_the_gpu_that_ran_out_is_the_one_that_is_told() -> None:
    run = replace(
        ended(out_of_memory="gpu"),
        gpus=(gpu(0), gpu(1)),
        peaks=(peak(79 * GIB), peak(50 * GIB, gpu=1, rank=1)),
        events=(event(42, "out-of-memory", "no room", gpu=1),),
    )
    assert first(run).gpus == (1,)
    assert "50.0 GiB of 80.0 GiB (62%) on GPU 1" in first(run).evidence[1]


def test_what_was_only_likely_stays_only_likely() -> None:
    guess = (event(60, "warning", "probably out of GPU memory: 79 GiB of 80 GiB were taken"),)
    found = first(replace(ended(out_of_memory="gpu"), events=guess))
    assert (found.sentence, found.confidence) == (
        "probably out of GPU memory after 1 min",
        "inferred",
    )
    assert found.evidence[0] == guess[0].text
    killed = ended(exit_code=137, signal="SIGKILL", out_of_memory="host")
    assert first(killed).confidence == "measured"
    guess = (event(60, "warning", "probably killed by the kernel"),)
    assert first(replace(killed, events=guess)).confidence == "inferred"


def test_out_of_memory_and_gone_on_is_told_apart() -> None:
    events = (event(9, "out-of-memory"), event(19, "out-of-memory"))
    run = run_of(spans((60, 0.95)), events=events)
    assert first(run).sentence == "ran out of GPU memory 2 times, and went on"
    failed = replace(run, ending=Ending(at_s=60, exit_code=1))
    assert first(failed).kind == "out-of-memory"


def test_the_hosts_memory_is_told_apart_from_the_gpus() -> None:
    run = replace(
        ended(exit_code=137, signal="SIGKILL", out_of_memory="host"), host_spans=(host(),)
    )
    assert "out of host memory" in first(run).sentence
    assert "8.0 GiB" in first(run).evidence[0]


def test_a_kill_that_nobody_explains_is_no_claim() -> None:
    found = first(ended(exit_code=137, signal="SIGKILL"))
    assert (found.kind, found.confidence) == ("maybe-out-of-memory", "weak")
    assert first(ended(exit_code=143, signal="SIGTERM")).kind == "no-out-of-memory"


def test_a_failure_of_another_kind_is_no_out_of_memory() -> None:
    found = first(ended(exit_code=2))
    assert (found.kind, found.confidence) == ("no-out-of-memory", "inferred")
    assert "it failed with 2" in found.sentence


def test_a_run_that_oomph_stopped_ended_as_asked() -> None:
    run = replace(ended(exit_code=130, signal="SIGINT"), events=(event(60, "stopped"),))
    assert (first(run).kind, first(run).confidence) == ("no-out-of-memory", "measured")
    assert "as requested" in first(run).sentence


def test_a_run_without_an_end_is_told_as_far_as_it_was_seen() -> None:
    run = run_of(spans((60, 0.95)), ending=None, last_seen_s=61.0)
    assert first(run).kind == "not-ended"
    assert "until 1 min 1 s it had not run out of memory" in first(run).sentence
    assert not diagnose(run).has_ended


@pytest.mark.parametrize(
    ("peaks", "source", "used", "misses"),
    [
        ([], "polled", 70 * GIB, "a peak shorter than 200 ms can have been missed"),
        ([peak(50 * GIB, source="polled")], "polled", 50 * GIB, "a peak shorter than 200 ms"),
        ([peak(75 * GIB, source="accounting")], "accounting", 75 * GIB, None),
        ([peak(75 * GIB, source="accounting"), peak(72 * GIB)], "torch", 72 * GIB, None),
        ([peak(72 * GIB), peak(60 * GIB, pid=9)], "torch", 72 * GIB, "1 more used this GPU"),
        ([peak(72 * GIB, gpu=None)], "polled", 70 * GIB, "a peak shorter than 200 ms"),
    ],
)
def test_the_best_source_of_the_peak_is_taken_and_says_what_it_misses(
    peaks: list[Any], source: str, used: int, misses: str | None
) -> None:
    memory = diagnose(run_of(spans((60, 0.95)), peaks=peaks)).gpus[0].memory
    assert (memory.peak_source, memory.peak_bytes) == (source, used)
    assert (misses in (memory.peak_misses or "")) if misses else memory.peak_misses is None


def test_on_a_shared_gpu_the_polled_peak_is_the_runs_own() -> None:
    shared = spans((60, 0.95), num_others=1, run_bytes=20 * GIB)
    assert diagnose(run_of(shared)).gpus[0].memory.peak_bytes == 20 * GIB
