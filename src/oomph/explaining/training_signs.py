"""What a script told of its own training -> findings: is it stable, and is the batch well used?"""

from __future__ import annotations

from collections.abc import Iterator

from oomph.records.report import Finding
from oomph.records.run import Run
from oomph.records.stability import ADVICE
from oomph.units import format_duration


def training_signs(run: Run) -> Iterator[Finding]:
    """Return what was told; each rank tells its own, and the first of each kind counts."""
    events = [event for event in run.events if event.kind == "unstable" and _parts(event.text)[0]]
    told = {event.text.partition(" (")[0]: event for event in reversed(events)}
    if told:
        first, *others = sorted(told.values(), key=lambda event: event.at_s)
        sentence, advice = _parts(first.text)
        parts = [_parts(event.text) for event in others]
        yield Finding(
            kind="unstable",
            sentence=sentence,
            evidence=(
                f"noticed after {format_duration(first.at_s)}",
                *(f"also: {also}" for also, _ in parts),
            ),
            confidence="inferred",
            advice=tuple(dict.fromkeys(each for each in (advice, *(a for _, a in parts)) if each)),
        )
    scales = [event.text for event in run.events if event.kind == "noise-scale" and event.text]
    if scales:
        yield Finding(
            kind="noise-scale",
            sentence=scales[-1],
            evidence=("from the gradients of pieces of batches, to a factor of 2 to 3",),
            confidence="inferred",
            advice=("oomph.scale_learning_rate(optimizer, from_batch, to_batch)",),
        )


def _parts(text: str) -> tuple[str, str]:
    """Return the sentence and the advice of a warning in words."""
    sentence, _, advice = text.partition(ADVICE)
    return sentence, advice
