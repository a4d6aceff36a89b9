"""A prediction with its trace, and a measurement -> one line of a verification."""

from __future__ import annotations

from oomph.errors import OomphError
from oomph.predicting.reductions import sized_on
from oomph.records.prediction import Prediction
from oomph.records.trace import Trace
from oomph.records.verification import Measurement, Predicted, Settings, Verified
from oomph.records.workload import Variant
from oomph.sensing.target import Target
from oomph.tricks.trick import to_put_on
from oomph.verifying.sequences import compare


def predicted_of(prediction: Prediction, trace: Trace, target: Target) -> Predicted:
    """Return the figures of a prediction with what is needed to judge each of them."""
    card = target.with_torch(trace.torch_version).card
    has_convolutions = bool(trace.convolutions) and not card.is_emulated
    outside = card.outside(has_convolutions=has_convolutions)
    return Predicted(
        allocated_bytes=prediction.allocated_bytes,
        reserved_bytes=prediction.reserved_bytes,
        device_bytes=prediction.device_bytes,
        low_bytes=prediction.low_bytes,
        high_bytes=prediction.high_bytes,
        outside_low_bytes=outside.low_bytes,
        outside_high_bytes=outside.high_bytes,
        step_s=prediction.step_s,
        step_low_s=prediction.step_low_s,
        step_high_s=prediction.step_high_s,
        fits=prediction.fits,
        doubt=prediction.doubt,
    )


def settings_of(variant: Variant) -> Settings:
    return Settings(
        micro_batch=variant.micro_batch,
        accumulation=variant.accumulation,
        precision=variant.precision,
        tricks=tuple(trick.name for trick in to_put_on(variant)),
    )


def verified_of(
    name: str,
    foreseen: tuple[Prediction, Trace],
    target: Target,
    measurement: Measurement | OomphError,
) -> Verified:
    """Compare a prediction with a measurement, or with the error that prevented it."""
    prediction, trace = foreseen
    predicted = predicted_of(prediction, trace, target)
    if isinstance(measurement, OomphError):
        return Verified(
            name=name,
            settings=settings_of(prediction.variant),
            predicted=predicted,
            measured=None,
            sequence=None,
            problem=f"not trained: {measurement.in_one_line()}",
            assumed=prediction.notes,
        )
    measured, recorded = measurement.measured, measurement.recorded
    trace = sized_on(trace, target.with_torch(trace.torch_version).card.multiprocessors)
    # What ran out stopped somewhere in a step; what was cut off began somewhere.
    is_comparable = recorded.is_whole and not measured.ran_out
    return Verified(
        name=name,
        settings=settings_of(prediction.variant),
        predicted=predicted,
        measured=measured,
        sequence=compare(trace, recorded) if is_comparable else None,
        assumed=prediction.notes,
    )
