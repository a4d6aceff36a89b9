"""Where the kernel refuses namespaces: the reason, the refusal, and the weaker way.

The refusals are the kernel's own: a limit of zero user namespaces, and a seccomp filter as a
container has it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oomph.errors import NoSandbox
from oomph.sandbox import linux
from oomph.sandbox.sandbox import Protection, Sandbox, protection, refusal
from sandbox.conftest import Home
from sandbox.insiders import (
    HERE,
    REFUSED,
    ask,
    fingerprint,
    needs_namespaces,
    needs_root,
    processes_with,
    run_inside,
    run_python,
    wait_until,
)

# The numbers of system calls in asm/unistd.h
UNSHARE = {"x86_64": 272, "aarch64": 97}.get(platform.machine())
MOUNT = {"x86_64": 165, "aarch64": 40}.get(platform.machine())


def allow_no_namespaces() -> None:
    """In a user namespace of our own we may set its limit, which binds those below."""
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(linux.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def forbid(number: int | None) -> None:
    """As a container's profile does: EPERM. include/uapi/linux/{filter,seccomp}.h"""
    load_number, jump_if_equal, give_back = 0x20, 0x15, 0x06
    not_permitted, allowed = 0x00050001, 0x7FFF0000
    program = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (load_number, 0, 0, 0),
            (jump_if_equal, 0, 1, number),
            (give_back, 0, 0, not_permitted),
            (give_back, 0, 0, allowed),
        )
    )
    kept = ctypes.create_string_buffer(program)
    described = struct.pack("HxxxxxxQ", 4, ctypes.addressof(kept))
    linux.gain_no_privileges()
    linux.call("prctl", 22, ctypes.c_ulong(2), described, ctypes.c_ulong(0), ctypes.c_ulong(0))


REFUSALS = [
    pytest.param(allow_no_namespaces, "max_user_namespaces", id="limit of zero"),
    pytest.param(
        lambda: forbid(UNSHARE),
        "Operation not permitted: 'unshare'",
        id="no unshare, as in Docker",
        marks=pytest.mark.skipif(UNSHARE is None, reason="its number is not known here"),
    ),
    pytest.param(
        lambda: forbid(MOUNT),
        "Operation not permitted: 'mount",
        id="namespaces, but no mounts in them, as with AppArmor",
        marks=pytest.mark.skipif(MOUNT is None, reason="its number is not known here"),
    ),
]


def refused(home: Home, refuse: Callable[[], None], work: Callable[[], Any]) -> Any:
    def refused_work() -> Any:
        refuse()
        return work()

    return home.do(refused_work)


@needs_namespaces
@pytest.mark.parametrize(("refuse", "reason"), REFUSALS)
def test_without_namespaces_there_is_a_reason_and_no_sandbox(
    home: Home, refuse: Callable[[], None], reason: str
) -> None:
    def start() -> tuple[str, str, str]:
        found = protection()
        try:
            Sandbox(run_python)
        except NoSandbox as error:
            return found.kind, found.why, str(error)
        return found.kind, found.why, "it started"

    kind, why, error = refused(home, refuse, start)
    assert kind == "none"
    assert reason in why
    assert reason in error
    assert "--unprotected" in error


def forced(home: Home, code: str) -> Any:
    """From the weaker way, which is taken because the kernel refuses the other."""
    refuse = (lambda: None) if REFUSED else allow_no_namespaces
    return refused(home, refuse, lambda: run_inside(code, is_unprotected=True))


def test_with_namespaces_the_stronger_way_is_taken_even_if_the_weaker_is_allowed() -> None:
    with Sandbox(run_python, is_unprotected=True) as sandbox:
        assert sandbox.protection.kind == HERE.kind


WRITES = """
home = os.environ["HOME"]
answer = {}
def attempt(name, harm):
    try:
        harm()
        answer[name] = "done"
    except OSError as error:
        answer[name] = "refused"
attempt("open", lambda: open("train.py", "a"))
attempt("create", lambda: open("new", "w"))
attempt("os.open", lambda: os.open("data/x", os.O_RDWR))
attempt("remove", lambda: os.remove("data/x"))
attempt("rename", lambda: os.rename("train.py", "gone.py"))
attempt("rename into the scratch", lambda: os.rename("train.py", os.environ["TMPDIR"] + "/x"))
attempt("truncate", lambda: os.truncate("runs/log", 0))
attempt("mkdir", lambda: os.mkdir("new"))
attempt("rmtree", lambda: shutil.rmtree("data"))
os.chdir(os.environ["TMPDIR"])
attempt("rmtree from the scratch", lambda: shutil.rmtree(home + "/project/data"))
os.chdir(home + "/project")
attempt("link", lambda: os.symlink("x", home + "/y"))
attempt("program", lambda: subprocess.run(["rm", "-rf", home]))
attempt("system", lambda: os.system("rm -rf " + home))
attempt("network", lambda: socket.create_connection(("127.0.0.1", 9)))
attempt("scratch", lambda: open(os.environ["TMPDIR"] + "/x", "w"))
attempt("tempfile", lambda: tempfile.mkdtemp())
attempt("/dev/null", lambda: open("/dev/null", "w"))
attempt("reading", lambda: open("train.py").read())
"""


def test_the_weaker_way_refuses_to_python_what_is_outside_its_scratch(home: Home) -> None:
    before = fingerprint(home.root)
    answer = forced(home, WRITES)
    done = {name for name, outcome in answer.items() if outcome == "done"}
    assert done == {"scratch", "tempfile", "/dev/null", "reading"}
    assert len(answer) == 18
    assert fingerprint(home.root) == before


@pytest.mark.skipif(linux.version() == 0, reason="this kernel has no Landlock")
def test_where_there_is_landlock_native_code_is_refused_too(home: Home) -> None:
    code = """
libc = ctypes.CDLL(None, use_errno=True)
opened = libc.open(b"train.py", os.O_WRONLY | os.O_TRUNC)
answer = opened, os.strerror(ctypes.get_errno())
"""
    assert forced(home, code) == [-1, "Permission denied"]
    assert (home.project / "train.py").read_text().startswith("this is")


@needs_namespaces
@pytest.mark.parametrize(("refuse", "reason"), REFUSALS)
def test_the_weaker_way_is_named_as_weak_as_it_is(
    home: Home, refuse: Callable[[], None], reason: str
) -> None:
    def look() -> tuple[Any, Protection]:
        with Sandbox(run_python, is_unprotected=True) as sandbox:
            return ask(sandbox, "answer = 'works'"), sandbox.protection

    answer, found = refused(home, refuse, look)
    assert answer == "works"
    assert found.kind == "none"
    assert reason in found.why
    assert ("Landlock" in found.why) == (linux.version() > 0)


FORKED = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1e6)
    os._exit(0)
answer = os.environ["TMPDIR"]
"""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_weaker_way_leaves_no_process_and_no_scratch_either(home: Home, end: str) -> None:
    def use() -> tuple[str, str]:
        """Told from a process that ends here, or is killed with its sandbox still open."""
        allow_no_namespaces()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with Sandbox(run_python, is_unprotected=True) as sandbox:
                scratch = ask(sandbox, FORKED)
                os.write(writing, f"{scratch} {sandbox._keeper}".encode())
                if end == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        scratch, keeper = os.read(reading, 1000).decode().split()
        return scratch, keeper

    scratch, keeper = home.do(use)
    assert scratch.startswith(tempfile.gettempdir())
    assert wait_until(lambda: not Path(scratch).exists())
    assert wait_until(lambda: not Path("/proc", keeper).exists())
    assert wait_until(lambda: not _sessions_of(keeper))


def _sessions_of(keeper: str) -> list[str]:
    """Processes whose parent was the keeper, or whose session it opened."""
    listed = subprocess.run(["ps", "-eo", "ppid=,sid=,pid="], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if keeper in line.split()]


@needs_namespaces
@needs_root
def test_in_a_container_whose_proc_is_masked_the_wall_holds_with_the_old_proc(home: Home) -> None:
    """A whole /proc is refused to a namespace that could not see all of one before."""
    outside = os.getpid()

    def mask() -> None:
        linux.mount("none", "/proc/sys", "tmpfs", linux.MS_RDONLY)

    code = f"""
answer = []
for path in ("/proc/{outside}/root/tmp/x", "/proc/{outside}/cwd/x", "/proc/self/oom_score_adj"):
    try:
        open(path, "w").write("1")
    except OSError as error:
        answer.append(error.strerror)
open("new", "w").close()
answer.append(os.path.exists("/proc/{outside}"))
"""
    answer = home.do(lambda: run_inside(code), before=mask)
    assert answer[-1] is True  # it is the old one
    assert set(answer[:-1]) <= {"Permission denied", "Read-only file system"}
    assert len(answer) == 4
    assert not (home.project / "new").exists()


def test_a_marked_process_can_be_found() -> None:
    """The tests above would pass if they looked in the wrong place."""
    mark = f"{os.getpid()}.75"
    with subprocess.Popen(["sleep", mark]) as found:
        while processes_with(mark) != [found.pid]:  # it takes a moment to have its name
            assert found.poll() is None
        found.kill()


@pytest.mark.parametrize("is_in_container", [True, False])
def test_a_refusal_says_what_to_try(is_in_container: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomph.sandbox.sandbox.is_in_container", lambda: is_in_container)
    attempt = refusal("unshare", None).attempt or ""
    assert attempt.startswith("docker run" if is_in_container else "--unprotected")
    assert "--unprotected" in attempt
