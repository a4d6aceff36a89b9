"""Slurm and Grid Engine on this machine, with four GPUs that are not there, for one test session.

Everything is below one directory and on loopback; nothing in /etc is changed. It takes root, and
Debian's packages (`make test-schedulers` installs them). Each `start_...` is a context manager that
yields the environment in which clients find the daemons.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

NUM_GPUS = 4
NUM_CPUS = 8  # declared, however many there are

HAS_SLURM = os.geteuid() == 0 and all(map(shutil.which, ("slurmctld", "slurmd", "munged")))
HAS_GRID_ENGINE = os.geteuid() == 0 and all(map(shutil.which, ("qsub", "qconf", "sge_qmaster")))


def wait_for(is_so: Callable[[], bool]) -> None:
    """Poll for something that a daemon does."""
    while not is_so():
        time.sleep(0.1)


def run(words: Sequence[str | Path], environment: Mapping[str, str]) -> str:
    """Run a command that must succeed, and return what it printed."""
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def prints(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return what a command prints, whether it succeeds or not."""
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False
    ).stdout


def start(words: Sequence[str | Path], environment: Mapping[str, str], log: Path) -> None:
    """Start a program that makes a daemon of itself; its output would hold a pipe open."""
    with log.open("ab") as file:
        subprocess.run(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            check=True,
        )


def end(pid_file: Path, name: str) -> None:
    """End a daemon by its own file, unless the number is another process's by now."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        if Path(f"/proc/{pid}/comm").read_text().startswith(name[:15]):
            os.kill(pid, signal.SIGTERM)
            while _is_there(pid):
                time.sleep(0.1)


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


# ---- Slurm ---------------------------------------------------------------------------------------

SLURM_CONF = """\
ClusterName=rig
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={here}/run/munge.sock
CryptoType=crypto/munge
SlurmctldPort={port}
SlurmdPort={other_port}
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool
SlurmctldPidFile={here}/run/slurmctld.pid
SlurmdPidFile={here}/run/slurmd.pid
SlurmctldLogFile={here}/log/slurmctld.log
SlurmdLogFile={here}/log/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdTimeout=300
InactiveLimit=0
KillWait=20
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} \
ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=gpu Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def start_slurm(here: Path) -> Iterator[dict[str, str]]:
    """Start munge, slurmctld and slurmd, and end them with all their jobs."""
    for name in ("state", "spool", "log", "run", "dev"):
        (here / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    for gpu in range(NUM_GPUS):
        run(["mknod", here / "dev" / f"gpu{gpu}", "c", "4", str(40 + gpu)], os.environ)
    key = here / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    configuration = here / "slurm.conf"
    configuration.write_text(
        SLURM_CONF.format(
            here=here,
            host=host,
            port=free_port(),
            other_port=free_port(),
            cpus=NUM_CPUS,
            gpus=NUM_GPUS,
        )
    )
    (here / "gres.conf").write_text(
        f"AutoDetect=off\nNodeName={host} Name=gpu File={here}/dev/gpu[0-{NUM_GPUS - 1}]\n"
    )
    client = {**os.environ, "SLURM_CONF": str(configuration)}
    log = here / "log" / "started"
    munge = [f"--key-file={key}", f"--socket={here}/run/munge.sock"]
    munge += [f"--pid-file={here}/run/munged.pid", f"--log-file={here}/log/munged.log"]
    munge += [f"--seed-file={here}/run/munged.seed"]
    try:
        start(["munged", "--force", *munge], client, log)
        start(["slurmctld", "-c", "-f", configuration], client, log)
        start(["slurmd", "-f", configuration, "-N", host], client, log)
        wait_for(lambda: prints(["sinfo", "-h", "-o", "%T"], client).strip() == "idle")
        yield client
    finally:
        # A job whose daemon is gone would leave its processes behind.
        subprocess.run(["scancel", "--user=root"], env=client, check=False, capture_output=True)
        wait_for(lambda: not prints(["squeue", "--noheader"], client).strip())
        for name in ("slurmd", "slurmctld", "munged"):
            end(here / "run" / f"{name}.pid", name)


# ---- Grid Engine ---------------------------------------------------------------------------------

LIBRARY, SHARED = Path("/usr/lib/gridengine"), Path("/usr/share/gridengine")
PE = """\
pe_name smp
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule $pe_slots
control_slaves FALSE
job_is_first_task TRUE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""
QUEUE = """\
qname all.q
hostlist localhost
seq_no 0
load_thresholds NONE
suspend_thresholds NONE
nsuspend 1
suspend_interval 00:05:00
priority 0
min_cpu_interval 00:05:00
processors UNDEFINED
qtype BATCH INTERACTIVE
ckpt_list NONE
pe_list smp
rerun FALSE
slots {slots}
tmpdir /tmp
shell /bin/bash
prolog NONE
epilog NONE
shell_start_mode unix_behavior
starter_method NONE
suspend_method NONE
resume_method NONE
terminate_method NONE
notify 00:00:20
owner_list NONE
user_lists NONE
xuser_lists NONE
subordinate_list NONE
complex_values NONE
projects NONE
xprojects NONE
calendar NONE
initial_state default
s_rt INFINITY
h_rt INFINITY
s_cpu INFINITY
h_cpu INFINITY
s_fsize INFINITY
h_fsize INFINITY
s_data INFINITY
h_data INFINITY
s_stack INFINITY
h_stack INFINITY
s_core INFINITY
h_core INFINITY
s_rss INFINITY
h_rss INFINITY
s_vmem INFINITY
h_vmem INFINITY
"""
_SETTINGS = {
    "min_uid": "0",
    "min_gid": "0",
    "load_report_time": "00:00:05",
    "execd_params": "ENABLE_ADDGRP_KILL=true",
    "shell_start_mode": "unix_behavior",
}
_SCHEDULE = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}


@contextlib.contextmanager
def start_grid_engine(here: Path, *, counted: str = "JOB") -> Iterator[dict[str, str]]:
    """Start qmaster and execd; `counted` is JOB or YES, what `qconf -sc` says of the GPUs."""
    client = _lay_out(here)
    spool, log = here / "spool", here / "log"
    try:
        start(["sge_qmaster"], client, log)
        wait_for(lambda: "localhost" in prints(["qconf", "-sh"], client))
        for flag in ("-ah", "-as"):
            run(["qconf", flag, "localhost"], client)
        _change(here, client, "-ssconf", "-Msconf", _SCHEDULE)
        complexes = run(["qconf", "-sc"], client).splitlines()
        rows = [row for row in complexes if not row.startswith("#")]
        rows.append(f"gpu gpu INT <= YES {counted} 0 0")
        (here / "complexes").write_text("\n".join(rows) + "\n")
        run(["qconf", "-Mc", here / "complexes"], client)
        start(["sge_execd"], client, log)
        wait_for(lambda: "localhost" in prints(["qconf", "-sel"], client))
        values = f"gpu={NUM_GPUS},slots={NUM_CPUS}"
        run(["qconf", "-mattr", "exechost", "complex_values", values, "localhost"], client)
        (here / "pe").write_text(PE)
        run(["qconf", "-Ap", here / "pe"], client)
        (here / "queue").write_text(QUEUE.format(slots=NUM_CPUS))
        run(["qconf", "-Aq", here / "queue"], client)
        yield client
    finally:
        subprocess.run(["qdel", "-f", "-u", "*"], env=client, check=False, capture_output=True)
        wait_for(lambda: not prints(["qstat", "-u", "*"], client).strip())
        end(spool / "execd" / "localhost" / "execd.pid", "sge_execd")
        end(spool / "qmaster" / "qmaster.pid", "sge_qmaster")


def _lay_out(here: Path) -> dict[str, str]:
    """Make a cell of Grid Engine's files below a directory; return the environment of clients."""
    root, spool = here / "root", here / "spool"
    cell = root / "default" / "common"
    cell.mkdir(parents=True)
    for name in ("qmaster", "execd", "spooldb"):
        (spool / name).mkdir(parents=True)
    for name in ("bin", "lib", "utilbin"):
        (root / name).mkdir()
        (root / name / "lx-amd64").symlink_to(LIBRARY)
    (root / "util").symlink_to(SHARED / "util")
    bootstrap = Path("/var/lib/gridengine/default/common/bootstrap").read_text()
    bootstrap = bootstrap.replace("/var/spool/gridengine", str(spool))
    lines = [
        "admin_user none" if line.startswith("admin_user") else line
        for line in bootstrap.splitlines()
    ]
    (cell / "bootstrap").write_text("\n".join(lines) + "\n")
    (cell / "act_qmaster").write_text("localhost\n")
    names = {socket.gethostname(), socket.gethostname().partition(".")[0], socket.getfqdn()}
    (cell / "host_aliases").write_text(" ".join(["localhost", *sorted(names - {"localhost"})]))
    client = {
        **{name: os.environ[name] for name in os.environ.keys() - {"SGE_ND"}},
        "SGE_ROOT": str(root),
        "SGE_CELL": "default",
        "SGE_QMASTER_PORT": str(free_port()),
        "SGE_EXECD_PORT": str(free_port()),
    }
    text = (SHARED / "default-configuration").read_text()
    settings = {**_SETTINGS, "execd_spool_dir": str(spool / "execd")}
    (here / "configuration").write_text(
        _changed(text, settings).replace("flush_time=00:00:15", "flush_time=00:00:01")
    )
    run([LIBRARY / "spoolinit", "berkeleydb", "libspoolb", spool / "spooldb", "init"], client)
    resources = SHARED / "util" / "resources"
    for words in (
        ["configuration", here / "configuration"],
        ["complexes", resources / "centry"],
        ["usersets", resources / "usersets"],
        ["managers", "root"],
    ):
        run([LIBRARY / "spooldefaults", *words], client)
    return client


def _change(
    here: Path, client: Mapping[str, str], show: str, change: str, values: Mapping[str, str]
) -> None:
    (here / "changed").write_text(_changed(run(["qconf", show], client), values))
    run(["qconf", change, here / "changed"], client)


def _changed(text: str, values: Mapping[str, str]) -> str:
    """Replace settings of one line each, and add those that are missing."""
    left, lines = dict(values), []
    for line in text.splitlines():
        name = line.split()[0] if line.split() else ""
        lines.append(f"{name} {left.pop(name)}" if name in left else line)
    return "\n".join([*lines, *(f"{name} {value}" for name, value in left.items())]) + "\n"
