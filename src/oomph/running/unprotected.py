"""A function that serves -> the same, in a process that is watched but not walled in.

For where the kernel refuses namespaces, and only when the user said so. Writes outside a scratch
directory are refused: by Landlock where the kernel has it, and by a hook in Python, which native
code passes by. The keeper adopts and kills whatever the script leaves behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from types import FrameType
from typing import NoReturn

from oomph.running import linux
from oomph.running.furnishing import furnish, make_terminal
from oomph.running.inside import (
    GO,
    Ends,
    Outside,
    Serve,
    begin,
    ending,
    with_exit,
)
from oomph.running.landlock import write_only_below
from oomph.running.offline import go_offline
from oomph.running.refusing import refuse_writes_outside

# Caches and settings that libraries write to unasked, each in a directory of its name.
CACHES = (
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "MPLCONFIGDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "WANDB_DIR",
    "NUMBA_CACHE_DIR",
)


class _Ended(BaseException):
    """The keeper was told to end, or the one who started it did."""


def watch(serve: Serve, ends: Ends, parent: int) -> NoReturn:
    """Be the keeper of an unprotected server, from the fork to the end."""
    with_exit(lambda: _watch(serve, ends, parent))


def _watch(serve: Serve, ends: Ends, parent: int) -> int:
    outside = begin(ends, parent, signal.SIGTERM)
    linux.adopt_orphans()
    linux.refuse_to_be_traced()
    scratch = tempfile.mkdtemp(prefix="oomph-")
    try:
        signal.signal(signal.SIGTERM, _end)
        if os.getppid() != parent:  # it ended before the handler was there
            return 1
        terminal = make_terminal()
        server = os.fork()
        if server == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with_exit(lambda: _be_server(serve, outside, scratch, terminal))
        return ending(server)
    except _Ended:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_descendants()
        shutil.rmtree(scratch, ignore_errors=True)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise _Ended


def _kill_descendants() -> None:
    """Kill children until there are none: orphans of a killed one become ours and follow."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    numbers = (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in map(int, numbers) if _is_child(pid)]


def _is_child(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # it ended meanwhile
        return False
    # proc(5): the name is in parentheses and may hold any; then the state and the parent's number
    return int(stat.rpartition(")")[2].split()[1]) == os.getpid()


def _be_server(serve: Serve, outside: Outside, scratch: str, terminal: int) -> int:
    furnish(terminal)
    linux.die_with_parent()
    for name in CACHES:
        os.environ[name] = f"{scratch}/{name.lower()}"
    go_offline(scratch)
    writable = (scratch, "/dev/shm")  # noqa: S108 - loaders hand over tensors there
    has_landlock = write_only_below(writable)
    refuse_writes_outside(writable)
    outside.tell(stage="ready", probe=None, read_only=[], has_landlock=has_landlock)
    outside.wait_for(GO)
    serve(outside.requests, outside.answers)
    return 0
