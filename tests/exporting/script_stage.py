"""A stage for training loops without torch: which examples each step weighs, exactly.

A loss is the mean over its examples, so its gradient gives each of them a share; a step takes the
shares that backward has added up. Two loops train alike if their steps do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from planning.plans import plan_of

from oomph.exporting.rewriting.diff import script_changes
from oomph.records.script import Loader, ScriptChanges, Seen


def seen_of(**settings: Any) -> Seen:
    """32 examples at a time, in fp32, by AdamW, with these settings instead."""
    given: dict[str, Any] = {
        "model": "Net",
        "num_parameters": 10,
        "num_trainable": 10,
        "parameter_bytes": 40,
        "optimizer": "AdamW",
        "is_fused": None,
        "is_foreach": None,
        "learning_rate": 1e-3,
        "micro_batch": 32,
        "accumulation": 1,
        "num_optimizer_steps": 2,
        "num_optimizers": 1,
        "precision": "fp32",
        "checkpointing": "none",
        "uses_compile": False,
        "uses_grad_scaler": False,
        "clips_gradients": False,
        "loader": None,
        "longest_sequence": None,
        "num_batches": 2,
        "invented": (),
        "approximations": (),
        "has_stepped": True,
        **settings,
    }
    return Seen(**given)


def loader_of(batch_size: int, place: str = "a line that is not the script's own") -> Loader:
    return Loader(number=0, batch_size=batch_size, num_workers=0, pin_memory=False, place=place)


def split(
    text: str | dict[str, str],
    arguments: Sequence[str] = (),
    seen: Seen | None = None,
    **plan: Any,
) -> ScriptChanges:
    """32 examples of one script (or several files), as 8 x 4 unless the plan says otherwise."""
    settings: dict[str, Any] = {"micro_batch": 8, "accumulation": 4, **plan}
    sources = {"train.py": text} if isinstance(text, str) else text
    return script_changes(sources, arguments, seen or seen_of(), plan_of(**settings))


def applied(text: str, diff: str) -> str:
    """A text with a unified diff of one file applied, which must fit it to the letter."""
    lines, result, at = text.splitlines(keepends=True), [], 0
    changes = diff.splitlines(keepends=True)[2:]
    for number, change in enumerate(changes):
        kind, rest = change[0], change[1:]
        if number + 1 < len(changes) and changes[number + 1].startswith("\\"):
            rest = rest.rstrip("\n")
        if kind == "@":
            start = int(change.split()[1].removeprefix("-").partition(",")[0])
            result += lines[at : start - 1]
            at = start - 1
        elif kind in " -":
            assert lines[at] == rest, (lines[at], rest)
            at += 1
        if kind in " +":
            result.append(rest)
    return "".join([*result, *lines[at:]])


class Loss:
    """The mean over some examples, times something."""

    def __init__(self, shares: dict[int, Fraction], stage: Stage) -> None:
        self.shares, self.stage = shares, stage

    def __truediv__(self, number: int) -> Loss:
        return Loss({one: share / number for one, share in self.shares.items()}, self.stage)

    def backward(self) -> None:
        for one, share in self.shares.items():
            self.stage.gradient[one] += share

    def item(self) -> float:
        return 1.0


class Stage:
    """What a script finds among its globals."""

    def __init__(self) -> None:
        self.gradient: dict[int, Fraction] = defaultdict(Fraction)
        self.steps: list[dict[int, Fraction]] = []
        self.told: list[str] = []

    def model(self, batch: Sequence[int]) -> Loss:
        return Loss({one: Fraction(1, len(batch)) for one in batch}, self)

    def scale(self, loss: Loss) -> Loss:
        return loss

    def step(self, _: object = None) -> None:
        self.steps.append({one: share for one, share in self.gradient.items() if share})

    def zero_grad(self, *, set_to_none: bool = True) -> None:  # noqa: ARG002
        self.gradient.clear()

    def tell(self, what: str) -> Any:
        return lambda *_, **__: self.told.append(what)

    def names(self, argv: Sequence[str] = ()) -> dict[str, Any]:
        stage = self

        class Scheduler:
            step = staticmethod(stage.tell("schedule"))

        class Scaler:
            scale = staticmethod(stage.scale)
            step = staticmethod(stage.step)
            update = staticmethod(stage.tell("update"))
            unscale_ = staticmethod(stage.tell("unscale"))

        return {
            "__name__": "__main__",
            "DataLoader": DataLoader,
            "model": self.model,
            "optimizer": self,
            "scheduler": Scheduler,
            "scaler": Scaler,
            "clip_grad_norm_": self.tell("clip"),
            "print": lambda *_, **__: None,
            "tqdm": lambda iterated, **_: iterated,
            "argv": list(argv),
        }


class DataLoader:
    def __init__(
        self, dataset: range, batch_size: int = 1, *, shuffle: bool = False, drop_last: bool = False
    ) -> None:
        del shuffle
        chunks = [dataset[at : at + batch_size] for at in range(0, len(dataset), batch_size)]
        self.chunks = [chunk for chunk in chunks if len(chunk) == batch_size or not drop_last]

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[range]:
        return iter(self.chunks)


def trained(text: str, argv: Sequence[str] = ()) -> Stage:
    """The stage after a script has run on it."""
    stage = Stage()
    exec(compile(text, "train.py", "exec"), stage.names(argv))  # noqa: S102 # our own scripts
    return stage
