"""What a training loop goes through -> its moments, told: batches of a loader, waits, phases."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from oomph.running.batches import BatchSizes, num_batches_in, num_drawn_by

Batch = TypeVar("Batch")

# When the wait for a batch began and ended, its samples, and whether it is of a new step. A loop
# only notes this each time; what it means is worked out every few seconds.
Fetched = tuple[float, float, int | None, bool]
MOST_UNTOLD = 128


class Listener(Protocol):
    """Who is told. None of this raises."""

    is_on: bool
    is_in_steps: bool
    fetched: list[Fetched]
    due: float  # when `catch_up` is wanted at the latest

    def catch_up(self) -> None: ...
    def waited(self, began: float, ended: float, batch: Any = None) -> None: ...
    def end_step(self, *, at: float | None = None) -> None: ...
    def drop_step(self) -> None: ...
    def epoch(self) -> None: ...
    def begin_phase(self, name: str) -> bool | None: ...
    def end_phase(self, *, resumes: bool) -> None: ...


class Steps(Generic[Batch]):
    """The batches of a loader, with their waits and steps told; as long as the loader."""

    def __init__(
        self, run: Listener, loader: Iterable[Batch], accumulate: int, num_samples: int | None
    ) -> None:
        self._run, self._loader = run, loader
        self._accumulate, self._num_samples = accumulate, num_samples

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # as the loader, it may have none

    def __iter__(self) -> Iterator[Batch]:
        run, number, held, iterator = self._run, 0, list[Batch](), iter(self._loader)
        loader = self._loader
        sizes = BatchSizes(num_batches_in(loader), self._num_samples, num_drawn_by(loader))
        # What most steps go through stands in this frame: each further object that they touched
        # would have left the processor's caches since the step before.
        clock, note, size, ask_at = time.monotonic, run.fetched.append, sizes.size, sizes.ask_at
        accumulate, first_of_step, due, full_at = self._accumulate, 0, 0.0, 0
        run.is_in_steps = True
        try:
            while True:
                began = clock()
                try:
                    held.append(next(iterator))
                except StopIteration:
                    break
                ended = clock()
                if number >= ask_at:
                    size, ask_at = sizes.ask(number, held[0])
                is_new = number == first_of_step
                if is_new:
                    first_of_step += accumulate
                note((began, ended, size, is_new))
                if ended >= due or number >= full_at:
                    due, full_at = self._catch_up(), number + MOST_UNTOLD
                number += 1
                yield held.pop()  # so that who deletes the batch in the loop frees its memory
            run.end_step(at=began)
        finally:
            run.is_in_steps = False
            run.drop_step()
        run.epoch()

    def _catch_up(self) -> float:
        """Tell what was noted, and forget what nobody is told; when to do so again."""
        run = self._run
        run.catch_up()
        if not run.is_on:
            run.fetched.clear()
        return run.due


class Waiting:
    """A wait for data, measured."""

    def __init__(self, run: Listener) -> None:
        self._run, self._began = run, 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._run.waited(self._began, time.monotonic())


class Phase:
    """A phase that began when it was made, and ends with its block, if it has one."""

    def __init__(self, run: Listener, name: str) -> None:
        self._run = run
        self._resumes = run.begin_phase(name)

    def end(self) -> None:
        self._run.end_phase(resumes=bool(self._resumes))

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.end()
