"""A script's files: torch.save and torch.load by size only, and which files affect the answer.

A tensor without memory is saved as its shape and loaded as such. Checkpoints of other runs are
mapped, not loaded, and read only as far as needed. An answer is valid while the files that the
script looked at are unchanged.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import sys
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from oomph.pretending.patches import put, wrap
from oomph.pretending.tensors import META, empty_strided, is_pretended, suspended
from oomph.records.script import Touched
from oomph.rehearsing.fault import is_installed
from oomph.rehearsing.script.deferred import Deferred
from oomph.rehearsing.script.places import (
    ONE_AT_A_TIME,
    Name,
    Places,
    Wanted,
    is_suspended,
    place_named,
    wanted,
)


def install(places: Places, deferred: Deferred) -> None:
    """Patch torch.save and torch.load, storage pointers, pickle and safetensors."""

    @wrap("save", torch, torch.serialization)
    def save(original: Any, *args: Any, **kwargs: Any) -> None:
        with ONE_AT_A_TIME, suspended():
            original(*args, **kwargs)

    @wrap("load", torch, torch.serialization)
    def load(original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = _place(map_location)
        was_on_gpu: set[int] = set()

        def stay(storage: Any, location: str) -> Any:
            if location.startswith("cuda"):
                was_on_gpu.add(storage._cdata)
            return storage

        def placed(tensor: torch.Tensor) -> Any:
            is_on_gpu = place == "cuda"
            if place is None and tensor.layout is torch.strided:  # back to where it was
                is_on_gpu = tensor.untyped_storage()._cdata in was_on_gpu
            return tensor.to("cuda") if is_on_gpu else tensor

        Wanted.loading = place or "cuda"
        try:
            loaded = original(f, stay, *args, **kwargs)
        finally:
            Wanted.loading = None
        return tree_map_only(torch.Tensor, placed, loaded)

    _patch_pointers(deferred)
    _patch_pickle(places, deferred)
    _patch_safetensors()


def _patch_pointers(deferred: Deferred) -> None:
    """Give storages without memory an address: tied weights are recognised by it."""

    @wrap("data_ptr", torch.UntypedStorage)
    def address(original: Any, storage: Any) -> int:
        if storage.device.type == "meta":
            return int(storage._cdata)
        deferred.write(storage)
        return int(original(storage))

    of_tensor = torch._C.TensorBase.data_ptr

    def tensor_address(tensor: Any) -> int:
        if not is_pretended(tensor) or tensor.layout is not torch.strided:
            deferred.flush(tensor)
            return int(of_tensor(tensor))
        start: int = tensor.untyped_storage().data_ptr()
        return start + int(tensor.storage_offset()) * int(tensor.element_size())

    put(torch.Tensor, data_ptr=tensor_address)

    # No op shows that these read memory.
    def written_first(original: Any, storage: Any, *args: Any, **kwargs: Any) -> Any:
        deferred.write(storage)
        return original(storage, *args, **kwargs)

    for name in ("__getitem__", "_write_file"):
        wrap(name, torch.UntypedStorage)(written_first)

    @wrap("__dlpack__", torch.Tensor)
    def exported(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        deferred.flush(tensor)
        return original(tensor, *args, **kwargs)


def _patch_pickle(places: Places, deferred: Deferred) -> None:
    """Patch pickling, where C++ would read the memory of a storage that has none."""

    @wrap("__reduce_ex__", torch.Tensor)
    def reduced(original: Any, tensor: torch.Tensor, protocol: Any) -> Any:
        if type(tensor) is not torch.Tensor or is_suspended() or not is_pretended(tensor):
            deferred.flush(tensor)
            return original(tensor, protocol)
        sizes = tuple(tensor.size()), tuple(tensor.stride())
        return _made_again, (*sizes, tensor.dtype, tensor.requires_grad, places.of(tensor))


def _made_again(
    size: Any, stride: Any, dtype: torch.dtype, requires_grad: bool, place: Name
) -> Any:
    with wanted(place):
        tensor = empty_strided(size, stride, dtype=dtype, device=META)
    return tensor.requires_grad_(requires_grad)


def _patch_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        return
    import safetensors.torch

    @wrap("save_file", safetensors.torch)
    def save_file(
        original: Any, tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None
    ) -> None:
        if any(map(is_pretended, tensors.values())):
            _write_sizes(tensors, filename, metadata)
        else:
            original(tensors, filename, metadata)


def _write_sizes(tensors: dict[str, torch.Tensor], filename: Any, metadata: Any) -> None:
    """Write a file of the true length without content: a sparse file takes no blocks for zeros."""
    from safetensors.torch import _TYPES

    names = {dtype: name for name, dtype in _TYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind = names[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(filename).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _place(map_location: Any) -> Name | None:
    """Return where loaded tensors go; None: back to where they were saved from."""
    if map_location is None:
        return None
    if isinstance(map_location, str | torch.device):
        return place_named(map_location)
    if isinstance(map_location, dict):
        return place_named(next(iter(map_location.values()), "cpu"))
    return "cpu"


# ---- what a script asks about files -> Touched ---------------------------------------------------
# Python's audit events report everything that Python opens, lists or starts. `os.stat` and similar
# calls raise no event, so they are patched. A file that compiled code opens is seen if it is open
# or mapped at the end, or if Python looked at it before, as libraries do to check that it exists.

_MOST_PATHS = 20_000  # judgement: checking more single files takes longer than a rehearsal
# https://docs.python.org/3/library/audit_events.html. A started program opens files unseen; a
# forked process sees only its own events.
_STARTING = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"}
    | {"os.forkpty", "pty.spawn"}
)
# These report on the machine and open none of the user's files; accelerate calls nvidia-smi.
_HARMLESS = frozenset({"nvidia-smi", "uname", "lscpu", "nproc", "hostname", "ldconfig"})
_LISTING = frozenset({"os.listdir", "os.scandir"})
_CHANGING = ("/proc/", "/sys/", "/dev/")  # volatile, and not the user's
_OF_THE_SYSTEM = (  # hier(7)
    *(f"{root}/{name}/" for root in ("", "/usr") for name in ("lib", "lib32", "lib64")),
    *("/usr/libexec/", "/usr/share/", "/etc/"),
)


class Touching:
    """Notes what is opened, listed and looked at, permanently from `listen` on."""

    def __init__(self) -> None:
        self._looked_at: set[str] = set()
        self._listed: set[str] = set()
        self._imported_from: set[str] = set()
        self._unseen: str | None = None
        self._path: list[str] = []

    def listen(self) -> None:
        self._path = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 - "" means here
        sys.addaudithook(self._hear)
        for name in ("stat", "lstat", "access"):
            original = getattr(os, name)
            wrap(name, os)(self._noted)
            for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
                if original in able:  # shutil looks it up there
                    able.add(getattr(os, name))

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            is_emptied = isinstance(flags, int) and flags & os.O_TRUNC
            if not is_emptied:
                _note(path, self._looked_at)
        elif event in _LISTING:
            # Python looks for modules and their versions in every directory of sys.path.
            is_import = "importlib" in sys._getframe(1).f_code.co_filename
            _note(args[0] or ".", self._imported_from if is_import else self._listed)
        elif event in _STARTING and not _is_harmless(event, args):
            self._unseen = self._unseen or f"it started a process ({event})"

    def _noted(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        _note(path, self._looked_at)
        return original(path, *args, **kwargs)

    def found(self, files: tuple[str, ...], asked_gpu: set[str]) -> Touched:
        """Return everything touched so far; `files` are those of the script's loaded modules."""
        looked_at = {*files, *_held_open(), *self._looked_at}
        imported_from = self._imported_from | set(self._path)
        found = {_source_of(path) for path in looked_at if _decides(path)}
        unseen = self._unseen
        if len(found) > _MOST_PATHS:
            found, unseen = set(), f"it looked at {len(found)} files"
        return Touched(
            looked_at=tuple(sorted(found)),
            listed=tuple(sorted(filter(_decides, self._listed))),
            imported_from=tuple(sorted(filter(_decides, imported_from))),
            asked_gpu=tuple(sorted(asked_gpu)),
            unseen=unseen,
        )


def _is_harmless(event: str, args: tuple[Any, ...]) -> bool:
    """Return whether a started program reads nothing of the user's; a shell may do anything."""
    program = args[0] if event == "subprocess.Popen" else None
    return isinstance(program, str) and os.path.basename(program) in _HARMLESS  # noqa: PTH119


def _note(path: Any, where: set[str]) -> None:
    """Note a path; skip a number, which is a file that is already open."""
    if isinstance(path, str | bytes | os.PathLike):
        where.add(os.path.join(os.getcwd(), os.fsdecode(path)))  # noqa: PTH109, PTH118 - thousands


def _decides(path: str) -> bool:
    """Return whether the path is the user's."""
    return not is_installed(path) and not path.startswith((*_CHANGING, *_OF_THE_SYSTEM))


def _source_of(path: str) -> str:
    """Return a compiled module's source file: Python may recompile it at any time."""
    if path.endswith(".pyc") and Path(path).parent.name == "__pycache__":
        try:
            return source_from_cache(path)
        except ValueError:  # not a name that Python gives
            return path
    return path


def _held_open() -> set[str]:
    """Return the files that this process has open or mapped, by any code."""
    mapped = {
        words[5]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if len(words := line.split(maxsplit=5)) == 6 and words[5].startswith("/")
    }
    own = Path("/proc/self/fd")
    names = [name for name in os.listdir(own) if _is_readable(int(name))]  # noqa: PTH208 - as names
    opened = {os.path.realpath(own / name) for name in names}
    return {path for path in mapped | opened if path.startswith("/") and _decides(path)}


def _is_readable(descriptor: int) -> bool:
    """Return whether a file was opened for reading; a shell's output redirect was not."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    except OSError:  # the descriptor of this listing, closed by now
        return False
