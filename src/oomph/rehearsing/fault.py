"""An error from a rehearsal -> the user's own line, and whether the user or oomph is at fault.

A shape mismatch is the user's error: a GPU would raise it too. An op that cannot run on tensors
without memory is a limit of oomph. To tell them apart, the op is called again with real tensors of
the same shapes.
"""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from oomph.errors import OomphError, UserCodeError

if TYPE_CHECKING:
    import torch

STAND_IN = "plain torch ops in place of what is called there, or a Workload without it"
OURS = f"{Path(__file__).parents[1]}{os.sep}"
_WRAPPERS = f"{OURS}pretending{os.sep}patches.py"
_MOST_ELEMENTS = 1 << 24  # judgement: largest op to try for real, 64 MiB of fp32
_MOST_SHOWN = 4  # judgement: tensors listed per op
# Messages of torch when an op reads the memory of a tensor without memory.
_NO_MEMORY = (
    "data is not allocated yet",
    "Cannot access data pointer",
    "Cannot copy out of meta tensor",
    "with Meta tensors",
    "but got meta",
)


@dataclass(frozen=True, slots=True)
class PretendedOp:
    """A call of an op that raised an error."""

    function: Any
    args: Any
    kwargs: Any
    error: BaseException

    def __str__(self) -> str:
        given = list(self._tensors())
        shown = [
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in given[:_MOST_SHOWN]
        ]
        more = ["..."] if len(given) > _MOST_SHOWN else []
        return f"{self.function}({', '.join([*shown, *more])})"

    def _tensors(self) -> Iterator[torch.Tensor]:
        import torch
        from torch.utils._pytree import tree_leaves

        leaves = tree_leaves((self.args, self.kwargs))
        return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def is_limit(self) -> bool | None:
        """Return whether only oomph fails here and a GPU would not; None if unknown."""
        if isinstance(self.error, NotImplementedError):
            return True
        if _is_deliberate(self.error):  # our copy of torch's message about a mismatch
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
        except NotImplementedError:  # no CPU kernel
            return None
        except Exception as error:  # noqa: BLE001 - any error counts as a failure
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
    """Return whether a kernel that oomph does not see needs a pretended tensor's memory."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def pretended_op(error: BaseException) -> PretendedOp | None:
    """Return the innermost pretended op that the error went through; None if there is none."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, given = frame.f_code, frame.f_locals
        if code.co_name == "__torch_dispatch__" and code.co_filename.startswith(OURS):
            found = PretendedOp(given["function"], given["args"], given["kwargs"] or {}, error)
    return found


def _is_of_ours(error: BaseException) -> bool:
    """Return whether oomph's own code failed, rather than refused something.

    An error of the system, as for a file that is not there, passes through oomph's wrappers.
    """
    return is_in_ours(error) and not _is_deliberate(error) and not isinstance(error, OSError)


def is_in_ours(error: BaseException) -> bool:
    """Return whether the error came from oomph's own code.

    A wrapped function of torch that was called with wrong arguments fails in its wrapper, before
    anything of ours has run: that is the caller's error.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_of_call = bool(frames) and frames[-1].filename == _WRAPPERS
    return bool(frames) and frames[-1].filename.startswith(OURS) and not is_of_call


def _is_deliberate(error: BaseException) -> bool:
    """Return whether a `raise` in oomph's own code raised it."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    return any(f.filename.startswith(OURS) and (f.line or "").startswith("raise") for f in frames)


def explained(error: BaseException, whose: str, attempt: str) -> OomphError:
    """Return an error with the user's own line in `whose`, or one that names oomph's limit."""
    place = in_words(line_of(error))
    because = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    if "torch" in sys.modules:  # else nothing was pretended yet
        op = pretended_op(error)
        is_limit = wants_memory(error) if op is None else op.is_limit()
        if is_limit:
            known = "" if _is_deliberate(error) else f"; and please report {report(op)}"
            return OomphError(
                f"oomph cannot rehearse {op.function if op else 'a kernel'}, called at {place}",
                because=f"{because}; this is a limit of oomph, not an error of yours",
                attempt=f"{STAND_IN}{known}",
            )
        if is_limit is None or (op is None and _is_of_ours(error)):
            attempt += f"; if it works there, the error is oomph's own: please report {report(op)}"
    return UserCodeError(f"the {whose} failed at {place}", because=because, attempt=attempt)


def report(op: PretendedOp | None) -> str:
    """Return what a report to oomph's authors should include."""
    import torch

    from oomph import __version__

    versions = f"oomph {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{op}, {versions}" if op is not None else versions


# ---- real tensors in place of pretended ones -----------------------------------------------------


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to its last in memory."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum(int((size - 1) * stride) for size, stride in pairs)


def _real_like(tensor: torch.Tensor) -> Any:
    """Return a CPU tensor of the same shape and strides. Integers are 0, a valid index."""
    import torch

    aten = torch.ops.aten
    value = 0.5 if tensor.is_floating_point() or tensor.is_complex() else 0
    whole = aten.full.default([_extent(tensor)], value, dtype=tensor.dtype, device="cpu")
    return aten.as_strided.default(whole, list(tensor.shape), list(tensor.stride()))


# ---- the user's own line -------------------------------------------------------------------------

_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {OURS}
)
_own: set[str] = set()  # the script's own places, even inside a library directory


def count_as_users(place: str) -> None:
    """Count a file or a directory as the user's wherever it lies: they asked for it by name."""
    _own.add(place)


def is_users(file: str) -> bool:
    """Return whether a file belongs neither to a library nor to oomph."""
    return any(map(file.startswith, _own)) or not (
        file.startswith((*_LIBRARIES, "<")) or "site-packages" in file or "dist-packages" in file
    )


# Where Python and its packages put files below a prefix. Other directories there may be the user's:
# /usr/src/app with the system's Python, or a project that contains its virtual environment.
_OF_PYTHON = ("bin/", "etc/", "include/", "lib/", "lib64/", "libexec/", "share/", "pyvenv.cfg/")


def is_installed(path: str) -> bool:
    """Return whether a path came with Python or a package, so that a version identifies it."""
    prefixes = {sys.prefix, sys.base_prefix}
    places = tuple(f"{prefix}/{name}" for prefix in prefixes for name in _OF_PYTHON)
    return not is_users(path) or f"{path}/".startswith(places)


def users_line(frame: FrameType | None = None) -> tuple[str, int] | None:
    """Return the user's innermost line, from a frame outwards; None if there is none."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def line_of(error: BaseException) -> tuple[str, int] | None:
    """Return the user's innermost line that the error went through; None if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return (own[-1].filename, own[-1].lineno or 0) if own else None


def in_words(place: tuple[str, int] | None) -> str:
    return f"{place[0]}:{place[1]}" if place else "a line that is not your own"
