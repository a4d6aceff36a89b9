"""Workload -> short runs with other batch sizes and learning rates, all from the same start.

Each run draws its examples with `workload.batch(n)`, sees as many as every other, and is judged by
the loss of the same held-out draw. A run is decided by its seed, so a study can be resumed.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oomph.errors import UsageError
from oomph.records.stability_study import RateRule, StudyRun
from oomph.records.workload import Workload
from oomph.stability.examples import mapped, tensors
from oomph.stability.learning_rate import scale_learning_rate
from oomph.stability.randomness import seed_everything
from oomph.training.stepper import Stepper

_NUM_POINTS = 24  # of a curve
_HELD_OUT = 512  # examples. Judgement
_HELD_OUT_SEED = 987_654
_RANGE_STEPS = 60
_RANGE_FROM, _RANGE_TO = 1e-2, 1e3  # times the learning rate
_DIVERGED_RATIO = 2.0  # of the lowest smoothed loss. Judgement


@dataclass(frozen=True, slots=True)
class Job:
    """One run to make."""

    batch_size: int
    rule: RateRule
    seed: int


class Bench:
    """Makes the runs of one workload, on the GPU if there is one."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload, self._seed = workload, seed
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        refuse_equal_batches(workload)
        num = max(_HELD_OUT, workload.batch_size)
        self._held_out = self._draw(num, _HELD_OUT_SEED)

    def run(self, job: Job, num_examples: int) -> StudyRun:
        """Train on `num_examples` examples."""
        began = time.monotonic()
        step, optimizer = self._made(job)
        num_steps = max(num_examples // job.batch_size, 1)
        due = {round(num_steps * n / _NUM_POINTS) for n in range(1, _NUM_POINTS + 1)}
        points = [(0, self._loss(step))]
        self._seed_data(job.seed)
        for number in range(1, num_steps + 1):
            step(self._moved(self._workload.batch(job.batch_size)))
            if number in due:
                points.append((number * job.batch_size, self._apart(step)))
                if points[-1][1] is None:
                    break
        scale = step.noise_scale
        return StudyRun(
            batch_size=job.batch_size,
            rule=job.rule,
            learning_rate=float(optimizer.param_groups[0]["lr"]),
            seed=job.seed,
            num_steps=num_steps,
            examples=tuple(at for at, _ in points),
            losses=tuple(loss for _, loss in points),
            noise_scale=None if scale is None else scale.examples,
            lasted_s=time.monotonic() - began,
        )

    def step_s(self, batch_size: int) -> float:
        """Return the time of a step, from a few."""
        step, _ = self._made(Job(batch_size, "as-is", self._seed))
        batch = self._moved(self._workload.batch(batch_size))
        step(batch)
        best = math.inf
        for _ in range(3):
            began = time.perf_counter()
            float(step(self._moved(self._workload.batch(batch_size))).loss)
            best = min(best, time.perf_counter() - began)
        return best

    def diverging_rate(self) -> float | None:
        """Raise the learning rate until the loss rises: an upper bound, None if it never does.

        It is no learning rate to use; it moves less than the best one does.
        """
        step, optimizer = self._made(Job(self._workload.batch_size, "as-is", self._seed))
        self._seed_data(self._seed)
        at_first = [float(group["lr"]) for group in optimizer.param_groups]
        smooth = lowest = None
        for number in range(_RANGE_STEPS):
            factor = _RANGE_FROM * (_RANGE_TO / _RANGE_FROM) ** (number / (_RANGE_STEPS - 1))
            for group, rate in zip(optimizer.param_groups, at_first, strict=True):
                group["lr"] = rate * factor
            loss = float(step(self._moved(self._workload.batch(self._workload.batch_size))).loss)
            smooth = loss if smooth is None else 0.7 * smooth + 0.3 * loss
            lowest = smooth if lowest is None else min(lowest, smooth)
            has_risen = smooth > lowest + (_DIVERGED_RATIO - 1) * abs(lowest)
            if not math.isfinite(loss) or (number > 5 and has_risen):
                diverging: float = at_first[0] * factor
                return diverging
        return None

    # ---- parts of a run ------------------------------------------------------------------------

    def _made(self, job: Job) -> tuple[Stepper, Any]:
        workload = self._workload
        seed_everything(job.seed)
        make: Any = workload.model
        model = copy.deepcopy(make) if isinstance(make, torch.nn.Module) else make()
        if not any(module.training for module in model.modules()):
            model.train()
        model = model.to(self.device)
        optimizer = workload.optimizer(model.parameters())
        if job.rule == "scaled":
            scale_learning_rate(optimizer, workload.batch_size, job.batch_size)
        step = Stepper(
            model,
            optimizer,
            workload.loss,
            clip_grad_norm=workload.clip_grad_norm,
            noise_scale="probe",
            watch_stability=False,
            on_difference="warn",
        )
        return step, optimizer

    def _loss(self, step: Stepper) -> float | None:
        found = float(step.evaluate(self._held_out))
        return found if math.isfinite(found) else None

    def _apart(self, step: Stepper) -> float | None:
        """Evaluate without touching the random numbers of the training."""
        with torch.random.fork_rng(devices=[0] if self.device == "cuda" else []):
            return self._loss(step)

    def _draw(self, num: int, seed: int) -> Any:
        self._seed_data(seed)
        return self._moved(self._workload.batch(num))

    def _seed_data(self, seed: int) -> None:
        seed_everything(seed + 1)

    def _moved(self, batch: Any) -> Any:
        def moved(_: str, leaf: Any) -> Any:
            return leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf

        return mapped(batch, moved)


def refuse_equal_batches(workload: Workload) -> None:
    """Raise UsageError if a workload has no data to train on, but a batch of one kind."""
    because = None
    if not callable(workload.batch):
        because = "its batch is one example batch, not a function that draws examples"
    else:
        seed_everything(0)
        drawn = [list(tensors(workload.batch(8))) for _ in range(3)]
        first = drawn[0]
        if all(
            len(first) == len(each) and all(map(torch.equal, first, each)) for each in drawn[1:]
        ):
            because = "batch(8) gives the same eight examples every time"
    if because is not None:
        raise UsageError(
            "this workload cannot be trained on",
            because=because,
            attempt="a batch that draws from your data: batch=lambda n: {name: column[rows] for"
            " name, column in data.items()}, with rows = torch.randint(len(data), (n,))"
            " (docs/stability.md)",
        )


def jobs(batch_sizes: Sequence[int], own: int, seeds: Sequence[int]) -> Iterator[Job]:
    """Return the runs of a study, the workload's own first."""
    for seed in seeds:
        yield Job(own, "as-is", seed)
    for size in batch_sizes:
        if size != own:
            yield from (Job(size, "scaled", seed) for seed in seeds)
            yield from (Job(size, "kept", seed) for seed in seeds)


def examples_within(
    seconds: float,
    todo: Sequence[Job],
    step_s: Callable[[int], float],
    *,
    most: int,
) -> int:
    """Return how many examples each run can see in that time: a multiple of the largest batch."""
    times = {size: step_s(size) for size in {job.batch_size for job in todo}}
    per_example_s = sum(times[job.batch_size] / job.batch_size for job in todo)
    largest = max(times)
    num = min(int(seconds / per_example_s), most)
    return max(num // largest, 1) * largest
