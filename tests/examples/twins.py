"""The example scripts and the same trainings as Workloads: TWINS, by script and size.

A prediction for a script, rehearsed as it is, is to be that for its twin. What a script's loop
keeps alive from step to step, its twin keeps, too.

dcgan.py has no twin: a Workload has one optimizer.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from examples import twins_of_images, twins_of_texts
from examples.commands import COMMANDS
from examples.loops import Twin
from oomph.records.workload import Variant, Workload

Make = Callable[..., tuple[Workload, Variant]]

WITHOUT = {"dcgan", "hf_trainer", "lightning_resnet", "accelerate_loop"}

# What pick_batch_by_gpu.py chooses, by GPU.
_CHOICES: dict[str, dict[str, Any]] = {
    "t4": {"batch_size": 8, "precision": "fp16"},
    "v100-32gb": {"batch_size": 32, "precision": "fp16"},
    "rtx4090": {"batch_size": 16, "precision": "bf16"},
    "a100-80gb": {"batch_size": 64, "precision": "bf16"},
}


def options_of(arguments: tuple[str, ...]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `name=value` and flags, as keyword arguments."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        is_pair = "=" in "".join(arguments)
        is_name = word.startswith("--") or (is_pair and place % 2 == 0)
        if is_name:
            value = words[place + 1] if place + 1 < len(words) else "--"
            name = word.removeprefix("--").replace("-", "_")
            found[name] = True if value.startswith("--") else _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text) if "," not in text else text
    except (SyntaxError, ValueError):
        return text


def _make(name: str) -> Make:
    found: Make = getattr(twins_of_images, name, None) or getattr(twins_of_texts, name)
    return found


def _twin(name: str, arguments: tuple[str, ...], gpu: str = "rtx4090", **more: Any) -> Twin:
    workload, variant = _make(name)(**{**options_of(arguments), **more})
    return Twin(
        program=COMMANDS[name].program,
        arguments=arguments,
        workload=workload,
        variant=variant,
        gpu=gpu,
    )


TWINS = {
    f"{name} {size}": _twin(name, arguments)
    for name, command in COMMANDS.items()
    if name not in WITHOUT
    for size, arguments in (("tiny", command.tiny), ("default", command.default))
} | {
    f"pick_batch_by_gpu on {gpu}": _twin("pick_batch_by_gpu", (), gpu, **choice)
    for gpu, choice in _CHOICES.items()
}
