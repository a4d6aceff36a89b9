"""An error out of a rehearsal -> the pretended op that raised it, and whose fault that is.

A shape that does not fit is the user's own error, and a GPU would say the same. An op that knows no
tensors without memory is a limit of oomph's. The op itself tells them apart: it is called once
more, with real tensors of the same shapes.
"""

from __future__ import annotations

import platform
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomph.errors import OomphError

STAND_IN = "plain torch ops in place of what is called there, or a Workload without it"
_OURS = str(Path(__file__).parents[1])
_MOST_ELEMENTS = 1 << 24  # that an op is tried with for real: 64 MiB of fp32
_MOST_TOLD = 4  # tensors of an op
# What torch says where somebody wants the memory of a tensor that has none.
_NO_MEMORY = (
    "data is not allocated yet",
    "Cannot access data pointer",
    "Cannot copy out of meta tensor",
    "with Meta tensors",
    "but got meta",
)


@dataclass(frozen=True, slots=True)
class PretendedOp:
    """A call of an op that raised something."""

    function: Any
    args: Any
    kwargs: Any
    error: BaseException

    def __str__(self) -> str:
        given = list(self._tensors())
        told = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in given[:_MOST_TOLD]]
        more = ["..."] if len(given) > _MOST_TOLD else []
        return f"{self.function}({', '.join([*told, *more])})"

    def _tensors(self) -> Iterator[Any]:
        import torch
        from torch.utils._pytree import tree_leaves

        leaves = tree_leaves((self.args, self.kwargs))
        return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def is_limit(self) -> bool | None:
        """Whether oomph fails at it and a GPU would not; None where that cannot be found out."""
        if isinstance(self.error, NotImplementedError):
            return True
        if _is_deliberate(self.error):  # what torch itself says of tensors that do not go together
            return False
        fails = self._fails_for_real()
        return None if fails is None else not fails

    def _fails_for_real(self) -> bool | None:
        from torch.utils._python_dispatch import _disable_current_modes

        if sum(_extent(tensor) for tensor in self._tensors()) > _MOST_ELEMENTS:
            return None
        try:
            with _disable_current_modes():
                args, kwargs = self._real()
                self.function(*args, **kwargs)
        except NotImplementedError:  # no kernel for the CPU
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, it fails
            return None if "not implemented for" in str(error) else True
        return False

    def _real(self) -> Any:
        import torch
        from torch.utils._pytree import tree_map

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return "cpu"
            return _real_like(leaf) if isinstance(leaf, torch.Tensor) else leaf

        return tree_map(real, (self.args, self.kwargs))


def wants_memory(error: BaseException) -> bool:
    """Whether a kernel that oomph does not see wants the memory of a pretended tensor."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def pretended_op(error: BaseException) -> PretendedOp | None:
    """The innermost op of the pretended GPU's that an error went through; None if there is none."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, given = frame.f_code, frame.f_locals
        if code.co_name == "__torch_dispatch__" and code.co_filename.startswith(_OURS):
            found = PretendedOp(given["function"], given["args"], given["kwargs"] or {}, error)
    return found


def is_of_ours(error: BaseException) -> bool:
    """Whether it came out of oomph's own code, and not because that refuses something."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OURS) and not _is_deliberate(error)


def _is_deliberate(error: BaseException) -> bool:
    """Whether a line of oomph's raised it in so many words."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    is_ours = last is not None and last.filename.startswith(_OURS)
    return is_ours and last is not None and (last.line or "").startswith("raise")


def refused(error: BaseException, where: str) -> OomphError | None:
    """The limit of oomph's that an error is, at a line of the user's; None if it is none."""
    op = pretended_op(error)
    if not (wants_memory(error) if op is None else op.is_limit()):
        return None
    told = " ".join(str(error).split())[:500]
    known = "" if _is_deliberate(error) else f"; and please report {report(op)}"
    return OomphError(
        f"oomph cannot rehearse {'a kernel' if op is None else op.function}, called at {where}",
        because=f"{type(error).__name__}: {told}; this is a limit of oomph, not an error of yours",
        attempt=f"{STAND_IN}{known}",
    )


def is_in_doubt(error: BaseException) -> bool:
    """Whether it may be oomph's own, and nothing tells."""
    op = pretended_op(error)
    return is_of_ours(error) if op is None else op.is_limit() is None


def report(op: PretendedOp | None) -> str:
    """What to tell oomph's authors of its limit."""
    import torch

    from oomph import __version__

    versions = f"oomph {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{op}, {versions}" if op is not None else versions


# ---- real tensors in the place of pretended ones -------------------------------------------------


def _extent(tensor: Any) -> int:
    """Elements from the first of a tensor to its last."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum(int((size - 1) * stride) for size, stride in pairs)


def _real_like(tensor: Any) -> Any:
    """On the CPU, of the same shape and strides. Whole numbers are 0: a row of anything."""
    import torch

    aten = torch.ops.aten
    value = 0.5 if tensor.is_floating_point() or tensor.is_complex() else 0
    whole = aten.full.default([_extent(tensor)], value, dtype=tensor.dtype, device="cpu")
    return aten.as_strided.default(whole, list(tensor.shape), list(tensor.stride()))
