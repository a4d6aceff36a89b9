"""What `oomph plan` prints: the answer, the table with its legend, and what consent would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning.plans import plan_of, prediction_of, variant_of

from oomph.planning.ranking import STABILITIES, tricks_of
from oomph.records.plan import Offer, Plans, Shortfall
from oomph.records.workload import Variant
from oomph.showing.plan import print_plans
from oomph.units import GIB


def plans_of(**changes: object) -> Plans:
    """Two plans: bf16 on one GPU, and twice as fast on two with offloaded activations."""
    best = replace(plan_of(precision="bf16"), relative_time=2.0, stability=STABILITIES[1])
    best = replace(best, tricks=tricks_of(best.variant))
    split = replace(plan_of(num_gpus=2, accumulation=8), relative_time=1.0, recommended=False)
    split = replace(split, tricks=tricks_of(split.variant))
    offloading = replace(split.prediction, host_bytes=3 * GIB, step_s=0.25)
    plain = replace(best, prediction=replace(best.prediction, host_bytes=0))
    plans = Plans(
        workload="train.py:workload",
        gpu="v100-16gb",
        batch_size=64,
        capacity_bytes=16 * GIB,
        fits_as_is="no",
        as_is=prediction_of(Variant(micro_batch=64)),
        plans=(plain, replace(split, prediction=offloading)),
        rejected=(),
        shortfall=None,
        caveats=(),
        num_candidates=2,
    )
    return replace(plans, **changes)  # type: ignore[arg-type]


OFFER = Offer(
    allow="qlora",
    price="only small adapters are trained",
    variant=variant_of(adapters="qlora", precision="bf16"),
    fits="yes",
    device_bytes=8 * GIB,
    high_bytes=9 * GIB,
    missing_bytes=0,
    host_bytes=0,
    step_s=2.6,
    time_ratio=0.31,
    smallest_gpu=None,
)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("wide")
def test_the_recommended_plan_is_the_1_00_x_of_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_plans(plans_of())
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if "GiB  " in line and " x" in line]
    assert [row.split()[-2] for row in rows] == ["1.00", "0.50"]
    assert "time: the recommended plan is 1.00 x." in said
    assert "With 2 GPUs (ddp): a step takes 250 ms, 2.0 x as fast as on 1." in said


@pytest.mark.usefixtures("wide")
def test_the_legend_explains_the_columns_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    print_plans(plans_of())
    said = capsys.readouterr().out
    assert "rounding = the same up to rounding" in said
    assert "error bar" in said
    assert "host: memory beside the GPU" in said
    alone = plans_of()
    print_plans(replace(alone, plans=alone.plans[:1]))
    said = capsys.readouterr().out
    assert "host: memory" not in said
    assert "GPUs" not in said


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_tricks_stay_visible_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_plans(plans_of())
    lines = capsys.readouterr().out.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("->"))
    assert "bf16" in lines[place] + lines[place + 1]
    assert all(len(line) <= columns for line in lines)


@pytest.mark.usefixtures("wide")
def test_an_offer_has_its_flag_its_figures_and_its_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_plans(plans_of(offers=(OFFER,)))
    said = capsys.readouterr().out
    assert "--allow qlora: 8.0 GiB of 16.0 GiB, 2.6 s a step, 0.31 x the time" in said
    assert "only small adapters are trained (micro-batch 4 x 16, bf16, qlora)" in said


@pytest.mark.usefixtures("wide")
def test_where_nothing_fits_the_nearest_is_named_with_and_without_consent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = Shortfall(
        missing_bytes=GIB,
        largest_part="parameters 9.0 GiB",
        smallest_gpu="rtx3090",
        num_gpus=2,
        variant=variant_of(checkpointing="blocks"),
        device_bytes=17 * GIB,
    )
    too_much = replace(
        OFFER, fits="no", missing_bytes=GIB // 2, smallest_gpu="a5000", time_ratio=None
    )
    print_plans(plans_of(plans=(), shortfall=short, offers=(too_much,)))
    said = capsys.readouterr().out
    closest = "micro-batch 4 x 16, recompute all blocks: 17.0 GiB of 16.0 GiB"
    assert f"Nothing is certain to fit. Closest: {closest}." in said
    assert "It needs 1.0 GiB more" in said
    assert "The smallest GPU for it: rtx3090." in said
    assert "--max-gpus 2" in said
    assert "tensor" not in said
    print_plans(plans_of(plans=(), shortfall=replace(short, beyond_sharding="It takes tensors.")))
    assert "It takes tensors." in capsys.readouterr().out
    assert "512.0 MiB too much; the smallest GPU for it: a5000" in said


@pytest.mark.usefixtures("wide")
def test_a_plan_that_may_not_fit_is_called_the_closest_and_not_recommended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans = plans_of()
    best = plans.plans[0]
    tight = replace(best, prediction=replace(best.prediction, fits="uncertain"))
    print_plans(replace(plans, plans=(tight,)))
    said = capsys.readouterr().out
    closest = "micro-batch 4 x 16, bf16: 12.0 GiB of 16.0 GiB, uncertain."
    assert f"Nothing is certain to fit. Closest: {closest}" in said
    assert "recommended:" not in said
