"""Script: a training program as the user starts it. Seen: what its rehearsal found out."""

from __future__ import annotations

import os  # not pathlib, whose import takes longer than the rest of the start
import shlex
from dataclasses import dataclass
from typing import Literal

from oomph.errors import UsageError
from oomph.records.generation import DEFAULT_NUM_SMS
from oomph.records.workload import Variant

# The start of a rehearsal's progress line, among what the script prints.
PROGRESS = "oomph rehearsal: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """`python PATH ARGUMENTS`, or `python -m MODULE ARGUMENTS`, started in a directory."""

    path: str | None = None
    module: str | None = None
    arguments: tuple[str, ...] = ()
    directory: str = "."
    # Files that read otherwise than on the disk, with their text: how a patch is rehearsed.
    edited: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        refuse_notebook(self.path or "")


def refuse_notebook(path: str) -> None:
    """Raise UsageError for a notebook, which is not a Python file."""
    if not path.endswith(".ipynb"):
        return
    script = path.removesuffix(".ipynb")
    raise UsageError(
        f"{path:.200} is a notebook, not a Python script",
        because="its code is in cells, which Python cannot run as a file",
        attempt="in a cell: define an oomph.Workload and call oomph.plan(workload, gpu=...);"
        f" or: jupyter nbconvert --to script {shlex.quote(path)}, then oomph plan {script}.py",
    )


def names_workload(place: str) -> bool:
    """Return whether it is `train.py:workload`, and not a script with such a file name."""
    _, colon, name = place.rpartition(":")
    return bool(colon) and name.isidentifier() and not os.path.isfile(place)  # noqa: PTH113


@dataclass(frozen=True, slots=True, kw_only=True)
class PretendedGpu:
    """The GPU that the script sees."""

    name: str
    total_bytes: int  # usable by CUDA
    capability: tuple[int, int]
    count: int = 1
    multi_processor_count: int = DEFAULT_NUM_SMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """The DataLoader that feeds the model in training."""

    number: int  # counted from 0, in the order of creation
    batch_size: int | None  # examples per batch; None: it does not batch
    num_workers: int
    pin_memory: bool
    place: str  # "train.py:31", where it is created


@dataclass(frozen=True, slots=True, kw_only=True)
class Invented:
    """A line of the script that read a value which does not exist, and the value it got."""

    file: str
    line: int
    what: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Where the script does something for the first time, as far as its own lines show."""

    # "batch": it makes a GPU tensor with one example per row, in every micro-step.
    what: Literal["optimizer", "forward", "backward", "clip", "step", "zero_grad", "batch"]
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a script does, as far as its rehearsal could see. None: not seen."""

    model: str | None  # its class; several are joined by " + "
    num_parameters: int
    num_trainable: int
    parameter_bytes: int
    optimizer: str | None
    is_fused: bool | None
    is_foreach: bool | None
    learning_rate: float | None
    micro_batch: int | None  # examples per batch; `batch_from` is the source
    accumulation: int | None  # backward passes per optimizer step
    num_optimizer_steps: int
    num_optimizers: int
    precision: str
    checkpointing: str  # "none", "by the script", "by oomph"
    uses_compile: bool
    uses_grad_scaler: bool
    clips_gradients: bool
    loader: Loader | None
    longest_sequence: int | None
    num_batches: int  # given to the model in training
    invented: tuple[Invented, ...]
    approximations: tuple[str, ...]
    has_stepped: bool  # False: no step was completed, so the peak is a lower bound
    num_backwards: int = 1  # in the first whole step, all optimizers together
    lines: tuple[Line, ...] = ()
    # If no loader gives the size, it is a dimension of the tensors given to the model.
    batch_from: Literal["loader", "first dimension", "second dimension"] | None = None
    num_rows: int | None = None  # that dimension, even if a loader gives the batch size
    batch_doubt: str | None = None  # why the batch size is unknown or only guessed
    kept_bytes: int = 0  # outputs that the loop keeps until the next batch
    loaders_beside: tuple[Loader, ...] = ()  # other loaders read for each batch
    # What the loss is divided by, last of all, before its first backward: N in `loss / N`.
    loss_divisor: float = 1.0
    expandable_segments: bool = False  # set in the environment, by the script or around it

    @property
    def is_batch_known(self) -> bool:
        """Return whether the batch size is known, so that the batch can be split."""
        return self.micro_batch is not None and self.batch_doubt is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What to change from the script. None: as in the script."""

    micro_batch: int | None = None
    how: Variant | None = None
    accumulation: int | None = None  # steps of the script that become micro-steps of one step
    first: Seen | None = None  # of the unchanged script; shows which loader to change


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """The surroundings that decided how a script ran, as far as a rehearsal could see."""

    looked_at: tuple[str, ...]  # files, existing or not
    listed: tuple[str, ...]  # directories that were listed
    imported_from: tuple[str, ...]  # directories searched for modules
    asked_gpu: tuple[str, ...]  # fields of PretendedGpu that the script read
    unseen: str | None  # why there may be more; None: no known reason


# Which part of a plan a change is for: several ways may be tried for one.
Aspect = Literal["split", "precision", "checkpointing", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patched:
    """A rehearsal of the script with its changes, beside what was planned."""

    fits: Literal["yes", "no", "uncertain"] | None  # None: it could not be rehearsed
    device_bytes: int | None
    planned_bytes: int
    differences: tuple[str, ...]  # of what it does to what was planned, a sentence each
    error: str | None = None  # why it could not be rehearsed

    @property
    def is_as_planned(self) -> bool:
        """Return whether it trains as planned and needs no more memory than planned."""
        return self.device_bytes is not None and not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptChanges:
    """What to change so that a script trains as planned."""

    diff: str  # of the user's files; "" if they need no change
    arguments: tuple[str, ...]  # all arguments for the script, changed or not
    by_hand: tuple[str, ...]  # changes to make by hand, a sentence each
    left: tuple[Aspect, ...] = ()  # what of the plan an edit was tried for, in vain
    edited: tuple[tuple[str, str], ...] = ()  # the changed files, whole, by absolute path
    tried: tuple[str, ...] = ()  # arguments that were found by trying, and what they showed
    patched: Patched | None = None  # if the changed script was rehearsed

    @property
    def is_whole(self) -> bool:
        """Return whether the diff and the arguments are all that the plan needs."""
        return not self.by_hand

    def changes_anything(self, arguments: tuple[str, ...]) -> bool:
        """Return whether the script, or its arguments, become others than these."""
        return bool(self.diff) or self.arguments != arguments
