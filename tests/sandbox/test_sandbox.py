"""Asking a sandbox: answers, what was printed, what the script finds, and how it can fail."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from oomph.errors import DiedInside, NoSandbox, OutOfTime, SpokeNonsense
from oomph.sandbox import sandbox as sandbox_module
from oomph.sandbox.conversation import KEPT_OUTPUT_BYTES, read_frame, write_frame
from oomph.sandbox.inside import OFFLINE
from oomph.sandbox.sandbox import Sandbox, protection
from oomph.units import MIB
from sandbox.conftest import Home
from sandbox.insiders import (
    ask,
    needs_namespaces,
    needs_root,
    processes_with,
    run_inside,
    run_python,
)

pytestmark = needs_namespaces


def test_the_protection_here_is_named() -> None:
    found = protection()
    assert found.kind == "namespaces"
    assert "network" in found.why


def test_it_has_the_memory_of_this_process_and_its_changes_stay_inside() -> None:
    counted = [1]

    def serve(requests: BinaryIO, answers: BinaryIO) -> None:
        while (request := read_frame(requests)) is not None:
            counted.append(int(request))
            write_frame(answers, json.dumps(counted).encode())

    with Sandbox(serve) as sandbox:
        assert sandbox.ask(b"2") == b"[1, 2]"
        assert sandbox.ask(b"3") == b"[1, 2, 3]"
    assert counted == [1]


def test_large_requests_and_answers_pass_while_the_script_prints() -> None:
    def serve(requests: BinaryIO, answers: BinaryIO) -> None:
        request = read_frame(requests)
        assert request is not None
        print("x" * 3 * MIB)
        write_frame(answers, request * 2)

    with Sandbox(serve) as sandbox:
        assert sandbox.ask(b"a" * 8 * MIB) == b"a" * 16 * MIB


def test_only_the_last_of_what_it_prints_is_kept_and_none_of_it_is_printed_here(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Sandbox(run_python) as sandbox:
        ask(sandbox, "for number in range(100_000): print('line', number)")
        ask(sandbox, "subprocess.run('echo from a program >&2', shell=True)")
        assert sandbox.output().endswith("line 99999\nfrom a program\n")
        assert len(sandbox.output()) == KEPT_OUTPUT_BYTES
    assert sandbox.output().endswith("from a program\n")
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_it_runs_where_it_was_started_and_reads_what_is_there(home: Home) -> None:
    code = "answer = os.getcwd(), open('train.py').readline(), os.environ['HOME'], os.getuid()"
    cwd, line, home_directory, uid = home.do(lambda: run_inside(code))
    assert (cwd, home_directory) == (str(home.project), str(home.path))
    assert line == "this is project/train.py\n"
    assert uid == (home.user if home.user is not None else os.getuid())


def test_the_environment_keeps_libraries_off_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracking.example")
    monkeypatch.setenv("WANDB_MODE", "online")
    inside = run_inside("answer = dict(os.environ)")
    assert {**inside, **OFFLINE} == inside
    assert inside["WANDB_MODE"] == "offline"
    assert "MLFLOW_TRACKING_URI" not in inside
    assert os.environ["WANDB_MODE"] == "online"


def test_a_script_that_looks_for_a_terminal_finds_one_at_which_nobody_types() -> None:
    code = """
size = subprocess.run(["stty", "size"], stdout=subprocess.PIPE, text=True).stdout
try:
    input("continue? ")
except EOFError:
    answer = size, sys.stdin.isatty(), os.get_terminal_size(0).columns
"""
    assert run_inside(code) == ["24 80\n", True, 80]


def test_a_full_scratch_is_a_full_disk_for_the_script() -> None:
    code = """
try:
    with open("oomph-large", "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
except OSError as error:
    answer = error.strerror
"""
    assert run_inside(code, scratch_bytes=8 * MIB) == "No space left on device"


@pytest.mark.parametrize(
    ("code", "because"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("sys.exit('no such dataset')", "exit code 1; its last output: no such dataset"),
        ("os._exit(4)", "exit code 4"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
        ("print('last words'); raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_an_end_without_an_answer_is_an_error_that_says_how_it_ended(
    code: str, because: str
) -> None:
    with Sandbox(run_python) as sandbox, pytest.raises(DiedInside) as raised:
        ask(sandbox, code)
    assert raised.value.because is not None
    assert because in raised.value.because
    with pytest.raises(DiedInside, match="closed"):
        ask(sandbox, "answer = 1")


def test_a_script_that_never_answers_is_killed_in_time() -> None:
    mark = f"{os.getpid()}.5"
    with Sandbox(run_python) as sandbox:
        ask(sandbox, f"subprocess.Popen(['sleep', '{mark}'])")
        with pytest.raises(OutOfTime, match=r"within 0\.2 s"):
            sandbox.ask(b"while True: pass", within_s=0.2)
        assert processes_with(mark) == []


def test_an_answer_that_is_none_is_an_error() -> None:
    def serve(requests: BinaryIO, answers: BinaryIO) -> None:
        read_frame(requests)
        answers.write(b"What is this?")
        answers.flush()
        read_frame(requests)

    with Sandbox(serve) as sandbox, pytest.raises(SpokeNonsense, match="is not valid"):
        sandbox.ask(b"")


def test_a_sandbox_that_leaks_is_refused_before_anything_runs(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall is left out: the probe is then written for real, found and taken away again."""
    before = sorted(home.project.iterdir())

    class NoCover:
        read_only: tuple[str, ...] = ()

        def __init__(self, *_: object) -> None: ...
        def directories(self, *_: object) -> None: ...
        def finish(self) -> None: ...

    def start() -> str:
        monkeypatch.setattr("oomph.sandbox.inside.Cover", NoCover)
        try:
            Sandbox(run_python)
        except NoSandbox as error:
            return str(error)
        return "it started"

    assert "appeared outside" in home.do(start)
    assert sorted(home.project.iterdir()) == before


def test_a_start_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "START_WITHIN_S", 0.3)
    monkeypatch.setattr("oomph.sandbox.inside.Cover.finish", lambda _: time.sleep(1e6))
    with pytest.raises(OutOfTime):
        Sandbox(run_python)


def test_a_loader_with_workers_and_a_pool_works_inside() -> None:
    import multiprocessing.pool
    import multiprocessing.shared_memory

    def serve(requests: BinaryIO, answers: BinaryIO) -> None:
        read_frame(requests)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            memory = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
            assert memory.buf is not None
            memory.buf[0] = sum(pool.map(abs, [-1, -2]))
            write_frame(answers, bytes(memory.buf[:1]))

    with Sandbox(serve) as sandbox:
        assert sandbox.ask(b"") == b"\x03"


@needs_root
def test_files_of_another_group_can_be_replaced_and_written_beside(home: Home) -> None:
    """As on a cluster, where a project belongs to the group of a laboratory."""
    inner = home.project / "inner"
    (inner / "runs").mkdir(parents=True)
    (inner / "train.py").write_text("this is inner")
    owner = 0 if home.user is None else home.user
    for path in (home.project, *home.project.rglob("*")):
        os.chown(path, owner, 777, follow_symlinks=False)
    code = """
open("new", "w").close()
open("runs/new", "w").close()
os.replace("new", "train.py")
os.makedirs("runs/a/b")
answer = open("train.py").read()
"""

    def work() -> str:
        os.chdir(inner)
        return str(run_inside(code))

    assert home.do(work) == ""
    assert (inner / "train.py").read_text() == "this is inner"


def test_paths_with_blanks_colons_and_commas_are_covered(tmp_path: Path) -> None:
    odd = tmp_path / "a b:c,d\\e"
    odd.mkdir()
    was = Path.cwd()
    os.chdir(odd)
    try:
        assert run_inside("open('new', 'w').close(); answer = os.listdir('.')") == ["new"]
    finally:
        os.chdir(was)
    assert list(odd.iterdir()) == []


# Devices that many machines have, and a sandbox has not.
NODES = ("autofs", "fuse", "kmsg", "hwrng", "net/tun")


def opens(name: str) -> bool:
    try:
        os.close(os.open(f"/dev/{name}", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def test_only_devices_that_are_asked_for_can_be_opened() -> None:
    """As for a script that trains on a real GPU: its driver's nodes."""
    node = next(filter(opens, NODES), None)
    if node is None:
        pytest.skip("no device of this machine can be opened by this user")

    def serve(requests: BinaryIO, answers: BinaryIO) -> None:
        while read_frame(requests) is not None:
            write_frame(answers, json.dumps([name for name in NODES if opens(name)]).encode())

    with Sandbox(serve, devices=(node, "no-such-node")) as sandbox:
        assert json.loads(sandbox.ask(b"")) == [node]
    with Sandbox(serve) as sandbox:
        assert json.loads(sandbox.ask(b"")) == []
