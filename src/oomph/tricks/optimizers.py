"""The user's optimizer -> another implementation of it, or another optimizer on its groups.

"fused", "foreach" and "for-loop" compute the same update. "adafactor" and "sgd" are different
optimizers: they change training. They keep the learning rate, which will need tuning.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks.definition import Definition, Fragment, Request, Severity, Target, by_hand

if TYPE_CHECKING:
    import torch

# Keywords of torch's optimizers; the class must accept the first one.
SWITCHES: Mapping[str, Mapping[str, bool]] = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"foreach": True, "fused": False},
    "for-loop": {"foreach": False, "fused": False},
}
EXCHANGED = ("8-bit", "adafactor", "sgd", "muon")  # these replace the user's optimizer
_MOMENTUM = 0.9  # our choice: nearly every published SGD recipe uses it


def groups_of(original: torch.optim.Optimizer, options: Sequence[str]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, keeping only these options."""
    return [
        {"params": _named(group), **{name: group[name] for name in options if name in group}}
        for group in original.param_groups
    ]


def _named(group: dict[str, Any]) -> list[Any]:
    """Return a group's parameters as its optimizer received them: with names if it had them."""
    names = group.get("param_names")
    return list(zip(names, group["params"], strict=True)) if names else list(group["params"])


def refuse_sparse(model: torch.nn.Module, variant: Variant) -> None:
    """Raise UsageError for a model with sparse gradients, which the optimizer would refuse."""
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        raise UsageError(
            f"the optimizer {variant.optimizer!r} cannot train this model",
            because="an embedding in it has sparse gradients",
            attempt="sparse=False in the embedding, or another optimizer",
        )


def switched(original: torch.optim.Optimizer, name: str) -> torch.optim.Optimizer:
    """Make the same optimizer with the same options and the given switch. Raises UsageError."""
    kind, switches = type(original), SWITCHES[name]
    needed = next(iter(switches))
    known = inspect.signature(kind.__init__).parameters
    if needed not in known:
        raise UsageError(
            f"{_title(kind)} has no {name} implementation",
            because=f"the class takes no {needed}=",
            attempt="as-is, or torch.optim.AdamW, which has all three",
        )
    taken = {switch: value for switch, value in switches.items() if switch in known}
    first = original.param_groups[0]
    options = [option for option in first if option not in ("params", "param_names")]
    groups = [{**group, **taken} for group in groups_of(original, options)]
    defaults = {option: value for option, value in original.defaults.items() if option in known}
    return _made(original, kind, groups, {**defaults, **taken}, name)


def exchanged(original: torch.optim.Optimizer, kind: str, **options: Any) -> torch.optim.Optimizer:
    """Make another torch.optim optimizer on the user's groups. Raises UsageError."""
    import torch

    other = getattr(torch.optim, kind)
    if isinstance(original, other):
        raise UsageError(f"the optimizer is {_title(other)} already", attempt="as-is")
    if any(group.get("maximize") for group in original.param_groups):
        options["maximize"] = True
    return _made(original, other, groups_of(original, ("lr", "weight_decay")), options, kind)


def _made(
    original: torch.optim.Optimizer,
    kind: Any,
    groups: list[dict[str, Any]],
    options: Mapping[str, Any],
    wanted: str,
) -> torch.optim.Optimizer:
    original.state.clear()  # Adagrad has state from the start: do not hold it twice
    try:
        made: torch.optim.Optimizer = kind(groups, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{_title(type(original))} cannot become {wanted}",
            because=" ".join(str(error).split())[:300],
            attempt="as-is",
        ) from error
    return made


def _title(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"


# ---- when it is possible -------------------------------------------------------------------------


def _why_not_torchs(request: Request) -> str | None:
    name = request.possible.optimizer_class
    is_torchs = name.startswith("torch.optim.")
    return None if is_torchs else f"{name.rpartition('.')[2]} is not one of torch's"


def _why_not_other(kind: str, request: Request) -> str | None:
    own = request.possible.optimizer_class
    is_same = own.startswith("torch.optim.") and own.rpartition(".")[2] == kind
    return "the optimizer already is one" if is_same else None


# ---- as plain code -------------------------------------------------------------------------------

_ANOTHER = '''
def planned_optimizer(parameters, make_optimizer):
    """{what}: your groups, learning rates and weight decays are taken over."""
    own = make_optimizer(parameters)
    names = ({names})
    groups = [
        {{"params": group["params"], **{{n: group[n] for n in names if n in group}}}}
        for group in own.param_groups
    ]
    return {made}
'''

_IMPLEMENTATION = '''
def planned_optimizer(parameters, make_optimizer):
    """Your optimizer, in its {what} implementation."""
    optimizer = make_optimizer(parameters)
    for settings in [optimizer.defaults, *optimizer.param_groups]:
        settings.update({{"fused": {fused}, "foreach": {foreach}}})
    return optimizer
'''


def other_optimizer_code(
    what: str,
    made: str,
    *,
    options: Sequence[str] = ("lr", "weight_decay"),
    imported: str = "",
    on_model: Sequence[str] = (),
) -> Fragment:
    """Return the code that makes another optimizer on the user's groups."""
    names = ", ".join(f'"{name}"' for name in options)
    return Fragment(
        imports=[imported] if imported else [],
        functions=[_ANOTHER.format(what=what, made=made, names=names)],
        on_model=on_model,
        makes_optimizer=True,
    )


def _implementation(variant: Variant) -> Fragment:
    if variant.precision == "pure-bf16":  # its rounding needs a special optimizer
        return Fragment()
    text = _IMPLEMENTATION.format(what=variant.optimizer, **SWITCHES[variant.optimizer])
    return Fragment(functions=[text], makes_optimizer=True)


# ---- the tricks ----------------------------------------------------------------------------------


def _switch(
    value: str, name: str, what: str, written: str, *, unless: Sequence[Target], **hooks: Any
) -> Definition:
    """Define one of torch's implementations of the user's optimizer."""

    def put_on_made(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update({n: on for n, on in SWITCHES[value].items() if n in group})

    return Definition(
        name=name,
        stability="same",
        setting="optimizer",
        value=value,
        what=what,
        code=f"{written} in the optimizer",
        why_not=_why_not_torchs,
        exchange_optimizer=partial(switched, name=value),
        put_on_made=put_on_made,
        by_hand=by_hand(f"the optimizer: your optimizer with {written}", unless=unless),
        in_code=_implementation,
        has_edit=True,
        **hooks,
    )


FUSED_OPTIMIZER = _switch(
    "fused",
    "fused-optimizer",
    "the optimizer's step in one kernel, without copies of the parameters",
    "fused=True",
    unless=["hf"],
    put_on_model=refuse_sparse,
)
FOR_LOOP_OPTIMIZER = _switch(
    "for-loop",
    "for-loop-optimizer",
    "the optimizer's step parameter by parameter, without copies of them all",
    "foreach=False",
    unless=[],
)
# Not a trick: it is torch's default on a GPU. Users can still ask for it.
FOREACH = _switch(
    "foreach",
    "foreach-optimizer",
    "the optimizer's step for all parameters at once",
    "foreach=True",
    unless=["hf"],
)


def _another(
    kind: str,
    what: str,
    written: str,
    *,
    unless: Sequence[Target],
    options: Mapping[str, Any],
    **hooks: Any,
) -> Definition:
    """Define a torch.optim optimizer that replaces the user's."""
    value = kind.lower()
    settings = "".join(f", {name}={option}" for name, option in options.items())
    return Definition(
        name=value,
        stability="changes",
        setting="optimizer",
        value=value,
        what=what,
        code=written,
        caveat="another optimizer: tune the learning rate anew",
        why_not=partial(_why_not_other, kind),
        exchange_optimizer=partial(exchanged, kind=kind, **options),
        too_late_for_optimizer=value,
        by_hand=by_hand(
            f"the optimizer: torch.optim.{kind}(parameters, lr=...{settings})", unless=unless
        ),
        in_code=lambda _: other_optimizer_code(value, f"torch.optim.{kind}(groups{settings})"),
        **hooks,
    )


ADAFACTOR = _another(
    "Adafactor",
    "Adafactor: rows and columns of the second moment instead of all of it",
    "torch.optim.Adafactor",
    unless=["hf"],
    options={},
    severity=Severity.SIMILAR_OPTIMIZER,
    price="an approximation of Adam's second moment: tune the learning rate anew",
    put_on_model=refuse_sparse,
)
SGD = _another(
    "SGD",
    "SGD with momentum: one value of state a parameter",
    f"torch.optim.SGD(momentum={_MOMENTUM})",
    unless=[],
    options={"momentum": _MOMENTUM},
    severity=Severity.OTHER_OPTIMIZER,
    price="no learning rate per parameter: find all settings of the optimizer anew",
)
