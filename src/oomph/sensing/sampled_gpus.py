"""GPUs of a watch, while they answer and while they do not -> as runs and machines have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oomph.records.machine import Device
from oomph.records.run import WatchedGpu
from oomph.sensing.gpus import NOTHING_READ, on_all
from oomph.sensing.watched import Identity, Watch


@dataclass(slots=True, eq=False)
class SampledGpu:
    """A GPU of the watch, while it answers and while it does not."""

    identity: Identity
    watched: WatchedGpu
    watch: Watch | None = None
    why_lost: str | None = None
    retry_s: float = 0.0


def watched(gpu: SampledGpu) -> WatchedGpu:
    return gpu.watched if gpu.watch is None else gpu.watch.watched_gpu()


def drop(gpu: SampledGpu, why: str, retry_s: float) -> None:
    if gpu.watch is not None:
        gpu.watched = gpu.watch.watched_gpu()
    gpu.watch, gpu.why_lost, gpu.retry_s = None, why, retry_s


def unwatched(identity: Identity) -> SampledGpu:
    """As it is known before its first answer."""
    watched = WatchedGpu(
        index=identity.index,
        uuid=identity.shown.uuid,
        name=identity.shown.gpu.name,
        total_bytes=None,
        power_limit_w=None,
        busy_source=None,
        is_used=False,
        cuda_index=identity.cuda_index,
        looks_apart_s=identity.looks_apart_s,
    )
    return SampledGpu(identity, watched)


def as_devices(gpus: Sequence[SampledGpu]) -> tuple[Device, ...]:
    """Slices under their GPU, as `oomph gpus` has them."""
    found: dict[int, Device] = {}
    for gpu in gpus:
        device, index = _device(gpu), gpu.identity.index
        if not device.is_slice:
            found[index] = device
            continue
        whole = found.get(index) or replace(
            NOTHING_READ,
            index=index,
            uuid=gpu.identity.shown.gpu.uuid,
            name=gpu.identity.shown.gpu.name,
        )
        found[index] = replace(whole, mig_enabled=True, slices=(*whole.slices, device))
    return tuple(
        replace(one, processes=on_all(one.slices)) if one.slices else one for one in found.values()
    )


def _device(gpu: SampledGpu) -> Device:
    if gpu.watch is not None:
        return gpu.watch.device()
    return replace(
        NOTHING_READ,
        index=gpu.identity.own_index,
        uuid=gpu.watched.uuid,
        name=gpu.watched.name,
        total_bytes=gpu.watched.total_bytes,
        problem=gpu.why_lost,
        cuda_index=gpu.identity.cuda_index,
        is_slice=gpu.identity.shown.slice is not None,
    )
