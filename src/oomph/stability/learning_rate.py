"""An optimizer and two batch sizes -> the optimizer with the learning rate of the other batch.

linear: lr x r (Goyal et al. 2017), for SGD. square-root: lr x sqrt(r), for Adam and its like; their
averages then cover as many examples as before (beta ** r) and epsilon shrinks like the gradient's
noise (Malladi et al. 2022; Marek et al. 2025). noise-curve: the same near 0, flat above the noise
scale (McCandlish et al. 2018). r is the ratio of the batch sizes.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, MutableMapping, MutableSequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from oomph.errors import UsageError
from oomph.records.stability import (
    LearningRateChange,
    LearningRateRule,
    NoiseScale,
    SettingChange,
)

_LINEAR = ("SGD", "ASGD")
# Besides those that have betas. All of them divide the gradient by its own size.
_ROOT = ("Adagrad", "RMSprop", "Rprop", "Adafactor", "Lion", "Muon", "Adadelta")
_RULES = ("linear", "square-root", "noise-curve")
# Learning rates that schedulers keep outside of the groups' "lr", there and in themselves.
_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "swa_lr")


def scale_learning_rate(
    optimizer: Any,
    from_batch: int,
    to_batch: int,
    noise_scale: float | NoiseScale | None = None,
    *,
    rule: LearningRateRule | None = None,
) -> LearningRateChange:
    """Change an optimizer and its schedulers in place, to train with another batch size.

    noise_scale: in examples, or as a Stepper measured it; the noise curve then replaces the rule of
        the optimizer's kind, so that the learning rate does not grow beyond what helps.
    rule: "linear" (SGD), "square-root" (Adam) or "noise-curve"; by default, by the optimizer.
    """
    inside = getattr(optimizer, "optimizer", optimizer)  # accelerate's
    is_linear = _is_linear(inside, rule)
    _check(from_batch, to_batch, noise_scale, rule)
    ratio = to_batch / from_batch
    scale = noise_scale.examples if isinstance(noise_scale, NoiseScale) else noise_scale
    power = 1.0 if is_linear else 0.5
    if rule in (None, "noise-curve") and scale is not None:
        named: LearningRateRule = "noise-curve"
        factor = ((1 + scale / from_batch) / (1 + scale / to_batch)) ** power
    else:
        named = "linear" if is_linear else "square-root"
        factor = ratio**power
    changes = [
        *_scaled_groups(inside, factor, ratio),
        *(each for s in _schedulers_of(inside) for each in _scaled_scheduler(s, factor)),
    ]
    return LearningRateChange(
        rule=named,
        from_batch=from_batch,
        to_batch=to_batch,
        factor=factor,
        changes=tuple(changes),
    )


def _check(from_batch: int, to_batch: int, noise_scale: Any, rule: str | None) -> None:
    for size in (from_batch, to_batch):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(
                f"{size!r:.40} is not a batch size", attempt="a whole number of examples above 0"
            )
    if rule == "noise-curve" and noise_scale is None:
        raise UsageError(
            "the noise curve needs the noise scale",
            attempt="noise_scale=step.noise_scale, once it is known",
        )
    scale = noise_scale.examples if isinstance(noise_scale, NoiseScale) else noise_scale
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        raise UsageError(
            f"a noise scale cannot be {scale}", attempt="a number of examples, or None"
        )


def _is_linear(optimizer: Any, rule: str | None) -> bool:
    """Return whether the learning rate belongs to the batch, not to its root. Raises UsageError."""
    if rule not in (None, *_RULES):
        raise UsageError(
            f"rule={rule!r:.40} is unknown", attempt=f"one of {', '.join(_RULES)}, or None"
        )
    if rule in ("linear", "square-root"):
        return rule == "linear"
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} is not an optimizer of torch",
            attempt="scale_learning_rate(optimizer, from_batch, to_batch)",
        )
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names & {*_LINEAR}:
        return True
    if names & {*_ROOT} or all("betas" in group for group in optimizer.param_groups):
        return False
    raise UsageError(
        f"oomph does not know how {type(optimizer).__name__}'s learning rate goes with the batch",
        attempt='rule="linear" if it steps by the gradient, as SGD; rule="square-root" if it'
        " divides it by its size, as Adam",
    )


# ---- the optimizer -----------------------------------------------------------------------------


def _scaled_groups(optimizer: Any, factor: float, ratio: float) -> Iterator[SettingChange]:
    for number, group in enumerate(optimizer.param_groups):
        where = f"group {number}"
        for name in _OF_GROUPS:
            if group.get(name) is not None:
                yield from _set(group, name, where, float(group[name]) * factor)
        yield from _scaled_averages(group, where, ratio)


def _scaled_averages(
    group: MutableMapping[str, Any], where: str, ratio: float
) -> Iterator[SettingChange]:
    """Let Adam's averages cover as many examples as before."""
    betas = group.get("betas")
    if isinstance(betas, tuple | list):
        new = [float(beta) ** ratio for beta in betas]
        for number, (old, beta) in enumerate(zip(betas, new, strict=True)):
            yield SettingChange(where=where, name=f"betas[{number}]", before=float(old), after=beta)
        if any(isinstance(beta, torch.Tensor) for beta in betas):
            for old, beta in zip(betas, new, strict=True):
                old.fill_(beta)
        else:
            group["betas"] = type(betas)(new)
        if isinstance(group.get("eps"), float):
            yield from _set(group, "eps", where, group["eps"] / math.sqrt(ratio))
    elif isinstance(group.get("alpha"), float) and "centered" in group:  # RMSprop
        yield from _set(group, "alpha", where, group["alpha"] ** ratio)


def _set(
    holder: MutableMapping[str, Any], name: str, where: str, value: float
) -> Iterator[SettingChange]:
    yield SettingChange(where=where, name=name, before=float(holder[name]), after=value)
    if isinstance(holder[name], torch.Tensor):  # a captured or compiled step reads it from there
        holder[name].fill_(value)
    else:
        holder[name] = value


# ---- its schedulers ----------------------------------------------------------------------------


def _schedulers_of(optimizer: Any) -> list[Any]:
    """Return every scheduler of an optimizer, which does not know them.

    One that is left out would put its own learning rate back at its next step.
    """
    kinds = set(_kinds(LRScheduler))
    objects: list[Any] = gc.get_objects()
    found = [each for each in objects if type(each) in kinds]
    return [each for each in found if _optimizer_of(each) is optimizer]


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield from _kinds(each)


def _optimizer_of(scheduler: Any) -> Any:
    own = getattr(scheduler, "optimizer", None)
    return getattr(own, "optimizer", own)


def _scaled_scheduler(scheduler: Any, factor: float) -> Iterator[SettingChange]:
    where, own = type(scheduler).__name__, vars(scheduler)
    for name in _OF_SCHEDULERS:
        value = own.get(name)
        if isinstance(value, MutableSequence):
            before = [float(each) for each in value]
            own[name] = [each * factor for each in value]  # lists may be shared
            for number, old in enumerate(before):
                yield SettingChange(
                    where=where, name=f"{name}[{number}]", before=old, after=old * factor
                )
        elif isinstance(value, int | float) and value:
            yield from _set(own, name, where, value * factor)
    # What it reports.
    own["_last_lr"] = [float(group["lr"]) for group in _optimizer_of(scheduler).param_groups]
