"""The interface to a vendor's GPU library: one module per library implements it.

`Backend` opens the library, `Gpu` is one GPU or slice, `Meter` asks one GPU repeatedly. A figure
the library does not give is a `Refusal`, never zero. To monitor another vendor's GPUs, write a
module with these three and open it in session.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from oomph.records.machine import MemorySource

ProcessKind = Literal["compute", "graphics"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused answer, as a value: "not allowed", "not supported" and "lost" differ from zero."""

    text: str
    code: int = 0  # the library's own error code
    is_unsupported: bool = False  # this GPU or driver does not have the figure
    is_final: bool = False  # the GPU answers, but will never give this figure
    is_driver_gone: bool = False  # no GPU of the driver answers


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one GPU; None where it is unknown."""

    total_bytes: int | None
    used_bytes: int | None
    source: MemorySource | None


@dataclass(frozen=True, slots=True)
class ListedProcess:
    """A process in the library's list."""

    pid: int
    used_bytes: int | None
    kind: ProcessKind


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices (MIG) of a GPU, by slot; `is_cut` or `by_slot` is None if it cannot be read."""

    is_cut: bool | None
    by_slot: dict[int, Gpu | Refusal] | None = field(default_factory=dict)
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters that only grow, and the power of this moment."""

    energy_mj: int | None = None
    power_w: float | None = None
    received_bytes: int | None = None
    sent_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BusySamples:
    """Samples of kernel-active time (seconds, percent), oldest first, and the time they cover.

    Seconds count from the newest sample of the last fetch, because the driver has its own clock.
    """

    values: list[tuple[float, int]] = field(default_factory=list)
    covered_s: float | None = None  # None: nothing was fetched before


class Gpu(Protocol):
    """One GPU, or one slice of a GPU."""

    uuid: str | None

    def why_no_uuid(self) -> Refusal | None: ...
    def name(self) -> str | Refusal: ...
    def memory(self) -> Memory | Refusal: ...
    def busy_percent(self) -> int | Refusal:
        """Return the share of the last sample period with at least one kernel running."""

    def temperature_c(self) -> int | Refusal: ...
    def power_mw(self) -> int | Refusal:
        """Return the power of the whole card: the current value, or a mean of the last second."""

    def power_limit_w(self) -> float | None: ...
    def link_bytes_per_s(self) -> float | None:
        """Return the maximum bandwidth of the link to the host, in one direction."""

    def processes(
        self, kind: ProcessKind, total_bytes: int | None
    ) -> tuple[ListedProcess, ...] | Refusal:
        """List the processes of one kind. `total_bytes` helps to reject impossible values."""

    def slices(self) -> Slices: ...
    def slice_instance(self) -> tuple[int, int] | None:
        """Return the GPU instance id and compute instance id of a slice."""

    def accounted_peaks(self, pids: Iterable[int]) -> dict[int, int]:
        """Return the peak bytes of those processes for which the driver has accounting data."""

    def meter(self, *, with_activity: bool) -> Meter: ...


class Meter(Protocol):
    """The questions asked of a watched GPU every second, with their arguments prepared once."""

    has_samples: bool  # the driver keeps samples of kernel-active time
    has_activity: bool  # hardware counters report how many multiprocessors worked

    def used_bytes(self) -> int | Refusal | None:
        """Return the bytes in use; None if the driver's figure makes no sense."""

    def busy_samples(self) -> BusySamples:
        """Fetch the driver's samples since the last time."""

    def counters(self) -> Counters: ...
    def throttled_by(self) -> tuple[str, ...] | None:
        """Return what limits the clocks now: "power", "heat", "hardware"; () if nothing does."""

    def process_shares(self) -> Mapping[int, float] | None:
        """Return each process's share of the multiprocessors since the last call, by PID.

        A process that is not in it has computed nothing. None if the driver cannot tell.
        """

    def activity(self) -> tuple[float | None, float | None]:
        """Return the activity of multiprocessors and memory since the last call, as ratios."""


class Backend(Protocol):
    """A vendor's library, opened for one process."""

    pid: int  # of the process that opened it: a forked process must open its own
    is_stale: bool  # the library was shut down by other code: open it again
    no_gpu: str  # the message for a driver without GPUs

    def __hash__(self) -> int: ...
    def driver_version(self) -> str | None: ...
    def num_gpus(self) -> int:
        """Return the number of GPUs. Raises Unreadable."""

    def gpu(self, index: int) -> Gpu | Refusal:
        """Return the GPU with that index, with its remembered refusals."""

    def gpu_of_uuid(self, uuid: str) -> Gpu | Refusal: ...
    def why_no_activity(self) -> str | None:
        """Return why hardware counters are not used: another tool uses them. None if they are."""

    def shut_down(self) -> None: ...
