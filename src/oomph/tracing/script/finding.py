"""A script's loop at its end -> Seen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from oomph.records.script import Invented, Line, Loader, Seen
from oomph.records.workload import How
from oomph.tracing.script.lazy import is_blank
from oomph.tracing.script.loop import Loop

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class Observed:
    """What is noted while the script runs."""

    def __init__(self, how: How | None) -> None:
        self._how = how
        self.approximations: set[str] = set()
        self._low: Any = None
        self._scales = self._checkpoints = False

    def install(self) -> None:
        kind: Any = torch.amp.autocast_mode.autocast
        enter = kind.__enter__

        def entered(context: Any) -> Any:
            if context._enabled and context.device == "cuda":
                self._low = context.fast_dtype
            return enter(context)

        kind.__enter__ = entered
        scaler: Any = torch.amp.GradScaler
        scale = scaler.scale

        def scaled(one: Any, outputs: Any) -> Any:
            self._scales = self._scales or one.is_enabled()
            return scale(one, outputs)

        scaler.scale = scaled
        self._watch_checkpoints()

    def _watch_checkpoints(self) -> None:
        """Inside of `checkpoint`: who has imported its name before calls what they imported."""
        from torch.utils import checkpoint

        module: Any = checkpoint
        generator, reentrant = (
            module._checkpoint_without_reentrant_generator,
            module.CheckpointFunction,
        )

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._checkpoints = True
            return generator(*args, **kwargs)

        class Noted(reentrant):  # type: ignore[misc, valid-type]
            @classmethod
            def apply(cls, *args: Any, **kwargs: Any) -> Any:
                self._checkpoints = True
                return reentrant.apply(*args, **kwargs)

        module._checkpoint_without_reentrant_generator = noted
        module.CheckpointFunction = Noted

    def seen(self, loop: Loop, loader: Loader | None, invented: tuple[Invented, ...]) -> Seen:
        """All but the size of a batch, which more than the loop is asked for."""
        from oomph.tracing.compiled import COMPILE

        models = _outermost(list(loop.roots.values()))
        parameters = {
            id(p): p for model in models for p in model.parameters() if not is_blank(p)
        }.values()
        optimizer = next((one for _, one in loop.alive()), None)
        group = optimizer.param_groups[0] if optimizer is not None else {}
        num_steps = sum(loop.num_steps.values())
        return Seen(
            model=_named(models) or None,
            num_parameters=sum(p.numel() for p in parameters),
            num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            optimizer=None if optimizer is None else type(optimizer).__name__,
            is_fused=group.get("fused"),
            is_foreach=group.get("foreach"),
            learning_rate=_figure(group.get("lr")),
            micro_batch=None,
            num_rows=loop.given.rows,
            accumulation=_accumulation(loop) if num_steps else None,
            num_optimizer_steps=num_steps,
            num_optimizers=len(loop.stepping()),
            num_backwards=max(loop.backwards_of_step[0], 1),
            precision=self._precision(parameters),
            checkpointing=self._checkpointing(),
            uses_compile=COMPILE in self.approximations,
            uses_grad_scaler=self._scales,
            clips_gradients=loop.clips,
            loader=loader,
            longest_sequence=loop.given.longest_sequence,
            num_batches=loop.given.num_batches,
            kept_bytes=loop.kept_bytes,
            invented=invented,
            approximations=tuple(sorted(self.approximations)),
            has_stepped=bool(num_steps) or not loop.alive(),
            lines=tuple(
                Line(what=what, file=file, line=line)  # type: ignore[arg-type] # it is one
                for what, (file, line) in loop.lines.items()
            ),
        )

    def _checkpointing(self) -> str:
        if self._how is not None and self._how.checkpointing != "none":
            return "by oomph"
        return "by the script" if self._checkpoints else "none"

    def _precision(self, parameters: Any) -> str:
        if self._low is not None:
            return _SHORT.get(self._low, str(self._low))
        dtypes = {p.dtype for p in parameters if p.is_floating_point()}
        if dtypes == {torch.bfloat16}:
            return "pure-bf16"
        if dtypes == {torch.float16}:
            return "pure-fp16"
        if dtypes == {torch.float64}:
            return "fp64"
        return "fp32"


def _named(models: list[Any]) -> str:
    """`Generator + 2 Critic`: each class once, as often as there is one."""
    counts = Counter(type(model).__name__ for model in models)
    return " + ".join(f"{n} {name}" if n > 1 else name for name, n in counts.items())


def _outermost(models: list[Any]) -> list[Any]:
    """Without those that are parts of others."""
    inner = {id(part) for model in models for part in model.modules() if part is not model}
    return [model for model in models if id(model) not in inner]


def _accumulation(loop: Loop) -> int:
    """Batches of the first whole step; those of optimizers by turns are no accumulation."""
    return max(loop.added_up[0] // max(loop.rounds_of_step[0], 1), 1)


def _figure(value: Any) -> float | None:
    return None if value is None else float(value)
