"""Whatever a run holds, it gives a report: within bounds, and the same after JSON."""

from __future__ import annotations

import math
from typing import get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oomph.explaining.compare import compare
from oomph.explaining.diagnose import diagnose
from oomph.records.report import Comparison, Report
from oomph.records.run import (
    Ending,
    Event,
    EventKind,
    GpuSpan,
    HostSpan,
    Peak,
    PeakSource,
    Run,
    StepSpan,
    WatchedGpu,
)
from oomph.records.stored import as_json, from_json

TIMES = st.floats(0, 1e7)
RATIOS = st.one_of(st.none(), st.floats(0, 1))
SIZES = st.one_of(st.none(), st.integers(0, 2**40))
COUNTS = st.one_of(st.none(), st.integers(0, 1000))
FLOATS = st.one_of(st.none(), st.floats(0, 1e6))
TEXTS = st.text(max_size=20)
NUM_GPUS = 3
PLACES = st.integers(0, NUM_GPUS - 1)
RANKS = st.one_of(st.none(), st.integers(0, 3))

GPUS = st.builds(
    WatchedGpu,
    index=st.integers(0, 7),
    uuid=st.none(),
    name=st.one_of(st.none(), TEXTS),
    total_bytes=SIZES,
    power_limit_w=FLOATS,
    busy_source=st.sampled_from(["buffered", "polled", None]),
    is_used=st.booleans(),
    cuda_index=RANKS,
    link_bytes_per_s=FLOATS,
)


@st.composite
def gpu_spans(draw: st.DrawFn) -> list[GpuSpan]:
    """As they come: one after another, with holes, and a busy ratio that is often unknown."""
    found: list[GpuSpan] = []
    at_s = draw(st.floats(0, 100))
    for _ in range(draw(st.integers(0, 12))):
        ended_s = at_s + draw(st.sampled_from([0.0, 0.2, 1.0, 10.0, 1e6]))
        found.append(
            GpuSpan(
                gpu=draw(PLACES),
                began_s=at_s,
                ended_s=ended_s,
                used_bytes=draw(SIZES),
                most_used_bytes=draw(SIZES),
                run_bytes=draw(SIZES),
                others_bytes=draw(SIZES),
                num_others=draw(COUNTS),
                busy_ratio=draw(st.one_of(st.sampled_from([None, 0.0, 0.2, 0.95]), RATIOS)),
                least_busy_ratio=draw(RATIOS),
                most_busy_ratio=draw(RATIOS),
                power_w=draw(FLOATS),
                temperature_c=draw(st.one_of(st.none(), st.integers(0, 120))),
                throttled_ratio=draw(RATIOS),
                throttled_by=draw(st.sampled_from([(), ("heat",), ("power", "odd")])),
                sm_active_ratio=draw(RATIOS),
                memory_active_ratio=draw(RATIOS),
                received_bytes=draw(SIZES),
                sent_bytes=draw(SIZES),
            )
        )
        at_s = ended_s + draw(st.sampled_from([0.0, 0.0, 5.0]))
    return found


HOSTS = st.builds(
    HostSpan,
    began_s=TIMES,
    ended_s=TIMES,
    cpu_cores=FLOATS,
    busiest_cpu_cores=FLOATS,
    memory_bytes=SIZES,
    num_processes=COUNTS,
    others_cpu_cores=FLOATS,
    stolen_cpu_cores=FLOATS,
    throttled_ratio=RATIOS,
    swapped_in_bytes=SIZES,
)
STEPS = st.builds(
    StepSpan,
    rank=st.integers(0, 3),
    began_s=TIMES,
    ended_s=TIMES,
    num_steps=st.integers(0, 1000),
    num_samples=COUNTS,
    step_s=st.floats(0, 1e4),
    longest_step_s=st.floats(0, 1e4),
    data_wait_s=FLOATS,
)
PEAKS = st.builds(
    Peak,
    source=st.sampled_from(get_args(PeakSource)),
    gpu=st.one_of(st.none(), PLACES),
    rank=RANKS,
    pid=COUNTS,
    allocated_bytes=SIZES,
    used_bytes=st.integers(0, 2**40),
    before_steps_bytes=SIZES,
)
EVENTS = st.builds(
    Event,
    at_s=TIMES,
    kind=st.sampled_from(get_args(EventKind)),
    text=TEXTS,
    gpu=st.one_of(st.none(), PLACES),
    rank=RANKS,
)
ENDINGS = st.builds(
    Ending,
    at_s=TIMES,
    exit_code=st.one_of(st.none(), st.integers(0, 255)),
    signal=st.sampled_from([None, "SIGKILL", "SIGINT"]),
    out_of_memory=st.sampled_from([None, "gpu", "host"]),
)
RUNS = st.builds(
    Run,
    id=TEXTS,
    command=st.tuples(TEXTS),
    directory=st.none(),
    host=TEXTS,
    user=st.none(),
    started_at=TIMES,
    oomph_version=TEXTS,
    num_cpus=COUNTS,
    gpus=st.tuples(*[GPUS] * NUM_GPUS),
    gpu_spans=gpu_spans().map(tuple),
    host_spans=st.lists(HOSTS, max_size=4).map(tuple),
    step_spans=st.lists(STEPS, max_size=4).map(tuple),
    peaks=st.lists(PEAKS, max_size=4).map(tuple),
    events=st.lists(EVENTS, max_size=6).map(tuple),
    ending=st.one_of(st.none(), ENDINGS),
    last_seen_s=TIMES,
)
MANY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(RUNS)
def test_any_run_gives_a_report_within_bounds(run: Run) -> None:
    report = diagnose(run)
    first, *rest = report.findings
    endings = {"out-of-memory", "recovered", "no-out-of-memory", "maybe-out-of-memory", "not-ended"}
    assert first.kind in endings
    assert not {found.kind for found in rest} & endings
    for found in report.findings:
        assert found.sentence
        assert "nan" not in found.sentence
        assert set(found.gpus) <= set(range(NUM_GPUS))
        assert found.grows_by_ratio is None or 1 < found.grows_by_ratio < math.inf
    for gpu in report.gpus:
        ratios = [gpu.shared_ratio, gpu.power.throttled_ratio, gpu.sm_active_ratio]
        if gpu.busy:
            assert gpu.busy.gaps == tuple(sorted(gpu.busy.gaps, key=lambda gap: gap.began_s))
            for one in filter(None, (gpu.busy.whole, gpu.busy.working)):
                ratios += [one.mean, one.p10, one.p50, one.p90]
                assert one.p10 <= one.p50 <= one.p90
            ratios.append(gpu.busy.pausing_ratio)
        assert all(ratio is None or 0 <= ratio <= 1 for ratio in ratios)
    for steps in report.steps:
        assert steps.data_wait_ratio is None or 0 <= steps.data_wait_ratio <= 1


@MANY
@given(RUNS)
def test_a_report_is_the_same_after_json(run: Run) -> None:
    report = diagnose(run)
    assert from_json(Report, as_json(report)) == report


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(RUNS, RUNS)
def test_any_two_runs_can_be_compared(one: Run, other: Run) -> None:
    found = compare(diagnose(one), diagnose(other))
    assert from_json(Comparison, as_json(found)) == found
