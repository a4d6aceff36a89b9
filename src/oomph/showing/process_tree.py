"""Processes on GPUs and their ancestors -> a tree in lines of text. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from oomph.records.machine import Ancestor, Job, Process
from oomph.showing.terminal import Glyphs, printable

_BETWEEN = " > "


@dataclass(slots=True, eq=False)
class _Node:
    """A process in the tree; `process` if it is on a GPU."""

    pid: int
    command: str | None
    process: Process | None = None
    children: dict[int, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of the tree."""

    lead: str  # the lines that connect it
    process: Process | None  # None: ancestors alone, which are not on a GPU
    names: str  # of ancestors without branches, joined

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid


def branches_of(processes: Iterable[Process], jobs: Sequence[Job], glyphs: Glyphs) -> list[Branch]:
    """Return the tree, each process once, in order of appearance."""
    root = _Node(1, None)
    chains = {job.pid: job.ancestors for job in jobs}
    for process in processes:
        _put(root, process, chains.get(process.pid, ()))
    return [
        branch
        for child in root.children.values()
        for branch in _branches(child, "", "", glyphs.tree)
    ]


def _put(root: _Node, process: Process, ancestors: Sequence[Ancestor]) -> None:
    node = root
    for ancestor in reversed(ancestors):
        node = node.children.setdefault(ancestor.pid, _Node(ancestor.pid, ancestor.command))
    found = node.children.setdefault(process.pid, _Node(process.pid, process.command))
    found.process = process


def _branches(node: _Node, lead: str, below: str, tree: tuple[str, ...]) -> Iterator[Branch]:
    names = []
    while node.process is None and len(node.children) == 1:
        names.append(_name(node.command))
        (node,) = node.children.values()
    if node.process is None:
        names.append(_name(node.command))
    if names:
        yield Branch(lead, None, _BETWEEN.join(names))
        lead, below = (below + tree[1], below + tree[3]) if node.process else (lead, below)
    if node.process is not None:
        yield Branch(lead, node.process, "")
    *others, last = node.children.values() or (None,)
    for child in others:
        assert child is not None  # noqa: S101 - only `last` may be
        yield from _branches(child, below + tree[0], below + tree[2], tree)
    if last is not None:
        yield from _branches(last, below + tree[1], below + tree[3], tree)


def _name(command: str | None) -> str:
    """Return a program's name, and a script's: an ancestor's arguments say little.

    >>> _name("/usr/bin/python3 -u /opt/bin/torchrun --nproc-per-node=4 a.py"), _name("-bash")
    ('python3 torchrun', 'bash')
    """
    program, *rest = (command or "?").split() or ["?"]
    name = os.path.basename(program).lstrip("-")  # noqa: PTH119
    script = next((word for word in rest if not word.startswith("-")), "")
    if name.startswith("python") and "-c" not in rest:
        name += f" {os.path.basename(script)}"  # noqa: PTH119
    return printable(name.strip()) or "?"
