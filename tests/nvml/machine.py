"""A machine with NVIDIA GPUs for tests, without NVIDIA GPUs.

It is a pair of C libraries, ``libnvidia-ml.so.1`` and ``libcuda.so.1``, with the real ABI. They
report what a script says, so nvidia-ml-py, nvitop, gpustat and the code under test run unmodified:

    machine = NvmlMachine(tmp_path, [Gpu(util=97, processes=[Proc(1234)]), Gpu()])
    machine.run(["nvitop", "-1"])                  # in another process
    with machine.active():                         # or in this one
        pynvml.nvmlInit()
    machine.gpus[0].util = 3
    machine.write()                                # the running programs see it at once
    machine.error("nvmlDeviceGetPowerUsage", 15, gpu=0)
    machine.calls()                                # what the programs called

The script (script.c reads it; `NvmlMachine.script` writes it) has one statement per line, ``#``
starts a comment, indentation means nothing, NA stands for "this query is not supported":

    driver 550.54.15            nvml 12.550.54.15            cuda 12040
    gpu 0                       # a section; the GPUs are numbered in order
      name TEXT                 # also: uuid, bus_id, serial, vbios
      util 97                   # any field of NUMBER_FIELDS in script.h
      process PID used=BYTES|NA kind=CGM|- gi=N ci=N sm=% mem=% enc=% dec=% peak=BYTES time_ms=N
      mig 0                     # a section in the section: a MIG device; same lines as a gpu
        gi 1                    # first gi and ci, then its processes
    series gpu=0 field=util step_ms=100 values=0,50,NA [hold=on]
    rate gpu=0 field=energy_mj per_second=250000
    error FUNCTION code=15 [gpu=3|3:1|*] [after=N] [times=N]     # FUNCTION may have * and ?
    latency FUNCTION us=100 [gpu=...] [after=N] [times=N]
    grow by=20 [gpu=...] [after=N] [times=N]      # processes that start after the size is told
    missing FUNCTION            # the driver is too old for it: FUNCTION_NOT_FOUND
    lost 3                      # GPU 3 fell off the bus
    process_stride 16|24|32     # of the _v3 process lists
    process_padding on|off      # off: the padding bytes of an entry are not written
    process_clear on|off        # on: the caller's buffer is zeroed first
    samples period_ms=167 depth=100               # of nvmlDeviceGetSamples
    epoch NANOSECONDS           # CLOCK_MONOTONIC at which series start; else when it is loaded
    cuda_order 2 0 1            cuda_error cuInit 100
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import fnmatch
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

HERE: Final = Path(__file__).resolve().parent
BUILD: Final = HERE / "build"
FLAGS: Final = ("-std=gnu99", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
SOURCES: Final = {
    "libnvidia-ml.so.1": ("nvml.c", "script.c"),
    "libcuda.so.1": ("cuda.c", "script.c"),
}

GIB: Final = 1 << 30
MIB: Final = 1 << 20

ERRORS: Final[dict[int, str]] = {
    1: "NVML_ERROR_UNINITIALIZED",
    2: "NVML_ERROR_INVALID_ARGUMENT",
    3: "NVML_ERROR_NOT_SUPPORTED",
    4: "NVML_ERROR_NO_PERMISSION",
    5: "NVML_ERROR_ALREADY_INITIALIZED",
    6: "NVML_ERROR_NOT_FOUND",
    7: "NVML_ERROR_INSUFFICIENT_SIZE",
    8: "NVML_ERROR_INSUFFICIENT_POWER",
    9: "NVML_ERROR_DRIVER_NOT_LOADED",
    10: "NVML_ERROR_TIMEOUT",
    11: "NVML_ERROR_IRQ_ISSUE",
    12: "NVML_ERROR_LIBRARY_NOT_FOUND",
    13: "NVML_ERROR_FUNCTION_NOT_FOUND",
    14: "NVML_ERROR_CORRUPTED_INFOROM",
    15: "NVML_ERROR_GPU_IS_LOST",
    16: "NVML_ERROR_RESET_REQUIRED",
    17: "NVML_ERROR_OPERATING_SYSTEM",
    18: "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    19: "NVML_ERROR_IN_USE",
    20: "NVML_ERROR_MEMORY",
    21: "NVML_ERROR_NO_DATA",
    22: "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED",
    23: "NVML_ERROR_INSUFFICIENT_RESOURCES",
    24: "NVML_ERROR_FREQ_NOT_SUPPORTED",
    25: "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    26: "NVML_ERROR_DEPRECATED",
    27: "NVML_ERROR_NOT_READY",
    28: "NVML_ERROR_GPU_NOT_FOUND",
    29: "NVML_ERROR_INVALID_STATE",
    30: "NVML_ERROR_RESET_TYPE_NOT_SUPPORTED",
    999: "NVML_ERROR_UNKNOWN",
}


# --------------------------------------------------------------------------- the libraries


class BuildError(RuntimeError):
    """The libraries of the test machine could not be compiled."""


@functools.cache
def build(*, cuda: bool = True) -> Path:
    """Compile the libraries, unless this was done before, and return their directory.

    With ``cuda=False`` the directory has no libcuda, as on a machine whose container has only the
    "utility" part of the driver. Several processes may build at once: each compiles for itself
    and the first to finish wins.
    """
    libraries = list(SOURCES) if cuda else ["libnvidia-ml.so.1"]
    target = BUILD / f"{_source_hash()}-{'nvml-cuda' if cuda else 'nvml'}"
    if not target.is_dir():
        _build_into(target, libraries)
    return target


def _source_hash() -> str:
    digest = hashlib.sha256(" ".join((platform.machine(), *FLAGS)).encode())
    for path in sorted([*HERE.glob("*.c"), *HERE.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _build_into(target: Path, libraries: Sequence[str]) -> None:
    BUILD.mkdir(exist_ok=True)
    (BUILD / ".gitignore").write_text("*\n")
    scratch = Path(tempfile.mkdtemp(dir=BUILD, prefix="building-"))
    try:
        for library in libraries:
            _compile(library, scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # not the case that another process was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(library: str, directory: Path) -> None:
    gcc = shutil.which("gcc")
    if gcc is None:
        raise BuildError("the test machine is written in C: install gcc to run these tests")
    sources = [str(HERE / source) for source in SOURCES[library]]
    output = str(directory / library)
    command = [gcc, *FLAGS, f"-Wl,-soname,{library}", *sources, "-o", output]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


@functools.cache
def symbols() -> frozenset[str]:
    """The names of all functions that the two libraries have."""
    found = set[str]()
    for library in SOURCES:
        names = re.findall(rb"(?<=\0)(?:nvml|cu)[A-Z]\w+(?=\0)", (build() / library).read_bytes())
        found.update(name.decode() for name in names)
    return frozenset(found)


def preload(*, cuda: bool = False) -> None:
    """Load the libraries into this process.

    A later ``CDLL("libnvidia-ml.so.1")``, which is what pynvml does, finds a library that is
    loaded already by this name. It cannot be undone: the process has the fake driver for good.
    """
    _load("libnvidia-ml.so.1")
    if cuda:
        _load("libcuda.so.1")


@functools.cache
def _load(library: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(build() / library), mode=ctypes.RTLD_GLOBAL)


# --------------------------------------------------------------------------- what is in it


class NotAvailable(enum.Enum):
    """The type of `NA`."""

    NA = "NA"

    def __repr__(self) -> str:
        return "NA"


NA: Final = NotAvailable.NA
"""The driver answers NOT_SUPPORTED when asked for this."""

Number: TypeAlias = int | NotAvailable
Text: TypeAlias = str | NotAvailable

# Attributes that are not simply "a line of the script with this name and value".
SPECIAL: Final = frozenset(
    {"name", "uuid", "used_bytes", "compute_capability", "processes", "migs", "lost"}
)


@dataclass
class Proc:
    """A process on a GPU."""

    pid: int
    used_bytes: int | None = GIB
    """None: the driver cannot tell (WSL, vGPU)."""
    kind: str = "C"
    """Letters: C compute, G graphics, M MPS. "-": it has ended, only accounting knows it."""
    gi: int | None = None
    ci: int | None = None
    """GPU and compute instance; None: that of the MIG device it is listed in, or none."""
    sm_util: int | None = None
    """Percent; None: nvmlDeviceGetProcessUtilization has no sample of it."""
    mem_util: int = 0
    encoder_util: int = 0
    decoder_util: int = 0
    peak_bytes: int | None = None
    """What accounting says; None: used_bytes."""
    time_ms: int = 0


@dataclass
class Mig:
    """A MIG device. None takes a sensible value."""

    uuid: str | None = None
    name: str | None = None
    gi: int | None = None
    ci: int = 0
    total_bytes: Number = 10 * GIB
    used_bytes: Number | None = None
    """None: the sum of its processes."""
    reserved_bytes: Number = 0
    gi_slices: int = 1
    ci_slices: int = 1
    sm_count: int = 14
    copy_engines: int | None = None
    decoders: int | None = None
    encoders: int | None = None
    jpeg_engines: int | None = None
    ofa_engines: int | None = None
    processes: list[Proc] = field(default_factory=list)


@dataclass
class Gpu:
    """A GPU. Any value may be `NA`; None is the default of script.h (or see the attribute)."""

    name: Text = "NVIDIA A100-SXM4-80GB"
    uuid: Text | None = None
    """None: `gpu_uuid` of its index."""
    total_bytes: Number = 80 * GIB
    used_bytes: Number | None = None
    """None: the sum of its processes, also of those in its MIG devices."""
    reserved_bytes: Number = 600 * MIB
    util: Number = 0
    mem_util: Number = 0
    temperature: Number = 40
    power_mw: Number = 60_000
    power_limit_mw: Number = 400_000
    processes: list[Proc] = field(default_factory=list)
    migs: list[Mig | None] = field(default_factory=list)
    """By index; None is a hole. If there is one, MIG mode is on."""
    lost: bool = False
    """It fell off the bus: every call about it says GPU_IS_LOST."""

    bus_id: Text | None = None
    serial: Text | None = None
    vbios: Text | None = None
    sm_active: Number | None = None
    dram_active: Number | None = None
    """What GPM counts, where `architecture` is 9 (Hopper) or later."""
    encoder_util: Number | None = None
    decoder_util: Number | None = None
    memory_temperature: Number | None = None
    slowdown_temperature: Number | None = None
    shutdown_temperature: Number | None = None
    max_temperature: Number | None = None
    max_memory_temperature: Number | None = None
    fan: Number | None = None
    """None is NA here: the default GPU has no fan."""
    num_fans: Number | None = None
    enforced_power_limit_mw: Number | None = None
    default_power_limit_mw: Number | None = None
    min_power_limit_mw: Number | None = None
    max_power_limit_mw: Number | None = None
    energy_mj: Number | None = None
    performance_state: Number | None = None
    compute_mode: Number | None = None
    persistence: Number | None = None
    display_active: Number | None = None
    display_mode: Number | None = None
    driver_model: Number | None = None
    event_reasons: Number | None = None
    supported_event_reasons: Number | None = None
    accounting_mode: Number | None = None
    accounting_buffer: Number | None = None
    addressing_mode: Number | None = None
    ecc_mode: Number | None = None
    ecc_corrected: Number | None = None
    ecc_uncorrected: Number | None = None
    minor_number: Number | None = None
    compute_capability: tuple[int, int] | NotAvailable | None = None
    architecture: Number | None = None
    cuda_cores: Number | None = None
    bar1_total_bytes: Number | None = None
    bar1_used_bytes: Number | None = None
    pcie_generation: Number | None = None
    max_pcie_generation: Number | None = None
    pcie_width: Number | None = None
    max_pcie_width: Number | None = None
    pcie_tx_kb_s: Number | None = None
    pcie_rx_kb_s: Number | None = None
    pcie_tx_bytes: Number | None = None
    pcie_rx_bytes: Number | None = None
    pcie_replays: Number | None = None
    graphics_clock: Number | None = None
    sm_clock: Number | None = None
    memory_clock: Number | None = None
    video_clock: Number | None = None
    max_graphics_clock: Number | None = None
    max_sm_clock: Number | None = None
    max_memory_clock: Number | None = None
    max_video_clock: Number | None = None
    mig_mode: Number | None = None
    mig_pending: Number | None = None
    max_mig_devices: Number | None = None


def gpu_uuid(index: int) -> str:
    """The UUID of a GPU that was not given one: always the same for the same index."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'gpu {index}.oomph')}"


def mig_uuid(gpu: int, index: int) -> str:
    """The UUID of a MIG device that was not given one."""
    return f"MIG-{uuid.uuid5(uuid.NAMESPACE_DNS, f'mig {gpu}:{index}.oomph')}"


@dataclass(frozen=True)
class Call:
    """A line of the call log: a call of a driver function by some process."""

    pid: int
    function: str
    gpu: int | None
    """None: the call was about no GPU, or about one that there is not."""
    mig: int | None
    result: int


# --------------------------------------------------------------------------- the script's lines


def _scalar(value: int | str | NotAvailable) -> str:
    return value.value if isinstance(value, NotAvailable) else str(value)


def _plain_lines(item: Gpu | Mig) -> list[str]:
    """The attributes that are lines as they are."""
    lines = []
    for attribute in dataclasses.fields(item):
        value = getattr(item, attribute.name)
        if attribute.name not in SPECIAL and value is not None:
            lines.append(f"{attribute.name} {_scalar(value)}")
    return lines


def _capability_lines(capability: tuple[int, int] | NotAvailable | None) -> list[str]:
    if capability is None:
        return []
    major, minor = (NA, NA) if isinstance(capability, NotAvailable) else capability
    return [
        f"compute_capability_major {_scalar(major)}",
        f"compute_capability_minor {_scalar(minor)}",
    ]


def _process_line(process: Proc) -> str:
    options: dict[str, int | str | NotAvailable | None] = {
        "used": NA if process.used_bytes is None else process.used_bytes,
        "kind": process.kind,
        "gi": process.gi,
        "ci": process.ci,
        "sm": process.sm_util,
        "mem": process.mem_util,
        "enc": process.encoder_util,
        "dec": process.decoder_util,
        "peak": process.peak_bytes,
        "time_ms": process.time_ms,
    }
    words = [f"{key}={_scalar(value)}" for key, value in options.items() if value is not None]
    return " ".join(["process", str(process.pid), *words])


def _used_by(processes: Sequence[Proc]) -> int:
    return sum(process.used_bytes or 0 for process in processes if process.kind != "-")


def _mig_lines(gpu: int, parent: str, index: int, mig: Mig) -> list[str]:
    used = _used_by(mig.processes) if mig.used_bytes is None else mig.used_bytes
    gigabytes = 10 if isinstance(mig.total_bytes, NotAvailable) else mig.total_bytes // GIB
    name = mig.name or f"{parent} MIG {mig.gi_slices}g.{gigabytes}gb"
    gi = [] if mig.gi is not None else [f"gi {index + 1}"]
    return [
        f"mig {index}",
        f"  name {name}",
        f"  uuid {mig.uuid or mig_uuid(gpu, index)}",
        *(f"  {line}" for line in gi),
        f"  used_bytes {_scalar(used)}",
        *(f"  {line}" for line in _plain_lines(mig)),
        *(f"  {_process_line(process)}" for process in mig.processes),
    ]


def _all_used(gpu: Gpu) -> int:
    used = _used_by(gpu.processes)
    return used + sum(_used_by(mig.processes) for mig in gpu.migs if mig is not None)


def _gpu_lines(index: int, gpu: Gpu) -> list[str]:
    used = _all_used(gpu) if gpu.used_bytes is None else gpu.used_bytes
    lines = [
        f"name {_scalar(gpu.name)}",
        f"uuid {_scalar(gpu.uuid or gpu_uuid(index))}",
        f"used_bytes {_scalar(used)}",
        *_plain_lines(gpu),
        *_capability_lines(gpu.compute_capability),
        *(_process_line(process) for process in gpu.processes),
    ]
    for number, mig in enumerate(gpu.migs):
        if mig is not None:
            lines += _mig_lines(index, _scalar(gpu.name), number, mig)
    return [f"gpu {index}", *(f"  {line}" for line in lines)]


def _options(**options: int | str | None) -> str:
    return "".join(f" {key}={value}" for key, value in options.items() if value is not None)


def _check_function(pattern: str) -> None:
    """A rule for a function that does not exist would make a test pass for no reason."""
    if not any(fnmatch.fnmatchcase(symbol, pattern) for symbol in symbols()):
        raise ValueError(f"the test machine has no function {pattern!r}")


# --------------------------------------------------------------------------- the machine

_last_mtime_ns = 0


def _next_mtime_ns() -> int:
    """A time stamp that no earlier script had: the kernel's own are only good to 4 ms."""
    global _last_mtime_ns
    _last_mtime_ns = max(time.time_ns(), _last_mtime_ns + 1)
    return _last_mtime_ns


class NvmlMachine:
    """A machine whose driver reports what you say.

    Attributes can be changed at any time, followed by `write`. The methods that change something
    write at once. Each write starts series, counters and the counts of errors anew, unless
    `epoch_ns` (CLOCK_MONOTONIC) fixes the start of series and counters.
    """

    def __init__(
        self,
        directory: Path,
        gpus: Sequence[Gpu] = (),
        *,
        driver: str = "550.54.15",
        nvml: str = "12.550.54.15",
        cuda: int = 12040,
        process_stride: int = 24,
        process_padding: bool = True,
        process_clear: bool = False,
        missing: Sequence[str] = (),
        sample_period_ms: int = 167,
        sample_depth: int = 100,
        epoch_ns: int | None = None,
        cuda_order: Sequence[int] = (),
        cuda_errors: Mapping[str, int] | None = None,
        libcuda: bool = True,
        log: bool = True,
    ) -> None:
        """Set up a machine whose files are in `directory`, and write its script.

        Args:
            directory: where the script and the call log are.
            gpus: the GPUs in NVML's order.
            driver: its version.
            nvml: the version of NVML.
            cuda: the CUDA version of the driver: 12040 is 12.4.
            process_stride: bytes per entry of the _v3 process lists: 16, 24 or 32.
            process_padding: whether the driver writes the padding bytes of an entry.
            process_clear: whether the driver zeroes the caller's buffer first.
            missing: functions (or patterns) that this driver does not have.
            sample_period_ms: distance of the samples of nvmlDeviceGetSamples and of processes.
            sample_depth: how many samples the driver keeps.
            epoch_ns: when series and counters start; None: when the script is loaded.
            cuda_order: NVML indices in CUDA's order; empty: NVML's order.
            cuda_errors: codes that CUDA functions fail with.
            libcuda: whether there is a libcuda.
            log: whether calls are logged; it makes each call slower.
        """
        self.directory = directory
        self.gpus = list(gpus)
        self.driver = driver
        self.nvml = nvml
        self.cuda = cuda
        self.process_stride = process_stride
        self.process_padding = process_padding
        self.process_clear = process_clear
        self.missing = list(missing)
        self.sample_period_ms = sample_period_ms
        self.sample_depth = sample_depth
        self.epoch_ns = epoch_ns
        self.cuda_order = list(cuda_order)
        self.cuda_errors = dict(cuda_errors or {})
        self.libcuda = libcuda
        self.log = log
        self._errors: list[str] = []
        self._latencies: list[str] = []
        self._growth: list[str] = []
        self._series: list[str] = []
        self.write()

    @property
    def path(self) -> Path:
        """The script."""
        return self.directory / "machine.nvml"

    @property
    def log_path(self) -> Path:
        """The call log. It is there after the first call."""
        return self.directory / "calls.log"

    def uuid(self, gpu: int, mig: int | None = None) -> str:
        """The UUID of a GPU or MIG device, given or not."""
        if mig is None:
            return _scalar(self.gpus[gpu].uuid or gpu_uuid(gpu))
        device = self.gpus[gpu].migs[mig]
        if device is None:
            raise ValueError(f"MIG device {mig} of GPU {gpu} is a hole")
        return device.uuid or mig_uuid(gpu, mig)

    # -- the script

    def script(self) -> str:
        """The text of the script."""
        lines = self._machine_lines()
        for index, gpu in enumerate(self.gpus):
            lines += ["", *_gpu_lines(index, gpu)]
        lines += ["", *(f"lost {index}" for index, gpu in enumerate(self.gpus) if gpu.lost)]
        lines += [*self._series, *self._errors, *self._latencies, *self._growth]
        if self.cuda_order:
            lines.append(" ".join(["cuda_order", *map(str, self.cuda_order)]))
        return "\n".join(lines) + "\n"

    def _machine_lines(self) -> list[str]:
        for function in (*self.missing, *self.cuda_errors):
            _check_function(function)
        epoch = [] if self.epoch_ns is None else [f"epoch {self.epoch_ns}"]
        return [
            f"driver {self.driver}",
            f"nvml {self.nvml}",
            f"cuda {self.cuda}",
            f"process_stride {self.process_stride}",
            f"process_padding {'on' if self.process_padding else 'off'}",
            f"process_clear {'on' if self.process_clear else 'off'}",
            f"samples period_ms={self.sample_period_ms} depth={self.sample_depth}",
            *epoch,
            *(f"missing {function}" for function in self.missing),
            *(f"cuda_error {function} {code}" for function, code in self.cuda_errors.items()),
        ]

    def write(self) -> None:
        """Replace the script, at once for every process that uses the machine."""
        self.write_script(self.script())

    def write_script(self, text: str) -> None:
        """The same with a script of your own."""
        scratch = self.directory / f".machine.{os.getpid()}"
        scratch.write_text(text)
        stamp = _next_mtime_ns()
        os.utime(scratch, ns=(stamp, stamp))
        scratch.replace(self.path)

    def unload_driver(self) -> None:
        """Take the driver away: calls say DRIVER_NOT_LOADED. `write` brings it back."""
        self.path.unlink()

    # -- trouble

    def error(
        self,
        function: str,
        code: int,
        gpu: int | str | None = None,
        after: int = 0,
        times: int | None = None,
    ) -> None:
        """Make calls of a function fail.

        Args:
            function: its exact name in C (``nvmlInitWithFlags``) or a pattern with ``*``.
            code: the error; see `ERRORS`.
            gpu: only calls about this GPU (``3``, with its MIG devices) or MIG device (``"3:1"``).
            after: let so many calls pass first, in each process.
            times: then fail only so often; None: always.
        """
        _check_function(function)
        self._errors.append(
            f"error {function}{_options(code=code, gpu=gpu, after=after, times=times)}"
        )
        self.write()

    def clear_errors(self) -> None:
        """Forget all errors."""
        self._errors.clear()
        self.write()

    def latency(
        self,
        us: int,
        function: str = "*",
        gpu: int | str | None = None,
        after: int = 0,
        times: int | None = None,
    ) -> None:
        """Make calls take longer. The first rule that fits a call counts; see `error`."""
        _check_function(function)
        self._latencies.append(
            f"latency {function}{_options(us=us, gpu=gpu, after=after, times=times)}"
        )
        self.write()

    def clear_latencies(self) -> None:
        """Make all calls fast again, also those that are under way."""
        self._latencies.clear()
        self.write()

    def grow(self, by: int, times: int | None = None, gpu: int | str | None = None) -> None:
        """Let processes start between the call for the size of a list and the one for the list.

        The second call then finds `by` more than the first one said. It does so `times` times, or
        always. nvidia-ml-py makes room for 2n+5, so `by` must be more than n+5 to hit it.
        """
        self._growth.append(f"grow{_options(by=by, times=times, gpu=gpu)}")
        self.write()

    def clear_growth(self) -> None:
        """No more process lists that grow."""
        self._growth.clear()
        self.write()

    # -- values over time

    def series(
        self,
        gpu: int | str,
        field: str,
        values: Sequence[Number],
        step_ms: int = 100,
        *,
        hold: bool = False,
    ) -> None:
        """Let a field take these values in turn, each for `step_ms`, again and again.

        Args:
            gpu: the GPU (``3``) or MIG device (``"3:1"``).
            field: name of an attribute of `Gpu` that is a number.
            values: the values, which may be `NA`.
            step_ms: how long each lasts.
            hold: stay at the last value instead of starting again.
        """
        listed = ",".join(map(_scalar, values))
        options = _options(gpu=gpu, field=field, step_ms=step_ms, values=listed)
        self._series.append(f"series{options} hold={'on' if hold else 'off'}")
        self.write()

    def rate(self, gpu: int | str, field: str, per_second: int) -> None:
        """Let a counter (``energy_mj``, ``pcie_rx_bytes``) grow."""
        self._series.append(f"rate{_options(gpu=gpu, field=field, per_second=per_second)}")
        self.write()

    def clear_series(self) -> None:
        """Make all values constant again."""
        self._series.clear()
        self.write()

    # -- use

    def env(self) -> dict[str, str]:
        """The environment variables that put a process on this machine."""
        path = [str(build(cuda=self.libcuda)), os.environ.get("LD_LIBRARY_PATH", "")]
        variables = {
            "LD_LIBRARY_PATH": ":".join(filter(None, path)),
            "OOMPH_NVML_SCRIPT": str(self.path),
        }
        if self.log:
            variables["OOMPH_NVML_LOG"] = str(self.log_path)
        return variables

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this machine, with these further environment variables."""
        return subprocess.run(
            command,
            env={**os.environ, **self.env(), **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put this process on this machine for a while.

        Only its NVML; see `preload` for its libcuda.
        """
        preload()
        wanted = self.env()
        names = ("LD_LIBRARY_PATH", "OOMPH_NVML_SCRIPT", "OOMPH_NVML_LOG")
        before = {name: os.environ.get(name) for name in names}
        _set_variables({name: wanted.get(name) for name in names})
        try:
            yield
        finally:
            _set_variables(before)

    def calls(self, function: str = "*") -> list[Call]:
        """The calls so far of all processes, in order; only those that fit the pattern."""
        if not self.log_path.exists():
            return []
        calls = [_parse_call(line) for line in self.log_path.read_text().splitlines()]
        return [call for call in calls if fnmatch.fnmatchcase(call.function, function)]

    def clear_calls(self) -> None:
        """Forget the calls so far."""
        self.log_path.unlink(missing_ok=True)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _parse_call(line: str) -> Call:
    pid, function, place, result = line.split()
    gpu, _, mig = place.partition(":")
    return Call(
        pid=int(pid),
        function=function,
        gpu=None if gpu == "-" else int(gpu),
        mig=int(mig) if mig else None,
        result=int(result),
    )
