"""Whose process is it: this run's, mine, others', or nobody can tell."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from oomph.sensing import ownership
from oomph.sensing.ownership import find_process

Start = Callable[..., int]
UNUSED_PID = 4_194_303  # the largest that Linux gives; nobody has it on a test machine

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to start another user's process")


def can_make_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--user", "--map-root-user", "--pid", "--mount", "--fork", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


in_container = pytest.mark.skipif(not can_make_namespaces(), reason="needs user namespaces")


def test_this_process_is_this_run() -> None:
    facts = find_process(os.getpid())
    assert facts.owner == "this-run"
    assert facts.command
    assert "python" in facts.command or "pytest" in facts.command
    assert facts.started_at is not None
    assert facts.started_at <= time.time()


def test_a_child_is_this_run(start_process: Start) -> None:
    assert find_process(start_process("train.py")).owner == "this-run"


def test_a_process_of_this_user_outside_this_run_is_mine(
    start_process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = start_process("train.py")
    monkeypatch.setattr(
        os, "getpid", lambda: UNUSED_PID
    )  # seen by a process that is not its parent
    facts = find_process(pid)
    assert facts.owner == "mine"
    assert "train.py" in (facts.command or "")


def test_a_process_that_carries_the_runs_token_is_this_run(
    start_process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ownership.RUN_TOKEN, "run-7")
    pid = start_process()
    stranger = start_process(env={**os.environ, ownership.RUN_TOKEN: "run-8"})
    monkeypatch.setattr(os, "getpid", lambda: UNUSED_PID)
    assert find_process(pid).owner == "this-run"
    assert find_process(stranger).owner == "mine"


@as_root
def test_a_process_of_another_user_is_others_and_named(start_process: Start) -> None:
    pid = start_process(user="nobody")
    facts = read_as_another_process(pid)
    assert facts["owner"] == "others"
    assert facts["user"] == "nobody"


def read_as_another_process(pid: int) -> dict[str, str]:
    code = (
        "import json, dataclasses; from oomph.sensing.ownership import find_process;"
        f"print(json.dumps(dataclasses.asdict(find_process({pid}))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts: dict[str, str] = json.loads(done.stdout)
    return facts


def test_a_process_that_has_ended_is_unknown() -> None:
    facts = find_process(UNUSED_PID)
    assert facts.owner == "unknown"
    assert "ended" in (facts.note or "")


def in_namespaces(code: str, *options: str, setup: str = "true", as_user: str = "") -> str:
    """What a script prints in a container of its own."""
    command = f"{setup} && exec {as_user} {sys.executable} -c {shlex.quote(code)}"
    done = subprocess.run(
        ["unshare", *options, "sh", "-c", command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


CONTAINER = ("--user", "--map-root-user", "--pid", "--mount", "--fork", "--mount-proc")

REUSE = """
import subprocess
from oomph.sensing import ownership
ownership.pids_are_the_hosts = lambda: False  # only here can one choose the next PID
for seconds in range(60, 80):
    open("/proc/sys/kernel/ns_last_pid", "w").write("499")
    with subprocess.Popen([f"job-{seconds}", str(seconds)], executable="/bin/sleep") as process:
        while not open(f"/proc/{process.pid}/cmdline").read():
            pass  # the kernel says that a program has begun before its arguments can be read
        print(process.pid, ownership.find_process(process.pid).command)
        process.kill()
"""


@in_container
def test_a_number_that_was_given_to_another_process_is_looked_at_again() -> None:
    told = [line.split() for line in in_namespaces(REUSE, *CONTAINER).splitlines()]
    assert {pid for pid, *_ in told} == {"500"}
    assert [name for _, name, _ in told] == [f"job-{seconds}" for seconds in range(60, 80)]


@in_container
def test_in_a_container_nobody_is_known_by_number_not_even_this_process() -> None:
    code = (
        "import os; from oomph.sensing.ownership import find_process;"
        "me = find_process(os.getpid()); print(me.owner, me.note)"
    )
    told = in_namespaces(code, *CONTAINER)
    assert told == "unknown a PID of the host: cannot tell whose; run the container with --pid=host"


def test_a_forked_child_learns_anew_who_it_is(start_process: Start) -> None:
    pid = start_process()  # this process's child, so this run's; not the child's child
    assert find_process(pid).owner == "this-run"
    child = os.fork()
    if child == 0:
        os._exit(0 if find_process(pid).owner == "mine" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_that_has_ended_but_was_not_buried_still_has_its_owner() -> None:
    process = subprocess.Popen(["true"])
    while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    assert find_process(process.pid).owner == "this-run"
    process.wait()


@as_root
@pytest.mark.parametrize("hidepid", [1, 2])
def test_a_process_that_the_machine_hides_is_others(start_process: Start, hidepid: int) -> None:
    pid = start_process()
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("needs a Python that any user may run")
    code = f"""
import sys; sys.path[:0] = {[str(Path(ownership.__file__).parents[2]), site_packages()]!r}
from oomph.sensing.ownership import find_process
print(find_process({pid}).owner)
"""
    setup = f"mount -t proc -o hidepid={hidepid} proc /proc"
    as_nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    command = f"{setup} && exec {as_nobody} {python} -c {shlex.quote(code)}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("another user cannot read this checkout")
    assert done.stdout.strip() == "others"


def site_packages() -> str:
    import psutil

    return str(Path(psutil.__file__).parents[1])
