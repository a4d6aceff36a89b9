"""Measuring what CUDA takes here, and what a prediction makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomph.records.calibration import Calibrated, Calibration
    from oomph.records.catalog import GpuModel


def calibrate(
    *, memory_only: bool = False, say: Callable[[str], None] | None = None
) -> tuple[Calibrated, ...]:
    """Measure what CUDA takes on each kind of GPU here, and keep it for `predict`.

    CUDA runs in a child, never in this process. `say` is told which GPU is being measured.
    """
    from oomph.sensing import calibration, kept_calibrations

    kept_calibrations.kept()  # a file that cannot be read is said before anything is measured
    kinds, driver_version = calibration.kinds_here()
    found = []
    for gpu in kinds:
        if say:
            say(f"measuring on {gpu.name}")
        measured = calibration.measure(gpu, driver_version, with_rates=not memory_only)
        kept_calibrations.keep(measured)
        found.append(_beside_assumed(measured))
    return tuple(found)


def calibrations() -> tuple[Calibrated, ...]:
    """What is kept, the newest last. Raises Unreadable."""
    from oomph.sensing.kept_calibrations import kept

    return tuple(map(_beside_assumed, kept()))


def forget_calibrations() -> bool:
    """Remove all that is kept. Was there anything?"""
    from oomph.sensing.kept_calibrations import forget

    return forget()


def _beside_assumed(calibration: Calibration) -> Calibrated:
    from oomph.predicting import overhead
    from oomph.predicting.rates import best_rates
    from oomph.records.calibration import Assumed, Calibrated
    from oomph.sensing.catalog import find_by_nvml_name

    model = find_by_nvml_name(calibration.gpu_name, calibration.total_bytes)
    if model is None:
        return Calibrated(calibration=calibration, assumed=None)
    context = overhead.context(model, calibration.torch_version, calibration.cuda_version)
    usable = overhead.usable_bytes(model)
    matmul_flops, bandwidth = best_rates(model)
    assumed = Assumed(
        gpu=model.name,
        context_bytes=context.likely_bytes,
        context_low_bytes=context.low_bytes,
        context_high_bytes=context.high_bytes,
        total_bytes=usable.likely_bytes,
        total_low_bytes=usable.low_bytes,
        total_high_bytes=usable.high_bytes,
        matmul_flops=matmul_flops,
        bandwidth_bytes_per_s=bandwidth,
    )
    return Calibrated(calibration=calibration, assumed=assumed)


def calibration_of(model: GpuModel, torch_version: str) -> tuple[Calibration | None, list[str]]:
    """The newest kept measurement of this GPU with this torch, and what is to be said of it."""
    import time

    from oomph.errors import Unreadable
    from oomph.sensing.catalog import find_by_nvml_name
    from oomph.sensing.kept_calibrations import kept

    try:
        of_gpu = [
            each for each in kept() if find_by_nvml_name(each.gpu_name, each.total_bytes) == model
        ]
    except Unreadable as error:
        return None, [error.in_one_line()]
    if not of_gpu:
        return None, []
    of_both = [each for each in of_gpu if each.torch_version == torch_version]
    if not of_both:
        last = of_gpu[-1].torch_version
        said = f"the calibration of this GPU is of torch {last}, and this is torch {torch_version}"
        return None, [f"{said}: it is not used; oomph calibrate measures anew"]
    found = of_both[-1]
    date = time.strftime("%Y-%m-%d", time.localtime(found.measured_at))
    return found, [
        f"this GPU is taken as measured here on {date}, with driver {found.driver_version}"
    ]


def with_rates(model: GpuModel, measured: Calibration | None) -> GpuModel:
    from oomph.predicting.rates import with_measured_rates

    if measured is None:
        return model
    return with_measured_rates(model, measured.matmul_flops, measured.bandwidth_bytes_per_s)
