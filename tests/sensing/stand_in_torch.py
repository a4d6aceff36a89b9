"""A package `torch` for the child of a calibration: it moves the figures of the test machine.

It has just what is asked of torch.cuda there, on a GPU whose context, libraries and rates the test
says. Time is counted, not waited for.
"""

from __future__ import annotations

from pathlib import Path

SOURCE = '''
import atexit, os
from types import SimpleNamespace as _Space

SAID = {said!r}
__version__ = SAID["version"]
version = _Space(cuda=SAID["cuda"])
MIB = 2 ** 20
held = reserved = clock_s = 0


def _rewrite(held):
    """Let the driver say what this process holds, in the section of the GPU that it sees."""
    path, uuid = os.environ["OOMPH_NVML_SCRIPT"], os.environ["CUDA_VISIBLE_DEVICES"]
    sections, mine = open(path).read().split("\\ngpu "), f"process {{os.getpid()}} "
    for number, section in enumerate(sections):
        if uuid not in section:
            continue
        lines = [line for line in section.splitlines() if mine not in line]
        place = next(i for i, line in enumerate(lines) if line.strip().startswith("used_bytes"))
        globals().setdefault("before", int(lines[place].split()[1]))
        moved = SAID["moves_bytes"] if held else SAID["moves_for_good_bytes"]
        lines[place] = f"  used_bytes {{before + held + moved}}"
        if held and SAID["listed"] != "hidden":
            used = held if SAID["listed"] == "with its bytes" else "NA"
            lines.insert(place + 1, f"  {{mine}}used={{used}} kind=C")
        sections[number] = "\\n".join(lines) + "\\n"
    scratch = f"{{path}}.{{os.getpid()}}"
    open(scratch, "w").write("\\ngpu ".join(sections))
    os.replace(scratch, path)


def _hold(size, reserves=0):
    global held, reserved
    if not held:
        if SAID["fails"]:
            raise RuntimeError(SAID["fails"])
        atexit.register(_rewrite, 0)
    held, reserved = held + size + reserves, reserved + reserves
    _rewrite(held)


class _Dtype:
    def __init__(self, name, itemsize):
        self.name, self.itemsize = name, itemsize


float32, float16, bfloat16 = _Dtype("float32", 4), _Dtype("float16", 2), _Dtype("bfloat16", 2)
uint8 = _Dtype("uint8", 1)


class _Tensor:
    def __init__(self, *shape, dtype=float32, **_):
        self.shape, self.dtype = shape, dtype

    def __matmul__(self, other):
        _hold(SAID["cublas_bytes"], reserves=8 * MIB)
        return self

    def sum(self):
        return self

    def backward(self): ...

    def copy_(self, other):
        global clock_s
        clock_s += 2 * self.shape[0] / SAID["bandwidth"]


def ones(*shape, **_):
    if not held:
        _hold(SAID["context_bytes"], reserves=2 * MIB)
    return _Tensor(*shape)


zeros = randn = _Tensor
empty_like = lambda tensor: tensor


def mm(left, right, out):
    global clock_s
    clock_s += 2 * left.shape[0] ** 3 / SAID["flops"][left.dtype.name]


class _Convolution:
    def __init__(self, *_, **__):
        _hold(SAID["cudnn_bytes"])

    def __call__(self, x):
        return x


class _Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at_s = clock_s

    def synchronize(self): ...

    def elapsed_time(self, end):
        return (end.at_s - self.at_s) * 1000


nn = _Space(Conv2d=_Convolution)
backends = _Space(
    cudnn=_Space(is_available=lambda: SAID["cudnn_bytes"] is not None),
    cuda=_Space(matmul=_Space(allow_tf32=True)),
)
cuda = _Space(
    is_available=lambda: SAID["is_available"],
    synchronize=lambda: None,
    empty_cache=lambda: None,
    memory_reserved=lambda: reserved,
    mem_get_info=lambda: (SAID["total_bytes"] // 2, SAID["total_bytes"]),
    get_device_capability=lambda: tuple(SAID["capability"]),
    get_device_properties=lambda index: _Space(total_memory=SAID["total_bytes"]),
    Event=_Event,
)
'''

MIB = 2**20
SAID = {
    "version": "2.13.0+cpu",  # that of the torch which rehearses here
    "cuda": "12.4",
    "context_bytes": 420 * MIB,
    "cublas_bytes": 40 * MIB,
    "cudnn_bytes": 60 * MIB,
    "total_bytes": 85_095_874_560,
    "bandwidth": 1.7e12,
    "flops": {"bfloat16": 260e12, "float16": 250e12, "float32": 19e12},
    "capability": [8, 0],
    "is_available": True,
    "fails": None,
    "listed": "with its bytes",  # "without" them, or "hidden": how the driver lists processes
    "moves_bytes": 0,  # of somebody else, while this process is there
    "moves_for_good_bytes": 0,  # of somebody else, and still when it has gone
}


def write(directory: Path, **said: object) -> Path:
    """The package, below `directory`; `said` is what differs from SAID."""
    package = directory / "torch"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(SOURCE.format(said={**SAID, **said}))
    return directory
