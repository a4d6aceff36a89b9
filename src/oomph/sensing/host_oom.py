"""The kernel's counters -> has it killed processes of this run for want of host memory?

The counter of this process's control group counts those inside it, whichever limit was hit. The
machine's own counter counts everybody's, and is evidence only beside a death by SIGKILL.

Limits: a command that moves itself to another group (a container, systemd-run) is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OomKills:
    """How often so far; None where the kernel does not tell."""

    in_group: int | None
    on_machine: int | None

    def grew_in_group(self, before: OomKills) -> bool:
        return _grew(before.in_group, self.in_group)

    def grew_on_machine(self, before: OomKills) -> bool:
        return _grew(before.on_machine, self.on_machine)


def read_oom_kills(root: Path = Path("/")) -> OomKills:
    """The counters as they are now."""
    on_machine = _counter(root / "proc/vmstat", "oom_kill")
    paths = _group_files(root)
    in_group = next((n for n in (_counter(p, "oom_kill") for p in paths) if n is not None), None)
    return OomKills(in_group, on_machine)


def _group_files(root: Path) -> list[Path]:
    """cgroups(7): a line is `number:controllers:path`; 0 and no controllers is version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        group = path.lstrip("/")
        if not controllers:
            found += [root / "sys/fs/cgroup" / group / "memory.events"]
        elif "memory" in controllers.split(","):
            found += [root / "sys/fs/cgroup/memory" / group / "memory.oom_control"]
    return found


def _counter(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _grew(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before
