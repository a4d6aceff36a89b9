"""A GPU of this machine -> Calibration: how much memory CUDA takes on it, measured from outside.

A child process starts CUDA stage by stage, and NVML is read between the stages, so this process
never has a CUDA context. If the driver reports memory per process, the child's figure is used.
If not (WSL, some containers), the memory in use before is subtracted; this is refused if anybody
else is on the GPU or the memory in use has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oomph.errors import Unreadable
from oomph.predicting import overhead
from oomph.predicting.rates import best_rates, with_measured_rates
from oomph.records.gpu_model import (
    Assumed,
    Calibrated,
    Calibration,
    GpuModel,
    MeasuredBy,
    from_jsonable,
)
from oomph.records.machine import Device
from oomph.records.stored import SCHEMA, as_json
from oomph.sensing.catalog import find_by_nvml_name
from oomph.sensing.devices import read_machine
from oomph.sensing.held import Held, held, own_pid
from oomph.sensing.mapping import only_visible
from oomph.store import replace_file
from oomph.units import MIB, format_bytes

# ---- run cuda_probe.py in a child that sees only one GPU, stage by stage ----

# The child finds the package where this process found it. The working directory, which Python
# would search first, is not searched: it is not ours.
_START = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]];"
    " from oomph.sensing.cuda_probe import main; main()"
)


class CudaChild:
    """Run cuda_probe.py in a child that sees one GPU."""

    def __init__(self, uuid: str) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit
        self._child = subprocess.Popen(
            [sys.executable, "-c", _START, str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
        )
        self.pid = self._child.pid
        self._is_first = True

    def __enter__(self) -> CudaChild:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._child.kill()
        self._child.communicate()  # closing the child's input ends it
        self._complaints.close()

    def next(self) -> dict[str, Any]:
        """Start the child's next stage, and return what torch reports about it."""
        assert self._child.stdin is not None  # noqa: S101 - both are pipes
        assert self._child.stdout is not None  # noqa: S101
        if not self._is_first:
            with contextlib.suppress(BrokenPipeError):  # the child has died; reported below
                self._child.stdin.write("\n")
                self._child.stdin.flush()
        self._is_first = False
        line = self._child.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" not in answer:
            return answer
        if answer["error"] == "no torch":
            raise Unreadable(
                "torch is not installed, and it is torch's use of CUDA that is measured",
                attempt="pip install torch, in the build for your driver",
            )
        raise Unreadable(
            "CUDA could not be started through torch",
            because=answer["error"],
            attempt="python -c 'import torch; torch.ones(1).cuda()', which says more",
        )

    def _last_words(self) -> str:
        status = self._child.wait()
        self._complaints.seek(0)
        words = self._complaints.read()[-300:].decode("utf-8", "replace").split()
        return f"its process ended with {status}: {' '.join(words)}"


# What a driver allocates and frees by itself while processes come and go. Judgement.
_STILL_BYTES = 16 * MIB
_SETTLES_S, _LOOK_EVERY_S = 2.0, 0.1  # a driver frees memory soon after the process has ended


def kinds_here() -> tuple[tuple[Device, ...], str]:
    """Return one visible GPU per name (a free one if possible), and the driver version."""
    machine = only_visible(read_machine())
    readable = [gpu for gpu in machine.gpus if gpu.uuid and gpu.name]
    if not readable:
        problems = filter(None, (machine.problem, *(gpu.problem for gpu in machine.gpus)))
        raise Unreadable("; ".join(problems) or "there is no GPU that can be read")
    kinds: dict[str | None, Device] = {}
    for gpu in sorted(readable, key=lambda gpu: gpu.is_free is False):
        kinds.setdefault(gpu.name, gpu)
    return tuple(kinds.values()), machine.driver_version or "unknown"


def measure(gpu: Device, driver_version: str, *, with_rates: bool = True) -> Calibration:
    """Start CUDA on one GPU in a child, and return how much memory it took. Raises Unreadable."""
    uuid = str(gpu.uuid)
    with CudaChild(uuid) as probe:
        started = _checked(probe.next())
        before = held(uuid)
        bare, at_bare = probe.next(), held(uuid)
        loaded, at_loaded = probe.next(), held(uuid)
        own = own_pid(before, at_loaded, probe.pid)
        has_neighbours = bool(before.others(own))
        rates = probe.next() if with_rates and not has_neighbours else {}
    taken = [seen.by(own) for seen in (at_bare, at_loaded)]
    measured_by: MeasuredBy = "process"
    if None in taken:
        _check_nobody_moved(uuid, gpu, before, own)
        measured_by = "difference"
        taken = [seen.used_bytes - before.used_bytes for seen in (at_bare, at_loaded)]
    return Calibration(
        gpu_name=str(gpu.name),
        driver_version=driver_version,
        torch_version=started["torch_version"],
        cuda_version=started["cuda_version"],
        context_bytes=_beside_torch(taken[0], bare, gpu),
        context_with_libraries_bytes=_beside_torch(taken[1], loaded, gpu),
        total_bytes=bare["total_bytes"],
        matmul_flops=rates.get("matmul_flops", {}),
        bandwidth_bytes_per_s=rates.get("bandwidth_bytes_per_s"),
        measured_by=measured_by,
        measured_at=time.time(),
    )


def _checked(started: dict[str, Any]) -> dict[str, Any]:
    version = started["torch_version"]
    if started["cuda_version"] is None:
        raise Unreadable(
            f"torch {version} cannot use a GPU",
            because="it was built without CUDA",
            attempt="pip install torch, in the build for your driver",
        )
    if not started["is_available"]:
        raise Unreadable(
            f"torch {version} finds no GPU, though the driver has one",
            because=f"it was built for CUDA {started['cuda_version']}, or may not open the device",
            attempt="python -c 'import torch; torch.ones(1).cuda()', which says more",
        )
    return started


def _beside_torch(taken_bytes: int | None, stage: Mapping[str, Any], gpu: Device) -> int:
    context_bytes = (taken_bytes or 0) - int(stage["reserved_bytes"])
    if context_bytes <= 0:
        raise Unreadable(
            f"what CUDA takes on {gpu.name} cannot be read",
            because=f"the driver says {format_bytes(taken_bytes or 0)}, less than torch holds",
            attempt="oomph gpus, to see what the driver reports",
        )
    return context_bytes


# ---- when the driver does not say which process holds what ----


def _check_nobody_moved(uuid: str, gpu: Device, before: Held, own: int | None) -> None:
    """Refuse a difference that includes other processes. Call it after the child has ended."""
    attempt = "again when nobody else is on it: oomph gpus --free lists free GPUs"
    if before.others(own):
        raise Unreadable(
            f"what CUDA takes on {gpu.name} cannot be separated from what others take",
            because=f"{len(before.others(own))} other processes are on it, and the driver does"
            " not report what each one holds",
            attempt=attempt,
        )
    after = _settled(uuid, before)
    if abs(after.used_bytes - before.used_bytes) > _STILL_BYTES or after.others(own):
        raise Unreadable(
            f"somebody else's memory on {gpu.name} moved while it was measured",
            because=f"{format_bytes(before.used_bytes)} were taken before and"
            f" {format_bytes(after.used_bytes)} after, and the driver does not report by whom",
            attempt=attempt,
        )


def _settled(uuid: str, before: Held) -> Held:
    """Return the GPU once the child's memory is free again, or after a timeout."""
    until = time.monotonic() + _SETTLES_S
    after = held(uuid)
    while after.used_bytes - before.used_bytes > _STILL_BYTES and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
        after = held(uuid)
    return after


# ---- the file of calibrations: $XDG_DATA_HOME/oomph/calibration.json ----
# One entry per GPU, driver, torch and CUDA version; measuring again replaces it. Several machines
# can share a home directory: a figure is used only for the combination it was measured with.


def path() -> Path:
    """Return the path of the calibration file."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "oomph" / "calibration.json"


def read_all() -> tuple[Calibration, ...]:
    """Read all calibrations, the newest last. Raises Unreadable."""
    try:
        stored = json.loads(path().read_text("utf-8"))
        if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
            raise ValueError(f"it is not of schema {SCHEMA}, which this oomph reads")
        found = [from_jsonable(entry) for entry in stored["calibrations"]]
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(
            f"the calibrations in {path()} cannot be read",
            because=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            attempt="oomph calibrate --forget, then oomph calibrate",
        ) from error
    return tuple(sorted(found, key=lambda calibration: calibration.measured_at))


def save(calibration: Calibration) -> None:
    """Write a calibration, replacing an earlier one of the same GPU, driver, torch and CUDA."""
    others = tuple(each for each in read_all() if each.key != calibration.key)
    path().parent.mkdir(parents=True, exist_ok=True)
    replace_file(path(), as_json({"calibrations": (*others, calibration)}) + "\n")


def forget() -> bool:
    """Remove the file, readable or not; return whether it existed."""
    try:
        path().unlink()
    except FileNotFoundError:
        return False
    return True


# ---- measured figures next to the ones oomph assumes without a calibration ----


def beside_assumed(calibration: Calibration) -> Calibrated:
    """Pair a calibration with the figures oomph would assume without it."""
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
    """Return the newest calibration of this GPU with this torch, and notes about it."""
    try:
        of_gpu = [
            each
            for each in read_all()
            if find_by_nvml_name(each.gpu_name, each.total_bytes) == model
        ]
    except Unreadable as error:
        return None, [error.in_one_line()]
    if not of_gpu:
        return None, []
    of_both = [each for each in of_gpu if each.torch_version == torch_version]
    if not of_both:
        last = of_gpu[-1].torch_version
        said = f"the calibration of this GPU is of torch {last}, and this is torch {torch_version}"
        return None, [f"{said}: it is not used; run oomph calibrate again"]
    found = of_both[-1]
    date = time.strftime("%Y-%m-%d", time.localtime(found.measured_at))
    return found, [
        f"the figures of this GPU were measured here on {date}, with driver {found.driver_version}"
    ]


def with_rates(model: GpuModel, measured: Calibration | None) -> GpuModel:
    """Return the model with the measured rates, if there are any."""
    if measured is None:
        return model
    return with_measured_rates(model, measured.matmul_flops, measured.bandwidth_bytes_per_s)
