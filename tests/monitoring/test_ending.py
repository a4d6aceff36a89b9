"""However it ends, nothing of it is left: no process, no file, no directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sandbox.insiders import (
    ask,
    needs_namespaces,
    processes_with,
    run_python,
    wait_until,
)

from oomph.sandbox.sandbox import Sandbox

pytestmark = needs_namespaces

LEFTOVERS = """
subprocess.Popen(["sleep", {mark!r}])
subprocess.run("setsid sleep {mark} >/dev/null 2>&1 </dev/null &", shell=True)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execvp("sleep", ["sleep", {mark!r}])
    os._exit(0)
"""

# A command as oomph's own would be: it asks, and is interrupted while it waits.
COMMAND = """
import sys
sys.path.insert(0, sys.argv[1])
from oomph.sandbox.sandbox import Sandbox
from sandbox.insiders import run_python
with Sandbox(run_python) as sandbox:
    sandbox.ask(sys.argv[2].encode())
    sandbox.ask(b"open('oomph-left', 'w').close(); time.sleep(1e6)")
"""


def mark_of(test: int) -> str:
    """An argument of `sleep` that nobody else has."""
    return f"{100_000 + os.getpid()}.{test}"


def test_processes_that_were_left_running_are_dead_when_it_is_closed() -> None:
    mark = mark_of(1)
    with Sandbox(run_python) as sandbox:
        ask(sandbox, LEFTOVERS.format(mark=mark))
        assert wait_until(lambda: len(processes_with(mark)) == 3)
    assert processes_with(mark) == []


def test_processes_that_were_left_running_are_dead_when_the_script_ends_by_itself() -> None:
    mark = mark_of(2)
    with Sandbox(run_python) as sandbox:
        ask(sandbox, LEFTOVERS.format(mark=mark))
        with pytest.raises(Exception, match="without an answer"):
            ask(sandbox, "os._exit(0)")
        assert processes_with(mark) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("is_whole_group", [True, False])
def test_a_command_that_is_interrupted_or_killed_leaves_nothing(
    tmp_path: Path, number: signal.Signals, is_whole_group: bool
) -> None:
    mark = mark_of(10 + number + 100 * is_whole_group)
    tests = str(Path(__file__).parents[1])
    arguments = [tests, LEFTOVERS.format(mark=mark)]
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as command:
        is_running = wait_until(lambda: len(processes_with(mark)) == 3)
        (os.killpg if is_whole_group else os.kill)(command.pid, number)
    assert is_running
    assert command.returncode == -number
    assert wait_until(lambda: processes_with(mark) == [])
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_and_no_zombie_is_left() -> None:
    def held() -> tuple[int, str]:
        children = subprocess.run(
            ["pgrep", "-c", "-P", str(os.getpid()), "python"], capture_output=True, text=True
        )
        return len(list(Path("/proc/self/fd").iterdir())), children.stdout

    before = held()
    for _ in range(5):
        with Sandbox(run_python) as sandbox:
            ask(sandbox, "answer = 1")
    assert held() == before


def test_closing_twice_or_after_its_keeper_died_is_no_error() -> None:
    mark = mark_of(3)
    sandbox = Sandbox(run_python)
    ask(sandbox, LEFTOVERS.format(mark=mark))
    os.kill(sandbox._keeper, signal.SIGKILL)
    sandbox.close()
    sandbox.close()
    assert processes_with(mark) == []


def test_it_can_be_used_from_a_thread_while_others_have_their_own() -> None:
    found: list[object] = []

    def use(number: int) -> None:
        with Sandbox(run_python) as sandbox:
            found.append(ask(sandbox, f"answer = {number}"))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, found)) == ["0", "1", "2", "3"]
