"""Gradients that do not add up -> the module or the loss in which examples meet, and what to do.

The calls of every module are compared, the whole batch's with its pieces': the first that gives
something else for the same input is where examples meet. If none does, it is the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from oomph.records.check import Finding
from oomph.stability.modes import EveryOp, name_of
from oomph.stability.whereabouts import Call, Whereabouts

_AS_CLOSE = 1e-6  # of a module's outputs, in fp64, relative to their largest

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
    "balance is then kept within each piece: usually tolerable, but another training; keep the"
    " micro-batch as large as it fits"
)
_DO_CONSTANT = (
    "add the term that does not depend on the data once a step, not with every piece; or divide it"
    " by the number of pieces"
)
_DO_LOSS = (
    "average what is combined over examples last, so that each example has a loss of its own; or"
    " keep the batch whole"
)


class Pairs(EveryOp):
    """Notes ops in the loss that give a value for every pair of examples."""

    def __init__(self, whereabouts: Whereabouts, num: int) -> None:
        super().__init__()
        self._whereabouts, self._num = whereabouts, num
        self.op: str | None = None

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        is_forward = torch._C._current_autograd_node() is None
        # The model's own forward is where models of transformers have their loss.
        is_of_the_loss = is_forward and self._whereabouts.module in (None, "")
        if self.op is None and is_of_the_loss and isinstance(out, torch.Tensor):
            sides = [size for size in out.shape if size >= self._num and size % self._num == 0]
            is_made_of_two = name_of(op) in ("mm", "bmm", "addmm", "cdist", "_cdist_forward")
            if is_made_of_two and len(sides) >= 2 and sides[0] == sides[1]:
                self.op = name_of(op)
        return out


def first_meeting(whole: Sequence[Call], pieces: Sequence[Sequence[Call]]) -> Call | None:
    """The first call in which the whole gives other than its pieces, though it was given the same.

    Inner calls end first: it is the innermost. None: examples met outside of the model.
    """
    if any([c.module for c in calls] != [c.module for c in whole] for calls in pieces):
        return None
    for place, call in enumerate(whole):
        parts = [calls[place] for calls in pieces]
        is_given_the_same = _agree(call.given, [part.given for part in parts])
        if is_given_the_same and not _agree(call.gave, [part.gave for part in parts]):
            return call
    return None


def _agree(whole: Sequence[Any], pieces: Sequence[Sequence[Any]]) -> bool:
    """Are the rows of the whole those of the pieces? What has no rows says nothing."""
    return all(
        _same_rows(tensor, [part[i] for part in pieces if i < len(part)])
        for i, tensor in enumerate(whole)
    )


def _same_rows(whole: Any, parts: Sequence[Any]) -> bool:
    if not whole.dim() or any(part.dim() != whole.dim() for part in parts):
        return True
    for d, size in enumerate(whole.shape):
        if sum(part.shape[d] for part in parts) == size and all(
            part.shape[:d] == whole.shape[:d] and part.shape[d + 1 :] == whole.shape[d + 1 :]
            for part in parts
        ):
            together = torch.cat(list(parts), d)
            if not whole.is_floating_point():
                return bool(torch.equal(whole, together))
            finite = torch.nan_to_num(whole), torch.nan_to_num(together)
            apart = (finite[0] - finite[1]).abs().max() if whole.numel() else torch.zeros(())
            largest = finite[0].abs().max() if whole.numel() else torch.ones(())
            return bool(apart <= _AS_CLOSE * largest)
    return True


def finding_of(
    model: Any, met: Call | None, *, mixing: set[str], pairs: str | None, scalars: Sequence[str]
) -> Finding:
    """What is known of the place, in words."""
    if met is not None:
        return _in_the_model(model, met.module, mixing)
    if mixing:
        op = min(mixing)
        return _finding("examples are mixed with others of the batch", None, op, _DO_MIXING)
    if pairs:
        what = "every example is compared with every other (contrastive, in-batch negatives)"
        return _finding(what, None, pairs, _DO_PAIRS)
    if scalars:
        what = "it gives one value for the whole batch, which the loss uses (balance of experts)"
        return _finding(what, scalars[0], None, _DO_BALANCE)
    what = (
        "it combines examples before it averages (a ratio of sums, statistics of the batch, the"
        " hardest examples, or two terms that are averaged over different things)"
    )
    return _finding(what, None, None, _DO_LOSS)


def _in_the_model(model: Any, name: str, mixing: set[str]) -> Finding:
    module = dict(model.named_modules()).get(name)
    kind = type(module).__name__
    if isinstance(module, _BatchNorm):
        what = f"{kind} normalises by the statistics of the micro-batch"
        return _finding(what, name, "batch_norm", _DO_NORM)
    if mixing:
        op = min(mixing)
        what = f"{kind} mixes examples with others of the batch"
        return _finding(what, name, op, _DO_MIXING)
    what = f"in {kind}, what comes out for an example depends on the others of the batch"
    return _finding(what, name, None, _DO_LOSS)


def constant_term() -> Finding:
    """Of a sum over examples, with a term that is there once however many examples there are."""
    what = "a term that does not depend on the data is counted once for each piece (weight decay)"
    return _finding(what, None, None, _DO_CONSTANT)


def single_values(model: Any, calls: Sequence[Call]) -> list[str]:
    """Modules that gave or keep a single value for a whole batch.

    Of the model itself one may be the loss; another one is none.
    """
    gave = [
        call.module
        for call in calls
        if sum(t.dim() == 0 and t.is_floating_point() for t in call.gave) > (call.module == "")
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


def _finding(what: str, module: str | None, op: str | None, do: str) -> Finding:
    return Finding(what=what, module=module, op=op, do=do)
