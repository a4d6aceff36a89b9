"""The example scripts and the same trainings as Workloads: TWINS, by script and size.

A prediction for a script, rehearsed as it is, is to be that for its twin. What a script's loop
keeps alive from step to step, its twin keeps, too.

dcgan.py has no twin: a Workload has one optimizer.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from examples import twins_of_frameworks, twins_of_images, twins_of_texts
from examples.commands import COMMANDS
from examples.loops import Twin
from oomph.records.workload import Variant, Workload

Make = Callable[..., tuple[Workload, Variant]]

WITHOUT = {"dcgan"}

# What pick_batch_by_gpu.py chooses, by GPU.
_CHOICES: dict[str, dict[str, Any]] = {
    "t4": {"batch_size": 8, "precision": "fp16"},
    "v100-32gb": {"batch_size": 32, "precision": "fp16"},
    "rtx4090": {"batch_size": 16, "precision": "bf16"},
    "a100-80gb": {"batch_size": 64, "precision": "bf16"},
}


def options_of(arguments: tuple[str, ...]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `name=value` and flags, as keyword arguments."""
    words: list[str] = []
    for argument in arguments:
        name, is_pair, value = argument.partition("=")
        words += [f"--{name.removeprefix('--')}", value] if is_pair else [argument]
    return {
        word.removeprefix("--").replace("-", "_"): following.startswith("--") or _value(following)
        for word, following in zip_longest(words, words[1:], fillvalue="--")
        if word.startswith("--")
    }


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _make(name: str) -> Make:
    homes = (twins_of_images, twins_of_texts, twins_of_frameworks)
    found: Make = next(vars(home)[name] for home in homes if name in vars(home))
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
