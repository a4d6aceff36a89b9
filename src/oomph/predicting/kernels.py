"""Op -> what it is to the GPU, the bus, the host or the link: seconds at full rate.

A pace makes the seconds of it that are had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oomph.predicting.communication import COMMUNICATION, Link
from oomph.predicting.paces import Pace
from oomph.predicting.rates import Kind, Rates
from oomph.records.trace import Op

Bound = Literal[
    "arithmetic", "memory bandwidth", "kernel launches", "host and bus", "communication"
]
Place = Literal["gpu", "to host", "from host", "host"]
_Role = Literal["kernel", "gather", "reduce", "wait"]

_MATMULS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear"}
    | {"_scaled_mm", "_grouped_mm"}
)
# Nothing of these runs on the GPU: they make a tensor, or another view of one.
_WITHOUT_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
    | {"_unsafe_view", "lift_fresh"}
)
# The host waits for the result of these.
WAITED_FOR = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"})


# What leaves the GPU: where each of these ops runs.
_PLACES: Mapping[str, Place] = {
    "copy_to_host": "to host",
    "copy_from_host": "from host",
    "on_host": "host",
}
BUS = ("copy_to_host", "copy_from_host")


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedKernel:
    """What an op is to the GPU: the seconds at full rate, before a pace is applied."""

    kind: Kind
    arithmetic_s: float
    traffic_s: float
    runs: bool  # False: the GPU has nothing to do
    is_waited_for: bool
    place: Place = "gpu"
    moved_bytes: int = 0  # of what is not the GPU's
    role: _Role = "kernel"
    link: Link | None = None  # of a collective
    num_pending: int = 0  # of a wait

    @property
    def is_gpus(self) -> bool:
        return self.place == "gpu" and self.role == "kernel"

    def unit_seconds(self, pace: Pace) -> tuple[float, float]:
        """Of one operation and of one byte, for a kernel that was priced with one of each."""
        share = pace.matmul if self.kind == "other" else getattr(pace, self.kind)
        return self.arithmetic_s / share, self.traffic_s / pace.bandwidth

    def at(self, pace: Pace) -> tuple[float, Bound]:
        """Seconds on the GPU, on the link or on the host, and what decides them."""
        if self.link is not None:
            share = pace.nvlink if self.link.kind == "nvlink" else pace.pcie
            sending_s = self.moved_bytes / (self.link.bytes_per_s * share)
            return pace.collective_s + sending_s, "communication"
        if self.place == "host":
            return self.moved_bytes / pace.host_bytes_per_s, "host and bus"
        if self.place != "gpu":
            return self.traffic_s / pace.bus, "host and bus"
        if not self.runs:
            return 0.0, "kernel launches"
        share = pace.matmul if self.kind == "other" else getattr(pace, self.kind)
        arithmetic_s = self.arithmetic_s / share
        traffic_s = self.traffic_s / pace.bandwidth
        longest = max(arithmetic_s, traffic_s, pace.kernel_s)
        if longest == pace.kernel_s:
            return longest, "kernel launches"
        return longest, "arithmetic" if longest == arithmetic_s else "memory bandwidth"


def kernel_of(op: Op, rates: Rates, bandwidth: float) -> PricedKernel | None:
    place = _PLACES.get(op.name, "gpu")
    if place != "gpu":
        return _off_the_gpu(op, place, rates.bus_bytes_per_s)
    if op.name in COMMUNICATION or op.name == "wait":
        return _beside(op, rates.link)
    kind = _kind_of(op.name)
    rate = rates.of(op.dtype, kind) if op.flops else 1.0
    if rate is None:
        return None
    return PricedKernel(
        kind=kind,
        arithmetic_s=op.flops / rate,
        traffic_s=op.moved_bytes / bandwidth,
        runs=op.name not in _WITHOUT_KERNEL,
        is_waited_for=op.name in WAITED_FOR,
    )


def _off_the_gpu(op: Op, place: Place, bus_bytes_per_s: float | None) -> PricedKernel | None:
    if bus_bytes_per_s is None:
        return None
    return PricedKernel(
        kind="other",
        arithmetic_s=0.0,
        traffic_s=op.moved_bytes / bus_bytes_per_s,
        runs=True,
        is_waited_for=False,
        place=place,
        moved_bytes=op.moved_bytes,
    )


def _beside(op: Op, link: Link | None) -> PricedKernel | None:
    """A collective, which the link does beside the GPU, or the GPU's waiting for one."""
    role: _Role = "gather" if op.name == "all_gather" else "reduce"
    is_wait = op.name == "wait"
    if link is None and not is_wait:
        return None
    return PricedKernel(
        kind="other",
        arithmetic_s=0.0,
        traffic_s=0.0,
        runs=False,
        is_waited_for=False,
        role="wait" if is_wait else role,
        link=None if is_wait else link,
        moved_bytes=op.moved_bytes,
        num_pending=op.num_pending,
    )


def _kind_of(name: str) -> Kind:
    if name in _MATMULS:
        return "matmul"
    if "attention" in name:
        return "attention"
    return "convolution" if "conv" in name else "other"


def is_beside_the_gpu(name: str) -> bool:
    """Whether an op is not the GPU's, but of the bus, the host or the link between GPUs."""
    return name in _PLACES or name in COMMUNICATION or name == "wait"
