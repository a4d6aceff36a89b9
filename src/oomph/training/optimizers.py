"""The user's optimizer -> the same one in another implementation, or another one on its groups.

"fused", "foreach" and "for-loop" compute the same update. "8-bit" keeps its state in fewer bits
(eight_bits.py). "adafactor" and "sgd" are other optimizers: they change training, and the
learning rate, which is taken over, will want tuning.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from oomph.errors import UsageError
from oomph.records.workload import check_optimizer
from oomph.training import eight_bits

# The keywords of torch's optimizers, and which of them the class must have.
_SWITCHES = {
    "fused": ("fused", {"fused": True, "foreach": False}),
    "foreach": ("foreach", {"foreach": True, "fused": False}),
    "for-loop": ("foreach", {"foreach": False, "fused": False}),
}
_DENSE = ("fused", "8-bit", "adafactor")  # they refuse sparse gradients
_NAMES = ("param_names",)
_MOMENTUM = 0.9


def changed(original: Any, name: str) -> Any:
    """The optimizer that `name` asks for, on the groups of the user's own. Raises UsageError."""
    if check_optimizer(name) == "as-is":
        return original
    if name in _SWITCHES:
        return _switched(original, name)
    if name == "8-bit":
        return eight_bits.eight_bit(original, groups_of(original, eight_bits.OPTIONS))
    if name == "adafactor":
        return _other(original, torch.optim.Adafactor)
    return _other(original, torch.optim.SGD, momentum=_MOMENTUM)


def check_model(model: Any, name: str) -> None:
    """Refuses what an optimizer cannot train. Raises UsageError."""
    is_sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    if is_sparse and name in _DENSE:
        raise UsageError(
            f"the optimizer {name!r} cannot train this model",
            because="an embedding in it has sparse gradients",
            attempt="sparse=False in the embedding, or another optimizer",
        )


def groups_of(original: Any, options: Sequence[str]) -> list[dict[str, Any]]:
    """The groups of an optimizer, with these of their options, where they have them."""
    return [
        {"params": _named(group), **{name: group[name] for name in options if name in group}}
        for group in original.param_groups
    ]


def _named(group: dict[str, Any]) -> list[Any]:
    """The parameters of a group as its optimizer was given them: with their names, if it was."""
    names = group.get("param_names")
    return list(zip(names, group["params"], strict=True)) if names else list(group["params"])


def _switched(original: Any, name: str) -> Any:
    """The same class with the same options, and its switches set."""
    kind, (needed, switches) = type(original), _SWITCHES[name]
    known = inspect.signature(kind.__init__).parameters
    if needed not in known:
        raise UsageError(
            f"{_title(kind)} has no {name} implementation",
            because=f"the class takes no {needed}=",
            attempt="as-is, or torch.optim.AdamW, which has all three",
        )
    switched = {switch: value for switch, value in switches.items() if switch in known}
    kept = [option for option in original.param_groups[0] if option not in ("params", *_NAMES)]
    groups = [{**group, **switched} for group in groups_of(original, kept)]
    options = {option: value for option, value in original.defaults.items() if option in known}
    return _made(original, kind, groups, {**options, **switched}, name)


def _other(original: Any, kind: Any, **options: Any) -> Any:
    if isinstance(original, kind):
        raise UsageError(f"the optimizer is {_title(kind)} already", attempt="as-is")
    if any(group.get("maximize") for group in original.param_groups):
        options["maximize"] = True
    return _made(original, kind, groups_of(original, ("lr", "weight_decay")), options, kind)


def _made(original: Any, kind: Any, groups: Any, options: Any, wanted: Any) -> Any:
    original.state.clear()  # Adagrad has state from the start: it is not to be there twice
    try:
        return kind(groups, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{_title(type(original))} cannot become {getattr(wanted, '__name__', wanted)}",
            because=" ".join(str(error).split())[:300],
            attempt="as-is",
        ) from error


def _title(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"
