"""What a step computes, how it is trained, a GPU -> its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomph.predicting.rates import MatmulPrecision
    from oomph.predicting.speed import StepTime
    from oomph.predicting.work import Work
    from oomph.records.catalog import GpuModel
    from oomph.records.trace import Op
    from oomph.records.workload import Variant


def step_time(work: Sequence[Op] | Work, variant: Variant, model: GpuModel) -> StepTime | None:
    from oomph.predicting import speed

    precision: MatmulPrecision = "tf32" if variant.precision == "tf32" else "fp32"
    return speed.estimate(
        work,
        model,
        matmul_precision=precision,
        num_gpus=variant.num_gpus,
        num_micro_steps=variant.accumulation,
    )
