"""Why memory ran out: the verdict, the budget, who held it, and what would have avoided it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oomph.oom_message import OomMessage

Verdict = Literal[
    "capacity",  # too much was needed at once
    "fragmentation",  # there was enough, in pieces that were too small
    "outside",  # other processes, or memory of this one outside PyTorch
    "limit",  # the memory was there; a limit, a driver or another device rule refused it
    "request",  # one request larger than the whole GPU: usually a mistake in a shape
    "growth",  # memory grew from step to step
    "graphs",  # the private pools of CUDA graphs held it
    "host",  # the machine's own memory
    "shared-memory",  # /dev/shm
    "full",  # nothing ran out; this is what held the memory
    "unknown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of the GPU's memory. `size_bytes` is None where it is not known."""

    name: str
    size_bytes: int | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who held memory at the moment that is explained."""

    kind: Literal["category", "line", "module"]
    name: str
    size_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What would have avoided it: the memory it needs, whether that was there, and its price."""

    name: str
    needed_bytes: int | None  # for PyTorch, up to the moment that is explained
    helps: bool | None  # None: unknown
    cost: str = ""
    source: Literal["replay", "edited replay", "arithmetic", "planner", "advice"] = "advice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How far the replayed allocator agrees with the recording: the ground under every what-if."""

    num_exact: int  # allocations at their recorded address
    num_recorded: int
    problem: str | None  # the first difference; None: the replay is exact

    @property
    def is_exact(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory from one place in the program that is kept from step to step."""

    name: str
    grown_bytes: int
    num_blocks: int
    per_step_bytes: int | None
    since_step: int | None  # from 1; None: steps are not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer of `oomph explain`, in the order in which it is printed."""

    source: str  # what was read
    verdict: Verdict
    sentence: str
    confidence: Literal["measured", "inferred", "guess"]
    reasons: tuple[str, ...] = ()
    message: OomMessage | None = None
    others: tuple[OomMessage, ...] = ()  # of other ranks, or of other moments
    device: int | None = None
    gpu_bytes: int | None = None  # of the GPU, without what other processes hold
    budget: tuple[Share, ...] = ()
    gate: Gate | None = None
    holders: tuple[Holder, ...] = ()
    growth: tuple[Growth, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    caveats: tuple[str, ...] = ()
    record_better: tuple[str, ...] = ()
    next_command: str | None = None
