"""The steps of a Stepper -> warnings about the training, and what is known of its noise scale.

Losses and norms stay on the GPU and are read together every few steps, so that training does not
wait for them. Nothing is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oomph.records.stability import StabilityWarning
from oomph.stability.watch import UpdateSize, Watch, tell
from oomph.training.noise_meter import NoiseMeter

READ_EVERY = 16  # steps: one wait for the GPU
_UPDATES_EVERY = 100  # steps
_NUM_WEIGHTS, _NUM_VALUES = 16, 256  # that an update is measured by: 16 kB


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step leaves, still on its device."""

    losses: tuple[tuple[torch.Tensor, float], ...]
    factor: float
    grad_norm: torch.Tensor | None
    loss_scale: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Some values of a weight before an update."""

    name: str
    weight: torch.Tensor
    before: torch.Tensor


class VitalSigns:
    """Watches the steps of one Stepper."""

    def __init__(
        self,
        model: nn.Module,
        meter: NoiseMeter,
        scaler: torch.amp.GradScaler | None,
        say: Callable[[str], None],
        *,
        is_on: bool,
        is_clipped: bool,
        is_first_rank: bool,
    ) -> None:
        self._model, self._meter, self._scaler, self._say = model, meter, scaler, say
        self._is_on, self._is_clipped, self._is_first_rank = is_on, is_clipped, is_first_rank
        self._watch = Watch()
        self._steps: list[_Step] = []
        self._num_steps = 0
        self._scale_before = math.inf
        self._sampled: list[_Sampled] = []
        self._sizes: list[tuple[str, torch.Tensor]] = []  # update, weight, share unchanged
        self._search: _Search | None = None
        self._advice: str | None = None
        self._warnings: list[StabilityWarning] = []

    @property
    def warnings(self) -> tuple[StabilityWarning, ...]:
        """Return all warnings so far; waits for the GPU if there is anything new."""
        self.read()
        return tuple(self._warnings)

    # ---- around each update --------------------------------------------------------------------

    def before_update(self) -> None:
        if self._is_on and self._num_steps % _UPDATES_EVERY == _UPDATES_EVERY - 1:
            self._sampled = [
                _Sampled(name, weight, _values(weight).clone())
                for name, weight in self._model.named_parameters()
                if weight.requires_grad and weight.dim() > 1 and weight.is_contiguous()
            ][:_NUM_WEIGHTS]

    def after_update(self) -> None:
        """Note how large the update was. Gradients are still there."""
        for each in self._sampled:
            after, gradient = _values(each.weight), each.weight.grad
            is_half = after.dtype in (torch.float16, torch.bfloat16)
            lost = torch.zeros((), device=after.device)
            if is_half and gradient is not None and gradient.is_contiguous():
                lost = ((after == each.before) & (_values(gradient) != 0)).float().mean()
            moved = (after.float() - each.before.float()).square().mean().sqrt()
            size = each.before.float().square().mean().sqrt()
            self._sizes.append((each.name, torch.stack([moved, size, lost])))
        self._sampled = []

    def after(
        self,
        losses: tuple[tuple[torch.Tensor, float], ...],
        factor: float,
        grad_norm: torch.Tensor | None,
    ) -> None:
        """Add a step, after its update."""
        if not self._is_on:
            return
        scale = getattr(self._scaler, "_scale", None)  # get_scale() would wait for the GPU
        scale = None if scale is None else scale.detach().clone()
        self._steps.append(_Step(losses, factor, grad_norm, scale))
        self._num_steps += 1
        if self._search is not None:
            self._end_search()
        if len(self._steps) >= READ_EVERY:
            self.read()

    # ---- reading -------------------------------------------------------------------------------

    def read(self) -> None:
        """Judge what the steps since the last time have left."""
        steps, self._steps = self._steps, []
        if steps:
            self._judge(steps)
        sizes, self._sizes = self._sizes, []
        if sizes:
            rows = torch.stack([row.cpu() for _, row in sizes]).tolist()
            self._tell(
                self._watch.updates(
                    [
                        UpdateSize(name=name, ratio=moved / size, lost_ratio=lost)
                        for (name, _), (moved, size, lost) in zip(sizes, rows, strict=True)
                        if size > 0
                    ]
                )
            )
        scale = self._meter.noise_scale if self._is_on else None
        if scale is not None and scale.advice != self._advice:
            self._advice = scale.advice
            tell(scale)

    def _judge(self, steps: Sequence[_Step]) -> None:
        losses = _numbers([loss for step in steps for loss, _ in step.losses])
        norms = _numbers([step.grad_norm for step in steps if step.grad_norm is not None])
        scales = _numbers([step.loss_scale for step in steps if step.loss_scale is not None])
        for step in steps:
            loss = sum(losses.pop(0) * share * step.factor for _, share in step.losses)
            norm = None if step.grad_norm is None else norms.pop(0)
            scale = math.inf if step.loss_scale is None else scales.pop(0)
            is_skipped, self._scale_before = scale < self._scale_before < math.inf, scale
            found = self._watch.step(
                loss, grad_norm=norm, is_clipped=self._is_clipped, is_skipped=is_skipped
            )
            self._tell(found)
            if not math.isfinite(loss) and self._search is None:
                self._search = _Search(self._model)

    def _end_search(self) -> None:
        if self._search is not None and not self._search.has_ended:
            self._tell(self._watch.not_finite("loss", self._search.end()))

    def _tell(self, found: Sequence[StabilityWarning]) -> None:
        for warning in found:
            self._warnings.append(warning)
            if self._is_first_rank:
                self._say(f"oomph, step {warning.step}: {warning}")
            tell(warning)


def _numbers(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of scalars, with a single wait."""
    if not tensors:
        return []
    device = tensors[0].device
    flat = [each.detach().reshape(()).to(device, torch.float64) for each in tensors]
    found: list[float] = torch.stack(flat).tolist()
    return found


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return some values of a contiguous tensor, from all over it."""
    flat = tensor.detach().view(-1)
    return flat[:: max(flat.numel() // _NUM_VALUES, 1)][:_NUM_VALUES]


class _Search:
    """Looks for the first module whose output is not finite, in one step."""

    def __init__(self, model: nn.Module) -> None:
        self.has_ended = False
        self._found: str | None = None
        self._hooks = [
            module.register_forward_hook(self._looking(name, module))
            for name, module in model.named_modules()
            if not any(True for _ in module.children())
        ]

    def _looking(self, name: str, module: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            if self._found is None and not _is_finite(output):
                broken = [each for each, p in module.named_parameters() if not _is_finite(p)]
                why = f" ({broken[0]} is not finite)" if broken else " (its weights are finite)"
                self._found = f"first in the output of {name or 'the model'}{why}"

        return look

    def end(self) -> str:
        """Return where the first value that is not finite was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.has_ended = [], True
        return self._found or "in one step; in the next, all modules gave finite values"


def _is_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value.detach()).all())
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list | tuple) else True
