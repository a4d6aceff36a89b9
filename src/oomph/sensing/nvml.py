"""NVML -> answers: the one import of pynvml, and what that binding leaves open.

`nvidia-ml-py` raises for every refusal; here a refusal is a value (`Refusal`), so that
"not allowed", "not supported" and "lost" stay different from each other and from zero.
What a GPU will never answer is remembered and not asked again. NVML's state belongs to
one process: after a fork the child opens its own.

Limits: NVIDIA only; Linux is what it is tested on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from oomph.errors import Unreadable

T = TypeVar("T")

# nvml.h, nvmlReturn_t. Repeated here because pynvml may only be imported on first use.
UNINITIALIZED = 1
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
UNREADABLE = -1  # ours: NVML answered, but the answer makes no sense

NO_GPU = "the NVIDIA driver runs, but has no GPU"

_FINAL = frozenset({NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH})

_IN_OUR_WORDS = {
    NOT_SUPPORTED: "not supported by this GPU or driver",
    NO_PERMISSION: "not allowed for this user",
    INSUFFICIENT_SIZE: "lost a race: it kept growing while it was read",
    FUNCTION_NOT_FOUND: "this driver is too old for it",
    ARGUMENT_VERSION_MISMATCH: "this driver is too old for it",
    GPU_IS_LOST: "the GPU is lost: it fell off the bus; see `dmesg | grep -i xid`, then reboot",
    RESET_REQUIRED: "the GPU must be reset: `sudo nvidia-smi --gpu-reset`, or reboot",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """NVML's no, as a value."""

    code: int
    text: str

    @property
    def is_missing(self) -> bool:
        """The driver has no such function, so an older one may answer."""
        return self.code in (FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH)

    @property
    def is_unsupported(self) -> bool:
        return self.is_missing or self.code == NOT_SUPPORTED

    @property
    def is_for_good(self) -> bool:
        """Asking again would change nothing: the GPU is there, and does not tell this."""
        return self.code in _FINAL or self.code == UNREADABLE

    @property
    def is_of_all(self) -> bool:
        """It is the driver that is away, not one GPU."""
        return self.code in (UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH)


@dataclass(slots=True, eq=False)
class Handle:
    """A GPU or a MIG slice, with what it has refused for good."""

    pointer: Any
    uuid: str | None = None
    refused: dict[tuple[Any, ...], Refusal] = field(default_factory=dict)  # by question


UUID = ("nvmlDeviceGetUUID",)  # the question, as `Handle.refused` has it


class Nvml:
    """NVML, initialised for the process that made this object."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.is_stale = False
        self._handles: dict[str, Handle] = {}
        self._refusals: dict[int, Refusal] = {}
        self.kept: dict[Any, Any] = {}  # what others have found out that holds for this session
        self._pynvml = _import_binding()
        try:
            self._pynvml.nvmlInit()
        except self._pynvml.NVMLError as error:
            raise _why_no_nvml(error.value, str(error)) from error

    def call_gpu(self, handle: Handle, symbol: str, *arguments: Any) -> Refusal | None:
        """Call the C function itself, where the binding cannot be relied on."""
        if handle.refused and (symbol,) in handle.refused:
            return handle.refused[symbol,]
        function = getattr(self._pynvml.nvmlLib, symbol, None)
        if function is None:
            return self.refuse(FUNCTION_NOT_FOUND)
        code = int(function(handle.pointer, *arguments))
        refusal = self.refuse(code) if code else None
        if refusal and code in _FINAL:
            handle.refused[symbol,] = refusal
        return refusal

    def constant(self, name: str) -> Any:
        return getattr(self._pynvml, name)

    def ask(self, function: str, *arguments: Any) -> Any:
        """The answer, or a Refusal."""
        call = getattr(self._pynvml, function, None)
        if call is None:  # a binding that is older than the function
            return self.refuse(FUNCTION_NOT_FOUND)
        try:
            return call(*arguments)
        except self._pynvml.NVMLError as error:
            return self.refuse(error.value)
        except UnicodeDecodeError:  # a name that is not text
            return Refusal(UNREADABLE, "unreadable: the driver's text is not UTF-8")

    def gpu(self, index: int) -> Handle | Refusal:
        """The GPU of that index; with what it has refused before, if it was met before."""
        return self.known(self.ask("nvmlDeviceGetHandleByIndex", index))

    def known(self, pointer: Any) -> Handle | Refusal:
        """The same for a pointer, or for the Refusal that came instead of one."""
        if isinstance(pointer, Refusal):
            return pointer
        uuid = self.ask(*UUID, pointer)
        if isinstance(uuid, Refusal):
            return uuid if uuid.code == GPU_IS_LOST else Handle(pointer, refused={UUID: uuid})
        handle = self._handles.setdefault(uuid, Handle(pointer, uuid))
        handle.pointer = pointer
        return handle

    def ask_gpu(self, handle: Handle, function: str, *arguments: Any) -> Any:
        """Ask about one GPU. What it refused for good is not asked again."""
        question = (function, *arguments)
        if question in handle.refused:
            return handle.refused[question]
        answer = self.ask(function, handle.pointer, *arguments)
        if isinstance(answer, Refusal) and answer.code in _FINAL:
            handle.refused[question] = answer
        return answer

    def refuse(self, code: int) -> Refusal:
        """NVML's return code as a Refusal."""
        # Somebody else in this process has shut NVML down, or the process was forked.
        self.is_stale |= code == UNINITIALIZED
        if code not in self._refusals:
            words = _IN_OUR_WORDS.get(code) or f"NVML says: {self._pynvml.NVMLError(code)}"
            self._refusals[code] = Refusal(code, words)
        return self._refusals[code]


_nvml: Nvml | None = None


def with_nvml(work: Callable[[Nvml], T]) -> T:
    """Do `work` with this process's NVML; once more from the start if it was shut down meanwhile.

    Raises Unreadable where there is no NVML to talk to.
    """
    nvml = _opened()
    try:
        result = work(nvml)
    except Unreadable:
        if not nvml.is_stale:
            raise
    else:
        if not nvml.is_stale:
            return result
    forget()
    return work(_opened())


def forget() -> None:
    """Drop the session; the next question opens NVML anew."""
    global _nvml
    _nvml = None


def close() -> None:
    """Shut the session down, as a driver that was reloaded needs it; the next question opens one.

    NVML counts its users: those of the rest of the process are left alone.
    """
    if _nvml is not None and _nvml.pid == os.getpid():
        _nvml.ask("nvmlShutdown")
    forget()


def _opened() -> Nvml:
    global _nvml
    if _nvml is None or _nvml.pid != os.getpid():
        _nvml = Nvml()
    return _nvml


def _import_binding() -> Any:
    """pynvml of the distribution `nvidia-ml-py`; other distributions own the same name."""
    try:
        import pynvml
    except ImportError as error:
        raise Unreadable(
            "the NVML binding is not installed",
            because=str(error),
            attempt="pip install nvidia-ml-py",
        ) from error
    # nvidia-ml-py is one module, and has had the v2 memory info since 2021. The old
    # distribution `pynvml` is a package of that name, `nvidia-ml-py3` stopped in 2018.
    if hasattr(pynvml, "__path__") or not hasattr(pynvml, "nvmlMemory_v2"):
        raise _wrong_distribution(Path(str(pynvml.__file__)))
    return pynvml


def _wrong_distribution(path: Path) -> Unreadable:
    # Slow (it reads every installed package), so only once something is wrong.
    from importlib.metadata import packages_distributions

    wrong = sorted(set(packages_distributions().get("pynvml", [])) - {"nvidia-ml-py"})
    owner = " and ".join(wrong) or "no package"
    return Unreadable(
        f"the installed pynvml is not NVIDIA's: it belongs to {owner}",
        because=f"{path} was imported instead of the module of nvidia-ml-py",
        attempt=f"pip uninstall -y {' '.join(wrong) or 'pynvml nvidia-ml-py3'}"
        " && pip install --force-reinstall nvidia-ml-py",
    )


def _why_no_nvml(code: int, nvmls_words: str) -> Unreadable:
    """What is wrong with the driver, and the cure."""
    if code == LIBRARY_NOT_FOUND and _is_tegra():
        return Unreadable(
            "this is a Jetson whose driver has no NVML",
            because="libnvidia-ml.so.1 was not found",
            attempt="tegrastats",
        )
    what, because, attempt = _NO_NVML.get(
        code,
        (
            "NVML does not start",
            f"it says: {nvmls_words}",
            "nvidia-smi, which asks the same library",
        ),
    )
    return Unreadable(what, because=because, attempt=attempt)


_NO_NVML = {
    LIBRARY_NOT_FOUND: (
        "no NVIDIA driver on this machine",
        "libnvidia-ml.so.1 was not found",
        "installing the driver; in a container, starting it with --gpus all",
    ),
    DRIVER_NOT_LOADED: (
        "the NVIDIA driver is not loaded",
        "its library is here, but the kernel module does not answer",
        "sudo modprobe nvidia, then dmesg | grep -i nvidia",
    ),
    LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver's library and its kernel module are of different versions",
        "the driver was upgraded since this machine was started",
        "rebooting, or unloading and loading the nvidia kernel modules",
    ),
    NO_PERMISSION: (
        "this user may not talk to the NVIDIA driver",
        "opening it was refused",
        "ls -l /dev/nvidia*, and ask for the group that owns them",
    ),
}


def _is_tegra() -> bool:
    return Path("/etc/nv_tegra_release").exists()
