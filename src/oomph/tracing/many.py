"""A workload -> as many rehearsals of it as somebody asks for, all in one child.

Importing torch and the user's file takes longer than a rehearsal: a plan needs a dozen of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from oomph.errors import OomphError
from oomph.records.trace import Trace
from oomph.records.workload import Keeps, Variant, Workload
from oomph.tracing.child import explained, in_a_child
from oomph.tracing.traces import MOST_MICRO_STEPS, keeping, loaded, users_files

if TYPE_CHECKING:
    from oomph.records.possible import Possible
    from oomph.tracing.rehearse import Apply

T = TypeVar("T")


class Rehearser:
    """A workload that can be rehearsed in any variant. Lives in the child."""

    def __init__(
        self,
        workload: Workload,
        files: tuple[str, ...],
        capability: tuple[int, int],
        apply: Apply,
        doubt: str | None,
    ) -> None:
        self.workload, self.files, self._doubt = workload, files, doubt
        self._capability, self._apply = capability, apply
        self._first: tuple[Variant, Trace] | None = None

    given: None = None  # nothing is on that the workload does not say
    refused: Mapping[str, str] = {}

    @property
    def batch_size(self) -> int:
        return self.workload.batch_size

    @property
    def clips_gradients(self) -> bool:
        return self.workload.clip_grad_norm is not None

    def look(self, inspect: Callable[[Any, Any], Possible]) -> Possible:
        """What can be put on the model and its optimizer."""
        from oomph.tracing.building import build, without_memory

        model = build(self.workload.model)
        with without_memory():
            optimizer = self.workload.optimizer([p for p in model.parameters() if p.requires_grad])
        return inspect(model, optimizer)

    def trace(self, variant: Variant, *, is_step_alone: bool = False) -> Trace:
        """Two training steps, with at most two micro-steps each: more are like the second.

        Raises UserCodeError for whatever the workload raises.
        """
        from oomph.tracing.rehearse import rehearse

        if self._first is not None and self._first[0] == variant and not is_step_alone:
            return self._first[1]
        steps = min(variant.accumulation, MOST_MICRO_STEPS)
        try:
            trace = rehearse(
                self.workload,
                replace(variant, accumulation=steps),
                self._capability,
                self._apply,
                is_step_alone=is_step_alone,
            )
        except OomphError:
            raise
        except Exception as error:  # whoever asks may go on without this variant
            raise explained(error) from error
        trace = replace(trace, doubt=self._doubt)
        self._first = self._first or (variant, trace)
        return trace


def with_rehearser(
    workload: Workload | tuple[Path, str],
    capability: tuple[int, int],
    apply: Apply,
    ask: Callable[[Rehearser], T],
    *,
    keeps: Keeps | None = None,
) -> T:
    """What `ask` finds out with a rehearser of the workload, in a child."""

    def work() -> T:
        before = set(sys.modules)
        made = workload if isinstance(workload, Workload) else loaded(*workload)
        made = keeping(made, keeps)
        from oomph.tracing.self_test import prepare_and_test

        doubt = prepare_and_test(capability, apply)
        return ask(Rehearser(made, users_files(before), capability, apply, doubt))

    return in_a_child(work)
