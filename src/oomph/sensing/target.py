"""The name or memory of a GPU -> its figures, and the memory CUDA leaves free on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from oomph.errors import UsageError, without_attempt
from oomph.predicting.overhead import NOTHING, Interval, context, cudnn, exactly, usable_bytes
from oomph.predicting.prediction import Card
from oomph.predicting.reductions import NONE, Multiprocessors
from oomph.records.generation import (
    DEFAULT_CAPABILITY,
    DEFAULT_GPU,
    DEFAULT_NUM_SMS,
    generation_of,
)
from oomph.records.gpu_model import Calibration, GpuModel, network_of
from oomph.records.machine import Device, Machine
from oomph.records.prediction import StepFrom
from oomph.sensing.calibration import calibration_of, with_rates
from oomph.sensing.catalog import find, find_by_nvml_name
from oomph.sensing.devices import read_machine
from oomph.sensing.host import free_memory_bytes
from oomph.sensing.mapping import only_visible
from oomph.units import MIB, TIB, format_bytes, parse_bytes

# The name of the GPU of oomph.emulated_gpu: torch can use all of its memory.
EMULATED = "emulated"
_MOST_TIB = 100  # of GPU memory; judgement: the largest GPU of 2025 has 288 GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU by name, by its memory, or both."""

    name: str
    model: GpuModel
    memory_bytes: int | None  # if given separately
    assumed: str | None  # what the name left open
    taken_bytes: int = 0  # for a GPU of this machine: what others hold on it now
    is_emulated: bool = False  # without a CUDA context
    host_bytes: int | None = None  # memory of the host that is free for training; None: unknown

    @property
    def capability(self) -> tuple[int, int]:
        return self.model.compute_capability or DEFAULT_CAPABILITY

    @property
    def multiprocessors(self) -> Multiprocessors:
        return multiprocessors_of(self.model)

    def joined_by(self, link: str | None) -> Target:
        """Return the GPU in machines that this network joins. Raises UsageError."""
        return replace(self, model=replace(self.model, network=network_of(link)))

    def with_torch(self, torch_version: str) -> Ready:
        """Add the figures for one torch version, including those `oomph calibrate` measured."""
        measured, notes = calibration_of(self.model, torch_version)
        return Ready(
            model=with_rates(self.model, measured),
            card=self._card(torch_version, measured),
            notes=(*self._assumptions(), *notes),
            has_measured_rates=bool(measured and measured.matmul_flops),
        )

    def _assumptions(self) -> tuple[str, ...]:
        is_said = self.assumed and (self.memory_bytes is None or self.taken_bytes)
        return (self.assumed,) if self.assumed and is_said else ()

    def _card(self, torch_version: str, measured: Calibration | None) -> Card:
        context_bytes = measured.context_with_libraries_bytes if measured else None
        return Card(
            name=self.name,
            usable=self._usable(measured),
            context=NOTHING
            if self.is_emulated
            else context(self.model, torch_version, measured_bytes=context_bytes),
            # The measurement ran a convolution, so it includes cuDNN's kernels.
            cudnn=NOTHING if measured or self.is_emulated else cudnn(self.model, torch_version),
            tf32=self.model.tf32,
            multiprocessors=NONE if self.is_emulated else self.multiprocessors,
            is_emulated=self.is_emulated,
        )

    def _usable(self, measured: Calibration | None) -> Interval:
        if self.memory_bytes is not None:
            usable = exactly(self.memory_bytes, "as given")
        elif measured is not None:
            usable = exactly(measured.total_bytes, "measured on this machine")
        else:
            usable = usable_bytes(self.model)
        taken = self.taken_bytes
        if not taken:
            return usable
        because = f"of which {format_bytes(taken)} is taken now"
        return _changed(usable, lambda size: max(size - taken, 0), because)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Everything known about a GPU for one version of torch."""

    model: GpuModel
    card: Card
    notes: tuple[str, ...]
    has_measured_rates: bool

    @property
    def step_from(self) -> StepFrom:
        """Return the source of the step time."""
        return "calibration" if self.has_measured_rates else "datasheet"

    @property
    def rated(self) -> GpuModel:
        """Return the model, or a common GPU to compare variants by if its rates are unknown."""
        is_rated = self.model.memory_bandwidth_bytes_per_s and self.model.fp32_flops
        return self.model if is_rated else find(DEFAULT_GPU).model

    def filled_to(self, ratio: float) -> Card:
        """Return the card with only this share of its memory usable."""
        if ratio >= 1:
            return self.card
        because = f"of which {ratio:.0%} may be used"
        usable = _changed(self.card.usable, lambda size: int(size * ratio), because)
        return replace(self.card, usable=usable)


def multiprocessors_of(model: GpuModel) -> Multiprocessors:
    """Return how many blocks of threads a GPU runs at once; a common GPU's if unknown."""
    generation = generation_of(model.compute_capability or DEFAULT_CAPABILITY)
    return Multiprocessors(model.num_sms or DEFAULT_NUM_SMS, generation.threads_per_sm)


def _changed(usable: Interval, change: Callable[[int], int], because: str) -> Interval:
    low, likely, high = map(change, (usable.low_bytes, usable.likely_bytes, usable.high_bytes))
    return Interval(low, likely, high, f"{usable.because}, {because}")


def find_target(
    gpu: str | None, gpu_memory: int | str | None, host_memory: int | str | None = None
) -> Target:
    """Return the requested GPU, with the memory of its host if given. Raises UsageError."""
    found = _find_gpu(gpu, gpu_memory)
    if host_memory is None:
        return found
    host_bytes = parse_bytes(host_memory) if isinstance(host_memory, str) else host_memory
    if host_bytes < MIB:
        raise UsageError(
            f"no host has {format_bytes(host_bytes)} of memory",
            because="a size without a unit counts as bytes",
            attempt="--host-memory 64GiB",
        )
    return replace(found, host_bytes=host_bytes)


def _find_gpu(gpu: str | None, gpu_memory: int | str | None) -> Target:
    if gpu is None and gpu_memory is None:
        return _gpu_here()
    memory_bytes = parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
    if memory_bytes is not None and not MIB <= memory_bytes <= _MOST_TIB * TIB:
        raise UsageError(
            f"no GPU has {format_bytes(memory_bytes)} of memory",
            because="a size without a unit counts as bytes" if memory_bytes < MIB else None,
            attempt="--gpu-memory 12GiB",
        )
    if gpu == EMULATED:
        return _emulated(memory_bytes)
    found = None if gpu is None else find(gpu)
    return Target(
        name=gpu or f"a GPU of {gpu_memory}",
        model=_unnamed_gpu() if found is None else found.model,
        memory_bytes=memory_bytes,
        assumed=None if found is None else found.assumed,
    )


def _emulated(memory_bytes: int | None) -> Target:
    """Return the GPU of oomph.emulated_gpu and `oomph run --emulate`. Raises UsageError."""
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


def freest(machine: Machine) -> Device | None:
    """Return the GPU with the most free memory, or None if the memory of none is known."""
    known = [gpu for gpu in machine.gpus if gpu.total_bytes is not None]
    return max(known, key=lambda gpu: (gpu.total_bytes or 0) - (gpu.used_bytes or 0), default=None)


def _gpu_here() -> Target:
    """Return the GPU of this machine with the most free memory. Raises UsageError without a GPU."""
    machine = only_visible(read_machine())
    device = freest(machine)
    if device is None:
        raise UsageError(
            "no GPU is named",
            because=without_attempt(machine.problem or "this machine shows none"),
            attempt="--gpu v100-16gb, or --gpu-memory 12GiB",
        )
    return target_of(device)


def target_of(device: Device) -> Target:
    """Return a GPU of this machine as what a prediction is for."""
    name = device.name or "a GPU without a name"
    model = find_by_nvml_name(name, device.total_bytes)
    taken = device.used_bytes or 0
    return Target(
        name=f"GPU {device.index} of this machine ({name})",
        model=model or _unnamed_gpu(),
        memory_bytes=None if model is not None else device.total_bytes,
        assumed=f"GPU {device.index} has the most free memory here; the {format_bytes(taken)} in"
        " use on it now are left out of the plan",
        taken_bytes=taken,
        host_bytes=free_memory_bytes(),
    )


def _unnamed_gpu() -> GpuModel:
    """Return a GPU for which only the memory is known."""
    return GpuModel(
        name="unnamed", title="an unnamed GPU", architecture="unknown", memory_bytes=0, sources={}
    )
