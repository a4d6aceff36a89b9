"""torch.save and torch.load of a script: sizes only.

A tensor without memory is written as its shape, and read back so. Checkpoints of other runs are
read as far as they must be: mapped, not loaded.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from oomph.tracing.pretend import is_pretended, suspended
from oomph.tracing.script.places import (
    META,
    ONE_AT_A_TIME,
    Name,
    Places,
    Wanted,
    is_suspended,
    place_named,
    wanted,
)

_empty_strided = torch._C._VariableFunctions.empty_strided


def install(places: Places, flush: Callable[[Any], None], write: Callable[[Any], None]) -> None:
    """Patch them."""
    true_save, true_load = torch.save, torch.load

    def save(obj: Any, *args: Any, **kwargs: Any) -> None:
        with ONE_AT_A_TIME, suspended():
            true_save(obj, *args, **kwargs)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = _place(map_location)
        was_on_gpu: set[int] = set()

        def stay(storage: Any, location: str) -> Any:
            if location.startswith("cuda"):
                was_on_gpu.add(storage._cdata)
            return storage

        def placed(tensor: Any) -> Any:
            is_back = place is None and _address(tensor) in was_on_gpu
            return tensor.to("cuda") if place == "cuda" or is_back else tensor

        Wanted.loading = place or "cuda"
        try:
            loaded = true_load(f, stay, *args, **kwargs)
        finally:
            Wanted.loading = None
        return tree_map_only(torch.Tensor, placed, loaded)

    module: Any = torch
    module.save, module.load = save, load
    torch.serialization.save, torch.serialization.load = save, load
    _patch_pointers(flush, write)
    _patch_pickle(places, flush)
    _patch_safetensors()


def _patch_pointers(flush: Callable[[Any], None], write: Callable[[Any], None]) -> None:
    """Storages without memory have no address, but are told apart by one: tied weights are."""
    storage: Any = torch.UntypedStorage
    methods: Any = torch.Tensor
    of_storage, of_tensor = storage.data_ptr, torch._C.TensorBase.data_ptr

    def address(one: Any) -> int:
        if one.device.type == "meta":
            return int(one._cdata)
        write(one)
        return int(of_storage(one))

    def tensor_address(one: Any) -> int:
        if not is_pretended(one) or one.layout is not torch.strided:
            flush(one)
            return int(of_tensor(one))
        start: int = address(one.untyped_storage())
        return start + int(one.storage_offset()) * int(one.element_size())

    storage.data_ptr, methods.data_ptr = address, tensor_address
    for owner, name, first in (
        (storage, "__getitem__", write),
        (storage, "_write_file", write),
        (methods, "__dlpack__", flush),
    ):
        setattr(owner, name, _after(first, getattr(owner, name)))


def _after(first: Callable[[Any], None], read: Callable[..., Any]) -> Callable[..., Any]:
    """A way to read memory that no op shows."""

    def reading(one: Any, *args: Any, **kwargs: Any) -> Any:
        first(one)
        return read(one, *args, **kwargs)

    return reading


def _patch_pickle(places: Places, flush: Callable[[Any], None]) -> None:
    """`pickle` asks a tensor itself, and C++ would read what a storage without memory holds."""
    kind: Any = torch.Tensor
    original = kind.__reduce_ex__

    def reduced(tensor: Any, protocol: Any) -> Any:
        if type(tensor) is not torch.Tensor or is_suspended() or not is_pretended(tensor):
            flush(tensor)
            return original(tensor, protocol)
        sizes = tuple(tensor.size()), tuple(tensor.stride())
        return _made_again, (*sizes, tensor.dtype, tensor.requires_grad, places.of(tensor))

    kind.__reduce_ex__ = reduced


def _made_again(size: Any, stride: Any, dtype: Any, requires_grad: bool, place: Name) -> Any:
    with wanted(place):
        tensor = _empty_strided(size, stride, dtype=dtype, device=META)
    return tensor.requires_grad_(requires_grad)


def _patch_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        return
    import safetensors.torch

    module: Any = safetensors.torch
    original = module.save_file

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if any(map(is_pretended, tensors.values())):
            _write_sizes(tensors, filename, metadata)
        else:
            original(tensors, filename, metadata)

    module.save_file = save_file


_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip - the names of the format's specification


def _write_sizes(tensors: Any, filename: Any, metadata: Any) -> None:
    """A file as long as it would be, and empty: the file system keeps no block of its zeros."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind = _SAFETENSORS[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(filename).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def _place(map_location: Any) -> Name | None:
    """Where what is loaded goes; None: back to where it was."""
    if map_location is None:
        return None
    if isinstance(map_location, str | torch.device):
        return place_named(map_location)
    if isinstance(map_location, dict):
        return place_named(next(iter(map_location.values()), "cpu"))
    return "cpu"
