"""The verb calibrate: measure how much memory CUDA takes here, for `predict`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomph.records.gpu_model import Calibrated


def calibrate(
    *, memory_only: bool = False, say: Callable[[str], None] | None = None
) -> tuple[Calibrated, ...]:
    """Measure how much memory CUDA takes on each kind of GPU here, and store it for `predict`.

    CUDA runs in a child process, never in this one. `say` is called with the GPU being measured.
    """
    from oomph.sensing import calibration

    calibration.read_all()  # raises on an unreadable file before anything is measured
    kinds, driver_version = calibration.kinds_here()
    found = []
    for gpu in kinds:
        if say:
            say(f"measuring on {gpu.name}")
        measured = calibration.measure(gpu, driver_version, with_rates=not memory_only)
        calibration.save(measured)
        found.append(calibration.beside_assumed(measured))
    return tuple(found)


def calibrations() -> tuple[Calibrated, ...]:
    """Return the stored calibrations, newest last. Raises Unreadable."""
    from oomph.sensing.calibration import beside_assumed, read_all

    return tuple(map(beside_assumed, read_all()))


def forget_calibrations() -> bool:
    """Remove all stored calibrations; return whether there were any."""
    from oomph.sensing.calibration import forget

    return forget()
