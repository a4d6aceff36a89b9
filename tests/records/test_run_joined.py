"""Runs of several ranks, as one."""

from __future__ import annotations

from dataclasses import replace

from oomph.records.run import Event, GpuSpan, Peak, Run, StepSpan, WatchedGpu
from oomph.records.run_spans import join_ranks

GPU = WatchedGpu(
    index=0,
    uuid="GPU-0",
    name="A100",
    total_bytes=80,
    power_limit_w=None,
    busy_source="buffered",
    is_used=True,
    cuda_index=0,
)
SPAN = GpuSpan(
    gpu=0,
    began_s=1.0,
    ended_s=2.0,
    used_bytes=10,
    most_used_bytes=10,
    run_bytes=None,
    others_bytes=None,
    num_others=None,
    busy_ratio=0.5,
    least_busy_ratio=None,
    most_busy_ratio=None,
    power_w=None,
    temperature_c=None,
    throttled_ratio=None,
)
STEPS = StepSpan(
    rank=0,
    began_s=1.0,
    ended_s=2.0,
    num_steps=4,
    num_samples=None,
    step_s=0.25,
    longest_step_s=0.25,
    data_wait_s=None,
)


def run_of(rank: int, *, uuid: str, started_at: float = 100.0) -> Run:
    return Run(
        id="a",
        command=("python", "train.py"),
        directory=None,
        host="here",
        user=None,
        started_at=started_at,
        oomph_version="0",
        num_cpus=2,
        gpus=(replace(GPU, uuid=uuid),),
        gpu_spans=(SPAN,),
        host_spans=(),
        step_spans=(replace(STEPS, rank=rank),),
        peaks=(Peak(source="torch", gpu=0, rank=rank, used_bytes=10 + rank),),
        events=(
            Event(at_s=0.0, kind="warning", text="no driver"),
            Event(at_s=1.0, kind="phase", text="training", rank=rank),
        ),
        ending=None,
        last_seen_s=2.0,
    )


def test_the_gpus_of_the_ranks_stand_side_by_side_and_keep_their_spans_and_peaks() -> None:
    run = join_ranks(run_of(0, uuid="GPU-0"), [run_of(1, uuid="GPU-1")])
    assert [gpu.uuid for gpu in run.gpus] == ["GPU-0", "GPU-1"]
    assert [span.gpu for span in run.gpu_spans] == [0, 1]
    assert [(peak.gpu, peak.used_bytes) for peak in run.peaks] == [(0, 10), (1, 11)]
    assert [span.rank for span in run.step_spans] == [0, 1]


def test_a_gpu_that_two_ranks_looked_at_is_not_counted_twice() -> None:
    run = join_ranks(run_of(0, uuid="GPU-0"), [run_of(1, uuid="GPU-0")])
    assert len(run.gpus) == len(run.gpu_spans) == 1
    assert [peak.gpu for peak in run.peaks] == [0, 0]


def test_times_of_a_rank_that_started_later_are_moved_to_the_first_ranks() -> None:
    run = join_ranks(run_of(0, uuid="GPU-0"), [run_of(1, uuid="GPU-1", started_at=103.0)])
    assert [span.began_s for span in run.step_spans] == [1.0, 4.0]
    assert run.last_seen_s == 5.0


def test_what_every_rank_warns_of_is_told_once() -> None:
    run = join_ranks(run_of(0, uuid="GPU-0"), [run_of(1, uuid="GPU-1")])
    assert [event.text for event in run.events] == ["no driver", "training", "training"]


def test_an_event_of_a_gpu_that_is_not_there_is_of_none() -> None:
    other = run_of(1, uuid="GPU-1")
    odd = replace(other, events=(Event(at_s=0.0, kind="lost", text="gone", gpu=77),))
    assert join_ranks(run_of(0, uuid="GPU-0"), [odd]).events[-2].gpu is None
