"""Random jobs, each with its plan, and whether a size of pieces fits: tried on emulated GPUs."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.job_models import Trained, drawn
from oomph.predicting.allocator_settings import LARGE_SEGMENT_BYTES
from oomph.units import GIB, MIB

if TYPE_CHECKING:
    from pretending.requests_of_card import Requests

NUM_BUDGETS = 4  # for each model
_AMPLE_BYTES = 8 * GIB
# Of a whole batch: more takes too long on a CPU.
_LEAST_BYTES, _MOST_BYTES = 192 * MIB, 768 * MIB
# Torch takes its memory in segments. A GPU has hundreds of them.
_LEAST_BUDGET_BYTES = 8 * LARGE_SEGMENT_BYTES


@dataclass(frozen=True, eq=False)
class Job:
    trained: Trained
    budget_bytes: int
    order: tuple[int, ...]  # the length of each batch of the loader
    plan: Any
    trials: Trials

    @property
    def batch_size(self) -> int:
        return self.trained.batch_size

    def length_at(self, sample: int) -> int:
        return self.order[min(sample // self.batch_size, len(self.order) - 1)]

    @functools.cache  # noqa: B019 - a job lives as long as the benchmark
    def largest(self, length: int) -> int:
        """The largest divisor of the batch that fits; 0 if none does."""
        from oomph.training.sizes import divisors

        sizes = divisors(self.batch_size)
        low, high = 0, len(sizes)
        while low < high:
            middle = (low + high) // 2
            is_split = sizes[middle] < self.batch_size
            if self.trials.fits(self.budget_bytes, sizes[middle], length, is_split=is_split):
                low = middle + 1
            else:
                high = middle
        return sizes[low - 1] if low else 0


@dataclass
class Trials:
    """Steps of a model on an emulated GPU, and what of them fits into less memory."""

    trained: Trained
    asked: dict[Any, Asked] = field(default_factory=dict)
    known: dict[Any, bool] = field(default_factory=dict)

    def fits(self, budget_bytes: int, size: int, length: int, *, is_split: bool) -> bool:
        key = budget_bytes, size, length, is_split
        if key not in self.known:
            self.known[key] = self._asked(size, length, is_split).fits_into(budget_bytes)
        return self.known[key]

    def peak_bytes(self, size: int, length: int) -> int:
        """Of pieces of a size."""
        return self._asked(size, length, True).peak_bytes

    def _asked(self, size: int, length: int, is_split: bool) -> Asked:
        """Of two steps, of two pieces each where they are split."""
        key = size, length, is_split
        if key not in self.asked:
            self.asked[key] = _asked_by(
                lambda: _train_by_hand(self.trained, size, length, 1 + is_split)
            )
        return self.asked[key]


@dataclass(frozen=True)
class Asked:
    """What an emulated GPU was asked for: one with less memory would be asked the same."""

    requests: Requests
    peak_bytes: int

    def fits_into(self, budget_bytes: int) -> bool:
        from oomph.predicting.allocator import CachingAllocator
        from oomph.predicting.allocator_settings import AllocatorSettings
        from oomph.predicting.replay import replay
        from oomph.predicting.segments import SimulatedDevice

        allocator = CachingAllocator(AllocatorSettings(), SimulatedDevice(budget_bytes))
        return replay(allocator, self.requests.sizes, self.requests.events).ran_out_at is None


def _asked_by(train: Callable[[], None]) -> Asked:
    from pretending.requests_of_card import Requests

    import oomph

    with oomph.emulated_gpu(_AMPLE_BYTES) as gpu:
        requests = Requests(gpu)
        train()
        return Asked(requests, gpu.peak_allocated_bytes)


def _train_by_hand(trained: Trained, size: int, length: int, num_pieces: int) -> None:
    model = trained.model().cuda()
    optimizer = trained.optimizer(model.parameters())
    for _ in range(2):
        for _ in range(num_pieces):
            piece = {name: each.cuda() for name, each in trained.batch(size, length).items()}
            (trained.loss(model, piece) / num_pieces).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- drawing jobs ----------------------------------------------------------------------------


def jobs(num: int, seed: int) -> list[Job]:
    chance = random.Random(seed)  # noqa: S311
    made: list[Job] = []
    while len(made) < num:
        made += _jobs_of(drawn(chance), chance)
    return made[:num]


def _jobs_of(trained: Trained, chance: random.Random) -> list[Job]:
    trials, longest = Trials(trained), trained.lengths[-1]
    two, four = (trials.peak_bytes(n, longest) for n in (2, 4))
    each = (four - two) / 2
    if not _LEAST_BYTES <= each * trained.batch_size <= _MOST_BYTES:
        return []
    found = []
    for _ in range(NUM_BUDGETS):
        num = trained.batch_size ** chance.uniform(0.4, 1.05)  # examples that should just fit
        budget_bytes = int((two + each * (num - 2)) * 1.03) + 2 * MIB
        order = _order(trained, chance)
        if budget_bytes < _LEAST_BUDGET_BYTES:
            continue
        plan = _plan(trained, budget_bytes)
        job = Job(trained, budget_bytes, order, plan, trials)
        if plan is not None and job.largest(longest):
            found.append(job)
    return found


def _order(trained: Trained, chance: random.Random) -> tuple[int, ...]:
    if chance.random() < 0.5:
        return trained.lengths[-1:] * 3
    order = list(trained.lengths) * 3
    chance.shuffle(order)
    return tuple(order)


def _plan(trained: Trained, budget_bytes: int) -> Any:
    """Of accumulation alone: the others' searches have nothing else."""
    import oomph
    from oomph.verbs.planned import trick_names

    forbid = [name for name in trick_names() if name != "accumulation"]
    return oomph.plan(
        trained.workload(), gpu="emulated", gpu_memory=budget_bytes, forbid=forbid
    ).best
