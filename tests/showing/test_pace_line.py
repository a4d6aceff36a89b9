"""The line of an epoch."""

from __future__ import annotations

from dataclasses import replace

from oomph.records.run import GpuSpan, Pace, Peak, WatchedGpu
from oomph.showing.line import pace_line
from oomph.units import GIB

GPU = WatchedGpu(
    index=3,
    uuid="GPU-3",
    name="NVIDIA A100-SXM4-80GB",
    total_bytes=80 * GIB,
    power_limit_w=400.0,
    busy_source="buffered",
    is_used=True,
    cuda_index=0,
)
SPAN = GpuSpan(
    gpu=0,
    began_s=0.0,
    ended_s=1.0,
    used_bytes=60 * GIB,
    most_used_bytes=61 * GIB,
    run_bytes=None,
    others_bytes=None,
    num_others=None,
    busy_ratio=0.83,
    least_busy_ratio=None,
    most_busy_ratio=None,
    power_w=250.0,
    temperature_c=None,
    throttled_ratio=None,
)
WHOLE = Pace(
    num_steps=500,
    step_s=0.0513,
    samples_per_s=623.4,
    data_wait_ratio=0.04,
    gpu=GPU,
    span=SPAN,
    gpu_problem=None,
    peak=Peak(source="torch", gpu=None, allocated_bytes=49 * GIB, used_bytes=58 * GIB),
)
NOTHING = Pace(
    num_steps=1,
    step_s=2.5,
    samples_per_s=None,
    data_wait_ratio=None,
    gpu=None,
    span=None,
    gpu_problem="no NVIDIA driver on this machine (libnvidia-ml.so.1 was not found); try: it",
    peak=None,
)


def test_the_line_of_an_epoch_tells_steps_gpu_and_torchs_peak() -> None:
    assert pace_line("epoch 2", WHOLE) == (
        "epoch 2: 500 steps of 51.3 ms, 623 samples/s, 4% waiting for data; "
        "GPU 3 = cuda:0 NVIDIA A100-SXM4-80GB: kernel-active 83%, 60.0 GiB of 80.0 GiB used; "
        "torch's peak 58.0 GiB reserved, 49.0 GiB allocated"
    )


def test_what_nobody_could_tell_is_said_and_not_left_out() -> None:
    assert pace_line("epoch 1", NOTHING) == (
        "epoch 1: 1 step of 2.5 s, data wait unknown; "
        "GPU unknown (no NVIDIA driver on this machine); "
        "no peak: CUDA does not run in this process"
    )


def test_a_gpu_with_a_hostile_name_does_not_take_over_the_terminal() -> None:
    named = replace(WHOLE, gpu=replace(GPU, name="\x1b[2Jevil"))
    assert "\x1b" not in pace_line("epoch 1", named)


def test_there_are_at_most_eight_scalars_and_only_those_that_are_known() -> None:
    everything = replace(WHOLE, span=replace(SPAN, sm_active_ratio=0.4))
    assert everything.scalars() == {
        "gpu/util": 0.83,
        "gpu/mem_used_ratio": 0.75,
        "gpu/mem_peak_reserved_gib": 58.0,
        "gpu/power_w": 250.0,
        "gpu/sm_active": 0.4,
        "time/step_s": 0.0513,
        "time/data_wait_ratio": 0.04,
        "throughput/samples_s": 623.4,
    }
    assert NOTHING.scalars() == {"time/step_s": 2.5}
