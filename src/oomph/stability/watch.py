"""Losses, gradient norms and sizes of updates -> warnings, as the training goes.

Silent while all is well. Each cause is told once. Numbers come in, sentences go out: no torch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from oomph.records.stability import NoiseScale, StabilityWarning, WarningKind

# ---- those that are told -------------------------------------------------------------------------

Told = Callable[[StabilityWarning | NoiseScale], None]
_listeners: list[Told] = []


def listen(listener: Told) -> None:
    """Tell this function every warning, and what is known of the noise scale, until `unlisten`."""
    _listeners.append(listener)


def unlisten(listener: Told) -> None:
    if listener in _listeners:
        _listeners.remove(listener)


def tell(what: StabilityWarning | NoiseScale) -> None:
    for listener in tuple(_listeners):
        listener(what)


# ---- oscillation ---------------------------------------------------------------------------------
# Two signs together, as each alone happens in healthy runs, too. One is the way that the loss has
# gone, up and down, over what it has won since the start: 1 for a loss that only falls, more for
# one that is slow and noisy. The other is its highest value over that of the start: weights are
# thrown far out, whereas a slow and noisy loss stays where it is. Points cover the whole run.

_NUM_POINTS = 8  # at least; when there are twice as many, neighbours are joined
_FEWEST_PER_POINT = 32  # steps
_AT_FIRST = 8  # steps, in which training has hardly moved
# Judgement, from runs of tests/stability/oscillation_grid.py: broken ones had 12 and more
# with 4.4 and more; healthy ones up to 4.6 with 3.6, or 2 with 4.6.
MOST_OSCILLATION = 6.0
HIGHEST_RATIO = 4.0
_MOST_RATIO = 3.0  # that a single loss counts as; judgement


class Course:
    """The course of a loss, in a bounded number of points."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._points: list[float] = []  # means over `_per_point` steps each
        self._per_point, self._sum, self._num = 1, 0.0, 0
        self._highest = -math.inf

    def add(self, loss: float) -> None:
        if len(self._first) < _AT_FIRST:
            self._first.append(loss)
        self._highest = max(self._highest, loss)
        # A single jump is no oscillation, however far it goes.
        within = min(loss, _MOST_RATIO * self.start) if self.start > 0 else loss
        self._sum, self._num = self._sum + within, self._num + 1
        if self._num == self._per_point:
            self._points.append(self._sum / self._num)
            self._sum, self._num = 0.0, 0
        if len(self._points) == 2 * _NUM_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(one + other) / 2 for one, other in pairs]
            self._per_point *= 2

    @property
    def start(self) -> float:
        return statistics.fmean(self._first)

    @property
    def highest_ratio(self) -> float | None:
        """Return the highest loss over that of the start; None for losses around 0."""
        return self._highest / self.start if self._first and self.start > 0 else None

    @property
    def oscillation(self) -> float | None:
        """Return the way over what was won; None while the course is too short."""
        if len(self._points) < _NUM_POINTS or self._per_point < _FEWEST_PER_POINT:
            return None
        return oscillation_of([self.start, *self._points])


def oscillation_of(losses: Sequence[float]) -> float | None:
    """Return the way that losses go over what they win; infinite if they win nothing.

    >>> oscillation_of([3.0, 2.0, 1.0]), oscillation_of([3.0, 1.0, 2.0, 1.0])
    (1.0, 2.0)
    """
    if len(losses) < 2:
        return None
    way, won = (
        sum(abs(new - old) for old, new in itertools.pairwise(losses)),
        losses[0] - losses[-1],
    )
    return way / won if won > 0 else math.inf


# ---- the watch -----------------------------------------------------------------------------------

_RECENT = 200  # steps
_FEWEST = 50  # before anything can stand out
_MANY = 3  # single ones happen
# Judgement. Losses of single examples are spread about like an exponential, and reach the median
# plus ten of these distances once in some million steps.
_SPIKE_DISTANCES = 10.0
_OUTLIER_RATIO = 10.0  # of the median gradient norm
_FEWEST_NORMS = 20
_MANY_SKIPS = 10  # of the recent steps; a scale that is right is tried too high once in 2000
_WARM_UP = 100  # steps: the first loss scale is too high on purpose
_LARGE_UPDATE = 0.1  # of the weights, root mean square. Judgement; 1e-3 is usual
_SMALL_UPDATE = 1e-7  # an fp32 weight does not change by less
_MANY_LOST = 0.5  # of the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSize:
    """The last update of one weight matrix, from some of its values."""

    name: str
    ratio: float  # root mean square of the update over that of the weights
    lost_ratio: float | None = None  # share of the values that did not change, in half precision


class Watch:
    """Watches one training."""

    def __init__(self) -> None:
        self._course = Course()
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._norms: deque[float] = deque(maxlen=_RECENT)
        self._spikes: deque[int] = deque(maxlen=_MANY)  # steps
        self._outliers: deque[int] = deque(maxlen=_MANY)
        self._skips: deque[int] = deque(maxlen=_MANY_SKIPS)
        self._told: set[WarningKind] = set()
        self.num_steps = 0

    def step(
        self,
        loss: float,
        *,
        grad_norm: float | None = None,
        is_clipped: bool = False,
        is_skipped: bool = False,
    ) -> list[StabilityWarning]:
        """Add a step; return new warnings. is_skipped: the loss scaler has left it out."""
        self.num_steps += 1
        return [
            *self._of_loss(loss),
            *(self._of_norm(grad_norm) if grad_norm is not None and not is_clipped else ()),
            *(self._of_skip() if is_skipped else ()),
        ]

    @property
    def oscillation(self) -> float | None:
        return self._course.oscillation

    def not_finite(self, what: str, where: str) -> list[StabilityWarning]:
        """Warn of a value that is not finite. where: the first module that has one."""
        return list(
            self._warn(
                "not-finite",
                f"the {what} is no finite number any more",
                where,
                "go back to a checkpoint before this step, with a smaller learning rate, a clipped"
                " gradient (clip_grad_norm=1.0), or bf16 in place of fp16",
            )
        )

    def updates(self, sizes: list[UpdateSize]) -> list[StabilityWarning]:
        """Add the sizes of one update; return new warnings."""
        return list(self._of_updates(sizes))

    # ---- rules ---------------------------------------------------------------------------------

    def _of_loss(self, loss: float) -> Iterator[StabilityWarning]:
        if not math.isfinite(loss):
            return
        if self._is_spike(loss):
            self._spikes.append(self.num_steps)
            if self._is_frequent(self._spikes):
                yield from self._warn(
                    "spikes",
                    f"the loss jumped {_MANY} times within {_RECENT} steps",
                    f"to {loss:.3g}; the median is {statistics.median(self._losses):.3g}",
                    "clip_grad_norm=1.0, a longer warm-up, or a smaller learning rate; and a look"
                    " at the examples of those steps",
                )
        self._losses.append(loss)
        self._course.add(loss)
        if self.num_steps % _FEWEST_PER_POINT == 0:
            yield from self._of_course()

    def _of_course(self) -> Iterator[StabilityWarning]:
        way, highest = self._course.oscillation, self._course.highest_ratio
        if way is None or highest is None or way <= MOST_OSCILLATION or highest <= HIGHEST_RATIO:
            return
        won = "it has won nothing" if way == math.inf else f"its way is {way:.2g}x what it has won"
        yield from self._warn(
            "oscillation",
            "the loss goes up and down instead of down",
            f"{won}, and it was up to {highest:.2g}x that of the start",
            "a smaller learning rate: if the batch became smaller,"
            " oomph.scale_learning_rate(optimizer, from_batch, to_batch)",
        )

    def _is_spike(self, loss: float) -> bool:
        if len(self._losses) < _FEWEST:
            return False
        ordered = sorted(self._losses)
        median, high = ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10]
        return loss > max(median + _SPIKE_DISTANCES * (high - median), 2 * abs(median))

    def _is_frequent(self, steps: deque[int]) -> bool:
        return len(steps) == steps.maxlen and self.num_steps - steps[0] < _RECENT

    def _of_norm(self, norm: float) -> Iterator[StabilityWarning]:
        if not math.isfinite(norm):
            return
        if len(self._norms) >= _FEWEST_NORMS:
            median = statistics.median(self._norms)
            if norm > _OUTLIER_RATIO * median > 0:
                self._outliers.append(self.num_steps)
                if self._is_frequent(self._outliers):
                    yield from self._warn(
                        "gradient-outliers",
                        "some gradients are far larger than the others",
                        f"a norm of {norm:.3g}; the median is {median:.3g}",
                        f"clip_grad_norm={2 * median:.1g}, and a look at the examples of those"
                        " steps",
                    )
        self._norms.append(norm)

    def _of_skip(self) -> Iterator[StabilityWarning]:
        if self.num_steps > _WARM_UP:
            self._skips.append(self.num_steps)
            if self._is_frequent(self._skips):
                yield from self._warn(
                    "scaler-skips",
                    f"the loss scaler left out {_MANY_SKIPS} of the last {_RECENT} steps",
                    "their gradients were not finite in fp16",
                    'bf16 in place of fp16 (precision="bf16"), a smaller learning rate, or a'
                    " clipped gradient; oomph check FILE:NAME --only fp16 names the module",
                )

    def _of_updates(self, sizes: list[UpdateSize]) -> Iterator[StabilityWarning]:
        known = [each for each in sizes if math.isfinite(each.ratio)]
        if not known:
            return
        lost = [each for each in known if (each.lost_ratio or 0.0) > _MANY_LOST]
        if lost:
            most = max(lost, key=lambda each: each.lost_ratio or 0.0)
            yield from self._warn(
                "lost-updates",
                "updates are too small for weights in half precision, and are rounded away",
                f"{most.lost_ratio or 0.0:.0%} of {most.name} did not change",
                "weights in fp32 with autocast to bf16, or an optimizer with stochastic rounding",
            )
        largest = max(known, key=lambda each: each.ratio)
        if self.num_steps > _FEWEST and largest.ratio > _LARGE_UPDATE:
            yield from self._warn(
                "large-updates",
                "updates are large beside their weights",
                f"a step changes {largest.name} by {largest.ratio:.0%}",
                "a smaller learning rate, at least for this part",
            )
        most_ratio = max(each.ratio for each in known)
        if self.num_steps > _WARM_UP and 0 < most_ratio < _SMALL_UPDATE and not lost:
            yield from self._warn(
                "small-updates",
                "updates are too small to change the weights",
                f"at most {most_ratio:.1g} of a weight in a step",
                "a larger learning rate; has the schedule ended, or is weight_decay all that acts?",
            )

    def _warn(
        self, kind: WarningKind, sentence: str, evidence: str, advice: str
    ) -> Iterator[StabilityWarning]:
        if kind not in self._told:
            self._told.add(kind)
            yield StabilityWarning(
                kind=kind, step=self.num_steps, sentence=sentence, evidence=evidence, advice=advice
            )
