"""Look -> the lower half of the live view: processes, those of one run under one heading.

What belongs together: the same run of oomph, else the workers of the same launcher, else a process
and its children that are on a GPU too (a script that starts the other ranks itself).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oomph.records.live import Job
from oomph.records.machine import Owner, Process
from oomph.showing.cells import Line, Piece
from oomph.showing.columns import Column, fitting, lines
from oomph.showing.gpu_row import OWNER_STYLES, Row
from oomph.showing.live_view import Sort
from oomph.showing.safe import printable
from oomph.units import format_duration, format_gib

_LEAST_FOR_COMMANDS = 14  # columns that the figures leave to the command lines
_MOST_NAME = 12  # of a user
_MOST_COMMAND = 400  # of a command line: more than any terminal shows of it


@dataclass(frozen=True, slots=True)
class Member:
    """A process on one GPU, and what it is part of."""

    label: str  # of the GPU
    process: Process
    job: Job | None


@dataclass(frozen=True, slots=True)
class Group:
    """Processes that belong together; a single one is a group of its own."""

    members: tuple[Member, ...]

    @property
    def first(self) -> Process:
        return self.members[0].process

    @property
    def used_bytes(self) -> int | None:
        known = [m.process.used_bytes for m in self.members if m.process.used_bytes is not None]
        return sum(known) if len(known) == len(self.members) else None

    @property
    def started_at(self) -> float | None:
        return min(
            (m.process.started_at for m in self.members if m.process.started_at is not None),
            default=None,
        )

    @property
    def has_heading(self) -> bool:
        return len(self.members) > 1


def members_of(rows: Iterable[Row], jobs: Sequence[Job], *, only_mine: bool) -> list[Member]:
    """Everybody on these GPUs; of a GPU that is cut into slices, by its slices."""
    by_pid = {job.pid: job for job in jobs}
    return [
        Member(row.label, process, by_pid.get(process.pid))
        for row in rows
        for process in (() if row.device.slices else row.device.processes or ())
        if not only_mine or process.owner in ("this-run", "mine")
    ]


def groups_of(members: Iterable[Member], sort: Sort) -> list[Group]:
    """What belongs together, in the order that is wanted. Within a group by rank, then by GPU."""
    members = list(members)
    pids = {member.process.pid for member in members}
    together: dict[object, list[Member]] = {}
    for member in members:
        together.setdefault(_key(member, pids), []).append(member)
    groups = [Group(tuple(sorted(part, key=_rank))) for part in together.values()]
    if sort == "memory":
        groups.sort(key=lambda group: -(group.used_bytes or 0))
    elif sort == "user":
        groups.sort(key=lambda group: (_OWNERS.index(group.first.owner), group.first.user or "~"))
    elif sort == "newest":
        groups.sort(key=lambda group: -(group.started_at or 0))
    return groups  # as they are met: by GPU


_OWNERS: tuple[Owner, ...] = ("this-run", "mine", "others", "unknown")


def _key(member: Member, pids: set[int]) -> object:
    job, process = member.job, member.process
    if job and job.run_id:
        return "run", process.user, job.run_id
    if job and job.launcher_pid:
        return "launcher", process.user, job.launcher_pid
    is_childs = job is not None and job.parent_pid in pids
    return "process", job.parent_pid if job and is_childs else process.pid


def _rank(member: Member) -> tuple[int, str]:
    job = member.job
    return (job.rank if job and job.rank is not None else 1 << 30), member.label


# ---- lines -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line before it has its columns."""

    owner: Owner
    who: str
    user: str
    gpu: str
    pid: str
    gib: str
    age: str
    what: tuple[Piece, ...]


def group_lines(groups: Sequence[Group], now: float, width: int) -> list[Line]:
    """The heading, then each group and its members."""
    entries = [entry for group in groups for entry in _entries(group, now)]
    if not entries:
        return []
    figures = fitting(_columns(entries), max(width - _LEAST_FOR_COMMANDS, 1))
    what = Column(heading="what", cells=["" for _ in entries], align="<")
    heading, *rows = lines([*figures, what])
    drawn: list[Line] = [heading]
    for entry, (who, *others, _) in zip(entries, rows, strict=True):
        drawn.append([(who[0], OWNER_STYLES[entry.owner]), *others, *entry.what])
    return drawn


def _columns(entries: Sequence[_Entry]) -> list[Column]:
    return [
        Column(heading="who", cells=[entry.who for entry in entries], align="<"),
        Column(heading="user", cells=[entry.user for entry in entries], align="<", keep=4),
        Column(heading="GPU", cells=[entry.gpu for entry in entries], keep=5),
        Column(heading="PID", cells=[entry.pid for entry in entries], keep=3),
        Column(heading="GiB", cells=[entry.gib for entry in entries]),
        Column(heading="for", cells=[entry.age for entry in entries], keep=2),
    ]


def _entries(group: Group, now: float) -> list[_Entry]:
    if not group.has_heading:
        return [_alone(group, now)]
    return [_heading(group, now), *(_within(member, group) for member in group.members)]


def _alone(group: Group, now: float) -> _Entry:
    (member,) = group.members
    return _Entry(
        owner=member.process.owner,
        who=member.process.owner,
        user=_user(member.process),
        gpu=member.label,
        pid=str(member.process.pid),
        gib=_gib(member.process.used_bytes),
        age=_age(group, now),
        what=(*_titles(group), (_command(member.process), "")),
    )


def _heading(group: Group, now: float) -> _Entry:
    count = len({member.process.pid for member in group.members})
    return _Entry(
        owner=group.first.owner,
        who=group.first.owner,
        user=_user(group.first),
        gpu=_labels(group),
        pid=f"({count})",
        gib=_gib(group.used_bytes),
        age=_age(group, now),
        what=(*_titles(group), (_command(group.first), "")),
    )


def _within(member: Member, group: Group) -> _Entry:
    is_told = member.process.command == group.first.command  # in the heading
    what = _rank_of(member.job) or ("" if is_told else _command(member.process))
    return _Entry(
        owner=member.process.owner,
        who="",
        user="",
        gpu=member.label,
        pid=str(member.process.pid),
        gib=_gib(member.process.used_bytes),
        age="",
        what=((what, "dim"),),
    )


def _rank_of(job: Job | None) -> str:
    if job is None or job.rank is None:
        return ""
    return f"rank {job.rank}" + ("" if job.world_size is None else f" of {job.world_size}")


def _titles(group: Group) -> list[Piece]:
    job = group.members[0].job
    pieces: list[Piece] = []
    if job and job.launcher:
        pieces.append((f"{job.launcher} ", "cyan"))
    if job and job.run_id:
        pieces.append((f"run {printable(job.run_id)[:24]} ", "cyan"))
    if job and job.rank is not None and not group.has_heading:
        pieces.append((f"rank {job.rank} ", "cyan"))
    return pieces


def _labels(group: Group) -> str:
    """
    >>> _labels(Group(tuple(Member(label, None, None) for label in ("0", "1", "2", "5"))))
    '0-2,5'
    """
    labels = list(dict.fromkeys(member.label for member in group.members))
    if not all(label.isdecimal() for label in labels):
        return ",".join(labels)
    spans: list[list[int]] = []
    for index in sorted(map(int, labels)):
        if spans and index == spans[-1][-1] + 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    return ",".join(f"{span[0]}-{span[-1]}" if span[1:] else str(span[0]) for span in spans)


def _user(process: Process) -> str:
    return printable(process.user or "?")[:_MOST_NAME]


def _gib(used_bytes: int | None) -> str:
    return "?" if used_bytes is None else format_gib(used_bytes)


def _age(group: Group, now: float) -> str:
    return "" if group.started_at is None else format_duration(now - group.started_at)


def _command(process: Process) -> str:
    command = printable((process.command or process.note or "?")[:_MOST_COMMAND])
    return f"{command} (graphics)" if process.kind == "graphics" else command
