"""Script: a training program as the user starts it. Seen: what a rehearsal of it found out."""

from __future__ import annotations

import os  # and not pathlib, which costs more to import than the rest of a start
from dataclasses import dataclass
from typing import Literal

from oomph.records.workload import How

# How a line begins in which a rehearsal tells how far it is, among what the script prints.
PROGRESS = "oomph rehearsal: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """`python PATH ARGUMENTS`, or `python -m MODULE ARGUMENTS`, started in a directory."""

    path: str | None = None
    module: str | None = None
    arguments: tuple[str, ...] = ()
    directory: str = "."


def names_workload(place: str) -> bool:
    """Whether it is `train.py:workload`, and no file that has such a name: that is a script."""
    _, colon, name = place.rpartition(":")
    return bool(colon) and name.isidentifier() and not os.path.isfile(place)  # noqa: PTH113


@dataclass(frozen=True, slots=True, kw_only=True)
class PretendedGpu:
    """The GPU that a script believes to have."""

    name: str
    total_bytes: int  # what CUDA can have of it
    capability: tuple[int, int]
    count: int = 1
    multi_processor_count: int = 108


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """The DataLoader that feeds the model in training."""

    number: int  # counted from 0, in the order in which the script makes them
    batch_size: int | None  # examples that it draws for a batch; None: it does not batch
    num_workers: int
    pin_memory: bool
    place: str  # "train.py:31", where the script makes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Invented:
    """A line of the script that read a value which does not exist, and what it was told."""

    file: str
    line: int
    what: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Where the script does something for the first time, as far as its own lines tell."""

    # "batch": it makes a tensor with an example in each row on the GPU, in every micro-step.
    what: Literal["optimizer", "forward", "backward", "clip", "step", "zero_grad", "batch"]
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a script does, as far as its rehearsal could see. None: that was not seen."""

    model: str | None  # its class; several are joined by " + "
    num_parameters: int
    num_trainable: int
    parameter_bytes: int
    optimizer: str | None
    is_fused: bool | None
    is_foreach: bool | None
    learning_rate: float | None
    micro_batch: int | None  # examples of one batch: `batch_from` names who says so
    accumulation: int | None  # backwards for one step of the optimizer
    num_optimizer_steps: int
    num_optimizers: int
    precision: str
    checkpointing: str  # "none", "by the script", "by oomph"
    uses_compile: bool
    uses_grad_scaler: bool
    clips_gradients: bool
    loader: Loader | None
    longest_sequence: int | None
    num_batches: int  # that the model was given in training
    invented: tuple[Invented, ...]
    approximations: tuple[str, ...]
    has_stepped: bool  # False: no step was completed, and the peak is a lower bound
    num_backwards: int = 1  # of the first whole step, of all optimizers together
    lines: tuple[Line, ...] = ()
    # A dimension is that of the tensors which the model is given, where no loader says the size.
    batch_from: Literal["loader", "first dimension", "second dimension"] | None = None
    num_rows: int | None = None  # that dimension, also where a loader says the size of a batch
    batch_doubt: str | None = None  # why the size of a batch is not known, or only guessed
    kept_bytes: int = 0  # of what the model returned, that the loop keeps until the next batch
    loaders_beside: tuple[Loader, ...] = ()  # others that are read for each batch

    @property
    def is_batch_known(self) -> bool:
        """Whether a batch can be spoken of as so many examples, and be divided."""
        return self.micro_batch is not None and self.batch_doubt is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What is to be other than in the script. None: as it is there."""

    micro_batch: int | None = None
    how: How | None = None
    accumulation: int | None = None  # steps of the script that become micro-steps of one
    first: Seen | None = None  # of the script as it is: tells which loader to change


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """What around a script has decided how it ran, as far as a rehearsal could see it."""

    looked_at: tuple[str, ...]  # files, whether they were there or not
    listed: tuple[str, ...]  # directories whose names were asked for
    imported_from: tuple[str, ...]  # directories in which modules were looked for
    asked_gpu: tuple[str, ...]  # fields of PretendedGpu that the script was told
    unseen: str | None  # why there may be more; None: no reason is known


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptChanges:
    """What to change so that a script trains as planned."""

    diff: str  # over the user's files; "" where nothing is to be changed in them
    arguments: tuple[str, ...]  # all that the script is to be given, changed or not
    by_hand: tuple[str, ...]  # what no edit was found for, a sentence each
