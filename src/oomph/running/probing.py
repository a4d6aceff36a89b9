"""What the processes of a run tell -> Progress.

Steps and epochs are what the script itself tells, through step_log.py; where it tells nothing,
nobody can count them, and that is said.
"""

from __future__ import annotations

import re
from pathlib import Path

from oomph.records.probe import Progress
from oomph.records.run import StepSpan
from oomph.running.step_log import EPOCH_ENDED
from oomph.running.step_reader import told_steps

_EPOCH_ENDED = re.compile(EPOCH_ENDED.format(r"\d{1,9}"))


def read_progress(files: list[Path]) -> Progress:
    """What the files of a run's processes tell so far."""
    each = [_progress_of(path) for path in files]
    return Progress(
        max((one.num_steps for one in each), default=0),
        max((one.num_epochs for one in each), default=0),
        any(one.is_told for one in each),
    )


def _progress_of(path: Path) -> Progress:
    num_steps, epochs = 0, set[str]()
    for record in told_steps(path):
        if isinstance(record, StepSpan):
            num_steps += record.num_steps
        elif record.kind == "phase" and _EPOCH_ENDED.fullmatch(record.text):
            epochs.add(record.text)
    return Progress(num_steps, len(epochs), bool(num_steps or epochs))
