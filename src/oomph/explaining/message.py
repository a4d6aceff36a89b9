"""Out-of-memory messages -> what happened, by arithmetic on the figures that torch printed.

torch prints a message after it has released every cached segment that was entirely free. What it
still holds beside its tensors therefore lies in the gaps between them. So if the cached and the
free bytes together are enough for the request, the memory was there, in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oomph.explaining.log import Log
from oomph.oom_message import OomMessage, Process, printed_error_bytes
from oomph.records.explanation import Explanation, Remedy, Share, Verdict
from oomph.units import GIB, MIB, format_bytes

# Judgement: an allocator that works well has up to this share of its memory in gaps. Replays of 46
# recorded programs: half have less than 2 %, a third more than 5 %.
_GAPS_RATIO = 0.05
# Judgement: what a CUDA context, NCCL and cuBLAS may take outside PyTorch's allocator. Published
# readings: 0.3 to 1.0 GiB.
_CONTEXT_BYTES = 1 * GIB
_ABSURD = 8  # times the GPU: no smaller batch brings such a request down
# torch takes whole segments from CUDA (kSmallBuffer, kLargeBuffer), and prints their size.
_SEGMENTS = {2 * MIB: "up to 1 MiB", 20 * MIB: "1 to 10 MiB"}


@dataclass(frozen=True, slots=True)
class _Case:
    """A message with the figures that follow from its own."""

    message: OomMessage
    settings: str  # the allocator's, as far as they are known
    own_pid: int | None = None  # of the process that failed, if the message lists it with others

    @property
    def requested(self) -> int:
        return self.message.requested_bytes or 0

    @property
    def held(self) -> int | None:
        """Return what PyTorch took from the GPU."""
        one = self.message
        return one.reserved_bytes if one.reserved_bytes is not None else one.allocated_bytes

    @property
    def outside(self) -> int | None:
        """Return what is neither free nor PyTorch's."""
        one = self.message
        if one.capacity_bytes is None or one.free_bytes is None or self.held is None:
            return None
        return one.capacity_bytes - one.free_bytes - self.held

    @property
    def own_outside(self) -> int | None:
        """Return what this process holds outside PyTorch: its context, NCCL, cuBLAS."""
        if self.message.process_bytes is None or self.held is None:
            return None
        return max(self.message.process_bytes - self.held, 0)

    @property
    def of_others(self) -> int | None:
        """Return what other processes hold; None if the message cannot tell."""
        named = sum(other.held_bytes for other in self.message.others)
        own = self.own_outside
        if own is not None and self.outside is not None:
            return max(named, self.outside - own, 0)
        return named or None

    @property
    def room(self) -> int | None:
        """Return the cached and free bytes: what a perfectly packed memory had for the request."""
        one = self.message
        if one.cached_bytes is None or one.free_bytes is None:
            return None
        return one.cached_bytes + one.free_bytes

    @property
    def rounding(self) -> int:
        one = self.message
        printed = (self.requested, one.cached_bytes or 0, one.free_bytes or 0, self.held or 0)
        return sum(printed_error_bytes(size) for size in printed)

    @property
    def limit(self) -> int | None:
        """Return a limit below the GPU's memory."""
        allowed, capacity = self.message.allowed_bytes, self.message.capacity_bytes
        if allowed is None or (capacity is not None and allowed >= capacity):
            return None
        return allowed

    @property
    def gpu_bytes(self) -> int | None:
        """Return what this process may have of the GPU, its context included."""
        capacity = self.message.capacity_bytes if self.limit is None else self.limit
        if capacity is None:
            return None
        others = self.of_others or 0
        unsure = self.rounding + printed_error_bytes(self.message.process_bytes or 0)
        return capacity - others if others > unsure else capacity

    @property
    def is_expandable(self) -> bool:
        return "expandable_segments:True" in self.settings


def explain_log(log: Log, *, source: str, settings: str = "") -> Explanation | None:
    """Explain the messages of a log; None if there is none.

    `settings` are the allocator's. What the log shows of them counts as well.
    """
    if not log.messages:
        return None
    first = _decisive(log.messages)
    known = ",".join(filter(None, (settings, log.settings)))
    case = _with_own_process(_Case(first, known))
    verdict, sentence, reasons, confidence = _verdict(case)
    return Explanation(
        source=source,
        verdict=verdict,
        sentence=sentence,
        confidence="guess" if confidence == "guess" else "inferred",
        reasons=tuple(reasons),
        message=first,
        others=tuple(message for message in log.messages if message is not first),
        device=first.device,
        gpu_bytes=case.gpu_bytes,
        budget=tuple(_budget(case)),
        remedies=tuple(_remedies(case, verdict)),
        caveats=tuple(_caveats(case, log)),
        record_better=_better(first),
        next_command=_next(case, verdict, log.script),
    )


def _with_own_process(case: _Case) -> _Case:
    """Return a case in which the process that failed is not among the others.

    In a container its number is not the driver's, and torch lists it with them. It is among them
    if they hold more than all that PyTorch does not, and it is the one that holds what PyTorch does
    and a context. If several do, or none, nobody can tell which of them it is.
    """
    message, outside, held = case.message, case.outside, case.held
    if message.process_bytes is not None or outside is None or held is None:
        return case
    sizes = [other.held_bytes for other in message.others]
    unsure = case.rounding + sum(map(printed_error_bytes, sizes))
    if sum(sizes) <= outside + unsure:
        return case
    least, most = held - unsure, held + _CONTEXT_BYTES + unsure
    possible = [other for other in message.others if least <= other.held_bytes <= most]
    if len(possible) != 1:
        return replace(case, message=replace(message, others=()))
    own = possible[0]
    rest = tuple(other for other in message.others if other is not own)
    message = replace(message, others=rest, process_bytes=own.held_bytes)
    return replace(case, message=message, own_pid=own.pid)


def _decisive(messages: Sequence[OomMessage]) -> OomMessage:
    """Return the message to explain: of each rank the last with figures, and of these the first.

    A run may survive earlier ones, and what comes after the one that ended it repeats it with less.
    """
    telling = [message for message in messages if message.has_figures] or [
        message for message in messages if message.memory == "gpu"
    ]
    last = {message.rank: message for message in telling or messages}
    return min(last.values(), key=lambda message: message.line or 0)


# ---- the verdict ---------------------------------------------------------------------------------

_Answer = tuple[Verdict, str, list[str], str]


def _verdict(case: _Case) -> _Answer:
    message = case.message
    if message.memory != "gpu":
        return _of_host(message)
    if message.is_corrupt:
        return (
            "request",
            "the requested size is not a size: more than 1 EB",
            ["a shape overflowed, or memory was corrupted before this request"],
            "inferred",
        )
    if message.family == "mps":
        return _of_mps(case)
    capacity = message.capacity_bytes
    if message.requested_bytes is not None and capacity is not None:
        if case.requested > capacity:
            return _too_large(case, capacity)
        if message.free_bytes is not None and case.held is not None:
            return _weighed(case)
        if case.held is not None and case.held <= capacity:
            return _roughly(case, capacity)
    return _without_figures(message)


def _too_large(case: _Case, capacity: int) -> _Answer:
    times = case.requested / capacity
    asked = f"one request of {format_bytes(case.requested)} on a GPU of {format_bytes(capacity)}"
    reasons = ["no setting and no other process matters: the request alone does not fit"]
    if times >= _ABSURD:
        reasons.append("usually a mistake in a shape: a dimension too many, or a wrong broadcast")
        return "request", f"{asked}, {times:,.0f} times its memory", reasons, "inferred"
    reasons.append("attention scores of a long sequence, logits of a large vocabulary, or a shape")
    return "request", asked, reasons, "inferred"


def _weighed(case: _Case) -> _Answer:
    message = case.message
    free, room = message.free_bytes or 0, case.room
    asked = format_bytes(case.requested)
    if free >= case.requested:
        return _refused(case, free)
    missing = case.requested - free
    cached = message.cached_bytes
    is_enough = room is not None and room >= case.requested + case.rounding
    if is_enough and cached is not None and cached > _GAPS_RATIO * (case.held or 0):
        return (
            "fragmentation",
            (
                f"fragmentation: {asked} were requested, and {format_bytes(room or 0)} were there"
                " in pieces"
            ),
            [
                (
                    f"{format_bytes(cached)} lay in gaps between tensors, {format_bytes(free)} were"
                    " free"
                ),
                "torch had released every other cached segment before it gave up",
            ],
            "inferred",
        )
    others = case.of_others
    if (
        others is not None
        and others >= missing
        and others > _GAPS_RATIO * (message.capacity_bytes or 0)
    ):
        return (
            "outside",
            (
                f"other processes held {format_bytes(others)} of this GPU;"
                f" {format_bytes(missing)} were missing"
            ),
            [_holds(other) for other in message.others],
            "inferred",
        )
    outside = case.outside
    if others is None and outside is not None and outside - _CONTEXT_BYTES >= missing:
        return (
            "outside",
            (
                f"{format_bytes(outside)} of this GPU were not PyTorch's;"
                f" {format_bytes(missing)} were missing"
            ),
            ["other processes, or libraries outside PyTorch's allocator: the message cannot tell"],
            "inferred",
        )
    return _full(case, missing, room)


def _holds(other: Process) -> str:
    return f"process {other.pid} held {format_bytes(other.held_bytes)}"


def _full(case: _Case, missing: int, room: int | None) -> _Answer:
    message = case.message
    live = message.allocated_bytes
    held = "" if live is None else f"tensors held {format_bytes(live)} and "
    capacity = f"the GPU has {format_bytes(message.capacity_bytes or 0)}"
    if room is None:
        reasons = [f"at least {format_bytes(missing)} more would have been needed"]
    elif room + case.rounding < case.requested:
        reasons = [
            (
                "fragmentation is impossible as the cause: the gaps and the free memory together"
                f" were {format_bytes(room)}"
            ),
            f"at least {format_bytes(case.requested - room)} more would have been needed",
        ]
    else:
        reasons = [
            (
                f"gaps and free memory together, {format_bytes(room)}, were about what was"
                " requested: packing it better would have carried it only a little further"
            )
        ]
    asked = format_bytes(case.requested)
    sentence = f"too much at once: {held}{asked} more were requested; {capacity}"
    return "capacity", sentence, reasons, "inferred"


def _refused(case: _Case, free: int) -> _Answer:
    asked = format_bytes(case.requested)
    if case.limit is not None:
        return (
            "limit",
            (
                f"a memory limit of {format_bytes(case.limit)} refused {asked}, with"
                f" {format_bytes(free)} free on the GPU"
            ),
            ["set_per_process_memory_fraction, or per_process_memory_fraction in the settings"],
            "inferred",
        )
    reasons = [
        "a limit on this process (set_per_process_memory_fraction), which old messages do not show",
        "or memory that another process held at that moment and has released since",
    ]
    if case.message.family == "hip":
        reasons.append("or ROCm, which refuses large requests on some cards with memory free")
    sentence = f"the GPU had {format_bytes(free)} free, and still refused {asked}"
    return "limit", sentence, reasons, "guess"


def _roughly(case: _Case, capacity: int) -> _Answer:
    held = case.held or 0
    if "NOT allocate memory block" in case.message.text:
        asked = f"one block of {format_bytes(case.requested)}"
        return "limit", f"{asked}: this GPU's driver allows 4 GB in one block", [], "inferred"
    sentence = (
        f"too much at once: PyTorch held {format_bytes(held)} and"
        f" {format_bytes(case.requested)} more were requested; the GPU has {format_bytes(capacity)}"
    )
    if held + case.requested <= capacity:
        left = format_bytes(capacity - held)
        return (
            "unknown",
            (
                f"{format_bytes(case.requested)} were refused though {left} of the GPU were not"
                " PyTorch's"
            ),
            ["the message does not say how much was free: other processes may have held it"],
            "guess",
        )
    return "capacity", sentence, [], "inferred"


def _of_mps(case: _Case) -> _Answer:
    message = case.message
    allowed, live = message.allowed_bytes, message.allocated_bytes
    other = message.other_allocations_bytes or 0
    if allowed is None or live is None:
        asked = f" ({format_bytes(case.requested)})" if message.requested_bytes else ""
        return "request", f"one tensor is larger than Metal's largest buffer{asked}", [], "inferred"
    missing = live + other + case.requested - allowed
    share = f"the limit is {format_bytes(allowed)}"
    if case.requested > allowed:
        return "request", f"one request of {format_bytes(case.requested)}; {share}", [], "inferred"
    if other >= missing and other > live:
        return (
            "outside",
            f"{format_bytes(other)} were held outside PyTorch's allocator; {share}",
            ["Metal's own buffers, and what other frameworks of this process hold"],
            "inferred",
        )
    sentence = (
        f"too much at once: tensors held {format_bytes(live)} and {format_bytes(case.requested)}"
        f" more were requested; {share}"
    )
    reasons = [f"{format_bytes(missing)} were missing"] if missing > 0 else []
    return "capacity", sentence, reasons, "inferred"


def _of_host(message: OomMessage) -> _Answer:
    asked = message.requested_bytes
    if message.memory == "workers":
        is_shm = "us error" in message.text
        if is_shm:
            return (
                "shared-memory",
                "a DataLoader worker died for lack of shared memory (/dev/shm)",
                ["workers hand their batches over through /dev/shm"],
                "inferred",
            )
        return (
            "host",
            "a DataLoader worker was killed: the machine's memory ran out",
            ["SIGKILL to a worker is almost always the kernel's out-of-memory killer"],
            "inferred",
        )
    if message.memory == "shared":
        return "shared-memory", "shared memory (/dev/shm) is full", [], "inferred"
    if message.family == "killed":
        held = message.process_bytes
        if held or "oom" in message.text.lower() or "memory" in message.text.lower():
            of = f"; it held {format_bytes(held)}" if held else ""
            text = f"the kernel killed a process: the machine's memory ran out{of}"
            return "host", text, [], "inferred"
        reason = "SIGKILL is what the kernel sends when memory runs out; a scheduler may, too"
        return "host", "a process was killed, probably for lack of memory", [reason], "guess"
    much = f": {format_bytes(asked)} were requested at once" if asked else ""
    return "host", f"the machine's own memory ran out, not the GPU's{much}", [], "inferred"


_LIBRARIES = {
    "math-library": "cuBLAS, cuSPARSE or another math library could not get its workspace",
    "cudnn": "cuDNN found no memory for a convolution's workspace",
    "nccl": "NCCL could not get memory for its buffers",
    "third-party": "a CUDA library beside PyTorch could not get memory",
    "cuda-driver": "the driver could not get memory",
}


def _without_figures(message: OomMessage) -> _Answer:
    if message.family in _LIBRARIES:
        reason = "outside PyTorch's allocator, which cannot release its cache for it"
        return "unknown", _LIBRARIES[message.family], [reason], "guess"
    if message.family in ("cuda-runtime", "thc"):
        reasons = [
            "CUDA reports errors late: the line in the traceback may not be the cause",
            "if it is the first CUDA call: another process holds the GPU, or is in exclusive mode",
        ]
        return "unknown", "the GPU's memory ran out; CUDA says no more", reasons, "guess"
    parts = []
    if message.requested_bytes is not None:
        parts.append(f"{format_bytes(message.requested_bytes)} were requested")
    if message.free_bytes is not None:
        parts.append(f"{format_bytes(message.free_bytes)} were free")
    if message.capacity_bytes is not None:
        parts.append(f"the GPU has {format_bytes(message.capacity_bytes)}")
    known = ": " + ", ".join(parts) if parts else ""
    reason = "the message is cut off, or its figures could not be read"
    return "unknown", f"the GPU's memory ran out{known}", [reason], "guess"


# ---- the budget ----------------------------------------------------------------------------------


def _budget(case: _Case) -> list[Share]:
    one = case.message
    graphs = "private pools, counted in tensors whether in use or not"
    rows: list[tuple[str, int | None, str]] = [
        ("GPU", one.capacity_bytes, ""),
        ("limit", case.limit, "a setting, or the system's"),
        *(("other process", other.held_bytes, f"pid {other.pid}") for other in one.others),
        _outside(case),
        ("reserved by PyTorch", one.reserved_bytes, ""),
        ("in tensors", one.allocated_bytes, ""),
        ("CUDA graphs", one.private_pools_bytes, graphs),
        ("in gaps", one.cached_bytes, "between tensors"),
        ("free", one.free_bytes, ""),
        ("requested", one.requested_bytes, ""),
    ]
    known = (row for row in rows if row[1] is not None)
    return [Share(name=name, size_bytes=size, note=note) for name, size, note in known]


def _outside(case: _Case) -> tuple[str, int | None, str]:
    name = "outside PyTorch"
    if case.own_outside is not None:
        return name, case.own_outside, "this process: CUDA context, NCCL, cuBLAS"
    if case.outside is not None:
        note = "other processes and the CUDA context; the message cannot tell them apart"
        return name, max(case.outside, 0), note
    return name, case.message.other_allocations_bytes, ""


# ---- what would have avoided it ------------------------------------------------------------------

_HAS_EXPANDABLE = ("cuda", "hip")
_PIECES = "the batch stays whole: a step takes somewhat longer"


def _remedies(case: _Case, verdict: Verdict) -> list[Remedy]:
    if case.message.memory != "gpu":
        return _of_the_host(case.message)
    remedies = []
    if verdict == "outside" and case.message.family != "mps":
        is_known = case.of_others is not None
        remedies.append(
            Remedy(
                name="end the other processes",
                needed_bytes=_packed(case),
                helps=True if is_known else None,
                cost="none for this run",
                source="arithmetic",
            )
        )
    if case.message.family in _HAS_EXPANDABLE and case.room is not None and not case.is_expandable:
        remedies.append(_against_gaps(case, verdict))
    if verdict == "limit" and case.limit is not None:
        remedies.append(
            Remedy(
                name="a larger memory fraction",
                needed_bytes=_packed(case),
                helps=True,
                cost="less for other processes",
                source="arithmetic",
            )
        )
    if verdict == "request":
        remedies.append(
            Remedy(
                name="another shape, or attention that keeps no scores",
                needed_bytes=None,
                helps=None,
            )
        )
    if verdict in ("capacity", "unknown", "outside", "fragmentation"):
        remedies.append(
            Remedy(
                name="the batch in pieces (accumulation)",
                needed_bytes=None,
                helps=None,
                cost=_PIECES,
            )
        )
    if verdict in ("capacity", "request") and (packed := _packed(case)):
        remedies.append(
            Remedy(
                name="a larger GPU",
                needed_bytes=packed,
                helps=True,
                cost="as far as this request; later ones are not known",
                source="arithmetic",
            )
        )
    return remedies


def _packed(case: _Case) -> int | None:
    live = case.message.allocated_bytes
    return None if live is None else live + case.requested


def _against_gaps(case: _Case, verdict: Verdict) -> Remedy:
    is_about_enough = (case.room or 0) + case.rounding >= case.requested
    may_help = verdict == "fragmentation" or (verdict == "capacity" and is_about_enough)
    return Remedy(
        name=_setting(case.message),
        needed_bytes=_packed(case),
        helps=None if may_help else False,
        cost="none; Linux, and not with IPC" if may_help else "none",
        source="arithmetic",
    )


_OLD = {"1.11 to 2.0": "max_split_size_mb:128", "1.4 to 2.0": "", "1.0 to 1.3": ""}


def _setting(message: OomMessage) -> str:
    """Return the setting against fragmentation that this version of torch knows."""
    setting = _OLD.get(message.torch_version or "", "expandable_segments:True")
    return setting or "torch 2.1 or newer with expandable_segments:True"


def _of_the_host(message: OomMessage) -> list[Remedy]:
    if message.memory == "shared" or "us error" in message.text:
        return [
            Remedy(
                name="a larger /dev/shm",
                needed_bytes=None,
                helps=True,
                cost="docker run --shm-size=8g, or --ipc=host",
            ),
            Remedy(
                name="num_workers=0, or fewer workers",
                needed_bytes=None,
                helps=None,
                cost="the GPU may wait for data",
            ),
        ]
    return [
        Remedy(
            name="fewer workers, a smaller prefetch_factor",
            needed_bytes=None,
            helps=None,
            cost="the GPU may wait for data",
        ),
        Remedy(name="more memory for the job", needed_bytes=None, helps=None),
    ]


# ---- the rest ------------------------------------------------------------------------------------


def _caveats(case: _Case, log: Log) -> list[str]:
    one = case.message
    caveats = []
    segment = _SEGMENTS.get(case.requested)
    if segment and one.family in ("cuda", "hip"):
        size = format_bytes(case.requested)
        caveats.append(f"{size} is what torch takes from CUDA at once: the tensor had {segment}")
    if one.capacity_bytes and (one.allocated_bytes or 0) > one.capacity_bytes:
        caveats.append(
            "more is allocated than the GPU has: Windows lends it the machine's memory,"
            " which is slow"
        )
    if case.own_pid is not None:
        caveats.append(f"process {case.own_pid} is this one: a container numbers it otherwise")
    elif "0 bytes memory in use" in one.text:
        caveats.append("the driver does not see this process (a container): its share is unknown")
    if one.hint == "expandable_segments" and case.is_expandable:
        caveats.append("torch proposes expandable_segments by reflex; it is on already")
    if one.rank is not None:
        ranks = sorted({m.rank for m in log.messages if m.rank is not None}, key=_by_number)
        if len(ranks) > 1:
            caveats.append(
                f"{len(ranks)} ranks report it ({', '.join(ranks[:8])}"
                f"{', ...' if len(ranks) > 8 else ''}); this is rank {one.rank}"
            )
    if one.num_seen > 1:
        caveats.append(f"the same message stands in the log {one.num_seen} times")
    if case.held is not None and one.memory == "gpu":
        caveats.append(
            "a message shows one moment: what the step would still have needed is not in it"
        )
    return caveats


def _by_number(rank: str) -> tuple[int, str]:
    return (int(rank), "") if rank.isdecimal() else (1 << 30, rank)


def _better(message: OomMessage) -> tuple[str, ...]:
    if message.memory != "gpu":
        return ()
    return (
        "oomph watch --record -- python train.py, unchanged: it keeps what every allocation was",
        'or oomph.record("oom.pickle") at the start of the script',
    )


def _next(case: _Case, verdict: Verdict, script: str | None) -> str:
    message = case.message
    if verdict in ("host", "shared-memory"):
        return f"oomph watch -- python {script or 'train.py'}"
    if verdict == "outside":
        return "oomph gpus"
    if verdict == "fragmentation" and not case.is_expandable:
        name = {"hip": "PYTORCH_HIP_ALLOC_CONF"}.get(message.family, "PYTORCH_CUDA_ALLOC_CONF")
        setting = _setting(message).rpartition(" ")[2]
        return f"{name}={setting} python {script or 'train.py'}"
    capacity = message.capacity_bytes or message.allowed_bytes
    size = f" --gpu-memory {capacity / GIB:.2f}GiB" if capacity else " --gpu GPU"
    return f"oomph plan {script or 'train.py'}{size}"
