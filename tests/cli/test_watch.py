"""`oomph watch -- COMMAND`: the command cannot tell, and whoever started it cannot either."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from nvml.machine import GIB, Gpu, NvmlMachine, Proc

from cli.watched import (
    COUNTING,
    OOMPH,
    Bench,
    gone,
    python,
    read_ready,
    state_of,
    told,
    wait_for,
)

BASH = shutil.which("bash") or "/bin/bash"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(NvmlMachine(tmp_path, [Gpu(), Gpu()]), tmp_path / "runs")


# ---- the same as without -------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_the_exit_code_is_the_commands(bench: Bench, code: int) -> None:
    command = ["sh", "-c", f"exit {code}"]
    assert bench.run(command).returncode == bench.bare(command).returncode == code


@pytest.mark.parametrize("name", ["TERM", "KILL", "INT", "HUP", "SEGV", "ABRT", "USR1"])
def test_a_command_that_dies_by_a_signal_is_a_death_by_that_signal(bench: Bench, name: str) -> None:
    command = ["sh", "-c", f"ulimit -c 0; kill -{name} $$"]
    wrapped, bare = bench.run(command), bench.bare(command)
    assert wrapped.returncode == bare.returncode == -signal.Signals[f"SIG{name}"]
    assert bench.read().ending is not None
    assert bench.read().ending.signal == f"SIG{name}"  # type: ignore[union-attr]


def test_output_is_passed_byte_for_byte_and_input_too(bench: Bench) -> None:
    content = bytes(range(256)) * 5000
    command = python(
        "import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer);"
        " sys.stderr.write('to stderr')"
    )
    wrapped, bare = bench.run(command, input=content), bench.bare(command, input=content)
    assert wrapped.stdout == bare.stdout == content
    assert wrapped.stderr.startswith(bare.stderr)


def test_a_reader_that_leaves_ends_the_command_as_ever(bench: Bench) -> None:
    script = '{} yes | head -1; echo "${{PIPESTATUS[0]}}"'
    outputs = [
        bench.bare([BASH, "-c", script.format(" ".join(prefix))]).stdout
        for prefix in ((), (*OOMPH, "watch", "--"))
    ]
    assert outputs == [b"y\n141\n"] * 2


def test_the_command_has_the_same_signals_files_and_group_as_without(bench: Bench) -> None:
    seen = """
    import os
    status = open("/proc/self/status").read().splitlines()
    print(*(line for line in status if line.startswith(("SigB", "SigI", "SigC", "Umask"))))
    print(sorted(os.listdir("/proc/self/fd")), os.getpgrp() == int(os.environ["GROUP"]))
    """
    (bench.machine.directory / "seen.py").write_text(textwrap.dedent(seen))
    prefixes = ("", " ".join((*OOMPH, "watch", "--")))
    bare, wrapped = (
        bench.bare(
            [
                BASH,
                "-c",
                (
                    "exec 7</dev/null; export GROUP=$(ps -o pgid= $$);"
                    f" {prefix} {sys.executable} {bench.machine.directory}/seen.py; echo $?"
                ),
            ]
        ).stdout
        for prefix in prefixes
    )
    assert wrapped == bare
    assert b"True\n0\n" in bare


def test_a_file_that_the_shell_has_opened_can_be_read(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("from the shell")
    prefix = " ".join((*OOMPH, "watch", "--"))
    done = bench.bare([BASH, "-c", f"{prefix} cat <(cat {tmp_path}/data)"])
    assert done.stdout == b"from the shell"


def test_only_two_variables_are_added_to_the_environment(bench: Bench) -> None:
    wrapped, bare = bench.run(["env", "-0"]), bench.bare(["env", "-0"])
    added = set(wrapped.stdout.split(b"\0")) - set(bare.stdout.split(b"\0"))
    assert {entry.split(b"=")[0] for entry in added} == {b"OOMPH_RUN_ID", b"OOMPH_RUN_DIR"}


@pytest.mark.parametrize(("name", "code"), [("no-such-program", 127), ("/etc/passwd", 126)])
def test_a_command_that_cannot_be_started_ends_as_in_a_shell(
    bench: Bench, name: str, code: int
) -> None:
    done = bench.run([name])
    assert done.returncode == bench.bare([BASH, "-c", name]).returncode == code
    assert "cannot be started" in told(done)[0]
    assert list(bench.runs.iterdir()) == []


def test_a_script_without_a_first_line_is_run_by_a_shell(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "job"
    script.write_text('echo "$1"\n')
    script.chmod(0o755)
    assert bench.run([str(script), "as ever"]).stdout == b"as ever\n"


# ---- signals to the wrapper ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGQUIT"])
def test_a_signal_to_the_wrapper_reaches_the_command_once(bench: Bench, name: str) -> None:
    number = signal.Signals[name]
    process = bench.start(python(COUNTING))
    read_ready(process)
    process.send_signal(number)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)  # for a second one, which must not come
    process.send_signal(signal.SIGUSR2)
    stdout, _ = process.communicate()
    assert stdout == b"all: %d\n" % number
    assert process.returncode == 7


def test_a_signal_that_the_command_does_not_handle_ends_both_by_it(bench: Bench) -> None:
    process = bench.start(python("import time; print('ready 1', flush=True); time.sleep(600)"))
    read_ready(process)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_the_wrapper_passes_signals_on_while_nvml_hangs(bench: Bench) -> None:
    bench.machine.latency(30_000_000)
    process = bench.start(python(COUNTING))
    read_ready(process)
    time.sleep(1)
    process.send_signal(signal.SIGUSR2)
    process.communicate()
    assert process.returncode == 7


def test_a_command_that_signals_its_whole_group_gets_the_signal_once(bench: Bench) -> None:
    code = """
    import os, signal, time
    got = []
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    time.sleep(0.5)
    os.killpg(0, signal.SIGUSR1)
    time.sleep(1)
    print(len(got))
    """
    process = bench.start(python(textwrap.dedent(code)), start_new_session=True)
    stdout, _ = process.communicate()
    assert (stdout, process.returncode) == (b"1\n", 0)


def test_killing_the_wrapper_leaves_the_command_and_all_but_the_last_second(bench: Bench) -> None:
    process = bench.start(python(COUNTING))
    pid = read_ready(process)
    bench.directory()
    wait_for(lambda: len(bench.read().host_spans) >= 3)
    wait_for(lambda: {span.gpu for span in bench.read().gpu_spans} == {0, 1})
    before = bench.read()
    process.kill()
    process.wait()
    assert not gone(pid)
    run = bench.read()
    assert run.ending is None
    assert run.command == tuple(python(COUNTING))
    assert run.last_seen_s >= before.last_seen_s
    assert run.host_spans[:3] == before.host_spans[:3]
    assert [gpu.index for gpu in run.gpus] == [0, 1]
    assert {span.gpu for span in run.gpu_spans} == {0, 1}
    os.kill(pid, signal.SIGUSR2)
    process.communicate()
    wait_for(lambda: gone(pid))


# ---- the terminal --------------------------------------------------------------------------------


def read_until(terminal: int, pattern: str) -> str:
    """What a terminal shows, up to a pattern."""
    shown = ""
    while not re.search(pattern, shown):
        select.select([terminal], [], [])
        try:
            shown += os.read(terminal, 4096).decode()
        except OSError:  # whoever wrote to it has ended
            assert re.search(pattern, shown), shown
    return shown


def test_the_command_is_on_the_terminal_as_without(bench: Bench) -> None:
    code = (
        "import os; print(*map(os.isatty, range(3)), os.tcgetpgrp(0) == os.getpgrp(),"
        " os.get_terminal_size())"
    )
    shown = []
    for command in (python(code), bench.wrapped(python(code), "--quiet")):
        pid, terminal = pty.fork()
        if pid == 0:
            os.execvpe(command[0], command, bench.env())  # noqa: S606
        shown.append(read_until(terminal, r"\)\r\n"))
        os.waitpid(pid, 0)
        os.close(terminal)
    assert shown[0] == shown[1]
    assert shown[0].startswith("True True True True")


# Starts a job as a shell does: in a group of its own, in the foreground, and sees it stop.
SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
while True:
    _, status = os.waitpid(pid, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if os.WIFSTOPPED(status):
        print("job stopped", flush=True)
        sys.stdin.readline()
        os.tcsetpgrp(0, pid)
        os.killpg(pid, signal.SIGCONT)
    else:
        print("job ended", os.waitstatus_to_exitcode(status), flush=True)
        break
"""


def in_a_shell(bench: Bench, command: list[str]) -> tuple[int, int]:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(sys.executable, [*python(SHELL), *command], bench.env())  # noqa: S606
    return pid, terminal


@pytest.mark.parametrize("is_watched", [False, True])
def test_ctrl_c_reaches_the_command_once(bench: Bench, is_watched: bool) -> None:
    command = python(COUNTING)
    shell, terminal = in_a_shell(bench, bench.wrapped(command) if is_watched else command)
    pid = int(re.findall(r"ready (\d+)", read_until(terminal, r"ready \d+\r\n"))[0])
    os.write(terminal, b"\x03")
    read_until(terminal, "got 2")
    time.sleep(0.3)  # for a second one, which must not come
    os.kill(pid, signal.SIGUSR2)
    shown = read_until(terminal, r"job ended 7")
    assert re.search(r"^all: 2\r$", shown, re.MULTILINE), shown
    os.waitpid(shell, 0)
    os.close(terminal)


@pytest.mark.parametrize("is_watched", [False, True])
def test_ctrl_z_stops_the_job_and_it_goes_on_in_the_foreground(
    bench: Bench, is_watched: bool
) -> None:
    command = python(COUNTING)
    shell, terminal = in_a_shell(bench, bench.wrapped(command) if is_watched else command)
    pid = int(re.findall(r"ready (\d+)", read_until(terminal, r"ready \d+\r\n"))[0])
    os.write(terminal, b"\x1a")
    read_until(terminal, "job stopped")
    assert state_of(pid) == "T"
    os.write(terminal, b"fg\n")
    wait_for(lambda: state_of(pid) != "T")
    os.kill(pid, signal.SIGUSR2)
    read_until(terminal, "job ended 7")
    os.waitpid(shell, 0)
    os.close(terminal)
    if is_watched:
        kinds = [event.kind for event in bench.read().events]
        assert "lost" not in kinds
        assert kinds.count("halted") == kinds.count("resumed") == 1


def test_a_command_that_is_stopped_and_continued_alone_ends_as_ever(bench: Bench) -> None:
    process = bench.start(python(COUNTING))
    pid = read_ready(process)
    wait_for(lambda: bool(bench.read().host_spans))  # its start may take longer than the halt
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: "halted" in [event.kind for event in bench.read().events])
    assert state_of(pid) == "T"
    os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGUSR2)
    _, told = process.communicate()
    assert process.returncode == 7
    halted, resumed = (e for e in bench.read().events if e.kind in ("halted", "resumed"))
    assert (halted.text, resumed.text) == ("SIGSTOP", "SIGCONT")
    assert resumed.at_s > halted.at_s  # by how much is up to when the wrapper was woken
    assert b"(halted for" in b" ".join(told.split())


# ---- what is kept --------------------------------------------------------------------------------


def test_a_run_is_kept_with_what_its_processes_held_on_the_gpu(bench: Bench) -> None:
    worker = "import time, os; print('ready', os.getpid(), flush=True); time.sleep(600)"
    # The worker's parent ends at once, as some launchers do: only the token tells whose it is.
    launcher = f'(setsid {sys.executable} -c "{worker}" &); exec sleep 600'
    process = bench.start(["sh", "-c", launcher])
    pid = read_ready(process)
    bench.machine.gpus[1].processes.append(Proc(pid, 7 * GIB))
    bench.machine.write()
    bench.directory()
    wait_for(lambda: any(span.run_bytes for span in bench.read().gpu_spans))
    wait_for(lambda: bench.read().host_spans[-1].num_processes == 2)
    process.send_signal(signal.SIGTERM)
    os.kill(pid, signal.SIGKILL)
    process.communicate()
    run = bench.read()
    assert [gpu.is_used for gpu in run.gpus] == [False, True]
    assert [(p.source, p.gpu, p.used_bytes) for p in run.peaks] == [("polled", 1, 7 * GIB)]
    assert run.ending is not None
    assert run.ending.exit_code == 128 + signal.SIGTERM


def test_without_a_driver_the_command_runs_and_that_is_said_once(bench: Bench) -> None:
    bench.machine.unload_driver()
    done = bench.run(["sh", "-c", "sleep 2.5; echo done; exit 3"])
    assert (done.stdout, done.returncode) == (b"done\n", 3)
    assert len([line for line in told(done) if "without GPU figures" in line]) == 1
    *_, at_the_end = done.stderr.partition(b"the run was not seen to use a GPU")
    assert b"without GPU figures" in at_the_end
    assert bench.read().gpus == ()
    assert bench.read().host_spans


def test_a_disk_that_is_full_costs_the_diary_and_one_warning(bench: Bench) -> None:
    bench.machine.log = False  # which is a file, too
    bench.machine.gpus = [Gpu() for _ in range(8)]  # of which a kilobyte does not hold the names
    bench.machine.write()
    limited = 'ulimit -f 1; exec "$@"'
    command = bench.wrapped(["sh", "-c", "sleep 3; echo done; exit 5"])
    done = bench.bare([BASH, "-c", limited, "bash", *command])
    assert (done.stdout, done.returncode) == (b"done\n", 5)
    warnings = [line for line in told(done) if line.startswith("not everything")]
    assert warnings == ["not everything of this run can be recorded: File too large"]
    # What the disk did not take is still in the report.
    assert b"exit 5" in done.stderr


def test_a_place_for_runs_that_cannot_be_made_costs_one_warning(bench: Bench) -> None:
    bench.runs = Path("/proc/no such place")
    done = bench.run(["sh", "-c", "sleep 2.5; echo done"])
    assert (done.stdout, done.returncode) == (b"done\n", 0)
    warnings = [line for line in told(done) if line.startswith("not everything")]
    assert len(warnings) == 1
    assert b"exit 0" in done.stderr


def test_runs_are_listed_with_how_they_ended(bench: Bench) -> None:
    bench.run(["sh", "-c", "exit 3"])
    listed = subprocess.run(
        [*OOMPH, "runs"], env=bench.env(), capture_output=True, check=True, text=True
    ).stdout
    assert "exit 3" in listed
    assert "sh -c 'exit 3'" in listed


# ---- out of memory -------------------------------------------------------------------------------


TELLING = """
import os, time
from pathlib import Path
from oomph.monitoring.step_log import StepLog
log = StepLog(Path(os.environ["OOMPH_RUN_DIR"]))
"""


def test_a_script_that_says_it_ran_out_of_memory_is_believed(bench: Bench) -> None:
    code = f"{TELLING}\nlog.event('out-of-memory', 'CUDA out of memory')\nraise SystemExit(1)"
    done = bench.run(python(code))
    assert done.returncode == 1
    ending = bench.read().ending
    assert ending is not None
    assert ending.out_of_memory == "gpu"
    assert b"out of GPU memory after" in done.stderr


@pytest.mark.parametrize(
    ("used", "code", "expected"), [(79, 1, "gpu"), (40, 1, None), (79, 0, None)]
)
def test_a_failure_with_a_full_gpu_is_probably_out_of_memory(
    bench: Bench, used: int, code: int, expected: str | None
) -> None:
    process = bench.start(python(COUNTING.replace("os._exit(7)", f"os._exit({code})")))
    pid = read_ready(process)
    bench.machine.gpus[0].processes.append(Proc(pid, used * GIB))
    bench.machine.write()
    bench.directory()
    wait_for(lambda: any(span.run_bytes for span in bench.read().gpu_spans))
    os.kill(pid, signal.SIGUSR2)
    _, stderr = process.communicate()
    ending = bench.read().ending
    assert ending is not None
    assert ending.out_of_memory == expected
    assert (b"probably out of GPU memory" in stderr) == (expected is not None)


# ---- probes --------------------------------------------------------------------------------------


STEPPING = f"""{TELLING}
for number in range(10_000):
    began = time.monotonic()
    time.sleep(0.05)
    log.steps([(time.monotonic(), time.monotonic() - began, 0.01, 8)])
    if number == 20:
        log.epoch_ended(1)
"""


@pytest.mark.parametrize("flags", [["--steps", "10"], ["--for", "10-steps"], ["--for", "1-epoch"]])
def test_a_probe_ends_the_command_after_so_many_steps_with_exit_code_0(
    bench: Bench, flags: list[str]
) -> None:
    done = bench.run(python(STEPPING), *flags)
    assert done.returncode == 0
    run = bench.read()
    assert sum(span.num_steps for span in run.step_spans) >= 10
    assert [event.text.endswith("as requested") for event in run.events if event.kind == "stopped"]
    assert b"KeyboardInterrupt" in done.stderr  # the polite way came first


def test_a_probe_of_a_time_needs_no_script_that_tells_anything(bench: Bench) -> None:
    done = bench.run(["sleep", "600"], "--time", "1s")
    assert done.returncode == 0
    assert b"after 1 s, as requested" in done.stderr


def test_a_probe_of_steps_that_nobody_tells_is_said_at_the_end(bench: Bench) -> None:
    done = bench.run(["sh", "-c", "exit 4"], "--steps", "3")
    assert done.returncode == 4
    assert any("reported no steps" in line for line in told(done))


@pytest.mark.parametrize(
    "flags",
    [["--for", "1-apple"], ["--time", "soon"], ["--steps", "0"], ["--steps", "1", "--time", "1s"]],
)
def test_a_probe_that_makes_no_sense_is_refused_before_anything_starts(
    bench: Bench, flags: list[str]
) -> None:
    done = bench.run(["sh", "-c", "echo started"], *flags)
    assert (done.returncode, done.stdout) == (2, b"")
