"""A workload and how to train it -> the traces that a prediction needs, made in a child."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from oomph.errors import UsageError
from oomph.records.trace import Trace
from oomph.records.workload import How, Keeps, Variant, Workload
from oomph.tracing.child import in_a_child

if TYPE_CHECKING:
    from oomph.tracing.rehearse import Apply

# Two micro-steps are like any number: the third takes what the second took.
MOST_MICRO_STEPS = 2
# The micro-batches that others follow from. 1 has another structure: torch drops dimensions of
# size 1.
LINE = (2, 3)


def kind_of(capability: tuple[int, int]) -> tuple[int, int]:
    """The GPUs that a trace is the same for: before Ampere, Ampere and Ada, Hopper and later.

    They differ in the attention kernels that they have and in cuBLAS's workspace.
    """
    return max(kind for kind in ((0, 0), (8, 0), (9, 0)) if kind <= capability)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish(How):
    """How to train, as far as the user has said."""

    micro_batch: int | None = None  # None: the whole batch at once
    keeps: Keeps | None = None  # None: as the workload says


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The traces, the way to train that they are for, and the files that decided them.

    One of the very micro-batch; or two that a line goes through, and where they are not that of the
    variant, a third as far away as it: a line goes through any two points.
    """

    variant: Variant
    traces: tuple[Trace, ...]
    files: tuple[str, ...]  # the user's own, that were imported
    batch_size: int  # of the workload


def trace(
    workload: Workload | tuple[Path, str], wish: Wish, capability: tuple[int, int], apply: Apply
) -> Traced:
    """Rehearse in a child: at two micro-batches that any other follows from, and at the wished."""
    return in_a_child(lambda: _traced(workload, wish, capability, apply))


def trace_exactly(
    workload: Workload | tuple[Path, str], wish: Wish, capability: tuple[int, int], apply: Apply
) -> Traced:
    """Rehearse at the very micro-batch, where no line goes through two others."""
    return in_a_child(lambda: _traced(workload, wish, capability, apply, exactly=True))


def _traced(
    workload: Workload | tuple[Path, str],
    wish: Wish,
    capability: tuple[int, int],
    apply: Apply,
    *,
    exactly: bool = False,
) -> Traced:
    before = set(sys.modules)
    made = keeping(workload if isinstance(workload, Workload) else loaded(*workload), wish.keeps)
    from oomph.tracing.rehearse import rehearse
    from oomph.tracing.self_test import prepare_and_test

    variant = variant_for_batch(made.batch_size, wish)
    doubt = prepare_and_test(capability, apply)
    # What is worth offloading depends on its size.
    is_line = variant.micro_batch >= LINE[0] and not (exactly or variant.offload_activations)
    line = LINE if is_line else ()
    sizes = tuple(dict.fromkeys((*line, variant.micro_batch)))
    steps = min(variant.accumulation, MOST_MICRO_STEPS)
    variants = [replace(variant, micro_batch=size, accumulation=steps) for size in sizes]
    return Traced(
        variant=variant,
        traces=tuple(
            replace(rehearse(made, each, capability, apply), doubt=doubt) for each in variants
        ),
        files=users_files(before),
        batch_size=made.batch_size,
    )


def variant_for_batch(batch_size: int, wish: Wish) -> Variant:
    """The effective batch is the contract: micro-batch x accumulation x GPUs is it."""
    micro_batch = wish.micro_batch or max(batch_size // wish.num_gpus, 1)
    at_a_time = micro_batch * wish.num_gpus
    if batch_size < 1 or batch_size % at_a_time:
        on_gpus = f" on each of {wish.num_gpus} GPUs" if wish.num_gpus > 1 else ""
        raise UsageError(
            f"a micro-batch of {micro_batch}{on_gpus} does not divide the batch of {batch_size}",
            because="micro-batch x accumulation x GPUs must be the batch that is trained with",
            attempt=_advice(batch_size, wish.num_gpus),
        )
    how = {field.name: getattr(wish, field.name) for field in fields(How)}
    return Variant(micro_batch=micro_batch, accumulation=batch_size // at_a_time, **how)


def _advice(batch_size: int, num_gpus: int) -> str:
    if batch_size % num_gpus:
        return f"a number of GPUs that divides {batch_size}"
    return f"one of {', '.join(map(str, _divisors(batch_size // num_gpus)))}"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, max(number, 1) + 1) if number % divisor == 0][:20]


def loaded(path: Path, name: str) -> Workload:
    from oomph.tracing.loading import load

    return load(path, name)


def keeping(workload: Workload, keeps: Keeps | None) -> Workload:
    """The workload whose loop keeps this; None: as it says itself."""
    return workload if keeps is None else replace(workload, keeps=keeps)


def users_files(before: set[str]) -> tuple[str, ...]:
    """The files of modules that the workload brought in, libraries excepted."""
    found = [getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - before]
    return tuple(
        sorted(
            file for file in found if file and Path(file).is_file() and not _is_of_a_library(file)
        )
    )


def _is_of_a_library(file: str) -> bool:
    libraries = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
    return file.startswith(libraries) or "site-packages" in file
