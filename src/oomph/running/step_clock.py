"""What a training loop tells of its moments -> steps: how long each took, and waited for data.

A step is open from its first wait for data to its end. What lies between is the step's, unless
the clock is paused meanwhile, as for an evaluation. Times are of time.monotonic().
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# When a step ended, how long it took, of that waiting for data (None: nobody measured it), and
# with how many samples. Neither object nor call is made that a step can do without.
Step = tuple[float, float, float | None, int | None]


class StepClock:
    """Holds what has happened of the step that is under way."""

    __slots__ = ("_data_wait_s", "_elapsed_s", "_num_samples", "_open_at")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """What was under way was no step."""
        self._open_at: float | None = None
        self._elapsed_s = 0.0
        self._data_wait_s: float | None = None
        self._num_samples: int | None = None

    @property
    def is_open(self) -> bool:
        return self._open_at is not None

    def resume(self, now: float) -> None:
        """The step begins, or goes on."""
        if self._open_at is None:
            self._open_at = now

    def pause(self, now: float) -> None:
        """What follows is not of the step."""
        if self._open_at is not None:
            self._elapsed_s += now - self._open_at
            self._open_at = None

    def waited(self, began: float, ended: float, num_samples: int | None = None) -> None:
        """For data of this step: so many samples, if anybody knows."""
        if self._open_at is None:
            self._open_at = began
        self._data_wait_s = (self._data_wait_s or 0.0) + ended - began
        if num_samples is not None:
            self._num_samples = (self._num_samples or 0) + num_samples

    def count(self, num_samples: int | None) -> None:
        """So many are of this step, whose wait was told without them."""
        if num_samples is not None:
            self._num_samples = (self._num_samples or 0) + num_samples

    def all_told(self) -> None:
        """Each wait was told: where there was none, the batches were fetched in an earlier step."""
        if self._data_wait_s is None:
            self._data_wait_s = 0.0
            self._num_samples = self._num_samples or 0

    def end(self, now: float, num_samples: int | None = None) -> Step | None:
        """The step has ended; None if nobody saw it begin."""
        if self._open_at is not None:
            self._elapsed_s += now - self._open_at
        elif not self._elapsed_s:
            return None
        counted = self._num_samples if num_samples is None else num_samples
        step = (now, self._elapsed_s, self._data_wait_s, counted)
        self._open_at = self._data_wait_s = self._num_samples = None
        self._elapsed_s = 0.0
        return step


@dataclass(slots=True, eq=False)
class Tally:
    """Steps, summed up."""

    num_steps: int = 0
    duration_s: float = 0.0
    num_measured: int = 0  # steps whose wait is known
    waited_s: float = 0.0
    num_counted: int = 0  # steps whose samples are known
    samples: int = 0

    def add(self, steps: Sequence[Step]) -> None:
        for _, duration_s, data_wait_s, num_samples in steps:
            self.num_steps += 1
            self.duration_s += duration_s
            if data_wait_s is not None:
                self.num_measured += 1
                self.waited_s += data_wait_s
            if num_samples is not None:
                self.num_counted += 1
                self.samples += num_samples

    def copy(self) -> Tally:
        return replace(self)

    def since(self, before: Tally) -> Tally:
        """What came after an earlier copy of this one."""
        return Tally(
            self.num_steps - before.num_steps,
            self.duration_s - before.duration_s,
            self.num_measured - before.num_measured,
            self.waited_s - before.waited_s,
            self.num_counted - before.num_counted,
            self.samples - before.samples,
        )

    @property
    def step_s(self) -> float | None:
        return self.duration_s / self.num_steps if self.num_steps else None

    @property
    def data_wait_s(self) -> float | None:
        """None where a part is unknown: the sum would be too small."""
        return self.waited_s if self.num_measured == self.num_steps else None

    @property
    def num_samples(self) -> int | None:
        return self.samples if self.num_counted == self.num_steps else None

    @property
    def data_wait_ratio(self) -> float | None:
        waited_s = self.data_wait_s
        if waited_s is None or self.duration_s <= 0:
            return None
        return min(waited_s / self.duration_s, 1.0)

    @property
    def samples_per_s(self) -> float | None:
        num_samples = self.num_samples
        if num_samples is None or self.duration_s <= 0:
            return None
        return num_samples / self.duration_s
