"""Gradients of a batch and of its pieces -> whether they add up; if not, where examples interact.

Least squares finds the weights that recombine the pieces. A remainder shows that examples depend on
each other. Then each module call on the whole batch is compared with the calls on its pieces: the
first one with a different output for the same input is where examples interact. If there is none,
they interact in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _BatchNorm

from oomph.records.check import Finding
from oomph.stability.calls import Call, ModuleTracker
from oomph.stability.randomness import Draws, EveryOp, name_of

_AS_CLOSE = 1e-6  # judgement: of a module's outputs in fp64, relative to the largest
_PARALLEL = 1e-9  # judgement: if two pieces' gradients are this parallel, weights are undefined

_DO_NORM = (
    "frozen statistics (eval mode) or GroupNorm change the model; else keep the micro-batch as"
    " large as it fits, and lower its momentum to 1 - (1 - m) ** (1 / pieces)"
)
_DO_MIXING = "mix before the batch is split: in the collate function, or at the top of the loop"
_DO_PAIRS = (
    "split with GradCache (two passes: all embeddings first, then gradients piece by piece), which"
    " is exact; or keep the batch whole"
)
_DO_BALANCE = (
    "balance is then kept within each piece: usually tolerable, but not the same training; keep the"
    " micro-batch as large as it fits"
)
_DO_LOSS = (
    "average what is combined over examples last, so that each example has a loss of its own; or"
    " keep the batch whole"
)
CONSTANT_TERM = Finding(
    what="a term that does not depend on the data is counted once for each piece (weight decay)",
    module=None,
    do="add the term that does not depend on the data once a step, not with every piece; or divide"
    " it by the number of pieces",
)


def cuts(num: int) -> list[int]:
    """Return where to cut in two: unevenly first, then elsewhere: 3 + 5, 2 + 6, 4 + 4."""
    wanted = (max(at, 1) for at in (3 * num // 8, num // 4, num // 2))
    return list(dict.fromkeys(at for at in wanted if at < num))


def fitted(whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> tuple[list[float] | None, float]:
    """Return the best weights, None if they are not unique, and the relative remainder."""
    matrix = torch.stack(list(pieces), 1)
    scale = matrix.norm(dim=0)
    scale[scale == 0] = 1.0
    found = torch.linalg.lstsq(matrix / scale, whole[:, None], driver="gelsd")
    weights = found.solution[:, 0] / scale
    residual = float((matrix @ weights - whole).norm() / whole.norm())
    singular = found.singular_values
    is_known = bool(singular[-1] > _PARALLEL * singular[0]) if len(singular) else True
    return ([float(w) for w in weights] if is_known else None), residual


def apart(gradient: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance of another gradient from one, relative to the size of the first."""
    return float((gradient - other).norm() / gradient.norm())


def is_constant_term(
    whole: torch.Tensor, pieces: Sequence[torch.Tensor], others: Sequence[torch.Tensor], same: float
) -> bool:
    """Return whether the excess is the same wherever the batch is cut. `others`: another cut."""
    sums = [torch.stack(list(each)).sum(0) for each in (pieces, others)]
    return float((sums[0] - sums[1]).norm()) <= same * float(whole.norm())


# ---- where examples interact -------------------------------------------------------------------


class Pairs(EveryOp):
    """Records ops in the loss that return a value for every pair of examples."""

    def __init__(self, tracker: ModuleTracker, num: int) -> None:
        super().__init__()
        self._tracker, self._num = tracker, num
        self.op: str | None = None

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = op(*args, **kwargs)
        is_forward = torch._C._current_autograd_node() is None
        # Models of transformers compute their loss in the top module's forward.
        is_of_the_loss = is_forward and self._tracker.module in (None, "")
        if self.op is None and is_of_the_loss and isinstance(out, torch.Tensor):
            sides = [size for size in out.shape if size >= self._num and size % self._num == 0]
            is_made_of_two = name_of(op) in ("mm", "bmm", "addmm", "cdist", "_cdist_forward")
            if is_made_of_two and len(sides) >= 2 and sides[0] == sides[1]:
                self.op = name_of(op)
        return out


class Watch(NamedTuple):
    """Observes one run of some examples; enter both around it."""

    where: ModuleTracker
    pairs: Pairs


def watch(model: nn.Module, num: int) -> Watch:
    """Return what observes a run of `num` examples."""
    where = ModuleTracker(model, records=True)
    return Watch(where, Pairs(where, num))


def find_meeting(model: nn.Module, watches: Sequence[Watch], draws: Draws) -> Finding:
    """Return where examples interact, from observing the whole batch and its pieces."""
    whole, *pieces = (each.where.calls for each in watches)
    met = first_meeting(whole, pieces)
    if met is not None:
        return _in_the_model(model, met.module, draws.mixing)
    if draws.mixing:
        what = "examples are mixed with others of the batch"
        return Finding(what=what, module=None, op=min(draws.mixing), do=_DO_MIXING)
    if all(each.pairs.op for each in watches):
        what = "every example is compared with every other (contrastive, in-batch negatives)"
        return Finding(what=what, module=None, op=watches[0].pairs.op, do=_DO_PAIRS)
    if scalars := _single_values(model, whole):
        what = "it gives one value for the whole batch, which the loss uses (balance of experts)"
        return Finding(what=what, module=scalars[0], do=_DO_BALANCE)
    what = (
        "it combines examples before it averages (a ratio of sums, statistics of the batch, the"
        " hardest examples, or two terms that are averaged over different things)"
    )
    return Finding(what=what, module=None, do=_DO_LOSS)


def first_meeting(whole: Sequence[Call], pieces: Sequence[Sequence[Call]]) -> Call | None:
    """Return the first call whose output differs between whole and pieces for the same input.

    Inner calls end first, so it is the innermost. None: examples interact outside the model.
    """
    if any([c.module for c in calls] != [c.module for c in whole] for calls in pieces):
        return None
    for place, call in enumerate(whole):
        parts = [calls[place] for calls in pieces]
        is_given_the_same = _agree(call.inputs, [part.inputs for part in parts])
        if is_given_the_same and not _agree(call.outputs, [part.outputs for part in parts]):
            return call
    return None


def _agree(whole: Sequence[torch.Tensor], pieces: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Return whether the rows of the whole equal those of the pieces; ignore what has no rows."""
    return all(
        _same_rows(tensor, [part[i] for part in pieces if i < len(part)])
        for i, tensor in enumerate(whole)
    )


def _same_rows(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    if not whole.dim() or any(part.dim() != whole.dim() for part in parts):
        return True
    for d, size in enumerate(whole.shape):
        if sum(part.shape[d] for part in parts) == size and all(
            part.shape[:d] == whole.shape[:d] and part.shape[d + 1 :] == whole.shape[d + 1 :]
            for part in parts
        ):
            together = torch.cat(list(parts), d)
            if not whole.is_floating_point():
                return torch.equal(whole, together)
            if not whole.numel():
                return True
            whole, together = torch.nan_to_num(whole), torch.nan_to_num(together)
            return bool((whole - together).abs().max() <= _AS_CLOSE * whole.abs().max())
    return True


def _in_the_model(model: nn.Module, name: str, mixing: set[str]) -> Finding:
    module = dict(model.named_modules()).get(name)
    kind = type(module).__name__
    if isinstance(module, _BatchNorm):
        what = f"{kind} normalises by the statistics of the micro-batch"
        return Finding(what=what, module=name, op="batch_norm", do=_DO_NORM)
    if mixing:
        what = f"{kind} mixes examples with others of the batch"
        return Finding(what=what, module=name, op=min(mixing), do=_DO_MIXING)
    what = f"in {kind}, what comes out for an example depends on the others of the batch"
    return Finding(what=what, module=name, do=_DO_LOSS)


def _single_values(model: nn.Module, calls: Sequence[Call]) -> list[str]:
    """Return modules that returned or store a single value for the whole batch.

    The model itself may return one such value, its loss; a second one counts.
    """
    gave = [
        call.module
        for call in calls
        if sum(t.dim() == 0 and t.is_floating_point() for t in call.outputs) > (call.module == "")
    ]
    keep = [
        name
        for name, module in model.named_modules()
        if any(
            isinstance(value, torch.Tensor) and value.dim() == 0 and value.grad_fn is not None
            for value in vars(module).values()
        )
    ]
    return [*gave, *keep]
