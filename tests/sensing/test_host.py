"""The run's processes: by ancestry, by token, and what they use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomph.sensing.host import (
    HostMeter,
    MachineCounters,
    OomKills,
    ProcessCpu,
    ProcessTree,
    free_memory_bytes,
    num_cpus,
    read_counters,
    read_oom_kills,
)
from oomph.sensing.ownership import RUN_TOKEN

TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # which the kernel counts CPU time in
SPIN = "import os; os.write(1, b'%d\\n' % os.getpid())\nwhile True: pass"


@pytest.fixture
def shell() -> Iterator[subprocess.Popen[bytes]]:
    """A shell with two busy workers, one of which was taken away from under it."""
    script = f'(setsid {sys.executable} -c "$0" &); {sys.executable} -c "$0" & wait'
    process = subprocess.Popen(
        ["sh", "-c", script, SPIN],
        stdout=subprocess.PIPE,
        env={**os.environ, RUN_TOKEN: "token of this test"},
    )
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    yield process
    for pid in (process.pid, *workers):
        os.kill(pid, 9)
    process.communicate()


def test_workers_are_found_by_their_parent_and_by_their_token(
    shell: subprocess.Popen[bytes],
) -> None:
    by_both = ProcessTree(shell.pid, "token of this test", 0.0)
    by_parent = ProcessTree(shell.pid, None, 0.0)
    assert by_both.look(1.0).num_processes == 3
    assert by_parent.look(1.0).num_processes == 2
    assert by_parent.ever < by_both.ever
    assert os.getpid() not in by_both.ever


def test_cpu_time_and_memory_are_those_of_the_workers(shell: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    tree = ProcessTree(shell.pid, "token of this test", 0.0)
    first = tree.look(time.monotonic() - began)
    # Two that never wait, on a machine that may have other things to do: until both had their turn.
    while True:
        span = tree.look(time.monotonic() - began)
        if (span.cpu_cores or 0) > (span.busiest_cpu_cores or 0) > 0:
            break
        time.sleep(0.5)
    looked_s = time.monotonic() - began - first.ended_s  # the look itself takes time, too
    used_s = (span.cpu_cores or 0) * (span.ended_s - span.began_s)
    assert used_s <= 2 * (looked_s + 2 * TICK_S)
    assert (span.memory_bytes or 0) > 10 << 20


def test_a_tree_whose_root_has_ended_is_empty_and_not_wrong() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    span = ProcessTree(process.pid, None, 0.0).look(1.0)
    assert (span.num_processes, span.memory_bytes, span.cpu_cores) == (0, None, 0)


def test_the_cpus_are_those_that_may_be_used() -> None:
    assert num_cpus() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/user/job\n", "sys/fs/cgroup/user/job/memory.events"),
        ("4:memory:/job\n0::/\n", "sys/fs/cgroup/memory/job/memory.oom_control"),
    ],
)
def test_kills_by_the_kernel_are_read_in_both_versions_of_cgroups(
    tmp_path: Path, cgroup: str, file: str
) -> None:
    for name, content in (
        ("proc/self/cgroup", cgroup),
        ("proc/vmstat", "nr_free 1\noom_kill 7\n"),
        (file, "oom 0\noom_kill 3\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    kills = read_oom_kills(tmp_path)
    assert kills == OomKills(in_group=3, on_machine=7)
    assert kills.grew_in_group(OomKills(2, 7))
    assert not kills.grew_on_machine(OomKills(2, 7))


def test_a_kernel_that_tells_nothing_is_no_evidence(tmp_path: Path) -> None:
    unknown = read_oom_kills(tmp_path)
    assert unknown == OomKills(None, None)
    assert not OomKills(3, 3).grew_in_group(unknown)


# ---- who else is there ---------------------------------------------------------------------------

STAT = """cpu  900 0 0 0 0 0 0 0 0 0
cpu0 100 20 30 999 999 4 6 50 7 0
cpu1 1000 0 0 0 0 0 0 0 0 0
cpu12 200 0 0 0 0 0 0 10 0 0
intr 1 2 3
"""


def machine(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_only_the_cpus_that_the_run_may_use_are_counted(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__stat=STAT, proc__vmstat="pswpin 3\npswpout 9\n")
    found = read_counters(frozenset({0, 12}), root)
    assert found.busy_s == pytest.approx((160 + 200) * TICK_S)  # neither idle, nor for a disk
    assert found.stolen_s == pytest.approx(60 * TICK_S)
    assert found.swapped_in_bytes == 3 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/job/7\n", "sys__fs__cgroup__job__7__cpu_dot_stat"),
        ("0::/job/7\n", "sys__fs__cgroup__cpu_dot_stat"),  # as a container sees its own
        ("4:cpu,cpuacct:/job/7\n", "sys__fs__cgroup__cpu__job__7__cpu_dot_stat"),
        ("9:memory:/x\n4:cpu:/\n", "sys__fs__cgroup__cpu__cpu_dot_stat"),
    ],
)
def test_a_cpu_limit_is_found_in_either_version_of_control_groups(
    tmp_path: Path, group: str, file: str
) -> None:
    told = "usage_usec 5\nnr_periods 40\nnr_throttled 9\nthrottled_usec 3\n"
    root = machine(tmp_path, proc__self__cgroup=group, **{file: told})
    found = read_counters(frozenset({0}), root)
    assert (found.num_periods, found.num_throttled) == (40, 9)


def test_a_kernel_that_tells_nothing_is_unknown(tmp_path: Path) -> None:
    assert read_counters(frozenset({0}), tmp_path) == MachineCounters()


def test_what_others_do_is_all_but_what_the_run_does(shell: subprocess.Popen[bytes]) -> None:
    tree = ProcessTree(shell.pid, "token of this test", 0.0)
    began = time.monotonic()
    time.sleep(1.0)
    span = tree.look(time.monotonic() - began)
    others, cores = span.others_cpu_cores or 0.0, span.cpu_cores or 0.0
    assert 0 <= others + cores <= (num_cpus() or 0) + 0.5  # two clocks that tick in hundredths
    assert span.swapped_in_bytes is not None


# ---- how much memory a new process could take ----------------------------------------------------

_MEMINFO = "MemTotal:       65536000 kB\nMemFree:          100000 kB\nMemAvailable:   32768000 kB\n"


def test_free_memory_is_what_the_kernel_says_is_available(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(_MEMINFO)
    assert free_memory_bytes(tmp_path) == 32768000 * 1024


@pytest.mark.parametrize(
    ("cgroup", "group", "limit", "used"),
    [
        ("0::/job/step", "sys/fs/cgroup/job", "memory.max", "memory.current"),
        (
            "4:memory:/job",
            "sys/fs/cgroup/memory/job",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
)
def test_the_limit_of_a_control_group_counts_also_of_an_outer_one(
    tmp_path: Path, cgroup: str, group: str, limit: str, used: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(_MEMINFO)
    (tmp_path / "proc/self/cgroup").write_text(f"{cgroup}\n")
    folder = tmp_path / group
    (folder / "step").mkdir(parents=True)
    (folder / "step" / limit).write_text("max\n")
    (folder / limit).write_text(f"{8 << 30}\n")
    (folder / used).write_text(f"{3 << 30}\n")
    assert free_memory_bytes(tmp_path) == 5 << 30
    (folder / used).write_text(f"{9 << 30}\n")
    assert free_memory_bytes(tmp_path) == 0


# ---- the machine as a whole, and single processes, for the live view -----------------------------


def test_the_host_has_the_cpu_time_since_the_last_look_its_memory_and_its_load(
    tmp_path: Path,
) -> None:
    sizes = "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:   250 kB\n"
    machine(tmp_path, proc__stat=STAT, proc__meminfo=sizes, proc__loadavg="3.25 2 1 4/99 7\n")
    meter = HostMeter(tmp_path)
    assert meter.look().cpu_ratio is None  # no time has passed
    # user, nice, system, idle, iowait: 30 of 100 ticks are busy
    (tmp_path / "proc/stat").write_text("cpu  920 0 10 60 10 0 0 0 0 0\n")
    look = meter.look()
    assert look.cpu_ratio == pytest.approx(0.3)
    assert (look.total_bytes, look.used_bytes, look.load) == (1000 * 1024, 750 * 1024, 3.25)


def test_a_host_that_tells_nothing_is_unknown(tmp_path: Path) -> None:
    look = HostMeter(tmp_path).look()
    assert (look.cpu_ratio, look.total_bytes, look.used_bytes, look.load) == (None,) * 4


def test_the_cpu_time_of_a_process_is_what_it_used_between_two_looks() -> None:
    cpu = ProcessCpu()
    assert cpu.cores([os.getpid(), 4_000_000], 10.0) == {}  # of a new one nothing is known
    began_s = time.process_time()
    while time.process_time() - began_s < 0.2:
        pass
    cores = cpu.cores([os.getpid(), 4_000_000], 20.0)
    assert cores.keys() == {os.getpid()}
    assert 0.01 <= cores[os.getpid()] < 1
