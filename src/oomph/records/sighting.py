"""Sighting, SeenGpu, Totals: a machine that is watched, at one moment, and what has added up.

A total only grows, from the moment somebody began to watch: whoever looks now and then takes the
difference of two, and misses nothing that was between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oomph.records.machine import Device
from oomph.records.run import GpuSpan, WatchedGpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of one GPU, since the watch began. A figure that was never known is None."""

    num_spans: int = 0
    watched_s: float = 0.0  # in all
    busy_known_s: float = 0.0  # of it, with a figure of kernel-active time
    active_s: float | None = None  # with at least one kernel running
    energy_j: float | None = None
    received_bytes: int | None = None  # over PCIe
    throttled_s: Mapping[str, float] = field(default_factory=dict)  # by "power", "heat", ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGpu:
    """One GPU, or one MIG slice of a GPU."""

    watched: WatchedGpu
    device: Device
    span: GpuSpan | None  # the last second; None: it did not answer then
    totals: Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """The machine at a moment."""

    number: int  # counts from 0
    at: float  # seconds since the epoch
    gpus: tuple[SeenGpu, ...]
    problem: str | None  # why there are no GPUs, or why what is told of them is old
    notes: tuple[str, ...] = ()  # what cannot be watched, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What is remembered of a Sighting: of each of its GPUs, in their order."""

    at: float  # seconds since the epoch
    used_bytes: tuple[int | None, ...]
    busy_ratios: tuple[float | None, ...]
    power_w: tuple[float | None, ...]
