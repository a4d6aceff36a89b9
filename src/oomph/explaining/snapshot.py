"""A memory snapshot -> why memory ran out, or what held it at its peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oomph.explaining.growth import difference, growth_of, step_ends
from oomph.explaining.holdings import (
    ACTIVATIONS,
    OTHER,
    Naming,
    allocations_of,
    holders_of,
    live_at,
    peak_of,
)
from oomph.explaining.picture import picture_of
from oomph.explaining.what_if import Program, settings_to_try
from oomph.predicting.allocator_settings import AllocatorSettings, round_size
from oomph.predicting.recorded import (
    RESERVES,
    Contradiction,
    recorded_settings,
    state_before,
)
from oomph.predicting.reproduction import Reproduction, reproduce
from oomph.records.explanation import Explanation, Gate, Holder, Remedy, Share, Verdict
from oomph.records.picture import Picture
from oomph.records.recording_facts import RecordingFacts
from oomph.records.snapshot import DeviceSnapshot, Snapshot
from oomph.units import GIB, MIB, format_bytes, format_duration, format_ratio

_SOME_RATIO = 0.05  # of what is live: less is not worth a line of its own
# Judgement, as for messages: what a CUDA context, NCCL and cuBLAS may take outside PyTorch.
_CONTEXT_BYTES = 1 * GIB
_GAIN_RATIO = 0.01  # a change of the program that saves less is not shown
_BATCHES = (0.9, 0.75, 0.5, 0.25)
# They can write over their input (torch.nn.functional, `inplace=True`).
_IN_PLACE = ("relu", "leaky_relu", "relu6", "elu", "hardtanh", "dropout")
_RECIPE = (
    'oomph.record("oom.pickle") at the start of the script, before the model is made',
    "or oomph watch --record -- python train.py, unchanged",
)


def explain_snapshot(
    snapshot: Snapshot,
    *,
    source: str,
    gpu_bytes: int | None = None,
    facts: RecordingFacts | None = None,
) -> Explanation:
    """Explain the GPU of a snapshot that ran out of memory; else the one that held most.

    `gpu_bytes` is the memory of the GPU, which a snapshot does not have; `facts` are what
    `oomph.record` wrote beside it.
    """
    return draw_snapshot(snapshot, source=source, gpu_bytes=gpu_bytes, facts=facts)[0]


def draw_snapshot(
    snapshot: Snapshot,
    *,
    source: str,
    gpu_bytes: int | None = None,
    facts: RecordingFacts | None = None,
    draws: bool = False,
) -> tuple[Explanation, Picture | None]:
    """Explain a snapshot, and draw it if asked for; None: there is nothing to draw."""
    device = _decisive(snapshot)
    if device is None:
        explanation = Explanation(
            source=source,
            verdict="unknown",
            sentence="the snapshot is empty: nothing was allocated, or nothing was recorded",
            confidence="measured",
            record_better=_RECIPE,
        )
        return explanation, None
    case = _Case(snapshot, device, source, gpu_bytes, facts)
    return case.explained(), case.drawn() if draws else None


def compare_snapshots(before: Snapshot, after: Snapshot, *, source: str) -> Explanation:
    """Explain what the later of two snapshots of one program holds more."""
    held = []
    for snapshot in (before, after):
        holders: list[Holder] = []
        for device in snapshot.devices:
            found = allocations_of(device.events(), device.segments)
            live = live_at(found, device.num_events)
            holders += holders_of(live, Naming(snapshot, device), most=1000)
        held.append(holders)
    grown = difference(*held)
    more = sum(one.size_bytes for one in held[1] if one.kind == "category")
    less = sum(one.size_bytes for one in held[0] if one.kind == "category")
    if more > less:
        sentence = (
            f"{format_bytes(more - less)} more are held: {format_bytes(less)}, then"
            f" {format_bytes(more)}"
        )
    else:
        sentence = f"nothing grew: {format_bytes(less)} were held, then {format_bytes(more)}"
    return Explanation(
        source=source,
        verdict="growth" if more > less else "full",
        sentence=sentence,
        confidence="measured",
        growth=tuple(grown),
        caveats=("both at the end of their recording; equal moments of two steps compare best",),
        record_better=_RECIPE,
    )


def _decisive(snapshot: Snapshot) -> DeviceSnapshot | None:
    failed = [d for d in snapshot.devices if _last_oom(d) is not None]
    used = [d for d in snapshot.devices if d.segments or d.num_events]
    return max(failed or used, key=_reserved_bytes, default=None)


def _last_oom(device: DeviceSnapshot) -> int | None:
    code = device.action_names.index("oom")
    actions = device.columns.actions
    return next((at for at in range(len(actions) - 1, -1, -1) if actions[at] == code), None)


def _reserved_bytes(device: DeviceSnapshot) -> int:
    return sum(segment["total_size"] for segment in device.segments)


@dataclass(frozen=True, slots=True)
class _Moment:
    """What the GPU held at the moment that is explained."""

    live_bytes: int  # as requested
    rounded_bytes: int
    pending_bytes: int
    reserved_bytes: int
    pools_bytes: int  # of CUDA graphs and of torch.cuda.MemPool
    requested_bytes: int | None  # by the request that failed
    free_bytes: int | None  # of the GPU

    @property
    def budget_bytes(self) -> int | None:
        """Return what PyTorch had at most: what it held, and what was free."""
        return None if self.free_bytes is None else self.reserved_bytes + self.free_bytes


class _Case:
    """One GPU of a snapshot, with what follows from it."""

    def __init__(
        self,
        snapshot: Snapshot,
        device: DeviceSnapshot,
        source: str,
        gpu_bytes: int | None,
        facts: RecordingFacts | None,
    ) -> None:
        self.snapshot, self.device = snapshot, device
        self.source, self.facts = source, facts
        self.gpu_bytes = gpu_bytes or (facts.total_bytes if facts else None)
        self.script = facts.script if facts else None
        self.events = device.events()
        self.settings = recorded_settings(snapshot.settings, device.segments)
        self.naming = Naming(snapshot, device)
        self.allocations = allocations_of(self.events, device.segments)
        self.oom_at = _last_oom(device)
        peak = peak_of(self.allocations, len(self.events))
        self.at = peak if self.oom_at is None else self.oom_at - 1
        self.live = live_at(self.allocations, self.at)
        self.moment = self._moment()
        self.reproduction = self._reproduced()
        self.growth = growth_of(
            [one for one in self.allocations if one.birth <= self.at],
            [end for end in step_ends(snapshot, device, self.naming) if end <= self.at + 1],
            self.naming,
        )

    def explained(self) -> Explanation:
        remedies = list(self._remedies())
        verdict, sentence, reasons = self._verdict(remedies)
        return Explanation(
            source=self.source,
            verdict=verdict,
            sentence=sentence,
            confidence="measured",
            reasons=tuple(reasons),
            device=self.device.device,
            gpu_bytes=self.gpu_bytes or self.moment.budget_bytes,
            budget=tuple(self._budget()),
            gate=self._gate(),
            holders=tuple(holders_of(self.live, self.naming)),
            growth=tuple(self.growth),
            remedies=tuple(remedies),
            caveats=tuple(self._caveats()),
            record_better=() if self._is_well_recorded() else _RECIPE,
            next_command=self._next(verdict),
        )

    def drawn(self) -> Picture:
        return picture_of(
            self.snapshot,
            self.device,
            self.allocations,
            self.naming,
            at=self.at,
            live=self.live,
            budget_bytes=self.moment.budget_bytes,
            requested_bytes=self.moment.requested_bytes,
        )

    def _moment(self) -> _Moment:
        divisions = self.settings.divisions_by_interval()
        after = self.events[self.at + 1 :]
        changed = sum(RESERVES.get(event["action"], 0) * event["size"] for event in after)
        requested_at: set[int] = set()
        for event in self.events[: self.at + 1]:
            if event["action"] == "free_requested":
                requested_at.add(event["addr"])
            elif event["action"] in ("alloc", "free_completed"):
                requested_at.discard(event["addr"])
        pools = (s for s in self.device.segments if tuple(s["segment_pool_id"]) != (0, 0))
        failed = None if self.oom_at is None else self.events[self.oom_at]
        return _Moment(
            live_bytes=sum(one.size_bytes for one in self.live),
            rounded_bytes=sum(round_size(one.size_bytes, divisions) for one in self.live),
            pending_bytes=sum(one.size_bytes for one in self.live if one.address in requested_at),
            reserved_bytes=_reserved_bytes(self.device) - changed,
            pools_bytes=sum(segment["total_size"] for segment in pools),
            requested_bytes=None if failed is None else failed["size"],
            free_bytes=None if failed is None else failed["device_free"],
        )

    def _reproduced(self) -> Reproduction | None:
        if not any(event["action"] == "alloc" for event in self.events):
            return None
        return reproduce(self.device.segments, self.events, self.settings)

    def _gate(self) -> Gate | None:
        found = self.reproduction
        if found is None:
            return None
        return Gate(
            num_exact=found.num_exact_allocs,
            num_recorded=found.num_allocs,
            problem=found.problem,
        )

    # ---- the verdict

    def _verdict(self, remedies: Sequence[Remedy]) -> tuple[Verdict, str, list[str]]:
        moment = self.moment
        asked, budget = moment.requested_bytes, moment.budget_bytes
        if asked is None or budget is None:
            return self._what_held_it()
        if asked > budget:
            text = f"one request of {format_bytes(asked)}, where PyTorch had {format_bytes(budget)}"
            return "request", text, ["no setting helps: the request alone does not fit"]
        live, missing = moment.rounded_bytes, moment.rounded_bytes + asked - budget
        facts = [f"tensors held {format_bytes(live)} of {format_bytes(budget)} for PyTorch"]
        if self.growth and sum(one.grown_bytes for one in self.growth) >= max(missing, asked // 2):
            return self._grew(facts)
        if missing > 0:
            return self._full(missing, facts)
        if moment.pools_bytes > moment.reserved_bytes // 2:
            facts.append(f"private pools held {format_bytes(moment.pools_bytes)}")
            return "graphs", "private pools (CUDA graphs) held the memory", facts
        if remedies and remedies[0].helps:  # as it was, with all that was free
            facts.append("a memory fraction refused it, or the driver: the replay finds room")
            free = format_bytes(moment.free_bytes or 0)
            return "limit", f"{format_bytes(asked)} were refused with {free} free on the GPU", facts
        return self._in_pieces(format_bytes(budget - live), remedies, facts)

    def _full(self, missing: int, facts: list[str]) -> tuple[Verdict, str, list[str]]:
        moment, budget = self.moment, self.moment.budget_bytes or 0
        gaps = moment.reserved_bytes - moment.rounded_bytes
        facts.append(
            f"{format_bytes(missing)} were missing: gaps of {format_bytes(gaps)} and"
            f" {format_bytes(moment.free_bytes or 0)} free do not hold the request"
        )
        outside = (self.gpu_bytes or budget) - budget
        if outside - _CONTEXT_BYTES >= missing:
            text = f"{format_bytes(outside)} of this GPU were not PyTorch's"
            facts.append("other processes, or libraries outside PyTorch's allocator")
            return "outside", f"{text}; {format_bytes(missing)} were missing", facts
        asked = format_bytes(moment.requested_bytes or 0)
        return "capacity", f"too much at once: {asked} more were requested", facts

    def _in_pieces(
        self, pieces: str, remedies: Sequence[Remedy], facts: list[str]
    ) -> tuple[Verdict, str, list[str]]:
        asked = format_bytes(self.moment.requested_bytes or 0)
        helps = [one.name for one in remedies if one.helps and one.source == "replay"]
        if helps or not remedies:
            if helps:
                facts.append(f"with {helps[0]} the replay passes with the same memory")
            text = f"fragmentation: {asked} were requested, and {pieces} were there in pieces"
            return "fragmentation", text, facts
        facts.append(f"{pieces} were left in pieces, and no setting of the allocator joins them")
        return "capacity", f"too much at once: {asked} more were requested of a full GPU", facts

    def _grew(self, facts: list[str]) -> tuple[Verdict, str, list[str]]:
        top = self.growth[0]
        per_step = format_bytes(sum(one.per_step_bytes or 0 for one in self.growth))
        facts.append(f"most of it from {top.name}")
        return "growth", f"a leak: memory grew by {per_step} a step until it ran out", facts

    def _what_held_it(self) -> tuple[Verdict, str, list[str]]:
        live, reserved = self.moment.live_bytes, self.moment.reserved_bytes
        if self.growth:
            per_step = format_bytes(sum(one.per_step_bytes or 0 for one in self.growth))
            text = f"memory grows by {per_step} a step; nothing has run out in this recording"
            return "growth", text, [f"most of it from {self.growth[0].name}"]
        when = "at its peak" if self.reproduction is not None else "when it was taken"
        text = (
            f"nothing ran out in this recording: {when}, tensors held {format_bytes(live)} of"
            f" {format_bytes(reserved)} reserved"
        )
        return "full", text, []

    # ---- the budget

    def _budget(self) -> Iterator[Share]:
        moment = self.moment
        budget = moment.budget_bytes
        if self.gpu_bytes is not None:
            yield Share(name="GPU", size_bytes=self.gpu_bytes)
            if budget is not None:
                note = "other processes, CUDA context"
                outside = max(self.gpu_bytes - budget, 0)
                yield Share(name="outside PyTorch", size_bytes=outside, note=note)
        if budget is not None:
            yield Share(name="for PyTorch", size_bytes=budget, note="reserved, and free on the GPU")
        yield Share(name="reserved", size_bytes=moment.reserved_bytes)
        yield Share(name="in tensors", size_bytes=moment.live_bytes)
        rounding = moment.rounded_bytes - moment.live_bytes
        yield Share(name="rounding", size_bytes=rounding, note="to 512 bytes")
        cached = max(moment.reserved_bytes - moment.rounded_bytes, 0)
        yield Share(name="cached", size_bytes=cached, note="in no tensor")
        if moment.pending_bytes:
            note = "freed, and waiting for another stream; counted in tensors"
            yield Share(name="pending", size_bytes=moment.pending_bytes, note=note)
        if moment.pools_bytes:
            note = "CUDA graphs, torch.cuda.MemPool"
            yield Share(name="private pools", size_bytes=moment.pools_bytes, note=note)
        if moment.free_bytes is not None:
            yield Share(name="free on the GPU", size_bytes=moment.free_bytes)
        if moment.requested_bytes is not None:
            yield Share(name="requested", size_bytes=moment.requested_bytes)

    # ---- what would have avoided it

    def _remedies(self) -> Iterator[Remedy]:
        if self.reproduction is None or not self.reproduction.is_exact:
            return
        end = self.at + 1
        try:
            before = state_before(self.device.segments, self.events, self.settings)
        except Contradiction:  # the replay was exact, so there is none
            return
        failed = None if self.oom_at is None else self.events[self.oom_at]
        program = Program.of(before, self.events[:end], self.settings, failed)
        as_it_was = self._tried("as it was", program, "", "replay", self.settings)
        yield as_it_was
        tried = [
            self._tried(name, program, cost, "replay", settings)
            for name, settings, cost in settings_to_try(self.settings)
        ]
        least = (as_it_was.needed_bytes or 0) * (1 - _GAIN_RATIO)
        tried += [one for one in self._edits(program) if (one.needed_bytes or 0) < least]
        yield from sorted(tried, key=lambda one: (one.helps is not True, one.needed_bytes or 0))

    def _tried(
        self,
        name: str,
        program: Program,
        cost: str,
        source: str,
        settings: AllocatorSettings | None = None,
    ) -> Remedy:
        needed, replayed = program.needs(settings)
        budget = self.moment.budget_bytes
        helps = None
        if budget is not None:
            helps = program.passes(budget, settings).ran_out_at is None
        if replayed.num_retries:
            times = "once" if replayed.num_retries == 1 else f"{replayed.num_retries} times"
            retries = f"the cache is released {times}"
            cost = f"{cost}; {retries}" if cost else retries
        return Remedy(
            name=name,
            needed_bytes=needed,
            helps=helps,
            cost=cost,
            source="replay" if source == "replay" else "edited replay",
        )

    def _edits(self, program: Program) -> Iterator[Remedy]:
        numbers = self._numbers_by_stack(program)
        forward = {n for n, stack in numbers.items() if self._is_of_the_forward(stack)}
        if forward:
            yield self._smaller_batch(program, forward)
            yield from self._checkpointed(program, numbers)
        in_place = {n for n, stack in numbers.items() if self._is_in_place(stack)}
        if self._matters(program, in_place):
            cost = "only where nothing else reads the input"
            yield self._tried(
                "activations in place", program.without(in_place), cost, "edited replay"
            )
        yield from self._deleted(program, numbers)

    def _numbers_by_stack(self, program: Program) -> dict[int, int]:
        """Return the stack of each request made in the recording."""
        return {
            number: self.events[birth]["frames"] or 0
            for number, birth in enumerate(program.births, 1)
            if birth >= 0
        }

    def _is_of_the_forward(self, stack: int) -> bool:
        return self.naming.category_of_stack(stack) == ACTIVATIONS

    def _is_in_place(self, stack: int) -> bool:
        return any(
            frame.name in _IN_PLACE and frame.file.endswith("functional.py")
            for frame in self.snapshot.stack(stack)
        )

    def _matters(self, program: Program, numbers: set[int]) -> bool:
        size = sum(program.requests.sizes[number - 1] for number in numbers)
        return size > _SOME_RATIO * self.moment.live_bytes

    def _smaller_batch(self, program: Program, forward: set[int]) -> Remedy:
        """Return the largest batch that passes; without a budget, half of it."""
        budget = self.moment.budget_bytes
        factors = _BATCHES if budget is not None else (0.5,)
        for factor in factors:
            scaled = program.scaled(forward, factor)
            if budget is None or scaled.passes(budget).ran_out_at is None:
                break
        cost = "accumulation: a longer step"
        return self._tried(f"{format_ratio(factor)} of the batch at once", scaled, cost, "edited")

    def _checkpointed(self, program: Program, numbers: dict[int, int]) -> Iterator[Remedy]:
        """Free what a module's forward made when it ends, except what it returns."""
        sizes: dict[tuple[str, str], int] = {}
        for one in self.live:
            for place in self.naming.forwards(one.stack):
                sizes[place] = sizes.get(place, 0) + one.size_bytes
        largest = sorted(sizes, key=lambda place: -sizes[place])[:6]
        best: Remedy | None = None
        for place in largest:
            deaths = _ends_of_calls(numbers, place, self.naming)
            if not self._matters(program, set(deaths)):
                continue
            name = f"checkpointing of {place[1]} ({place[0].rpartition('/')[2]})"
            cost = "its forward runs twice"
            found = self._tried(name, program.freed_at(deaths), cost, "edited replay")
            if best is None or (found.needed_bytes or 0) < (best.needed_bytes or 0):
                best = found
        if best is not None:
            yield best

    def _deleted(self, program: Program, numbers: dict[int, int]) -> Iterator[Remedy]:
        """Leave out what the largest line outside of the model holds."""
        live_births = {one.birth for one in self.live}
        by_line: dict[str, set[int]] = {}
        for number, stack in numbers.items():
            is_live = program.births[number - 1] in live_births
            if is_live and self.naming.category_of_stack(stack) == OTHER:
                by_line.setdefault(self.naming.line(stack), set()).add(number)
        sizes = program.requests.sizes
        for line in sorted(by_line, key=lambda line: -sum(sizes[n - 1] for n in by_line[line]))[:1]:
            if self._matters(program, by_line[line]):
                cost = "if it is not needed here any more"
                changed = program.without(by_line[line])
                yield self._tried(f"an earlier del of {line}", changed, cost, "edited replay")

    # ---- the rest

    def _is_well_recorded(self) -> bool:
        return self.reproduction is not None and self.oom_at is not None

    def _caveats(self) -> Iterator[str]:
        if self.facts is not None:
            yield _in_words(self.facts)
        if self.reproduction is None:
            yield (
                "no allocations are recorded, only what was held when it was taken: history was"
                " off, or its limit was 1 (the old _record_memory_history(True))"
            )
        elif any(one.birth < 0 for one in self.live):
            early = sum(one.size_bytes for one in self.live if one.birth < 0)
            yield f"{format_bytes(early)} of it are from before the recording"
        without = sum(one.size_bytes for one in self.live if not one.stack)
        if without > _SOME_RATIO * self.moment.live_bytes:
            yield f"{format_bytes(without)} have no stack"
        if self.reproduction is not None and self.reproduction.is_exact:
            yield (
                "a smaller batch is replayed with what the forward made scaled, and checkpointing"
                " without what it would free: oomph plan predicts the whole step"
            )
        if self.oom_at is not None:
            yield (
                "'helps' means that it passes this point: what the step would still have needed"
                " was never recorded"
            )
        others = [d.device for d in self.snapshot.devices if d is not self.device and d.segments]
        if others:
            yield f"this is GPU {self.device.device}; the snapshot also has {_listed(others)}"

    def _next(self, verdict: Verdict) -> str | None:
        script = self.script or "train.py"
        if verdict == "fragmentation" and not self.settings.expandable_segments:
            return f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python {script}"
        if verdict == "outside":
            return "oomph gpus"
        size = self.gpu_bytes or self.moment.budget_bytes
        if verdict in ("capacity", "request", "full", "fragmentation") and size is not None:
            return f"oomph plan {script} --gpu-memory {_typed(size)}"
        return None


def _typed(size_bytes: int) -> str:
    """Return a size as it is typed in a command."""
    is_large = size_bytes >= 4 * GIB
    return f"{size_bytes / GIB:.2f}GiB" if is_large else f"{size_bytes // MIB}MiB"


def _in_words(facts: RecordingFacts) -> str:
    parts = [facts.gpu, f"torch {facts.torch_version}"]
    parts += [f"rank {facts.rank}"] if facts.rank else []
    parts += [f"after step {facts.step}"] if facts.step is not None else []
    parts += [facts.alloc_conf] if facts.alloc_conf else []
    return f"recorded on {', '.join(parts)}; after {format_duration(facts.after_s)}"


def _listed(devices: Sequence[int]) -> str:
    return ("GPU " if len(devices) == 1 else "GPUs ") + ", ".join(map(str, devices))


def _ends_of_calls(
    numbers: dict[int, int], place: tuple[str, str], naming: Naming
) -> dict[int, int]:
    """Return for each request inside of calls of a forward the last request of its call.

    Calls follow each other where the line within the forward goes back. The last request of a call
    is what it returns, and the last call may still be going on.
    """
    calls: list[list[int]] = []
    line_before: int | None = None
    for number, stack in numbers.items():
        line = naming.line_within(stack, place)
        if line is None:
            line_before = None
            continue
        if line_before is None or line < line_before:
            calls.append([])
        calls[-1].append(number)
        line_before = line
    return {number: call[-1] for call in calls[:-1] for number in call[:-1]}
