"""The GPU that a question is about -> its figures, and what CUDA leaves of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomph.predicting.assembly import Card
    from oomph.predicting.overhead import Interval
    from oomph.records.calibration import Calibration
    from oomph.records.catalog import GpuModel
    from oomph.records.prediction import StepFrom

# Ways to train on a GPU of which only the memory is known are compared at the rates of this one.
_REFERENCE = "a100-40gb"
# The name of the GPU of oomph.emulated_gpu: all of its memory is torch's.
EMULATED = "emulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU by name, by its memory, or both."""

    name: str
    model: GpuModel
    memory_bytes: int | None  # where it is given apart
    assumed: str | None  # what its name left open
    taken_bytes: int = 0  # of a GPU that is here: what others hold of it now
    is_emulated: bool = False  # without a CUDA context

    @property
    def capability(self) -> tuple[int, int]:
        return self.model.compute_capability or (8, 0)

    def with_torch(self, torch_version: str) -> Ready:
        """The same with what was measured here of it, where something was."""
        from oomph.verbs.measurements import calibration_of, with_rates

        measured, told = calibration_of(self.model, torch_version)
        return Ready(
            model=with_rates(self.model, measured),
            card=self._card(torch_version, measured),
            notes=(*self._assumptions(), *told),
            has_measured_rates=bool(measured and measured.matmul_flops),
        )

    def _assumptions(self) -> tuple[str, ...]:
        is_said = self.assumed and (self.memory_bytes is None or self.taken_bytes)
        return (self.assumed,) if self.assumed and is_said else ()

    def _card(self, torch_version: str, measured: Calibration | None) -> Card:
        from oomph.predicting.assembly import Card
        from oomph.predicting.overhead import NOTHING, context, cudnn, exactly, usable_bytes

        usable = usable_bytes(self.model)
        if measured is not None:
            usable = exactly(measured.total_bytes, "measured on this machine")
        if self.memory_bytes is not None:
            usable = exactly(self.memory_bytes, "as given")
        if self.taken_bytes:
            usable = _without(usable, self.taken_bytes)
        taken_bytes = measured.context_with_libraries_bytes if measured else None
        return Card(
            name=self.name,
            usable=usable,
            context=NOTHING
            if self.is_emulated
            else context(self.model, torch_version, measured_bytes=taken_bytes),
            # A measurement has run a convolution: cuDNN's kernels are in it.
            cudnn=NOTHING if measured or self.is_emulated else cudnn(self.model, torch_version),
            has_fast_tf32=self.model.has_fast_tf32,
            is_emulated=self.is_emulated,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """All that is known of a GPU for one version of torch."""

    model: GpuModel
    card: Card
    notes: tuple[str, ...]
    has_measured_rates: bool

    @property
    def step_from(self) -> StepFrom:
        """Where the time of a step comes from."""
        return "calibration" if self.has_measured_rates else "datasheet"

    @property
    def rated(self) -> GpuModel:
        """The model, with rates to compare by where its own are not known."""
        from oomph.verbs.readings import find_gpu

        is_rated = self.model.memory_bandwidth_bytes_per_s and self.model.fp32_flops
        return self.model if is_rated else find_gpu(_REFERENCE).model

    def filled_to(self, ratio: float) -> Card:
        """The card of which only a share may be used."""
        return replace(self.card, usable=_share(self.card.usable, ratio))


def _share(usable: Interval, ratio: float) -> Interval:
    if ratio >= 1:
        return usable
    low, likely, high = (
        int(size * ratio) for size in (usable.low_bytes, usable.likely_bytes, usable.high_bytes)
    )
    return replace(
        usable,
        low_bytes=low,
        likely_bytes=likely,
        high_bytes=high,
        because=f"{usable.because}, of which {ratio:.0%} may be used",
    )


def _without(usable: Interval, taken_bytes: int) -> Interval:
    from oomph.units import format_bytes

    low, likely, high = (
        max(size - taken_bytes, 0)
        for size in (usable.low_bytes, usable.likely_bytes, usable.high_bytes)
    )
    return replace(
        usable,
        low_bytes=low,
        likely_bytes=likely,
        high_bytes=high,
        because=f"{usable.because}, of which {format_bytes(taken_bytes)} is taken now",
    )


def find_target(gpu: str | None, gpu_memory: int | str | None) -> Target:
    """The GPU that was asked for. Raises UsageError."""
    from oomph.errors import UsageError
    from oomph.units import parse_bytes
    from oomph.verbs.readings import find_gpu

    if gpu is None and gpu_memory is None:
        return _gpu_here()
    memory_bytes = parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
    if memory_bytes is not None and memory_bytes < 1:
        raise UsageError(f"a GPU of {gpu_memory} has no memory", attempt="--gpu-memory 12GiB")
    if gpu == EMULATED:
        return _emulated(memory_bytes)
    found = None if gpu is None else find_gpu(gpu)
    return Target(
        name=gpu or f"a GPU of {gpu_memory}",
        model=_unnamed_gpu() if found is None else found.model,
        memory_bytes=memory_bytes,
        assumed=None if found is None else found.assumed,
    )


def _emulated(memory_bytes: int | None) -> Target:
    """What oomph.emulated_gpu and `oomph run --emulate` give. Raises UsageError."""
    from oomph.errors import UsageError

    if memory_bytes is None:
        raise UsageError(
            "an emulated GPU has no memory of its own",
            attempt="--gpu emulated --gpu-memory 2GiB, as in oomph run --emulate 2GiB",
        )
    return Target(
        name="the emulated GPU",
        model=_unnamed_gpu(),
        memory_bytes=memory_bytes,
        assumed=None,
        is_emulated=True,
    )


def _gpu_here() -> Target:
    """The GPU of this machine that is emptiest now. Raises UsageError where there is none."""
    from oomph.errors import UsageError
    from oomph.sensing.catalog import find_by_nvml_name
    from oomph.units import format_bytes
    from oomph.verbs.readings import gpus

    machine = gpus(visible=True)
    known = [gpu for gpu in machine.gpus if gpu.total_bytes is not None]
    if not known:
        raise UsageError(
            "no GPU is named",
            because=machine.problem or "this machine shows none",
            attempt="--gpu v100-16gb, or --gpu-memory 12GiB",
        )
    device = min(known, key=lambda gpu: gpu.used_bytes or 0)
    name = device.name or "a GPU without a name"
    model = find_by_nvml_name(name, device.total_bytes)
    taken = device.used_bytes or 0
    return Target(
        name=f"GPU {device.index} of this machine ({name})",
        model=model or _unnamed_gpu(),
        memory_bytes=None if model is not None else device.total_bytes,
        assumed=f"GPU {device.index} is the emptiest here: {format_bytes(taken)} of it are taken"
        " now, which is not planned with",
        taken_bytes=taken,
    )


def _unnamed_gpu() -> GpuModel:
    """A GPU of which only the memory is known."""
    from oomph.records.catalog import GpuModel

    return GpuModel(
        name="unnamed",
        title="an unnamed GPU",
        architecture="unknown",
        memory_bytes=0,
        measured_bytes=None,
        memory_bandwidth_bytes_per_s=None,
        fp32_flops=None,
        tf32_flops=None,
        fp16_flops=None,
        bf16_flops=None,
        matmul_bf16_flops=None,
        num_sms=None,
        compute_capability=None,
        nvlink_bytes_per_s=None,
        pcie=None,
        sources={},
    )
