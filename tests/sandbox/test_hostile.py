"""A script that does its worst: it sees what it did, and nobody else does."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from oomph.errors import DiedInside
from oomph.sandbox import linux
from oomph.sandbox.sandbox import Sandbox
from sandbox.conftest import Home
from sandbox.insiders import (
    ask,
    fingerprint,
    give,
    in_a_process,
    needs_namespaces,
    needs_root,
    processes_with,
    run_inside,
    run_python,
)

pytestmark = needs_namespaces

HARM = """
home = os.environ["HOME"]
done = {}
def attempt(name, harm):
    try:
        harm()
        done[name] = True
    except OSError as error:
        done[name] = error.errno

def append(path):
    with open(path, "a") as file:
        file.write("changed")

def by_libc():
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.open(b"data/x", os.O_WRONLY | os.O_TRUNC)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    libc.write(descriptor, b"by libc", 7)

attempt("append", lambda: append("train.py"))
attempt("through a link", lambda: append("link"))
attempt("truncate", lambda: os.truncate("runs/log", 0))
attempt("libc", by_libc)
attempt("chmod", lambda: os.chmod("train.py", 0))
attempt("times", lambda: os.utime("data", (1, 1)))
attempt("create", lambda: append("new"))
attempt("make directories", lambda: os.makedirs("a/b/c"))
attempt("rename", lambda: os.rename("train.py", "gone.py"))
attempt("remove", lambda: os.remove("data/x"))
attempt("remove a tree", lambda: shutil.rmtree("data"))
attempt("make it again", lambda: os.mkdir("data"))
attempt("home", lambda: append(home + "/notes"))
attempt("dot file", lambda: append(home + "/.bashrc"))
attempt("temporary", lambda: append(tempfile.gettempdir() + "/oomph-hostile"))
attempt("subprocess", lambda: subprocess.run("rm -rf ~/.config/key", shell=True, check=True))
attempt("everything", lambda: subprocess.run("rm -rf ~/.[a-z]* ~/*", shell=True))
answer = {"done": done, "left": sorted(os.listdir(home))}
"""


def test_whatever_a_script_destroys_is_destroyed_for_itself_alone(home: Home) -> None:
    before = fingerprint(home.root)
    answer = home.do(lambda: run_inside(HARM))
    assert set(answer["done"].values()) == {True}, answer
    assert answer["left"] == []
    assert fingerprint(home.root) == before
    assert not Path("/tmp/oomph-hostile").exists()  # noqa: S108


@needs_root
def test_a_mount_below_the_home_and_files_beside_it_are_safe_and_can_be_written(
    home: Home,
) -> None:
    disk = home.path / "disk"

    def mount_a_disk() -> None:
        disk.mkdir()
        linux.mount("none", str(disk), "tmpfs", 0)
        (disk / "results").write_text("mine")
        if home.user is not None:
            give(home.path, home.user)

    def harm() -> Any:
        before = fingerprint(home.path)
        answer = run_inside(
            HARM.replace(
                'attempt("append"',
                'attempt("on the mount", lambda: append(home + "/disk/results"))\n'
                'attempt("new there", lambda: append(home + "/disk/new"))\n'
                'attempt("append"',
                1,
            )
        )
        return answer, fingerprint(home.path) == before

    answer, is_unchanged = home.do(harm, before=mount_a_disk)
    assert is_unchanged
    assert set(answer["done"].values()) == {True}, answer
    assert answer["left"] == [
        ".config",
        "disk",
        "project",
    ]  # mount points inside: emptied, but not removed


@needs_root
def test_a_directory_of_the_users_elsewhere_with_a_mount_below_is_safe(home: Home) -> None:
    """Neither home nor project: as root it is covered, for others it is read-only."""
    elsewhere = home.root / "elsewhere"

    def mount_below() -> None:
        (elsewhere / "disk").mkdir(parents=True)
        (elsewhere / "file").write_text("mine")
        if home.user is not None:
            give(elsewhere, home.user)
        linux.mount("none", str(elsewhere / "disk"), "tmpfs", 0)

    def harm() -> Any:
        before = fingerprint(elsewhere)
        answer = run_inside(
            f"open({str(elsewhere / 'file')!r}, 'a').write('x'); answer = 'written'"
        )
        return answer, fingerprint(elsewhere) == before

    answer, is_unchanged = home.do(harm, before=mount_below)
    assert is_unchanged
    assert answer == "written"


@needs_root
def test_where_the_kernel_takes_no_overlay_it_is_read_only_and_said_so(home: Home) -> None:
    """Overlays stack two deep, no deeper: a third is refused, as on some file systems any is."""

    def stack_overlays() -> None:
        upper = home.root / "upper"
        upper.mkdir()
        linux.mount("none", str(upper), "tmpfs", 0)
        for name in ("one", "two"):
            for part in (f"{name}-upper", f"{name}-work"):
                (upper / part).mkdir()
            layers = f"upperdir={upper}/{name}-upper,workdir={upper}/{name}-work"
            options = f"lowerdir={home.path},{layers}"
            linux.mount("overlay", str(home.path), "overlay", 0, options)
        if home.user is not None:
            give(home.path, home.user)

    def harm() -> Any:
        before = fingerprint(home.path)
        with Sandbox(run_python) as sandbox:
            answer = ask(sandbox, "answer = open('train.py').readline(); open('new', 'w')")
            return answer, sandbox.read_only, fingerprint(home.path) == before

    answer, read_only, is_unchanged = home.do(harm, before=stack_overlays)
    assert answer == "OSError: [Errno 30] Read-only file system: 'new'"
    assert {str(home.path), str(home.project)} <= set(read_only)
    assert is_unchanged


def test_the_packages_of_python_are_not_changed() -> None:
    packages = sysconfig.get_paths()["purelib"]
    answer = run_inside(
        f"open({packages!r} + '/oomph_hostile.py', 'w').close(); answer = 'written'"
    )
    assert answer == "written"
    assert not Path(packages, "oomph_hostile.py").exists()


def test_the_root_directory_and_the_kernels_settings_are_read_only(home: Home) -> None:
    code = """
answer = []
for path in ("/oomph-hostile", "/proc/sys/kernel/printk", "/sys/oomph", "/proc/self/oom_score_adj"):
    try:
        open(path, "w").write("1")
    except OSError as error:
        answer.append(error.errno)
"""
    refused = set(home.do(lambda: run_inside(code)))
    assert refused <= {1, 13, 30}  # EPERM, EACCES, EROFS
    assert len(home.do(lambda: run_inside(code))) == 4


def test_neither_the_script_nor_a_program_it_starts_can_take_the_wall_down(home: Home) -> None:
    code = f"""
libc = ctypes.CDLL(None, use_errno=True)
def errno_of(call):
    assert call == -1
    return ctypes.get_errno()
home = os.environ["HOME"].encode()
answer = {{
    "umount": errno_of(libc.umount2(b"{home.path}", 2)),
    "umount /": errno_of(libc.umount2(b"/", 2)),
    "remount": errno_of(libc.mount(b"none", b"/", None, ctypes.c_ulong(32), None)),
    "bind": errno_of(libc.mount(b"/", home, None, ctypes.c_ulong(0x1000), None)),
    "programs": [
        subprocess.run(command, shell=True, capture_output=True).returncode
        for command in (
            "umount -l {home.path}", "umount -l /tmp", "umount /dev", "umount /proc",
            "mount -o remount,rw /", "mknod disk b 8 0", "chroot / true",
            "unshare -m umount -l /tmp", "unshare -Urm umount -l /tmp",
        )
    ],
    "status": [line for line in open("/proc/self/status") if line.startswith(("Cap", "NoNew"))],
    "devices": sorted(os.listdir("/dev")),
}}
"""
    answer = home.do(lambda: run_inside(code))
    assert {answer[name] for name in ("umount", "umount /", "remount", "bind")} <= {1, 22}
    assert answer["umount"] == 1
    assert 0 not in answer["programs"], answer["programs"]
    status = dict(line.split() for line in answer["status"])
    kept = 0b11011 if home.user is None and os.geteuid() == 0 else 0  # root's file capabilities
    assert {int(status[f"Cap{name}:"], 16) for name in ("Prm", "Eff", "Bnd")} == {kept}
    assert status["NoNewPrivs:"] == "1"
    assert set(answer["devices"]) == {
        *("full", "null", "random", "tty", "urandom", "zero"),
        *("fd", "ptmx", "pts", "shm", "stderr", "stdin", "stdout"),
    }


NESTED = f"""
libc = ctypes.CDLL(None, use_errno=True)
flags = {{"user": {linux.CLONE_NEWUSER}, "both": {linux.CLONE_NEWUSER | linux.CLONE_NEWNS}}}
answer = {{}}
for name, flag in flags.items():
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.unshare(flag) == 0 else ctypes.get_errno())
    answer[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
answer["programs"] = [
    subprocess.run(command, shell=True, capture_output=True).returncode
    for command in ("unshare -U true", "unshare -Ur true", "unshare -Urm true", "unshare -m true")
]
try:
    open("/proc/sys/user/max_user_namespaces", "w").write("9")
    answer["limit"] = True
except OSError as error:
    answer["limit"] = error.errno
"""


def test_no_namespace_of_its_own_gives_the_script_its_capabilities_back(home: Home) -> None:
    answer = home.do(lambda: run_inside(NESTED))
    assert answer["user"] == answer["both"] == errno.ENOSPC
    assert 0 not in answer["programs"]
    assert answer["limit"] in (errno.EROFS, errno.EACCES)


def test_where_nested_namespaces_cannot_be_forbidden_they_give_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a namespace of its own a process has every capability, but not over our mounts."""
    monkeypatch.setattr(linux, "forbid_namespaces", lambda: None)
    code = f"""
child = os.fork()
if child == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    status = 1
    if libc.unshare(0x10020000) == 0 and libc.umount2(b"{home.path}", 2) == -1:
        remount = libc.mount(b"none", b"/", None, ctypes.c_ulong(0x1020), None)
        status = 0 if remount == -1 else 2
    os._exit(status)
answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

    assert home.do(lambda: run_inside(code)) == 0


ATTACH = """
child = os.fork()
if child == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_void_p(0)
    def tried(how, pid):
        return 0 if libc.ptrace(how, pid, zero, zero) == 0 else ctypes.get_errno()
    found = [tried(how, pid) for how in (16, 0x4206) for pid in (os.getppid(), 1)]
    os.kill(os.getppid(), signal.SIGSTOP)
    os._exit(0 if set(found) == {errno.EPERM} else 1)
answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""  # PTRACE_ATTACH and PTRACE_SEIZE


def test_a_script_can_neither_trace_nor_stop_those_who_answer_for_it(home: Home) -> None:
    assert home.do(lambda: run_inside(ATTACH)) == 0


def test_what_this_process_has_open_cannot_be_written_to_from_inside(home: Home) -> None:
    def harm() -> tuple[Any, str]:
        notes = Path(home.path, "notes")
        with notes.open("a") as file:
            directory = os.open(home.path, os.O_RDONLY)
            code = f"""
answer = []
for harm in (
    lambda: os.write({file.fileno()}, b"changed"),
    lambda: os.ftruncate({file.fileno()}, 0),
    lambda: os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd={directory}),
    lambda: os.fchdir({directory}),
):
    try:
        answer.append(harm())
    except OSError as error:
        answer.append(error.strerror)
"""
            return run_inside(code), notes.read_text()

    answer, notes = home.do(harm)
    assert answer == [7, "Invalid argument", "Not a directory", "Not a directory"]
    assert notes == "this is notes\n" * 10
    assert not (home.path / "new").exists()


def test_no_network_is_reached_but_a_script_can_talk_to_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        answer = run_inside(f"""
answer = []
for address in (("192.0.2.1", 80), ("127.0.0.1", {outside.getsockname()[1]})):
    try:
        socket.create_connection(address)
    except OSError as error:
        answer.append(error.strerror)
with socket.create_server(("127.0.0.1", 0)) as server:
    with socket.create_connection(server.getsockname()):
        answer.append("itself")
""")
    assert answer == ["Network is unreachable", "Connection refused", "itself"]


CONNECT = """
with socket.socket(socket.AF_UNIX) as client:
    try:
        client.connect({path!r})
    except OSError as error:
        answer = error.strerror
"""


def test_sockets_of_programs_outside_are_out_of_reach(home: Home) -> None:
    where = home.path / "agent"
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(where))
        agent.listen()
        where.chmod(0o777)
        code = CONNECT.format(path=str(where))
        assert home.do(lambda: run_inside(code)) == "Connection refused"


@needs_root
def test_sockets_and_devices_in_a_directory_that_is_only_read_only_are_out_of_reach(
    home: Home,
) -> None:
    """No overlay lies over a mount that a user cannot write to."""
    agent = socket.socket(socket.AF_UNIX)

    def mount_a_disk() -> None:
        linux.mount("none", "/mnt", "tmpfs", 0, "mode=755")
        agent.bind("/mnt/agent")
        agent.listen()
        os.mknod("/mnt/device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        for name in ("agent", "device"):
            Path("/mnt", name).chmod(0o777)

    code = (
        CONNECT.format(path="/mnt/agent")
        + """
try:
    open("/mnt/device")
except OSError as error:
    answer = answer, error.strerror
"""
    )
    with agent:
        answer = home.do(lambda: run_inside(code), before=mount_a_disk)
    out_of_reach = {"Connection refused", "Permission denied", "No such file or directory"}
    assert len(answer) == 2
    assert set(answer) <= out_of_reach


def test_shared_memory_can_be_read_and_what_is_written_there_is_private() -> None:
    before = Path("/dev/shm/oomph-before")  # noqa: S108
    before.write_text("before")
    code = """
open('/dev/shm/oomph-new', 'w').close()
answer = open('/dev/shm/oomph-before').read(), os.path.exists('/dev/shm/oomph-new')
os.remove('/dev/shm/oomph-before')
"""
    try:
        assert run_inside(code) == ["before", True]
        assert before.read_text() == "before"
        assert not Path("/dev/shm/oomph-new").exists()  # noqa: S108
    finally:
        before.unlink()


def test_processes_outside_are_neither_seen_nor_killed() -> None:
    mark = f"{os.getpid()}.125"
    with subprocess.Popen(["sleep", mark]) as bystander:
        code = """
answer = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
try:
    os.kill(-1, signal.SIGTERM)  # everyone but itself and process 1
except ProcessLookupError:
    answer.append("nobody")
"""
        told, alive = run_inside(code), processes_with(mark)
        bystander.kill()
    assert told == [1, 2, "nobody"]
    assert alive == [bystander.pid]


def test_two_sandboxes_at_once_do_not_see_each_other() -> None:
    with Sandbox(run_python) as one, Sandbox(run_python) as other:
        for sandbox, text in ((one, "one"), (other, "other")):
            ask(sandbox, f"open('oomph-shared', 'w').write({text!r})")
        read = "answer = open('oomph-shared').read(), os.getpid()"
        assert [ask(one, read), ask(other, read)] == [["one", 2], ["other", 2]]
    assert not Path("oomph-shared").exists()


@pytest.mark.parametrize("kind", ["user", "mnt", "pid", "net", "ipc"])
def test_every_namespace_is_another(kind: str) -> None:
    path = f"/proc/self/ns/{kind}"
    assert run_inside(f"answer = os.readlink({path!r})") != os.readlink(path)


def test_a_script_that_kills_its_process_group_kills_nobody_outside() -> None:
    def ask_for_it() -> str:
        os.setsid()  # whoever is hit, it is not the one who runs the tests
        with Sandbox(run_python) as sandbox, pytest.raises(DiedInside):
            ask(sandbox, "os.kill(0, signal.SIGKILL)")
        return "alive"

    assert in_a_process(ask_for_it) == "alive"
