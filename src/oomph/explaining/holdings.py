"""The events of one GPU -> every allocation with its life, and who held memory at a moment.

What an allocation was is read from its stack, by these rules in order: an interval that torch names
(Optimizer.step), a C++ node of autograd (23 % of recorded allocations have no Python frame), the
Python functions around it. Blocks that were live before the recording have the stack that the
snapshot keeps with them, or none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from oomph.records.explanation import Holder
from oomph.records.snapshot import Annotation, DeviceSnapshot, Frame, Record, Snapshot

BEFORE = -1  # the birth of what was live before the first event
_UNKNOWN = "not recorded: from before the recording"
ACTIVATIONS = "activations and other results of the forward"
_BACKWARD = "made by the backward"
_GRADIENTS = "gradients"
_OPTIMIZER = "optimizer"
_NO_STACK = "made without a Python stack: mostly by the backward"
_LOADED = "parameters, buffers and batches moved to the GPU"
OTHER = "other tensors of your program"


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation and its life, in events."""

    birth: int
    death: int | None  # when its memory could be used again
    size_bytes: int
    address: int
    stack: int  # 0: unknown


def allocations_of(events: Sequence[Record], segments: Iterable[Record]) -> list[Allocation]:
    """Return every allocation, those from before the first event first."""
    born: dict[int, tuple[int, int, int]] = {}  # address: birth, size, stack
    found: list[Allocation] = []
    before: list[Allocation] = []
    for at, event in enumerate(events):
        action = event["action"]
        if action == "alloc":
            born[event["addr"]] = at, event["size"], event["frames"] or 0
        elif action == "free_completed":
            address = event["addr"]
            life = born.pop(address, None)
            if life is None:
                before.append(Allocation(BEFORE, at, event["size"], address, 0))
            else:
                found.append(Allocation(life[0], at, life[1], address, life[2]))
    found += [Allocation(birth, None, size, at, stack) for at, (birth, size, stack) in born.items()]
    before += _always_live(segments, born)
    return before + found


def _always_live(
    segments: Iterable[Record], born: dict[int, tuple[int, int, int]]
) -> Iterable[Allocation]:
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive" and address not in born:
                size, stack = block["requested_size"], block["frames"] or 0
                yield Allocation(BEFORE, None, size, address, stack)
            address += block["size"]


def live_at(allocations: Iterable[Allocation], at: int) -> list[Allocation]:
    """Return what is live just after an event."""
    return [one for one in allocations if one.birth <= at and (one.death is None or one.death > at)]


def peak_of(allocations: Iterable[Allocation]) -> int:
    """Return the event after which most bytes are live; BEFORE if that is before the first."""
    changes: list[tuple[int, int]] = []
    for one in allocations:
        changes.append((one.birth, one.size_bytes))
        if one.death is not None:
            changes.append((one.death, -one.size_bytes))
    live = most = 0
    peak = BEFORE
    for at, change in sorted(changes, key=lambda change: (change[0], change[1])):
        live += change
        if live > most:
            most, peak = live, at
    return peak


# ---- who held it ---------------------------------------------------------------------------------

_MOST_LINES = 8
_NOT_THE_USERS = ("site-packages", "dist-packages", "/torch/", "<frozen", "<string>", "<eval")


class Naming:
    """Names what an allocation was, and the place in the program that asked for it."""

    def __init__(self, snapshot: Snapshot, device: DeviceSnapshot) -> None:
        self._snapshot = snapshot
        self._times = device.columns.times_us
        self._steps = _intervals(snapshot.annotations, "Optimizer.step")
        # Few stacks differ, so each is looked at once.
        self.category_of_stack = lru_cache(maxsize=None)(self._category_of_stack)
        self.line = lru_cache(maxsize=None)(self._line)
        self.forwards = lru_cache(maxsize=None)(self._forwards)
        self.line_within = lru_cache(maxsize=None)(self._line_within)

    def category(self, one: Allocation) -> str:
        if one.birth >= 0 and _is_inside(self._steps, self._times[one.birth]):
            return _OPTIMIZER
        if one.birth >= 0 and not one.stack:
            return _NO_STACK
        return self.category_of_stack(one.stack)

    def _category_of_stack(self, number: int) -> str:
        frames = self._snapshot.stack(number)
        if not frames:
            return _UNKNOWN
        names = " ".join(frame.name for frame in frames if not frame.is_python)
        python = [frame for frame in frames if frame.is_python]
        for word, category in _BY_NODE:
            if word in names:
                return category
        if any(frame.name in _STEPS and "optim" in frame.file for frame in python):
            return _OPTIMIZER
        if any(frame.name == "backward" and "/torch/" in frame.file for frame in python):
            return _BACKWARD
        if any(frame.name in ("forward", "_call_impl") for frame in python):
            return ACTIVATIONS
        if any(frame.name in _MOVES for frame in python) or "THPVariable_cuda" in names:
            return _LOADED
        return OTHER

    def _line(self, number: int) -> str:
        frames = self._snapshot.stack(number)
        python = [frame for frame in frames if frame.is_python]
        own = next((frame for frame in python if _is_the_users(frame)), None)
        place = own or (python[0] if python else None)
        if place is not None:
            return f"{place.file}:{place.line} in {place.name}"
        return _node(frames) or "no Python stack recorded"

    def _forwards(self, number: int) -> tuple[tuple[str, str], ...]:
        """Return the file and name of each of the user's forwards around, innermost first."""
        return tuple(
            (frame.file, frame.name)
            for frame in self._snapshot.stack(number)
            if frame.name.rpartition(".")[2] == "forward" and _is_the_users(frame)
        )

    def module(self, number: int) -> str | None:
        """Return the user's innermost forward; of modules only file and function are recorded."""
        forwards = self.forwards(number)
        return f"{forwards[0][1]} in {forwards[0][0]}" if forwards else None

    def _line_within(self, number: int, place: tuple[str, str]) -> int | None:
        """Return where a forward was when it asked; None if it is not around."""
        frames = self._snapshot.stack(number)
        return next((f.line for f in frames if (f.file, f.name) == place), None)

    def is_of_optimizer(self, number: int) -> bool:
        return self.category_of_stack(number) == _OPTIMIZER


_STEPS = ("step", "wrapper", "_init_group", "_single_tensor_adam", "_multi_tensor_adam", "adamw")
_MOVES = ("to", "cuda", "_apply", "convert", "load_state_dict", "collate", "pin_memory", "_to_copy")
_BY_NODE = (
    ("AccumulateGrad", _GRADIENTS),
    ("autograd::Engine::", _BACKWARD),
    ("c10d::", "buffers of the communication between GPUs"),
    ("getCurrentCUDABlasLtWorkspace", "workspaces of cuBLAS and cuDNN"),
    ("getNewWorkspace", "workspaces of cuBLAS and cuDNN"),
)


def _is_the_users(frame: Frame) -> bool:
    return (
        not any(part in frame.file for part in _NOT_THE_USERS) and "/lib/python" not in frame.file
    )


def _node(frames: Iterable[Frame]) -> str | None:
    """Return the autograd node that asked for memory, where no Python frame is recorded."""
    for frame in frames:
        name = frame.name
        if "autograd::generated::" in name:
            return (
                name.split("autograd::generated::")[1].split("::")[0].split("_apply")[0] + " (C++)"
            )
        if "AccumulateGrad" in name:
            return "AccumulateGrad (C++)"
        if "autograd::" in name and "::apply(" in name:
            return name.split("::apply(")[0].rpartition("::")[2] + " (C++)"
    return next(
        (
            f"{frame.name.split('(')[0][:80]} (C++)"
            for frame in frames
            if "at::native::" in frame.name
        ),
        None,
    )


def _intervals(annotations: Iterable[Annotation], name: str) -> tuple[list[int], list[int]]:
    starts: list[int] = []
    ends: list[int] = []
    for one in sorted(annotations, key=lambda one: one.time_us):
        if one.name.startswith(name):
            (starts if one.is_start else ends).append(one.time_us)
    return starts, ends


def _is_inside(intervals: tuple[list[int], list[int]], time_us: int) -> bool:
    starts, ends = intervals
    return bool(time_us) and bisect_right(starts, time_us) > bisect_right(ends, time_us)


def holders_of(
    live: Sequence[Allocation], naming: Naming, *, most: int = _MOST_LINES
) -> list[Holder]:
    """Return who held these allocations: categories, the largest lines, the largest modules."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for one in live:
        names = [("category", naming.category(one)), ("line", naming.line(one.stack))]
        module = naming.module(one.stack)
        if module is not None:
            names.append(("module", module))
        for key in names:
            sums[key][0] += one.size_bytes
            sums[key][1] += 1
    found = [
        Holder(kind=kind, name=name, size_bytes=size, num_blocks=num)  # type: ignore[arg-type]
        for (kind, name), (size, num) in sums.items()
    ]
    found.sort(key=lambda holder: -holder.size_bytes)
    return [
        holder
        for kind in ("category", "line", "module")
        for holder in [one for one in found if one.kind == kind][:most]
    ]
