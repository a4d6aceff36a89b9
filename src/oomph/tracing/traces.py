"""A workload and how to train it -> the traces that a prediction needs, made in a child."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from oomph.errors import UsageError
from oomph.records.trace import Trace
from oomph.records.workload import Precision, Variant, Workload
from oomph.tracing.child import in_a_child

# Two micro-steps are like any number: the third takes what the second took.
_MOST_MICRO_STEPS = 2
_AFFINE_FROM = 2  # a micro-batch of 1 has another structure: torch drops dimensions of size 1


def kind_of(capability: tuple[int, int]) -> tuple[int, int]:
    """The GPUs that a trace is the same for: before Ampere, Ampere and Ada, Hopper and later.

    They differ in the attention kernels that they have and in cuBLAS's workspace.
    """
    return max(kind for kind in ((0, 0), (8, 0), (9, 0)) if kind <= capability)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How to train, as far as the user has said."""

    micro_batch: int | None = None  # None: the whole batch at once
    precision: Precision = "fp32"
    checkpoint_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One or two traces, the way to train that they are for, and the files that decided them."""

    variant: Variant
    traces: tuple[Trace, ...]
    files: tuple[str, ...]  # the user's own, that were imported
    batch_size: int  # of the workload


def trace(workload: Workload | tuple[Path, str], wish: Wish, capability: tuple[int, int]) -> Traced:
    """Rehearse in a child: at two micro-batches that any other follows from, or at 1 itself."""
    return in_a_child(lambda: _traced(workload, wish, capability))


def trace_exactly(
    workload: Workload | tuple[Path, str], wish: Wish, capability: tuple[int, int]
) -> Traced:
    """Rehearse at the very micro-batch, where no line goes through two others."""
    return in_a_child(lambda: _traced(workload, wish, capability, exactly=True))


def _traced(
    workload: Workload | tuple[Path, str],
    wish: Wish,
    capability: tuple[int, int],
    *,
    exactly: bool = False,
) -> Traced:
    before = set(sys.modules)
    made = workload if isinstance(workload, Workload) else _loaded(*workload)
    from oomph.tracing.rehearse import prepare, rehearse

    variant = variant_for_batch(made.batch_size, wish)
    prepare(capability)
    is_line = variant.micro_batch >= _AFFINE_FROM and not exactly
    sizes = (_AFFINE_FROM, _AFFINE_FROM + 1) if is_line else (variant.micro_batch,)
    steps = min(variant.accumulation, _MOST_MICRO_STEPS)
    return Traced(
        variant=variant,
        traces=tuple(
            rehearse(made, replace(variant, micro_batch=size, accumulation=steps), capability)
            for size in sizes
        ),
        files=_users_files(before),
        batch_size=made.batch_size,
    )


def variant_for_batch(batch_size: int, wish: Wish) -> Variant:
    """The effective batch is the contract: micro-batch times accumulation is it."""
    micro_batch = wish.micro_batch or batch_size
    if batch_size < 1 or batch_size % micro_batch:
        raise UsageError(
            f"a micro-batch of {micro_batch} does not divide the batch of {batch_size}",
            because="micro-batch times accumulation must be the batch that is trained with",
            attempt=f"one of {', '.join(map(str, _divisors(batch_size)))}",
        )
    return Variant(
        micro_batch=micro_batch,
        accumulation=batch_size // micro_batch,
        precision=wish.precision,
        checkpoint_every=wish.checkpoint_every,
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, max(number, 1) + 1) if number % divisor == 0][:20]


def _loaded(path: Path, name: str) -> Workload:
    from oomph.tracing.loading import load

    return load(path, name)


def _users_files(before: set[str]) -> tuple[str, ...]:
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
