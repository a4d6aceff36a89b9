"""A workload and a training variant -> the traces for a prediction, recorded in a child."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from oomph.errors import OomphError, UsageError
from oomph.records.script import refuse_notebook
from oomph.records.trace import Trace
from oomph.records.workload import Keeps, Possible, Variant, Workload
from oomph.rehearsing.child import explained, in_a_child
from oomph.rehearsing.fault import is_installed

T = TypeVar("T")

# Two micro-steps stand for any number: the third allocates what the second did.
MOST_MICRO_STEPS = 2
# Others are extrapolated from these micro-batches. 1 has another structure: torch drops dimensions
# of size 1.
LINE = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to rehearse: the tricks, and the part of the batch split that the user has set."""

    tricks: Variant  # its micro-batch is ignored
    micro_batch: int | None = None  # None: the whole batch at once
    keeps: Keeps | None = None  # None: as the workload says


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The traces, the variant they are for, and the files they depend on.

    Either one trace at exactly the micro-batch, or two that define a line. If neither of the two is
    at the variant's micro-batch, a third one is, to check the line.
    """

    variant: Variant
    traces: tuple[Trace, ...]
    files: tuple[str, ...]  # the user's own imported files
    batch_size: int  # the workload's


def trace(
    workload: Workload | tuple[Path, str],
    request: Request,
    capability: tuple[int, int],
    *,
    is_linear: bool = True,
) -> Traced:
    """Rehearse in a child at two micro-batches that define a line, and at the requested one.

    If memory is not linear in the micro-batch, rehearse at exactly the requested one.
    """

    ask = partial(_traced, request=request, is_linear=is_linear)
    return with_rehearser(workload, capability, ask, keeps=request.keeps)


def _traced(rehearser: Rehearser, *, request: Request, is_linear: bool) -> Traced:
    variant = variant_for_batch(rehearser.batch_size, request)
    # The size decides what is worth offloading, so memory is not linear in the micro-batch.
    is_line = is_linear and variant.micro_batch >= LINE[0] and not variant.offload_activations
    sizes = dict.fromkeys((*(LINE if is_line else ()), variant.micro_batch))
    traces = tuple(rehearser.trace(replace(variant, micro_batch=size)) for size in sizes)
    return Traced(
        variant=variant, traces=traces, files=rehearser.files, batch_size=rehearser.batch_size
    )


def variant_for_batch(batch_size: int, request: Request) -> Variant:
    """Split the batch into micro-batch x accumulation steps x GPUs. Raises UsageError."""
    num_gpus = request.tricks.num_data_gpus
    micro_batch = request.micro_batch or max(batch_size // num_gpus, 1)
    at_a_time = micro_batch * num_gpus
    if batch_size < 1 or batch_size % at_a_time:
        on_gpus = f" on each of {num_gpus} GPUs" if num_gpus > 1 else ""
        raise UsageError(
            f"a micro-batch of {micro_batch}{on_gpus} does not divide the batch of {batch_size}",
            because="micro-batch x accumulation x GPUs must be the batch that is trained with",
            attempt=_advice(batch_size, num_gpus),
        )
    return replace(request.tricks, micro_batch=micro_batch, accumulation=batch_size // at_a_time)


def _advice(batch_size: int, num_gpus: int) -> str:
    if batch_size % num_gpus:
        return f"a number of GPUs that divides {batch_size}"
    share = batch_size // num_gpus
    divisors = [divisor for divisor in range(1, max(share, 1) + 1) if share % divisor == 0][:20]
    return f"one of {', '.join(map(str, divisors))}"


def users_files(before: set[str]) -> tuple[str, ...]:
    """Return the files of modules that the workload imported, without libraries."""
    files = [getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - before]
    return tuple(sorted(f for f in files if f and not is_installed(f) and Path(f).is_file()))


# ---- "train.py:workload" -> the Workload of that name in that file -------------------------------


def split(place: str) -> tuple[Path, str]:
    """Return the file and the name in it. Raises UsageError if `place` is not of that form."""
    file, colon, name = place.rpartition(":")
    path = Path(file)
    refuse_notebook(file)
    if not colon or not name.isidentifier():
        raise UsageError(
            f"{place!r:.200} does not say where the workload is",
            because="a workload is named by its file and its name in that file",
            attempt="train.py:workload",
        )
    check_script(path, file)
    return path, name


def check_script(path: Path, called: str) -> None:
    """Raise UsageError for a file that is not there, with the name that was probably meant."""
    if path.is_file():
        return
    import difflib

    here = path.parent
    names = sorted(one.name for one in here.glob("*.py")) if here.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    because = f"the scripts in {here} are {', '.join(names[:6])}" if names else None
    if path.is_dir():
        because = "it is a directory"
    elif not here.is_dir():
        because = f"there is no directory {here}"
    raise UsageError(
        f"there is no file {called!r:.200}",
        because=because or f"there is no script in {here.resolve()}",
        attempt=str(Path(called).with_name(near[0])) if near else "the path of your script",
    )


def load(path: Path, name: str) -> Workload:
    """Import the file as a module, not as a program, and return its workload."""
    sys.path.insert(0, str(path.parent.resolve()))
    sys.argv = [str(path)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file", attempt="a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        names = [one for one in vars(module) if not one.startswith("_")][:12]
        workloads = [one for one, value in vars(module).items() if isinstance(value, Workload)]
        raise UsageError(
            f"{path} has no {name!r}",
            because=f"the names in it are {', '.join(names) or 'none'}",
            attempt=f"{path}:{workloads[0] if workloads else 'workload'}",
        )
    return as_workload(getattr(module, name), f"{path}:{name}")


def as_workload(found: Any, called: str) -> Workload:
    """Return a Workload, or call a function that returns one."""
    made = found() if callable(found) and not isinstance(found, Workload) else found
    if not isinstance(made, Workload):
        raise UsageError(
            f"{called} is not a Workload",
            because=f"it is {made!r:.80}",
            attempt="workload = oomph.Workload(model=..., batch=..., loss=..., optimizer=...,"
            " batch_size=...)",
        )
    return made


# ---- any number of rehearsals of one workload ----------------------------------------------------


class Rehearser:
    """Rehearses a workload in any variant. Lives in the child.

    Importing torch and the user's file takes longer than a rehearsal, and a plan needs a dozen.
    """

    def __init__(
        self,
        workload: Workload,
        capability: tuple[int, int],
        doubt: str | None,
        modules_before: set[str],
    ) -> None:
        self.workload = workload
        self._capability, self._doubt, self._modules_before = capability, doubt, modules_before
        self._first: tuple[Variant, Trace] | None = None

    given: None = None  # no tricks are on beyond what the workload says
    refused: Mapping[str, str] = {}

    @property
    def files(self) -> tuple[str, ...]:
        """Return the user's own files imported so far."""
        return users_files(self._modules_before)

    @property
    def batch_size(self) -> int:
        return self.workload.batch_size

    @property
    def clips_gradients(self) -> bool:
        return self.workload.clip_grad_norm is not None

    def look(self) -> Possible:
        """Return which tricks apply to the model and its optimizer."""
        from oomph.rehearsing.building import build, without_memory
        from oomph.tricks.apply import possible

        model = build(self.workload.model)
        with without_memory():
            optimizer = self.workload.optimizer([p for p in model.parameters() if p.requires_grad])
        return possible(model, optimizer)

    def trace(self, variant: Variant, *, is_step_alone: bool = False) -> Trace:
        """Record two training steps of at most two micro-steps: later ones repeat the second.

        Raises UserCodeError for whatever the workload raises.
        """
        from oomph.rehearsing.rehearse import rehearse

        if self._first is not None and self._first[0] == variant and not is_step_alone:
            return self._first[1]
        steps = min(variant.accumulation, MOST_MICRO_STEPS)
        try:
            trace = rehearse(
                self.workload,
                replace(variant, accumulation=steps),
                self._capability,
                is_step_alone=is_step_alone,
            )
        except OomphError:
            raise
        except Exception as error:  # the caller may go on without this variant
            raise explained(error) from error
        trace = replace(trace, doubt=self._doubt)
        self._first = self._first or (variant, trace)
        return trace


def with_rehearser(
    workload: Workload | tuple[Path, str],
    capability: tuple[int, int],
    ask: Callable[[Rehearser], T],
    *,
    keeps: Keeps | None = None,
) -> T:
    """Call `ask` with a rehearser of the workload in a child, and return its result."""
    return in_a_child(partial(_ask, workload, capability, ask, keeps))


def _ask(
    workload: Workload | tuple[Path, str],
    capability: tuple[int, int],
    ask: Callable[[Rehearser], T],
    keeps: Keeps | None,
) -> T:
    """Load the workload, prepare this process, and ask. Runs in the child."""
    before = set(sys.modules)
    made = workload if isinstance(workload, Workload) else load(*workload)
    made = replace(made, keeps=keeps or made.keeps)
    from oomph.rehearsing.self_test import prepare_and_test

    return ask(Rehearser(made, capability, prepare_and_test(capability), before))
