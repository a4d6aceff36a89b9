"""`oomph watch` on a real terminal: what it draws, what keys do, and how it gives it back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from conftest import OnMachine
from nvml.machine import GIB, Gpu, NvmlMachine, Proc

from oomph.cli import main

Start = Callable[..., int]
WATCH = [sys.executable, "-m", "oomph", "watch"]
ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A program on a pseudo-terminal, and what it has written."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], size: tuple[int, int]):
        self.master, self.slave = pty.openpty()
        self.resize(*size)
        self.modes_before = termios.tcgetattr(self.slave)
        self.written = ""
        self.process = subprocess.Popen(
            command,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**os.environ, "TERM": "xterm", "PYTHONUTF8": "1", **env},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self) -> None:
        """What has come since."""
        while select.select([self.master], [], [], 0.05)[0]:
            try:
                chunk = os.read(self.master, 1 << 16)
            except OSError:  # the other side is closed
                return
            self.written += chunk.decode(errors="replace")

    def until(self, condition: Callable[[str], bool]) -> str:
        """Read until what was written since the last time is such, and return it."""
        while not condition(self.written):
            self.read()
            if self.process.poll() is not None and not condition(self.written):
                self.read()
                assert condition(self.written), f"it ended: {self.written!r}"
        seen, self.written = self.written, ""
        return seen

    def until_text(self, text: str) -> str:
        return self.until(lambda written: text in plain(written))

    def wait(self) -> int:
        while self.process.poll() is None:
            self.read()  # else a full terminal would keep it from ending
        self.read()
        return self.process.returncode

    def is_given_back(self) -> bool:
        return termios.tcgetattr(self.slave) == self.modes_before


def plain(written: str) -> str:
    """Without colours and movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


@contextlib.contextmanager
def terminal(
    machine: NvmlMachine,
    *arguments: str,
    size: tuple[int, int] = (120, 30),
    command: Sequence[str] = WATCH,
    env: Mapping[str, str] | None = None,
) -> Iterator[Terminal]:
    opened = Terminal([*command, *arguments], {**machine.env(), **(env or {})}, size)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.master)
        os.close(opened.slave)


@pytest.fixture
def machine(tmp_path: Path, start_process: Start) -> NvmlMachine:
    mine = start_process("python train.py")
    return NvmlMachine(tmp_path, [Gpu(util=40, processes=[Proc(mine, 20 * GIB)]), Gpu()])


# ---- what it shows -----------------------------------------------------------------------------


def test_it_draws_the_gpus_and_quits_with_q(machine: NvmlMachine) -> None:
    with terminal(machine) as tty:
        first = tty.until_text("t time span")
        assert first.index(ENTERED) < first.index("GPUs")
        assert "2 GPUs: 1 mine, 1 free" in plain(first)
        assert "20.0 of 80.0  25%" in plain(first)
        assert "python train.py" in plain(first)
        assert not tty.is_given_back()
        tty.press("q")
        assert tty.wait() == 0
        assert LEFT in tty.written
        assert tty.is_given_back()


def test_it_follows_what_changes_and_writes_only_that(machine: NvmlMachine) -> None:
    with terminal(machine) as tty:
        tty.until_text("40%")
        machine.gpus[0].util = 77
        machine.write()
        changed = plain(tty.until_text("77%"))
        assert "GiB used" not in changed  # the heading is as it was


def test_a_window_that_is_made_narrower_is_drawn_anew(machine: NvmlMachine) -> None:
    with terminal(machine) as tty:
        tty.until_text("t time span")
        tty.resize(40, 12)
        tty.process.send_signal(signal.SIGWINCH)
        narrow = tty.until(lambda written: "active" in written and "20/80" in plain(written))
        assert "python" in plain(narrow)


def test_keys_filter_pause_and_help(machine: NvmlMachine) -> None:
    with terminal(machine) as tty:
        tty.until_text("f all")
        tty.press("f")
        tty.until_text("f mine")
        tty.press("?")
        tty.until_text("this help, and back")
        tty.press("\x1b")
        tty.until_text("GiB used")
        tty.press(" ")
        tty.until_text("paused")
        machine.gpus[0].util = 77
        machine.write()
        time.sleep(2.5)  # two looks
        tty.read()
        assert "77%" not in plain(tty.written)
        tty.press(" ")
        tty.until_text("77%")


def test_colours_are_left_out_where_they_are_not_wanted(machine: NvmlMachine) -> None:
    colour = re.compile(r"\x1b\[[1-9][0-9;]*m")
    with terminal(machine) as tty:
        assert colour.search(tty.until_text("t time span"))
    with terminal(machine, "--no-color") as tty:
        assert not colour.search(tty.until_text("t time span"))
    with terminal(machine, env={"NO_COLOR": "1"}) as tty:
        assert not colour.search(tty.until_text("t time span"))


def test_a_command_line_of_another_cannot_write_to_this_terminal(
    tmp_path: Path, start_process: Start
) -> None:
    pid = start_process("evil \x1b[2J\x1b]0;owned\x07")
    with terminal(NvmlMachine(tmp_path, [Gpu(processes=[Proc(pid)])])) as tty:
        written = tty.until_text("evil")
        assert "evil ?[2J?]0;owned?" in written


# ---- how it ends -------------------------------------------------------------------------------


def test_ctrl_c_gives_the_terminal_back(machine: NvmlMachine) -> None:
    with terminal(machine) as tty:
        tty.until_text("t time span")
        tty.press("\x03")
        assert tty.wait() == 130
        assert LEFT in tty.written
        assert "Traceback" not in tty.written
        assert tty.is_given_back()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_gives_the_terminal_back_and_ends_it_by_that_signal(
    machine: NvmlMachine, number: signal.Signals
) -> None:
    with terminal(machine) as tty:
        tty.until_text("t time span")
        tty.process.send_signal(number)
        assert tty.wait() == -number
        assert LEFT in tty.written
        assert tty.is_given_back()


BROKEN = """
import sys
from oomph.cli import main
from oomph.showing import live
def draw(*_): raise LookupError("a mistake in drawing")
live.draw = draw
sys.exit(main(["watch"]))
"""


def test_an_exception_gives_the_terminal_back_before_it_is_told(machine: NvmlMachine) -> None:
    with terminal(machine, command=[sys.executable, "-c", BROKEN]) as tty:
        assert tty.wait() == 1
        assert tty.written.index(LEFT) < tty.written.index("a mistake in drawing")
        assert tty.is_given_back()


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_again(
    machine: NvmlMachine,
) -> None:
    shell = ["bash", "--norc", "--noprofile", "-i"]
    with terminal(machine, command=shell, env={"PS1": "shell> "}) as tty:
        tty.until_text("shell> ")
        tty.press(f"{sys.executable} -m oomph watch\r")
        tty.until_text("t time span")
        tty.press("\x1a")
        stopped = tty.until_text("shell> ")
        assert LEFT in stopped
        assert "Stopped" in stopped
        tty.press("stty -a | tr ' ' '\\n' | grep icanon\r")
        modes = tty.until(lambda written: re.search(r"[\r\n]-?icanon", written) is not None)
        assert "-icanon" not in modes
        tty.press("fg\r")
        again = tty.until_text("t time span")
        assert ENTERED in again
        tty.press("q")
        assert LEFT in tty.until_text("shell> ")


def test_a_stopped_view_that_is_killed_ends_and_leaves_the_shell_its_terminal(
    machine: NvmlMachine,
) -> None:
    shell = ["bash", "--norc", "--noprofile", "-i"]
    with terminal(machine, command=shell, env={"PS1": "shell> "}) as tty:
        tty.until_text("shell> ")
        tty.press(f"{sys.executable} -m oomph watch\r")
        tty.until_text("t time span")
        tty.press("\x1a")
        tty.until_text("shell> ")
        tty.press("kill %1; while kill -0 %1; do sleep 0.1; done 2> /dev/null; echo gone\r")
        rest = tty.until(lambda written: re.search(r"[\r\n]gone", written) is not None)
        assert ENTERED not in rest


def test_a_terminal_that_hangs_up_ends_it(machine: NvmlMachine) -> None:
    with terminal(machine) as tty:
        tty.until_text("t time span")
        master, tty.master = tty.master, os.open(os.devnull, os.O_RDWR)
        os.close(master)
        assert tty.process.wait() == -signal.SIGHUP


def test_a_terminal_that_is_gone_before_its_signal_comes_ends_it_the_same_way(
    machine: NvmlMachine,
) -> None:
    """Which of the two a process notices first is chance, so here the signal never comes."""
    code = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP]);"
        "os.execv(sys.executable, [sys.executable, '-m', 'oomph', 'watch'])"
    )
    with terminal(machine, command=[sys.executable, "-c", code]) as tty:
        tty.until_text("t time span")
        master, tty.master = tty.master, os.open(os.devnull, os.O_RDWR)
        os.close(master)
        assert tty.process.wait() == -signal.SIGHUP


# ---- trouble -----------------------------------------------------------------------------------


def test_a_driver_that_hangs_is_said_and_keys_go_on_working(machine: NvmlMachine) -> None:
    with terminal(machine) as tty:
        tty.until_text("t time span")
        machine.latency(10_000_000, "nvmlDeviceGetMemoryInfo_v2")
        tty.until_text("the driver has not answered for")
        tty.press("f")
        tty.until_text("f mine")
        tty.press("q")
        assert tty.wait() == 0
        assert tty.is_given_back()


def test_a_gpu_that_is_lost_is_said_and_the_view_goes_on(machine: NvmlMachine) -> None:
    with terminal(machine) as tty:
        tty.until_text("t time span")
        machine.gpus[1].lost = True
        machine.write()
        tty.until_text("the GPU is lost")
        machine.gpus[1].lost = False
        machine.gpus[0].util = 77
        machine.write()
        tty.until_text("77%")


@pytest.mark.slow
def test_a_driver_that_is_reloaded_is_said_and_comes_back(machine: NvmlMachine) -> None:
    with terminal(machine) as tty:
        tty.until_text("t time span")
        machine.unload_driver()
        tty.until_text("not loaded")
        machine.gpus[0].util = 77
        machine.write()
        tty.until_text("77%")


def test_a_machine_without_a_driver_is_said_at_once(machine: NvmlMachine) -> None:
    machine.unload_driver()
    with terminal(machine) as tty:
        assert tty.wait() == 4
        assert "the NVIDIA driver is not loaded" in tty.written
        assert ENTERED not in tty.written


def test_without_keys_it_says_how_to_quit(machine: NvmlMachine) -> None:
    through_a_shell = ["bash", "-c", f"{sys.executable} -m oomph watch < /dev/null"]
    with terminal(machine, command=through_a_shell) as tty:
        tty.until_text("no keys; Ctrl-C quits")
        tty.press("\x03")
        tty.wait()
        assert LEFT in tty.written


# ---- no terminal -------------------------------------------------------------------------------


def test_a_pipe_gets_one_look_and_a_note(machine: NvmlMachine) -> None:
    done = machine.run(WATCH)
    assert done.returncode == 0
    assert "20.0 of 80.0  25%" in done.stdout
    assert "\x1b" not in done.stdout
    assert (
        done.stderr == "oomph: standard output is not a terminal, so this is the output of --once\n"
    )


def test_once_needs_no_note(machine: NvmlMachine) -> None:
    done = machine.run([*WATCH, "--once"])
    assert "python train.py" in done.stdout
    assert done.stderr == ""


def test_a_terminal_that_cannot_move_its_cursor_gets_one_look(machine: NvmlMachine) -> None:
    with terminal(machine, env={"TERM": "dumb"}) as tty:
        assert tty.wait() == 0
        assert "TERM=dumb" in tty.written
        assert ENTERED not in tty.written


def test_json_has_the_machine_and_the_jobs(
    on_machine: OnMachine, start_process: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = start_process("train.py", env={**os.environ, "RANK": "3", "OOMPH_RUN_ID": "r1"})
    on_machine([Gpu(processes=[Proc(pid, GIB)])])
    assert main(["watch", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1
    assert told["machine"]["gpus"][0]["processes"][0]["pid"] == pid
    (job,) = told["jobs"]
    assert (job["pid"], job["rank"], job["run_id"]) == (pid, 3, "r1")


def test_json_with_an_interval_is_a_line_a_look(machine: NvmlMachine) -> None:
    command = [*WATCH, "--json", "--interval", "1"]
    env = {**os.environ, **machine.env()}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.terminate()
    assert looks[0]["at"] < looks[1]["at"] < looks[2]["at"]


def test_visible_uuids_are_cudas(
    on_machine: OnMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = on_machine([Gpu(), Gpu(), Gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert main(["watch", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["visible"] == [machine.uuid(2), machine.uuid(0)]


@pytest.mark.parametrize("interval", ["0", "-1", "soon", "nan", "0.5", "1e9"])
def test_an_interval_that_makes_no_sense_is_refused(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "--interval", interval]) == 2
    assert "is not a number of seconds from 1 to 3600" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--once", "--", "true"],
        ["--filter", "mine", "--", "true"],
        ["--interval", "2", "--", "true"],
        ["--time", "5m"],
        ["--html", "report.html"],
        ["--quiet"],
    ],
)
def test_a_flag_of_the_other_form_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_no_gpu_is_exit_1_and_no_driver_exit_4(
    on_machine: OnMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine([])
    assert main(["watch", "--once"]) == 1
    on_machine([Gpu()]).unload_driver()
    assert main(["watch", "--once"]) == 4
    assert "not loaded" in capsys.readouterr().out
