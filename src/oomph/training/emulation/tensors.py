"""What a tensor says of its device, and how it moves between the host and the card."""

from __future__ import annotations

from typing import Any

import torch

from oomph.training.emulation.patches import Patches
from oomph.training.emulation.places import GPU, Places, place_of, true_device


def patch_tensors(patches: Patches, places: Places) -> None:
    _patch_device(patches, places)
    _patch_moves(patches, places)
    _patch_pinning(patches, places)
    _patch_numpy(patches, places)
    _patch_storages(patches, places)


def _patch_device(patches: Patches, places: Places) -> None:
    on_card = places.on_card

    def device(tensor: Any) -> Any:
        true = true_device(tensor)
        return GPU if true.type == "cpu" and on_card(tensor) else true

    patches.set(torch.Tensor, "device", property(device))
    patches.set(torch.Tensor, "is_cuda", property(on_card))
    patches.set(torch.Tensor, "is_cpu", property(lambda it: device(it).type == "cpu"))
    patches.set(torch.Tensor, "get_device", lambda tensor: 0 if on_card(tensor) else -1)


def _patch_moves(patches: Patches, places: Places) -> None:
    original = torch.Tensor.to

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        place, args, kwargs = _without_device(args, kwargs)
        if place is None:
            return original(tensor, *args, **kwargs)
        is_there = places.on_card(tensor) == (place == "card")
        if is_there:
            return original(tensor, *args, **kwargs) if args or kwargs else tensor
        with places.asking(place):
            return original(tensor, *_with_copy(tensor, args, kwargs), **kwargs)

    def cuda(tensor: Any, device: Any = "cuda", non_blocking: bool = False, **how: Any) -> Any:
        return to(tensor, "cuda" if device is None else device, non_blocking=non_blocking, **how)

    def cpu(tensor: Any, **how: Any) -> Any:
        return to(tensor, "cpu", **how)

    patches.set(torch.Tensor, "to", to)
    patches.set(torch.Tensor, "cuda", cuda)
    patches.set(torch.Tensor, "cpu", cpu)
    patches.set(torch.Tensor, "record_stream", lambda *_, **__: None)


def _patch_pinning(patches: Patches, places: Places) -> None:
    """Pinned memory is plain memory of the host: where nothing is copied, nothing is slower."""

    def pin_memory(tensor: Any, *_: Any, **__: Any) -> Any:
        if places.on_card(tensor) or tensor.layout is not torch.strided:
            kind = tensor.type()
            raise RuntimeError(f"cannot pin '{kind}' only dense CPU tensors can be pinned")
        if places.is_pinned(tensor):
            return tensor
        pinned = tensor.detach().clone()
        places.pin(pinned)
        return pinned

    patches.set(torch.Tensor, "pin_memory", pin_memory)
    patches.set(torch.Tensor, "is_pinned", lambda tensor, *_, **__: places.is_pinned(tensor))


def _without_device(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The place that Tensor.to is asked for, and its other arguments."""
    if args and isinstance(args[0], torch.Tensor):
        other = args[0]
        return place_of(other.device), (other.dtype, *args[1:]), kwargs
    if "other" in kwargs:
        other = kwargs["other"]
        kwargs = {name: value for name, value in kwargs.items() if name != "other"}
        return place_of(other.device), (other.dtype, *args), kwargs
    if args and (args[0] is None or isinstance(args[0], str | int | torch.device)):
        place = place_of(args[0])
        if place is None and args[0] is not None:  # `meta`: torch's own matter
            return None, args, kwargs
        # to(device, dtype, ...): without the device, a dtype that is not given has no place.
        rest = args[1:]
        if rest and not isinstance(rest[0], torch.dtype):
            names = ("dtype", "non_blocking", "copy")
            kwargs = {**kwargs, **dict(zip(names, rest, strict=False))}
            rest = ()
        return place, rest, _given(kwargs)
    place = place_of(kwargs.get("device"))
    if place is not None or kwargs.get("device", 0) is None:
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    return place, args, _given(kwargs)


def _given(kwargs: Any) -> Any:
    return {
        name: value for name, value in kwargs.items() if not (name == "dtype" and value is None)
    }


def _with_copy(tensor: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of a move, which always copies."""
    kwargs["copy"] = True
    args = args[:2]  # dtype, non_blocking; not `copy`
    return args if args or "dtype" in kwargs else (tensor.dtype,)


def _patch_numpy(patches: Patches, places: Places) -> None:
    """Refused as for a tensor on a real GPU."""
    original, original_array = torch.Tensor.numpy, torch.Tensor.__array__

    def refuse(tensor: Any) -> None:
        if places.on_card(tensor):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )

    def numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(tensor)
        return original(tensor, *args, **kwargs)

    def array(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(tensor)
        return original_array(tensor, *args, **kwargs)

    patches.set(torch.Tensor, "numpy", numpy)
    patches.set(torch.Tensor, "__array__", array)


def _patch_storages(patches: Patches, places: Places) -> None:
    """torch.load(..., map_location="cuda") moves storages, which no op shows."""
    original = torch.UntypedStorage.to

    def to(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if place_of(device) != "card":
            return original(storage, device=device, non_blocking=non_blocking)
        moved = storage.clone()
        places.card.place(moved)
        return moved

    patches.set(torch.UntypedStorage, "to", to)
    patches.set(torch.UntypedStorage, "cuda", lambda storage, *_, **__: to(storage, device="cuda"))
