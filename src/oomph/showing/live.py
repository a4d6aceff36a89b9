"""Look, histories, View -> the lines of one frame of the live view. Pure.

From top to bottom: the machine and the time, problems, the GPUs, the processes, the keys. The
middle scrolls. Lines never exceed the terminal's width, nor their number its height.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oomph.records.machine import Device, Job, Look, Owner, Process
from oomph.showing.gpus import (
    MINE,
    OWNER_STYLES,
    Row,
    Table,
    bar_legend,
    in_one_unit,
    provenance,
    ratio_of,
    rows_of,
    table_lines,
)
from oomph.showing.graph import AXIS_CELLS, Graph, beside, graph_lines, load_style
from oomph.showing.live_view import KEYS, Filter, Histories, Sort, View
from oomph.showing.process_tree import Branch, branches_of
from oomph.showing.terminal import (
    Column,
    Glyphs,
    Line,
    Piece,
    fit,
    fitting,
    lines,
    printable,
    width_of,
    wrap,
)
from oomph.units import format_duration, format_gib, format_ratio

# ---- processes, grouped by run -------------------------------------------------------------------
# What belongs together: the same run of oomph, else the workers of the same launcher, else a
# process and its children on a GPU (a script that starts the other ranks itself).

_LEAST_FOR_COMMANDS = 14  # columns left for command lines
_MOST_NAME = 12  # characters of a user name
_MOST_COMMAND = 400  # characters of a command line: more than any terminal shows


@dataclass(frozen=True, slots=True)
class Member:
    """A process on one GPU, and its job."""

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
    def cpu_cores(self) -> float | None:
        """Return the CPU cores that all its processes keep busy; None if that of one is unknown."""
        cores = {m.process.pid: m.process.cpu_cores for m in self.members}
        known = [one for one in cores.values() if one is not None]
        return sum(known) if len(known) == len(cores) else None

    @property
    def has_heading(self) -> bool:
        return len(self.members) > 1


def members_of(rows: Iterable[Row], jobs: Sequence[Job], *, only_mine: bool) -> list[Member]:
    """Return all processes on these GPUs; for a divided GPU, by slice."""
    by_pid = {job.pid: job for job in jobs}
    return [
        Member(row.label, process, by_pid.get(process.pid))
        for row in rows
        for process in (() if row.device.slices else row.device.processes or ())
        if not only_mine or process.owner in MINE
    ]


def groups_of(members: Iterable[Member], sort: Sort) -> list[Group]:
    """Group and sort the processes. Within a group, sort by rank, then by GPU."""
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
    return groups  # in order of appearance: by GPU


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

# who, user, GPU, PID, GiB, SM, CPU, for, what
_Entry = tuple[Line, str, str, str, str, Line, Line, str, Line]


def group_lines(groups: Sequence[Group], now: float, width: int) -> list[Line]:
    """Return the heading, then each group and its members."""
    entries = [entry for group in groups for entry in _entries(group, now)]
    if not entries:
        return []
    who, user, gpu, pid, gib, sm, cpu, age, what = zip(*entries, strict=True)
    figures = [
        Column("who", who, align="<"),
        Column("user", user, keep=4, align="<"),
        Column("GPU", gpu, keep=6),
        Column("PID", pid, keep=3),
        Column("GiB", gib),
        Column("SM", sm, keep=5),
        Column("CPU", cpu, keep=2),
        Column("for", age, keep=1),
    ]
    kept = fitting(figures, max(width - _LEAST_FOR_COMMANDS, 1))
    return lines([*kept, Column("what", what, align="<")])


def _entries(group: Group, now: float) -> list[_Entry]:
    first = group.first
    num_processes = len({member.process.pid for member in group.members})
    entry: _Entry = (
        [(first.owner, OWNER_STYLES[first.owner])],
        printable(first.user or "?")[:_MOST_NAME],
        _labels(group),
        f"({num_processes})" if group.has_heading else str(first.pid),
        _gib(group.used_bytes),
        [] if group.has_heading else _sm(first),
        _cpu(group.cpu_cores),
        "" if group.started_at is None else format_duration(now - group.started_at),
        [*_titles(group), (_command(first), "")],
    )
    return [entry, *(_within(member, group) for member in group.members if group.has_heading)]


def _within(member: Member, group: Group) -> _Entry:
    process = member.process
    is_in_heading = process.command == group.first.command
    what = _rank_of(member.job) or ("" if is_in_heading else _command(process))
    return (
        [],
        "",
        member.label,
        str(process.pid),
        _gib(process.used_bytes),
        _sm(process),
        _cpu(process.cpu_cores),
        "",
        [(what, "dim")],
    )


def _sm(process: Process) -> Line:
    """Return a process's share of its GPU's multiprocessors; blank if nobody measured it."""
    ratio = process.sm_ratio
    return [] if ratio is None else [(format_ratio(ratio), load_style(ratio))]


def _cpu(cores: float | None) -> Line:
    """Return CPU time as `top` shows it: 100% is one core."""
    return [] if cores is None else [(format_ratio(cores), "")]


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


def _gib(used_bytes: int | None) -> str:
    return "?" if used_bytes is None else format_gib(used_bytes)


def _command(process: Process) -> str:
    command = printable((process.command or process.note or "?")[:_MOST_COMMAND])
    return f"{command} (graphics)" if process.kind == "graphics" else command


def _tree(groups: Sequence[Group], jobs: Sequence[Job], width: int, glyphs: Glyphs) -> list[Line]:
    """Return the processes below what started them, with the figures of each on the left."""
    members = [member for group in groups for member in group.members]
    labels: dict[int, list[str]] = {}
    for member in members:
        labels.setdefault(member.process.pid, []).append(member.label)
    branches = branches_of((member.process for member in members), jobs, glyphs)
    if not branches:
        return []
    shown = [branch.process for branch in branches]
    gpus = ["" if one is None else ",".join(labels[one.pid]) for one in shown]
    figures = [
        Column("GPU", gpus, keep=6),
        Column("GiB", ["" if one is None else _gib(one.used_bytes) for one in shown]),
        Column("SM", [[] if one is None else _sm(one) for one in shown], keep=5),
        Column("CPU", [[] if one is None else _cpu(one.cpu_cores) for one in shown], keep=2),
    ]
    kept = fitting(figures, max(width - _LEAST_FOR_COMMANDS, 1))
    what = [_branch_line(branch) for branch in branches]
    return lines([*kept, Column("process", what, align="<")])


def _branch_line(branch: Branch) -> Line:
    process = branch.process
    if process is None:
        return [(branch.lead, "dim"), (branch.names, "dim")]
    user = printable(process.user or "?")[:_MOST_NAME]
    named = f"{process.pid} {user} "
    return [(branch.lead, "dim"), (named, OWNER_STYLES[process.owner]), (_command(process), "")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The data one frame is drawn from."""

    look: Look | None  # None: the driver has not answered yet
    histories: Histories
    view: View
    interval_s: float
    glyphs: Glyphs
    silent_s: float = 0.0  # how long the first answer has been missing, if that is long
    hears_keys: bool = True


@dataclass(frozen=True, slots=True)
class Drawn:
    lines: Sequence[Line]
    scroll: int  # as far as possible
    page: int  # visible lines of the middle


def draw(frame: Frame, width: int, height: int) -> Drawn:
    """Draw the frame for a terminal of that size."""
    top, middle, bottom = _top(frame, width), _middle(frame, width), [_keys(frame, width)]
    if height < 6:  # every line counts
        top, bottom = top[:1] if height > 2 else [], []
    host = _host(frame, width)
    if host and len(top) + 1 + len(middle) + len(bottom) <= height:
        top.insert(1, host)
    page = max(height - len(top) - len(bottom), 0)
    middle += _graphs(frame, width, page - len(middle))
    scroll = max(min(frame.view.scroll, len(middle) - page), 0)
    shown = middle[scroll : scroll + page]
    if bottom:
        shown += [[]] * (page - len(shown))
        bottom = [_with_place(bottom[0], scroll, page, len(middle))]
    lines = [fit(line, width, frame.glyphs.more) for line in (*top, *shown, *bottom)]
    return Drawn(lines[:height], scroll, page)


def draw_once(frame: Frame, width: int) -> list[Line]:
    """Draw one look at full length: for --once, and if the output is not a terminal."""
    lines = [*_top(frame, width), *_middle(frame, width)]
    return [fit(line, width, frame.glyphs.more) for line in lines]


# ---- top ---------------------------------------------------------------------------------------


def _top(frame: Frame, width: int) -> list[Line]:
    look = frame.look
    if look is None:
        waited = f" for {frame.silent_s:.0f} s, without an answer" if frame.silent_s else ""
        return [[(f"asking the driver{waited}", "bold")]]
    pieces: list[Piece] = [("paused", "reverse"), ("  ", "")] if frame.view.is_paused else []
    if look.machine.gpus:  # else "0 GPUs" would claim to know
        pieces += [(_counted(look), "bold"), ("  ", "")]
    pieces.append((time.strftime("%H:%M:%S", time.localtime(look.at)), ""))
    pieces += [("  ", ""), (provenance(look.machine), "dim")]
    return [pieces, *_prose(look.machine.problem or "", width, "bold red")]


def _counted(look: Look) -> str:
    """Return how many GPUs there are, and whose."""
    machine = look.machine
    devices = [row.device for row in rows_of(machine) if not row.device.slices]
    counts = {
        "mine": sum(_has_process_of(device, MINE) for device in devices),
        "others'": sum(_has_process_of(device, ("others",)) for device in devices),
        "free": sum(device.is_free is True for device in devices),
        "unknown": sum(
            device.is_free is not True and not _has_process_of(device, (*MINE, "others"))
            for device in devices
        ),
    }
    gpus = f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) != 1)}"
    if any(gpu.slices for gpu in machine.gpus):
        gpus += f", {sum(device.is_slice for device in devices)} slices"
    whose = ", ".join(f"{count} {whose}" for whose, count in counts.items() if count)
    return f"{gpus}: {whose}" if whose else gpus


def _has_process_of(device: Device, owners: tuple[Owner, ...]) -> bool:
    return any(process.owner in owners for process in device.processes or ())


def _host(frame: Frame, width: int) -> Line:
    """Return the line of the CPUs and the memory of the machine; empty if nothing is known."""
    host = frame.look.host if frame.look else None
    if host is None:
        return []
    cpu = [("CPU ", ""), (ratio_of(host.cpu_ratio), load_style(host.cpu_ratio))]
    parts: list[tuple[list[Piece], list[Piece]]] = [(cpu, [(f" of {host.num_cpus} cores", "dim")])]
    if host.used_bytes is not None and host.total_bytes:
        ratio = host.used_bytes / host.total_bytes
        sizes = f"{format_gib(host.used_bytes)} of {format_gib(host.total_bytes)} GiB"
        memory = [("  RAM ", ""), (sizes, load_style(ratio))]
        parts.append((memory, [(f" {format_ratio(ratio)}", "dim")]))
    if host.load is not None:
        style = load_style(host.load / host.num_cpus)
        parts.append(([("  load ", ""), (f"{host.load:.1f}", style)], []))
    long = [piece for part, more in parts for piece in (*part, *more)]
    return long if width_of(long) <= width else [piece for part, _ in parts for piece in part]


# ---- what spare lines are for --------------------------------------------------------------------

_LEAST_ROWS, _MOST_ROWS = 3, 24  # of a graph; judgement
_LEAST_GRAPH, _GRAPH_GAP = 34, 3  # cells


def _graphs(frame: Frame, width: int, num_spare: int) -> list[Line]:
    """Return graphs of the machine for the lines that are left, side by side and below."""
    if frame.look is None or frame.view.is_help or width < _LEAST_GRAPH:
        return []
    pace, histories = frame.view.looks_per_cell, frame.histories
    tracks = [
        ("kernel-active, all GPUs", histories.all_busy),
        ("GPU memory", histories.all_full),
        *([("CPU", histories.cpu)] if frame.look.host else []),
    ]
    number = min((width + _GRAPH_GAP) // (_LEAST_GRAPH + _GRAPH_GAP), len(tracks))
    num_blocks = min(-(-len(tracks) // number), num_spare // (_LEAST_ROWS + 2))
    if not num_blocks:
        return []
    rows = min(num_spare // num_blocks - 2, _MOST_ROWS)  # a blank line and the title
    each = (width - _GRAPH_GAP * (number - 1)) // number
    span = f"last {in_one_unit(frame.interval_s * pace * (each - AXIS_CELLS))}"
    graphs = [
        graph_lines(Graph(title, track.cells(pace), span), each, rows, frame.glyphs)
        for title, track in tracks[: number * num_blocks]
    ]
    blocks = [graphs[at : at + number] for at in range(0, len(graphs), number)]
    return [line for block in blocks for line in ([], *beside(block, _GRAPH_GAP))]


# ---- middle ------------------------------------------------------------------------------------


def _middle(frame: Frame, width: int) -> list[Line]:
    if frame.view.is_help:
        return _help(frame)
    look = frame.look
    if look is None:
        return []
    rows = _rows(look, frame.view)
    lines = table_lines(_table(frame, look, rows), width) if rows else []
    if not rows and look.machine.gpus:
        lines += _prose(_NOTHING[frame.view.filter], width, "dim")
    for row in rows:
        if row.device.problem:
            lines += _prose(f"GPU {row.label}: {row.device.problem}", width, "red")
    for note in look.notes:
        lines += _prose(note, width, "dim")
    members = members_of(rows, look.jobs, only_mine=frame.view.filter == "mine")
    groups = groups_of(members, frame.view.sort)
    if frame.view.is_tree:
        grouped = _tree(groups, look.jobs, width, frame.glyphs)
    else:
        grouped = group_lines(groups, look.at, width)
    return [*lines, [], *grouped] if grouped else lines


_NOTHING = {
    "all": "",
    "mine": "no process of yours is on a GPU; f shows all of them",
    "visible": "CUDA_VISIBLE_DEVICES shows none of these GPUs; f shows all of them",
}


def _rows(look: Look, view: View) -> list[Row]:
    """Return the GPUs and slices that pass the filter."""
    rows = list(rows_of(look.machine))
    if view.filter == "mine":
        return [row for row in rows if _has_process_of(row.device, MINE)]
    if view.filter == "visible" and look.visible is not None:
        places = {uuid: i for i, uuid in enumerate(look.visible) if uuid}
        shown = [row for row in rows if row.device.uuid in places]
        return sorted(shown, key=lambda row: places[row.device.uuid or ""])
    return rows


def _table(frame: Frame, look: Look, rows: Sequence[Row]) -> Table:
    pace = frame.view.looks_per_cell
    return Table(
        rows=rows,
        glyphs=frame.glyphs,
        names_users=True,
        cuda_indices={uuid: i for i, uuid in enumerate(look.visible or ()) if uuid},
        sm_active_ratios=look.sm_active_ratios,
        busy={uuid: track.cells(pace) for uuid, track in frame.histories.busy.items()},
        full={uuid: track.cells(pace) for uuid, track in frame.histories.full.items()},
        cell_s=frame.interval_s * pace,
    )


def _prose(text: str, width: int, style: str) -> list[Line]:
    return [[(line, style)] for line in wrap(printable(text), width)]


def _help(frame: Frame) -> list[Line]:
    figures = (("memory", bar_legend(frame.glyphs)), *_LEGEND)
    keys: list[Line] = [[("keys", "bold")], *map(_explained, KEYS)]
    return [*keys, [], [("figures", "bold")], *map(_explained, figures)]


def _explained(entry: tuple[str, str]) -> Line:
    word, meaning = entry
    return [(f"  {word:<13}  ", "cyan"), (meaning, "")]


_LEGEND = (
    ("kernel-active", "share of the time with at least one kernel running, however small"),
    ("SM", "a process's share of the GPU's multiprocessors, by the driver"),
    ("CPU", "100% is one core"),
    ("SM active", "how many of its multiprocessors worked, over the time: Hopper and later"),
    ("mine", "of this user"),
    ("others", "of other users"),
    ("unknown", "owner unknown, for example in a container with its own PIDs"),
)


# ---- bottom ------------------------------------------------------------------------------------


def _keys(frame: Frame, width: int) -> Line:
    if not frame.hears_keys:
        return [("standard input is no terminal: no keys; Ctrl-C quits", "dim")]
    view = frame.view
    keys = [
        ("q", "quit"),
        ("f", view.filter),
        ("s", f"by {view.sort}"),
        ("?", "help"),
        ("space", "go on" if view.is_paused else "pause"),
        ("v", "list" if view.is_tree else "tree"),
        ("t", "time span"),
    ]
    pieces: list[tuple[str, str]] = []
    left = width - 12  # leaves room for the scroll position
    for key, what in keys:
        left -= len(f"{key} {what}  ")
        if left >= 0:
            pieces += [(key, "bold"), (f" {what}  ", "dim")]
    return pieces


def _with_place(line: Line, scroll: int, page: int, num_lines: int) -> Line:
    """Add the scroll position, if not all lines are visible."""
    if num_lines <= page:
        return line
    return [*line, (f"{scroll + 1}-{scroll + page}/{num_lines}", "reverse")]


def lines_of(look: Look, *, filter: Filter, glyphs: Glyphs, width: int) -> list[Line]:  # noqa: A002
    """Return one look as lines of text."""
    view = View(filter=filter)
    frame = Frame(look=look, histories=Histories(), view=view, interval_s=1.0, glyphs=glyphs)
    return draw_once(frame, width)
