"""What to verify, and the GPU here -> Verification: predict, train in a child, compare, in turn."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oomph.errors import OomphError, Unreadable, UsageError, without_attempt
from oomph.planning.predictions import predict_script_by_trace, predict_workload_by_trace
from oomph.pretending.emulated_run import settings_text, size_of
from oomph.records.machine import Device
from oomph.records.prediction import Prediction
from oomph.records.script import Script
from oomph.records.trace import Trace
from oomph.records.verification import (
    Kind,
    Measurement,
    OnGpu,
    Scale,
    Site,
    Verification,
    Verified,
)
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.traces import Request
from oomph.sensing.catalog import find_by_nvml_name
from oomph.sensing.devices import read_machine
from oomph.sensing.mapping import only_visible
from oomph.sensing.target import EMULATED, Target, find_target, freest, target_of
from oomph.units import format_bytes
from oomph.verifying.children import measure_apart, measure_sandboxed
from oomph.verifying.judging import verified_of

Say = Callable[[str], None]
Foreseen = tuple[Prediction, Trace]

_EMULATE = "--emulate 16GiB, which trains on the CPU and shows what this does"
_SETTINGS = (
    "PYTORCH_ALLOC_CONF is set, and predictions assume torch's defaults: unset it, or give its"
    " expandable segments as --expandable-segments"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHere:
    """The GPU to verify on."""

    target: Target
    gpu: OnGpu
    notes: tuple[str, ...] = ()

    @property
    def scale(self) -> Scale:
        return "full" if self.gpu.emulated_bytes is None else "tiny"


def gpu_here(emulate: str | int | None) -> GpuHere:
    """Return the visible GPU with the most free memory, or an emulated one.

    Raises Unreadable without a GPU.
    """
    _check_torch()
    if emulate is not None:
        size_bytes = size_of(emulate)
        return GpuHere(
            target=find_target(EMULATED, size_bytes), gpu=OnGpu(emulated_bytes=size_bytes)
        )
    machine = only_visible(read_machine())
    parts = tuple(part for gpu in machine.gpus for part in gpu.slices or (gpu,))  # MIG
    device = freest(replace(machine, gpus=parts))
    if device is None or device.uuid is None:
        problem = machine.problem if device is None else device.problem
        raise Unreadable(
            "there is no GPU here to verify on",
            because=without_attempt(problem or "this machine shows none"),
            attempt=_EMULATE,
        )
    return GpuHere(
        target=target_of(device),
        gpu=OnGpu(uuid=device.uuid, driver_version=machine.driver_version),
        notes=tuple(_notes(device)),
    )


def _notes(device: Device) -> Iterable[str]:
    others = [each for each in device.processes or () if each.kind == "compute"]
    if others:
        held = format_bytes(device.used_bytes or 0)
        yield (
            f"{len(others)} other processes were on the GPU at the start, which had {held} in use:"
            " times may be theirs as well, and the model has less room"
        )
    if settings_text():
        yield _SETTINGS


def target_of_site(site: Site) -> Target:
    """Return the GPU that a verification was made on, as what a prediction is for."""
    if site.is_emulated:
        return find_target(EMULATED, site.total_bytes)
    model = find_by_nvml_name(site.gpu_name, site.total_bytes)
    unnamed = replace(
        find_target(None, site.total_bytes).model, compute_capability=site.compute_capability
    )
    return Target(
        name=site.gpu_name,
        model=model or replace(unnamed, num_sms=site.num_sms),
        memory_bytes=site.total_bytes,
        assumed=None,
    )


def _check_torch() -> None:
    """Check that torch is installed, without importing it, which takes seconds."""
    if importlib.util.find_spec("torch") is None:
        raise Unreadable(
            "nothing can be trained without torch",
            because="there is none beside this oomph",
            attempt="pip install torch, in the build for your driver",
        )


# ---- one workload, one script --------------------------------------------------------------------


def verify_workload(
    name: str,
    workload: Workload | tuple[Path, str],
    here: GpuHere,
    request: Request,
    *,
    expandable_segments: bool,
    say: Say,
) -> Verification:
    """Predict a workload, train it, compare. Raises what the workload raises."""
    foreseen = _foreseen(workload, here, request, say, expandable_segments=expandable_segments)
    say("training it for a few steps")
    measurement = measure_apart(workload, foreseen[0].variant, here.gpu)
    return _of_one("workload", name, foreseen, here, measurement)


def verify_script(
    name: str, script: Script, here: GpuHere, *, is_unprotected: bool, is_fresh: bool, say: Say
) -> Verification:
    """Predict a script, run it up to a few steps, compare. Raises what the script raises."""
    foreseen = predict_script_by_trace(
        script,
        here.target,
        Request(tricks=Variant(micro_batch=1)),
        has_own_precision=True,
        expandable_segments=False,
        say=say,
        is_unprotected=is_unprotected,
        is_fresh=is_fresh,
    )
    say("running the script on the GPU, up to a few steps; what it writes is thrown away")
    measurement, danger = measure_sandboxed(script, here.gpu, is_unprotected=is_unprotected)
    notes = () if danger is None else (f"not protected: {danger}",)
    return _of_one("script", name, foreseen, here, measurement, notes)


def _foreseen(
    workload: Workload | tuple[Path, str],
    here: GpuHere,
    request: Request,
    say: Say,
    *,
    expandable_segments: bool = False,
) -> Foreseen:
    return predict_workload_by_trace(
        workload,
        here.target,
        request,
        expandable_segments=expandable_segments,
        measured=None,
        say=say,
    )


def _of_one(
    kind: Kind,
    name: str,
    foreseen: Foreseen,
    here: GpuHere,
    measurement: Measurement,
    notes: Sequence[str] = (),
) -> Verification:
    return Verification(
        site=measurement.site,
        kind=kind,
        scale="full",
        verified=(verified_of(name, foreseen, here.target, measurement),),
        num_asked=1,
        notes=(*here.notes, *notes),
    )


# ---- the zoo -------------------------------------------------------------------------------------


def zoo_names(only: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the zoo's models, or those asked for. Raises UsageError."""
    from oomph.verifying.zoo import ZOO

    unknown = [name for name in only if name not in ZOO]
    if unknown:
        raise UsageError(
            f"the zoo has no {unknown[0]!r:.40}",
            because=f"its models are {', '.join(ZOO)}",
            attempt="--only gpt,resnet-channels-last",
        )
    return tuple(name for name in ZOO if not only or name in only)


def verify_zoo(here: GpuHere, names: Sequence[str], say: Say) -> Verification:
    """Verify the models in turn. Ctrl-C ends it, and what was measured is kept."""
    importlib.import_module("torch._dynamo")  # once, for all children: it takes each seconds

    verified: list[Verified] = []
    site: Site | None = None
    interrupted = threading.Event()
    with _noting_interrupts(interrupted), contextlib.suppress(KeyboardInterrupt):
        for number, name in enumerate(names, 1):
            say(f"{number} of {len(names)}: {name}")
            found, seen_at = _verify_model(name, here)
            if interrupted.is_set():  # its child was interrupted as well
                break
            site = site or seen_at
            verified.append(found)
    return Verification(
        site=site,
        kind="zoo",
        scale=here.scale,
        verified=tuple(verified),
        num_asked=len(names),
        was_interrupted=interrupted.is_set(),
        notes=here.notes,
    )


@contextlib.contextmanager
def _noting_interrupts(interrupted: threading.Event) -> Iterator[None]:
    """Note Ctrl-C before it raises: where Python runs the callbacks of a fork, it is swallowed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _verify_model(name: str, here: GpuHere) -> tuple[Verified, Site | None]:
    """Verify one model; what fails is part of the answer, except for the machine's own faults."""
    foreseen = predict_zoo_model(name, here.scale, here.target)
    if isinstance(foreseen, OomphError):
        problem = f"not rehearsed: {foreseen.in_one_line()}"
        found = Verified(
            name=name,
            settings=None,
            predicted=None,
            measured=None,
            sequence=None,
            problem=problem,
        )
        return found, None
    from oomph.verifying.zoo import ZOO

    measurement: Measurement | OomphError
    try:
        workload = ZOO[name].make(here.scale)
        measurement = measure_apart(workload, foreseen[0].variant, here.gpu)
    except Unreadable:
        raise
    except OomphError as error:
        measurement = error
    site = measurement.site if isinstance(measurement, Measurement) else None
    return verified_of(name, foreseen, here.target, measurement), site


def predict_zoo_model(name: str, scale: Scale, target: Target) -> Foreseen | OomphError:
    """Return today's prediction for a model of the zoo, or why there is none."""
    from oomph.verifying.zoo import ZOO

    workload = ZOO[name].make(scale)
    try:
        return predict_workload_by_trace(
            workload,
            target,
            ZOO[name].request(workload),
            expandable_segments=False,
            measured=None,
            say=lambda _: None,
        )
    except OomphError as error:
        return error
