"""Adam or AdamW -> Muon for the hidden weights, and AdamW for everything else.

Muon (torch.optim.Muon, since torch 2.9) keeps one momentum where Adam keeps two, and makes each
update orthogonal with five rounds of matrix products in bf16 (https://kellerjordan.github.io/posts/
muon/). It is for matrices between hidden layers: the linear layers inside the repeated blocks.
Embeddings, the head, biases and norms stay with AdamW, as its authors advise. The rate of each
update is scaled so that AdamW's learning rate and weight decay hold ("match_rms_adamw", Liu et al.
2025, arXiv 2502.16982).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from oomph.errors import UsageError
from oomph.records.workload import Variant, divides_parameters
from oomph.tricks.definition import (
    TOO_LATE_IN_SCRIPT,
    Definition,
    Fragment,
    Request,
    Severity,
    by_hand,
)
from oomph.tricks.lora import adaptable
from oomph.tricks.optimizers import groups_of, refuse_sparse

if TYPE_CHECKING:
    import torch

_HIDDEN = "_oomph_is_hidden"  # marks a weight that Muon updates
_IS_MUON = "is_muon"  # in a parameter group
_OPTIONS = ("lr", "betas", "eps", "weight_decay")
_ADJUST = "match_rms_adamw"


def mark_hidden_weights(model: torch.nn.Module) -> None:
    """Mark the weights that Muon updates, for the optimizer, which sees no modules."""
    layers = adaptable(model).values()
    inside = {id(layer) for layer in layers}
    shared = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    for layer in layers:
        if layer.weight.dim() == 2 and id(layer.weight) not in shared:
            setattr(layer.weight, _HIDDEN, True)


def muon(original: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make Muon and AdamW, as one optimizer, on the user's groups. Raises UsageError."""
    import torch

    if not isinstance(original, torch.optim.Adam):
        raise _refusal(
            f"{type(original).__name__} cannot become Muon",
            "Muon is scaled to the learning rates of torch.optim.Adam and torch.optim.AdamW",
            "as-is, or torch.optim.AdamW",
        )
    for option in ("amsgrad", "maximize"):
        if any(group[option] for group in original.param_groups):
            raise _refusal(f"Muon has no {option}", "torch.optim.Muon does not compute it", "as-is")
    groups: list[dict[str, Any]] = []
    for group in groups_of(original, _OPTIONS):
        for is_muon in (True, False):
            ones = [one for one in group["params"] if _is_hidden(one) == is_muon]
            if ones:
                groups.append({**group, "params": ones, _IS_MUON: is_muon})
    if not any(group[_IS_MUON] for group in groups):
        raise _refusal(
            "there is nothing that Muon could update",
            "no weight of a linear layer in the repeated blocks is trained",
            "as-is",
        )
    made: torch.optim.Optimizer = _kind()(groups)
    return made


def _refusal(what: str, because: str, attempt: str) -> UsageError:
    return UsageError(what, because=because, attempt=attempt)


def _is_hidden(one: Any) -> bool:
    """Return whether a parameter, or a (name, parameter), is a hidden weight."""
    return hasattr(one[1] if isinstance(one, tuple) else one, _HIDDEN)


@functools.cache
def _kind() -> Any:
    import torch

    class MuonAndAdamW(torch.optim.Optimizer):
        """Both optimizers on one set of groups and states, so that a loop sees a single one."""

        def __init__(self, groups: Any) -> None:
            for group in groups:
                defaults = _defaults(is_muon=group[_IS_MUON])
                group |= {name: group.get(name, value) for name, value in defaults.items()}
            super().__init__(groups, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for is_muon in (True, False):
                kind: Any = torch.optim.Muon if is_muon else torch.optim.AdamW
                one = kind.__new__(kind)  # for these groups and states themselves, not for copies
                groups = self._groups(is_muon=is_muon)
                one.__setstate__({"state": self.state, "param_groups": groups, "defaults": {}})
                kind.step.__wrapped__(one)  # beneath torch's hooks, which count one step, not two
            return loss

        def _groups(self, *, is_muon: bool) -> list[dict[str, Any]]:
            return [group for group in self.param_groups if group[_IS_MUON] == is_muon]

    return MuonAndAdamW


@functools.cache
def _defaults(*, is_muon: bool) -> dict[str, Any]:
    import torch

    some = [torch.zeros(1, 1)]
    one = torch.optim.Muon(some, adjust_lr_fn=_ADJUST) if is_muon else torch.optim.AdamW(some)
    return one.defaults


_IN_CODE = '''
def planned_optimizer(parameters, make_optimizer):
    """Muon for the hidden weights and AdamW for the rest, with your groups and options."""
    return muon(make_optimizer(parameters))
'''


# ---- the trick -----------------------------------------------------------------------------------


def _put_on_model(model: torch.nn.Module, variant: Variant) -> None:
    refuse_sparse(model, variant)
    mark_hidden_weights(model)


def _why_not(request: Request) -> str | None:
    kind = request.possible.optimizer_class.rpartition(".")[2]
    return None if kind in ("Adam", "AdamW") else f"scaled to Adam's rates, and this is {kind}"


def _conflict(variant: Variant, _: bool) -> UsageError | None:
    found: tuple[str, str] | None = None
    if variant.adapters != "none":
        found = "with adapters no hidden weight is trained", "AdamW"
    elif divides_parameters(variant):
        found = "its products need whole weights, and each GPU has a part of them", "ddp"
    elif variant.offload_optimizer:
        found = "its products of matrices would run on the host", "only one of these two tricks"
    if found is None:
        return None
    return _refusal("Muon cannot be used here", found[0], found[1])


MUON = Definition(
    name="muon",
    stability="changes",
    setting="optimizer",
    value="muon",
    severity=Severity.OTHER_OPTIMIZER,
    price="another algorithm for hidden weights: compare the losses of the first hundred steps",
    what="Muon for hidden weights: one momentum a value; AdamW for the rest",
    code="torch.optim.Muon and torch.optim.AdamW, or oomph.apply",
    caveat="another optimizer: it takes AdamW's learning rate, but compare the first losses",
    why_not=_why_not,
    why_not_on=lambda model: None if adaptable(model) else "no linear layers in repeated blocks",
    why_not_in_script=TOO_LATE_IN_SCRIPT,
    conflict=_conflict,
    put_on_model=_put_on_model,
    exchange_optimizer=muon,
    too_late_for_optimizer="muon",
    by_hand=by_hand(
        "the optimizer: torch.optim.Muon(hidden weights, lr=..., adjust_lr_fn="
        f'"{_ADJUST}") and torch.optim.AdamW for embeddings, the head, biases and norms'
    ),
    in_code=lambda _: Fragment(
        imports=["from oomph.tricks.muon import mark_hidden_weights, muon"],
        functions=[_IN_CODE],
        on_model=["mark_hidden_weights(model)"],
        makes_optimizer=True,
        notes=["It needs oomph, for Muon and AdamW as one optimizer."],
    ),
)
