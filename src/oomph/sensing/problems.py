"""Refusals -> one sentence: what could not be read of a GPU, and why."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from oomph.sensing.nvml import Refusal


@dataclass(slots=True)
class Problems:
    """Gathers refusals, so that one cause is told once for all that it hides."""

    _labels_by_cause: dict[str, list[str]] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)

    def add(self, label: str, refusal: Refusal) -> None:
        self._labels_by_cause.setdefault(refusal.text, []).append(label)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def value(self, label: str, answer: Any, *, among: Container[Any] | None = None) -> Any:
        """What was answered; None if it was refused, or is not `among` what can be.

        A GPU that lacks a sensor is unknown there, which is no problem to report.
        """
        if isinstance(answer, Refusal):
            if not answer.is_unsupported:
                self.add(label, answer)
            return None
        if among is not None and answer not in among:
            self.note(f"{label}: the driver's figure makes no sense ({answer})")
            return None
        return answer

    def told(self) -> str | None:
        causes = [
            f"{', '.join(labels)}: {cause}" for cause, labels in self._labels_by_cause.items()
        ]
        return "; ".join([*causes, *self._notes]) or None
