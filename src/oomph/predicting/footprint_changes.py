"""A footprint -> that of another way to train, where no further rehearsal is needed.

Without accumulation: what the second micro-step does is left out. With another optimizer: its step
sees parameters and gradients, and nothing of how they were computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oomph.predicting.footprint import (
    CATEGORIES,
    OF_ALLOCATIONS,
    OF_EVENTS,
    PHASES,
    Footprint,
    Kernel,
)
from oomph.predicting.micro_steps import second_micro_step

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

_STEP = PHASES.index("step")
_WORKSPACE = CATEGORIES.index("workspace")
_GRADIENTS = CATEGORIES.index("gradients")
_SECOND = 2


class NotSpliceable(Exception):
    """The optimizer's step cannot be told from the rest, or sees other parameters."""


# ---- accumulation --------------------------------------------------------------------------------


def without_accumulation(footprint: Footprint) -> Footprint:
    """The same with one micro-step in a step.

    What the first leaves behind, the loss and the batch, then lives until it would have been
    replaced by the next step's: it takes the part of what the second leaves behind.
    """
    import numpy as np

    event = footprint.event.copy()
    in_second = footprint.micro_step == _SECOND
    for step in (1, 2):
        of_step = in_second & (footprint.step == step)
        for left, replaced in _heirs(footprint, event, of_step):
            event[event == -(left + 1)] = -(replaced + 1)
    kept = ~in_second
    cut = replace(footprint, event=np.where(kept, event, 0)).keeping(kept)
    return replace(cut, op=footprint.op[~_are_of_second_micro_step(footprint)])


def _are_of_second_micro_step(footprint: Footprint) -> Any:
    import numpy as np

    second = second_micro_step([kernel.phase for kernel in footprint.kernels], footprint.op)
    found = np.zeros(len(footprint.op), dtype=bool)
    found[second.start : second.stop] = True
    return found


def _heirs(footprint: Footprint, event: Numbers, of_step: Any) -> list[tuple[int, int]]:
    """What the second micro-step leaves behind, and what of the first it took the place of."""
    born = set((event[of_step & (event > 0)] - 1).tolist())
    died = set((-event[of_step & (event < 0)] - 1).tolist())
    left, replaced = sorted(born - died), sorted(died - born)
    pairs = []
    for one in left:
        alike = next((two for two in replaced if _is_alike(footprint, one, two)), None)
        if alike is not None:
            replaced.remove(alike)
            pairs.append((one, alike))
    return pairs


def _is_alike(footprint: Footprint, one: int, two: int) -> bool:
    return all(
        getattr(footprint, name)[one] == getattr(footprint, name)[two]
        for name in ("fixed_bytes", "grown_bytes", "born")
    )


# ---- the optimizer -------------------------------------------------------------------------------


def with_step_of(footprint: Footprint, other: Footprint) -> Footprint:
    """The forward and backward of one footprint, the optimizer's step of another.

    Raises NotSpliceable.
    """
    import numpy as np

    if not _are_built_alike(footprint, other):
        raise NotSpliceable("the two train other parameters")
    rest = footprint.keeping(~_is_of_step(footprint))
    added = _with_later_names(other.keeping(_is_of_step(other)), len(rest.names))
    if (added.phase != _STEP).any():
        raise NotSpliceable("something that the optimizer's step makes is freed after it")
    numbered = added.event + np.sign(added.event) * len(rest.fixed_bytes)
    work = _with_step_kernels(footprint, other)
    return Footprint(
        **{
            name: np.concatenate([getattr(rest, name), getattr(added, name)])
            for name in OF_ALLOCATIONS
        },
        event=_interleaved(rest, added, rest.event, numbered),
        **{
            name: _interleaved(rest, added, getattr(rest, name), getattr(added, name))
            for name in OF_EVENTS
        },
        kernels=work[0],
        op=work[1],
        names=(*rest.names, *added.names),
        host_bytes=(
            rest.host_bytes[0] + added.host_bytes[0],
            rest.host_bytes[1] + added.host_bytes[1],
        ),
    )


def without_gradients(footprint: Footprint) -> Footprint:
    """The same without the gradients of parameters."""
    import numpy as np

    return footprint.keeping(footprint.category[np.abs(footprint.event) - 1] != _GRADIENTS)


def workspaces(footprint: Footprint) -> set[tuple[int, int]]:
    """The bytes and the streams of what libraries take once and never give back."""
    places = (footprint.category == _WORKSPACE).nonzero()[0]
    sizes, streams = footprint.fixed_bytes[places].tolist(), footprint.stream[places].tolist()
    return set(zip(sizes, streams, strict=True))


def without_workspaces(footprint: Footprint, known: Iterable[tuple[int, int]]) -> Footprint:
    """The same after something that has these already.

    An optimizer that multiplies matrices (Adafactor) takes cuBLAS's workspace only where the
    forward has not.
    """
    import numpy as np

    columns = zip(footprint.fixed_bytes.tolist(), footprint.stream.tolist(), strict=True)
    have = set(known)
    is_there = np.array([each in have for each in columns], dtype=bool)
    is_there &= footprint.category == _WORKSPACE
    return footprint.keeping(~is_there[np.abs(footprint.event) - 1])


def _with_later_names(footprint: Footprint, num_before: int) -> Footprint:
    """The same, for names that come after so many others."""
    return replace(
        footprint, label=footprint.label + num_before, module=footprint.module + num_before
    )


def _with_step_kernels(
    footprint: Footprint, other: Footprint
) -> tuple[tuple[Kernel, ...], Numbers]:
    """The kernels of both, and the ops of forward and backward followed by the other's step."""
    import numpy as np

    mine = footprint.op[~_are_of_step(footprint)]
    theirs = other.op[_are_of_step(other)] + len(footprint.kernels)
    return (*footprint.kernels, *other.kernels), np.concatenate([mine, theirs])


def _are_of_step(footprint: Footprint) -> Any:
    """Which ops are of the optimizer's step."""
    import numpy as np

    of_step = np.array([kernel.phase == "step" for kernel in footprint.kernels], dtype=bool)
    return of_step[footprint.op]


def _interleaved(rest: Footprint, added: Footprint, mine: Numbers, theirs: Numbers) -> Numbers:
    """A column of the one, with that of the other at the end of each training step."""
    import numpy as np

    first = int(np.searchsorted(rest.step, 1, side="right"))
    return np.concatenate(
        [mine[:first], theirs[added.step == 1], mine[first:], theirs[added.step == _SECOND]]
    )


def _are_built_alike(footprint: Footprint, other: Footprint) -> bool:
    """Whether what is there before training is the same: it tells two models apart.

    Of data that a script puts there, and that grows with the batch, the other knows one size only.
    """
    mine, theirs = _built(footprint), _built(other)
    return len(mine) == len(theirs) and all(
        grown or fixed == its for (fixed, grown), (its, _) in zip(mine, theirs, strict=True)
    )


def _built(footprint: Footprint) -> list[tuple[int, int]]:
    """The sizes of what is there before training, and how they grow with the micro-batch."""
    built = footprint.event[(footprint.step == 0) & (footprint.event > 0)] - 1
    sizes = footprint.fixed_bytes[built].tolist(), footprint.grown_bytes[built].tolist()
    return list(zip(*sizes, strict=True))


def _is_of_step(footprint: Footprint) -> Any:
    """Which events are of allocations that the optimizer's step requests."""
    import numpy as np

    return footprint.born[np.abs(footprint.event) - 1] == _STEP
