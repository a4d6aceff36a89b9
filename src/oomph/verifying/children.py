"""A workload or a script -> its Measurement, from a process of its own that then ends.

A workload trains in a fork, as it is rehearsed. A script trains in the sandbox that it is rehearsed
in, with the nodes of the GPU's driver: what it writes is thrown away, and it is stopped after the
steps that are measured.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn

from oomph.errors import OomphError, Unreadable, UserCodeError
from oomph.records.script import Script
from oomph.records.stored import from_jsonable, to_jsonable
from oomph.records.verification import Measurement, OnGpu
from oomph.records.workload import Variant, Workload
from oomph.rehearsing import fault
from oomph.rehearsing.child import in_a_child, stay_on_one_thread
from oomph.rehearsing.script.sandboxed import limit_s
from oomph.rehearsing.traces import load
from oomph.sandbox.conversation import read_frame, write_frame
from oomph.sandbox.sandbox import Sandbox
from oomph.sensing.held import Held, held, own_pid

# The nodes of NVIDIA's driver: one per GPU, nvidiactl, nvidia-uvm, nvidia-caps/ for MIG; and WSL's.
_NODES = ("nvidia*", "nvidia-caps/*", "dxg")

_OTHERS = (
    "{} other processes are on this GPU and the driver does not report what each one holds, so the"
    " device's memory is not compared"
)
_HIDDEN = "the driver does not report the memory of a process, so the device's is not compared"
_DIFFERENCE = (
    "the device's memory is what the GPU had in use at the end, less what it had before: the driver"
    " does not report it per process"
)
_SHARED = "{} other processes are on this GPU: the step time may be theirs as well"


def measure_apart(
    workload: Workload | tuple[Path, str], variant: Variant, gpu: OnGpu
) -> Measurement:
    """Train a workload for a few steps in a child. Raises what it raises, or UserCodeError."""

    def work() -> Measurement:
        see_only(gpu)
        made = workload if isinstance(workload, Workload) else load(*workload)
        before = None if gpu.uuid is None else held(gpu.uuid)
        from oomph.verifying.measuring import measure_workload

        measurement = measure_workload(made, variant, gpu)
        return with_device_bytes(measurement, gpu, before, os.getpid())

    return in_a_child(work)


def measure_sandboxed(
    script: Script, gpu: OnGpu, *, is_unprotected: bool
) -> tuple[Measurement, str | None]:
    """Train a script for a few steps in a sandbox.

    Return what was measured, and what the sandbox does not protect from. Raises NoSandbox and
    what the script raises.
    """
    before = None if gpu.uuid is None else held(gpu.uuid)
    nodes = () if gpu.uuid is None else driver_nodes()
    serve = partial(_serve, script, gpu)
    with Sandbox(serve, is_unprotected=is_unprotected, devices=nodes) as sandbox:
        protection = sandbox.protection
        answer = _read(sandbox.ask(b"measure", within_s=limit_s()))
        # The process inside has a PID of its own, so the driver's list has a new entry instead.
        found = with_device_bytes(answer, gpu, before, None)
    return found, None if protection.kind == "namespaces" else protection.why


def see_only(gpu: OnGpu) -> None:
    """Let this process see one GPU. Call it before CUDA starts."""
    if gpu.uuid is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu.uuid


def driver_nodes(root: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the nodes below /dev that CUDA opens."""
    found = (path for pattern in _NODES for path in root.glob(pattern) if path.is_char_device())
    return tuple(sorted(str(path.relative_to(root)) for path in found))


# ---- what the driver says while the process is alive ---------------------------------------------


def with_device_bytes(
    measurement: Measurement, gpu: OnGpu, before: Held | None, pid: int | None
) -> Measurement:
    """Add the driver's figure of the process, moved to the moment of the allocator's peak."""
    if gpu.uuid is None or before is None:
        return measurement
    now = held(gpu.uuid)
    own = own_pid(before, now, pid)
    taken_bytes, num_others = now.by(own), len(before.others(own))
    notes: list[str] = []
    if taken_bytes is None and now.by_pid is not None and not num_others:
        taken_bytes = now.used_bytes - before.used_bytes
        notes.append(_DIFFERENCE)
    if taken_bytes is None:
        notes.append(_OTHERS.format(num_others) if num_others else _HIDDEN)
    elif num_others:
        notes.append(_SHARED.format(num_others))
    measured = measurement.measured
    device_bytes = None
    if taken_bytes is not None and measured.reserved_bytes is not None:
        device_bytes = taken_bytes - measurement.reserved_bytes + measured.reserved_bytes
    measured = replace(measured, device_bytes=device_bytes, notes=(*measured.notes, *notes))
    return replace(measurement, measured=measured)


# ---- inside the sandbox --------------------------------------------------------------------------


def _serve(script: Script, gpu: OnGpu, requests: BinaryIO, replies: BinaryIO) -> None:
    read_frame(requests)
    see_only(gpu)
    stay_on_one_thread()

    def answer(content: object) -> NoReturn:
        """Answer, and keep CUDA alive until the sandbox is closed."""
        write_frame(replies, json.dumps(to_jsonable(content)).encode())
        read_frame(requests)
        os._exit(0)

    try:
        from oomph.verifying.measuring import measure_script

        measure_script(script, gpu, lambda found: answer({"measurement": found}))
    except OomphError as error:
        found = error
    except BaseException as error:  # noqa: BLE001 - whatever the script raises is the answer
        found = fault.explained(error, "script", "running the script by itself")
    texts = {"what": found.what, "because": found.because, "attempt": found.attempt}
    answer({"error": texts, "is_of_machine": isinstance(found, Unreadable)})


def _read(content: bytes) -> Measurement:
    """Read an answer, which may be forged: it is data and nothing else."""
    try:
        answer = json.loads(content)
        if "measurement" in answer:
            return from_jsonable(Measurement, answer["measurement"])
        texts = {name: str(answer["error"][name] or "") for name in ("what", "because", "attempt")}
        kind = Unreadable if answer["is_of_machine"] else UserCodeError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserCodeError(
            "the script's process gave an answer that cannot be read",
            because=f"{type(error).__name__}: {error}",
        ) from None
    raise kind(texts["what"], because=texts["because"] or None, attempt=texts["attempt"] or None)
