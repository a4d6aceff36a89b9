"""The time of a step: a roofline for each op, two clocks, and the bounds around them."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.errors import UsageError
from oomph.predicting import speed
from oomph.predicting.footprint import work_of
from oomph.predicting.links import links_among
from oomph.predicting.pricing import Prices, lane_of, sizes_of
from oomph.predicting.rates import BEST_OF_SHEET, Rates, best_rates, with_measured_rates
from oomph.predicting.speed import StepTime, anchored, estimate, parts_of_work
from oomph.records.gpu_model import GpuModel
from oomph.records.trace import Op, Phase
from oomph.sensing import catalog
from oomph.tricks import offload_activations

A100 = catalog.find("a100 80").model
V100 = catalog.find("v100 16").model
T4 = catalog.find("t4").model
P40 = catalog.find("p40").model

TERA = 10**12
GIGA = 10**9


def op(name: str = "mm", flops: int = 0, moved: int = 0, **more: Any) -> Op:
    given_ = {"phase": "forward", "dtype": "float32", **more}
    return Op(name=name, flops=flops, moved_bytes=moved, **given_)


def time_of(*ops: Op, on: GpuModel = A100, **options: Any) -> StepTime:
    time = estimate(ops, on, **options)
    assert time is not None
    return time


models = st.sampled_from(catalog.all_models())
names = st.sampled_from(
    ["mm", "bmm", "convolution", "_scaled_dot_product_flash_attention", "add_", "empty", "nonzero"]
)
dtypes = st.sampled_from(["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "int64"])
phases: st.SearchStrategy[Phase] = st.sampled_from(["input", "forward", "backward", "step"])
ops_ = st.builds(
    Op,
    name=names,
    phase=phases,
    flops=st.integers(0, 10 * TERA),
    moved_bytes=st.integers(0, 10 * GIGA),
    dtype=dtypes,
)
steps = st.lists(ops_, min_size=1, max_size=30)


# ---- what holds for every step ---------------------------------------------------------------


@given(steps, models)
def test_a_step_is_not_shorter_than_what_the_gpu_or_the_host_needs(
    ops: list[Op], model: GpuModel
) -> None:
    time = estimate(ops, model)
    if time is not None:
        assert time.step_s >= max(time.gpu_busy_s, time.host_s) * (1 - 1e-9)
        assert time.step_s <= (time.gpu_busy_s + time.host_s) * (1 + 1e-9)
        assert 0 < time.low_s <= time.step_s <= time.high_s


@given(steps, st.data())
def test_more_work_in_an_op_never_makes_a_step_shorter(ops: list[Op], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ops) - 1))
    more = replace(
        ops[at],
        flops=ops[at].flops + data.draw(st.integers(0, TERA)),
        moved_bytes=ops[at].moved_bytes + data.draw(st.integers(0, GIGA)),
    )
    before, after = time_of(*ops), time_of(*ops[:at], more, *ops[at + 1 :])
    assert before.step_s <= after.step_s * (1 + 1e-9)
    assert before.high_s <= after.high_s * (1 + 1e-9)


@given(steps, ops_)
def test_one_more_op_never_makes_a_step_shorter(ops: list[Op], more: Op) -> None:
    assert time_of(*ops).step_s <= time_of(*ops, more).step_s * (1 + 1e-9)


@given(
    steps,
    models,
    st.sampled_from(["memory_bandwidth_bytes_per_s", "fp32_flops", "fp16_flops", "tf32_flops"]),
)
def test_twice_the_hardware_never_makes_a_step_longer(
    ops: list[Op], model: GpuModel, figure: str
) -> None:
    before = estimate(ops, model)
    rate = getattr(model, figure)
    if before is None or rate is None:
        return
    after = estimate(ops, replace(model, **{figure: 2 * rate}))
    assert after is not None
    assert after.step_s <= before.step_s * (1 + 1e-9)


@given(steps)
def test_tf32_never_makes_a_step_longer(ops: list[Op]) -> None:
    assert time_of(*ops, matmul_precision="tf32").step_s <= time_of(*ops).step_s * (1 + 1e-9)


# ---- what is not known -----------------------------------------------------------------------


@given(steps, models)
def test_without_a_bandwidth_there_is_no_answer(ops: list[Op], model: GpuModel) -> None:
    assert estimate(ops, replace(model, memory_bandwidth_bytes_per_s=None)) is None


def test_no_ops_are_no_step() -> None:
    assert estimate([], A100) is None


def test_a_rate_that_nobody_knows_matters_only_where_it_is_needed() -> None:
    model = replace(A100, fp32_flops=None)
    assert estimate([op(flops=TERA)], model) is None
    assert estimate([op(flops=TERA, dtype="bfloat16")], model) is not None
    assert estimate([op("add", moved=GIGA)], model) is not None


def test_every_gpu_whose_speed_the_catalogue_has_gets_an_answer() -> None:
    step = [op(flops=TERA), op("convolution", flops=TERA, dtype="float16"), op("add", moved=GIGA)]
    for model in catalog.all_models():
        known = model.memory_bandwidth_bytes_per_s and model.fp32_flops
        assert (estimate(step, model) is not None) == bool(known)


# ---- rates -----------------------------------------------------------------------------------


def test_an_fp32_matmul_uses_tf32_only_if_it_is_asked_for() -> None:
    step = op(flops=100 * TERA)
    assert time_of(step).step_s > 4 * time_of(step, matmul_precision="tf32").step_s
    on_v100 = time_of(step, on=V100, matmul_precision="tf32")  # which has none
    assert on_v100.step_s == time_of(step, on=V100).step_s


def test_an_fp32_convolution_uses_tf32_unasked_where_there_is_tf32() -> None:
    step = op("convolution_backward", flops=100 * TERA)
    assert time_of(step).step_s < time_of(op(flops=100 * TERA)).step_s / 4
    assert time_of(step, on=V100).step_s > 4 * time_of(step).step_s


def test_a_card_without_tensor_cores_computes_fp16_at_its_vector_rate() -> None:
    fp32, fp16 = (time_of(op(flops=TERA, dtype=dtype), on=P40) for dtype in ("float32", "float16"))
    assert fp16.step_s == fp32.step_s


def test_bf16_is_slow_where_the_hardware_has_only_fp16() -> None:
    fp16, bf16 = (time_of(op(flops=TERA, dtype=dtype), on=T4) for dtype in ("float16", "bfloat16"))
    assert bf16.step_s > 5 * fp16.step_s
    assert bf16.step_s == time_of(op(flops=TERA), on=T4).step_s


def test_bf16_and_tf32_follow_from_fp16_on_tensor_cores_that_have_them() -> None:
    model = replace(A100, bf16_flops=None, tf32_flops=None, matmul_bf16_flops=None)
    complete = replace(A100, matmul_bf16_flops=None)
    for step in (op(flops=TERA, dtype="bfloat16"), op("convolution", flops=TERA)):
        assert time_of(step, on=model) == time_of(step, on=complete)


def test_a_measured_matmul_is_the_ceiling_and_else_the_usual_share_of_the_sheet() -> None:
    step = op(flops=100 * TERA, dtype="bfloat16")
    assert A100.matmul_bf16_flops is not None
    best_s = 100 * TERA / A100.matmul_bf16_flops
    assert 1.1 * best_s < time_of(step).gpu_busy_s < 1.4 * best_s  # of no known shape
    unknown = replace(A100, matmul_bf16_flops=None, num_sms=None)
    of_best = time_of(step).gpu_busy_s / best_s
    best_s = 100 * TERA / (312 * TERA * BEST_OF_SHEET)
    assert time_of(step, on=unknown).gpu_busy_s == pytest.approx(best_s * of_best, rel=0.01)


def test_the_usual_share_of_the_sheet_is_that_of_the_catalogue() -> None:
    ratios = {
        model.matmul_bf16_flops / model.bf16_flops
        for model in catalog.all_models()
        if model.matmul_bf16_flops and model.bf16_flops
    }
    assert median(ratios) == pytest.approx(BEST_OF_SHEET, abs=0.01)


def test_fused_attention_has_an_efficiency_of_its_own() -> None:
    matmul = time_of(op(flops=100 * TERA, dtype="bfloat16"))
    attention = time_of(op("_flash_attention_forward", flops=100 * TERA, dtype="bfloat16"))
    assert attention.step_s > matmul.step_s


def test_fp64_is_slow_on_a_t4_and_half_as_fast_as_fp32_on_a_v100() -> None:
    single, double = op(flops=TERA), op(flops=TERA, dtype="float64")
    assert time_of(double, on=V100).gpu_busy_s == pytest.approx(
        2 * time_of(single, on=V100).gpu_busy_s, rel=0.001
    )
    assert time_of(double, on=T4).gpu_busy_s > 30 * time_of(single, on=T4).gpu_busy_s


# ---- what a step is bound by -----------------------------------------------------------------


def test_an_optimizer_step_is_bound_by_memory_bandwidth() -> None:
    time = time_of(*[op("_foreach_addcdiv_", moved=4 * GIGA, phase="step")] * 10)
    assert time.bound_by == "memory bandwidth"
    assert 40 / 2039 / 0.92 < time.gpu_busy_s < 40 / 2039 / 0.75


def test_large_matmuls_are_bound_by_arithmetic() -> None:
    assert time_of(*[op(flops=TERA, moved=GIGA // 10)] * 10).bound_by == "arithmetic"


def test_many_small_ops_are_bound_by_their_launches_and_a_faster_gpu_does_not_help() -> None:
    step = [op("add", moved=4096)] * 1000
    slow, fast = time_of(*step, on=T4), time_of(*step, on=A100)
    assert slow.bound_by == fast.bound_by == "kernel launches"
    assert slow.step_s == pytest.approx(fast.step_s, rel=0.001)
    assert fast.step_s == pytest.approx(fast.host_s, rel=0.01)


def test_launches_hide_behind_a_long_kernel_before_them_but_not_after_them() -> None:
    small, large = [op("add", moved=4096)] * 1000, op(flops=TERA)
    hidden, shown = time_of(large, *small), time_of(*small, large)
    assert hidden.gpu_busy_s == pytest.approx(shown.gpu_busy_s)
    assert hidden.step_s == pytest.approx(hidden.gpu_busy_s, rel=0.01)
    assert shown.step_s == pytest.approx(shown.host_s + time_of(large).gpu_busy_s, rel=0.01)


def test_the_host_waits_where_a_value_is_read() -> None:
    large, small = op(flops=TERA), [op("add", moved=4096)] * 1000
    read = op("_local_scalar_dense", moved=4)
    assert time_of(large, read, *small).step_s > time_of(large, *small).step_s


def test_making_a_view_or_an_empty_tensor_costs_the_gpu_nothing() -> None:
    time = time_of(op("empty", moved=GIGA), op("_unsafe_view", moved=GIGA))
    assert time.gpu_busy_s == 0
    assert time.step_s == time.host_s


# ---- measured steps --------------------------------------------------------------------------


@given(steps, st.floats(1e-4, 1e4))
def test_a_step_held_to_itself_is_what_was_measured(ops: list[Op], measured_s: float) -> None:
    time = time_of(*ops)
    held = anchored(time, time, measured_s)
    assert held.step_s == pytest.approx(measured_s)
    assert held.low_s < measured_s < held.high_s
    assert held.bound_by == time.bound_by


def test_a_measured_step_is_known_to_a_tenth() -> None:
    """Ratios between steps of one model were off by 11 % at worst."""
    time = time_of(*[op(flops=TERA)] * 4)
    held = anchored(time, time, 1.0)
    assert 0.85 <= held.low_s <= 0.92
    assert 1.08 <= held.high_s <= 1.15


def test_a_measured_step_carries_its_ratio_to_another_and_narrows_the_bounds() -> None:
    one, two = time_of(*[op(flops=TERA)] * 4), time_of(*[op(flops=TERA)] * 8)
    held = anchored(two, one, 3 * one.step_s)
    assert held.step_s == pytest.approx(3 * two.step_s)
    assert held.high_s / held.low_s < two.high_s / two.low_s


def test_the_bounds_stay_wide_where_another_thing_decides() -> None:
    arithmetic, launches = time_of(op(flops=TERA)), time_of(*[op("add", moved=4)] * 1000)
    held = anchored(launches, arithmetic, arithmetic.step_s)
    assert held.low_s <= launches.low_s
    assert launches.high_s <= held.high_s


@pytest.mark.parametrize("measured_s", [0.0, -1.0, float("nan")])
def test_a_step_that_took_no_time_is_refused(measured_s: float) -> None:
    time = time_of(op(flops=TERA))
    with pytest.raises(UsageError, match="no time"):
        anchored(time, time, measured_s)


# ---- rates that were measured ----------------------------------------------------------------

rates = st.floats(1e9, 1e16)


@given(models, st.dictionaries(st.sampled_from(["float16", "float32"]), rates), rates)
def test_the_best_rates_are_those_that_were_measured(
    model: GpuModel, matmul_flops: dict[str, float], bandwidth: float
) -> None:
    found, copied = best_rates(with_measured_rates(model, matmul_flops, bandwidth))
    assert {dtype: found[dtype] for dtype in matmul_flops} == pytest.approx(matmul_flops)
    assert copied == pytest.approx(bandwidth)


def test_a_measured_bf16_matmul_leaves_the_datasheet_as_it_is() -> None:
    changed = with_measured_rates(A100, {"bfloat16": 2e14, "float16": 1.9e14}, None)
    assert changed.bf16_flops == A100.bf16_flops
    found, copied = best_rates(changed)
    assert found["bfloat16"] == pytest.approx(2e14)
    assert found["float16"] == pytest.approx(1.9e14)
    assert found["float32"] == best_rates(A100)[0]["float32"]
    assert copied == best_rates(A100)[1]


def test_nothing_measured_changes_nothing() -> None:
    assert with_measured_rates(A100, {}, None) == A100


# ---- what leaves the GPU ---------------------------------------------------------------------

BUS_BYTES_PER_S = 16 * 1.969e9 * 0.80  # of the A100: PCIe 4.0 x16


def test_copies_to_the_host_run_beside_the_gpu() -> None:
    working = op("mm", flops=10 * TERA)
    copied = op("copy_to_host", moved=GIGA)
    alone = time_of(*[working] * 4)
    beside = time_of(*[working, copied] * 4)
    assert alone.step_s / 4 > GIGA / BUS_BYTES_PER_S
    assert beside.step_s == pytest.approx(alone.step_s + GIGA / BUS_BYTES_PER_S, rel=0.01)


def test_as_many_tensors_wait_for_their_copy_as_the_trick_keeps() -> None:
    assert speed._NUM_WAITING == offload_activations._NUM_KEPT


def test_backward_waits_for_what_comes_back() -> None:
    time = time_of(op("copy_from_host", moved=10 * GIGA, phase="backward"), op("mm", flops=1))
    assert time.step_s == pytest.approx(10 * GIGA / BUS_BYTES_PER_S, rel=0.01)
    assert time.bound_by == "host and bus"


def test_the_gpu_does_not_run_far_ahead_of_the_copies() -> None:
    time = time_of(*[op("mm", flops=1), op("copy_to_host", moved=GIGA)] * 20)
    assert time.step_s == pytest.approx(20 * GIGA / BUS_BYTES_PER_S, rel=0.01)


def test_a_step_on_the_host_waits_for_gradients_and_the_gpu_for_parameters() -> None:
    copies = 2 * GIGA / BUS_BYTES_PER_S
    time = time_of(
        op("copy_to_host", moved=GIGA, phase="step"),
        op("on_host", moved=50 * GIGA, phase="step"),
        op("copy_from_host", moved=GIGA, phase="step"),
    )
    assert time.step_s == pytest.approx(copies + 1, rel=0.01)
    assert time.low_s < time.step_s < time.high_s


def test_without_a_known_bus_there_is_no_time() -> None:
    assert estimate([op("copy_to_host", moved=GIGA)], replace(A100, pcie=None)) is None
    assert estimate([op("mm", flops=1)], replace(A100, pcie=None)) is not None


# ---- several GPUs ----------------------------------------------------------------------------

SENT = 3 * GIGA  # 10 ms at what the sheet of the A100 has in one direction
SENDING_S = 0.010 / 0.78 + 30e-6
COMPUTING_S = time_of(op(flops=10 * TERA)).step_s


def collective(name: str, sent: int = SENT, phase: Phase = "backward") -> Op:
    return op(name, moved=sent, phase=phase)


def wait(num_pending: int = 0) -> Op:
    return op("wait", phase="backward", num_pending=num_pending)


def on_eight(*ops: Op, on: GpuModel = A100) -> StepTime:
    return time_of(*ops, on=on, links=links_among(on, 8))


def test_what_is_sent_takes_its_bytes_over_the_link() -> None:
    time = on_eight(op(moved=8), collective("all_reduce"), wait())
    assert time.waited_s == pytest.approx(SENDING_S, rel=0.01)
    assert time.bound_by == "communication"


def test_what_is_sent_while_kernels_run_costs_nothing() -> None:
    computing = op(flops=100 * TERA, phase="backward")
    sent = on_eight(op(moved=8), collective("all_reduce"), computing, wait())
    alone = on_eight(op(moved=8), computing)
    assert sent.waited_s == 0
    assert sent.step_s == pytest.approx(alone.step_s)


def test_gradients_are_sent_when_they_are_computed_and_not_before() -> None:
    time = on_eight(op(flops=10 * TERA), collective("reduce_scatter"), wait())
    assert time.step_s == pytest.approx(COMPUTING_S + SENDING_S, rel=0.001)


def test_parameters_are_gathered_while_the_unit_before_runs() -> None:
    unit = [collective("all_gather"), wait(), op(flops=10 * TERA)]
    time = on_eight(*unit, *unit, *unit)
    hidden = max(SENDING_S - COMPUTING_S, 0)
    assert time.step_s == pytest.approx(SENDING_S + 3 * COMPUTING_S + 2 * hidden, rel=0.01)


def test_a_wait_may_leave_the_last_collective_going_on() -> None:
    two = [op(moved=8), collective("all_gather"), collective("reduce_scatter")]
    assert on_eight(*two, wait(1)).waited_s == pytest.approx(SENDING_S, rel=0.01)
    assert on_eight(*two, wait(0)).waited_s == pytest.approx(2 * SENDING_S, rel=0.01)


def test_pcie_is_slower_than_nvlink() -> None:
    pcie = catalog.find("a100-pcie-80gb").model
    ops = [op(moved=8), collective("all_reduce"), wait()]
    assert on_eight(*ops, on=pcie).step_s > 5 * on_eight(*ops).step_s


def test_gpus_that_nobody_knows_the_link_of_have_no_time() -> None:
    ops = [op(moved=8), collective("all_reduce"), wait()]
    assert estimate(ops, P40, links=links_among(P40, 2)) is None
    assert estimate(ops, A100, links=links_among(A100, 16)) is None
    assert estimate(ops, A100, links=links_among(A100, 16, 16)) is not None
    assert estimate(ops, A100, links=links_among(A100, 8, 4)) is None


def count_of(name: str, ops: list[Op], num_micro_steps: int) -> int:
    work = work_of(ops)
    return sum(
        repeats * sum(work.kernels[number].name == name for number in numbers)
        for numbers, repeats in parts_of_work(work, num_micro_steps)
    )


def test_with_ddp_more_micro_steps_send_nothing_more() -> None:
    def micro_step(*sent: Op) -> list[Op]:
        return [op(flops=TERA), op(flops=TERA, phase="backward"), *sent]

    ops = [*micro_step(), *micro_step(collective("all_reduce"), wait()), op("add_", phase="step")]
    assert count_of("all_reduce", ops, 5) == 1
    assert count_of("mm", ops, 5) == 10


def test_with_fsdp_every_micro_step_sends() -> None:
    micro_step = [collective("all_gather", phase="forward"), op(), op(phase="backward")]
    assert count_of("all_gather", [*micro_step, *micro_step], 5) == 5


@given(steps, models)
def test_a_step_with_more_micro_steps_takes_what_it_takes_written_out(
    ops: list[Op], model: GpuModel
) -> None:
    micro_step = [replace(each, phase="forward") for each in ops]
    micro_step += [replace(each, phase="backward") for each in ops]
    told = estimate([*micro_step, *micro_step], model, num_micro_steps=5)
    written_out = estimate(micro_step * 5, model)
    assert (told is None) == (written_out is None)
    if told is not None and written_out is not None:
        assert told.step_s == pytest.approx(written_out.step_s)
        assert told.bound_by == written_out.bound_by


@given(steps, models)
def test_the_clocks_are_those_that_run_op_by_op(ops: list[Op], model: GpuModel) -> None:
    """The rule, simulated by hand: what the host issues, the GPU begins when it is free."""
    time = estimate(ops, model)
    if time is None:
        return
    priced = Prices(Rates(model, "fp32")).of(ops)
    assert priced is not None
    host = gpu = 0.0
    for each, kernel_s, host_s in zip(
        ops, priced.seconds(sizes_of(ops)), priced.host_s, strict=True
    ):
        host += host_s
        gpu = max(gpu, host) + kernel_s
        if lane_of(each.name, 0).is_waited_for:
            host = gpu
    assert time.step_s == pytest.approx(gpu)
