"""Squared gradient norms of pieces and of whole batches -> the gradient noise scale.

The noise scale (McCandlish et al. 2018, arXiv 1812.06162) is S / |G|^2: S is the summed variance of
the gradient of one example, G the mean gradient. The squared norm of a mean over b examples is
|G|^2 + S / b on average, so a small and a large b give both. Single steps say little, and their
ratio even less: S and |G|^2 are averaged separately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from oomph.records.stability import NoiseScale, Trend

_HORIZON = 30  # samples that the average covers. Judgement, as EMA 0.97
_FEWEST = 5  # samples. Judgement
# Judgement, from tuned runs on small models: the noise scale and the batch beyond which examples
# are wasted differed by a factor of up to 2.4. With fewer samples, the band becomes wider.
_BAND = 2.0
_WIDEST_BAND = 3.0
_TREND_RATIO = 1.5  # judgement: smaller changes are within the noise
_TREND_POINTS = 12
_POINT_EVERY = 5  # samples


@dataclass(frozen=True, slots=True)
class Sample:
    """One step: mean squared norm of its pieces, and squared norm of their mean.

    Each piece counts by its weight t in the mean over all ranks, and comes from b examples.
    """

    pieces_square: float  # sum of t |g|^2
    whole_square: float  # |sum of t g|^2
    pieces_share: float  # sum of t / b
    whole_share: float  # sum of t^2 / b
    num: int  # examples

    @property
    def noise_and_signal(self) -> tuple[float, float] | None:
        """Return S and |G|^2; None if the step cannot tell."""
        apart = self.pieces_share - self.whole_share
        if not (apart > 0 and math.isfinite(self.pieces_square + self.whole_square)):
            return None
        noise = (self.pieces_square - self.whole_square) / apart
        return noise, self.whole_square - self.whole_share * noise


class NoiseEstimate:
    """Averages S and |G|^2 over sampled steps."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._batch = 0
        # Means of S, G2, S^2, G2^2 and S G2: the squares give the error of the ratio.
        self._means = [0.0] * 5
        self._points: list[float] = []

    def add(self, sample: Sample) -> None:
        found = sample.noise_and_signal
        if found is None:
            return
        noise, signal = found
        self.num_samples += 1
        self._batch = sample.num
        rate = 1 / min(self.num_samples, _HORIZON)
        moments = (noise, signal, noise**2, signal**2, noise * signal)
        self._means = [
            old + rate * (new - old) for old, new in zip(self._means, moments, strict=True)
        ]
        if self.num_samples % _POINT_EVERY == 0 and (ratio := self._ratio) is not None:
            self._points = [*self._points, ratio][-_TREND_POINTS:]

    @property
    def _ratio(self) -> float | None:
        noise, signal, *_ = self._means
        return noise / signal if noise > 0 and signal > 0 else None

    @property
    def scale(self) -> NoiseScale | None:
        """Return the noise scale; None while it is not known to a factor of 3."""
        ratio = self._ratio
        if ratio is None or self.num_samples < _FEWEST:
            return None
        band = max(_BAND, math.exp(2 * self._relative_error))
        if band > _WIDEST_BAND:
            return None
        return NoiseScale(
            examples=ratio,
            low=ratio / band,
            high=ratio * band,
            batch=self._batch,
            num_samples=self.num_samples,
            trend=self._trend,
        )

    @property
    def _relative_error(self) -> float:
        """Return the standard error of the ratio, relative to it (delta method)."""
        noise, signal, noise2, signal2, both = self._means
        variance = (
            (noise2 - noise**2) / noise**2
            + (signal2 - signal**2) / signal**2
            - 2 * (both - noise * signal) / (noise * signal)
        )
        # An exponential average over H samples is as good as a plain one over 2 H - 1.
        num = min(self.num_samples, 2 * _HORIZON - 1)
        return math.sqrt(max(variance, 0.0) / num)

    @property
    def _trend(self) -> Trend | None:
        third = len(self._points) // 3
        if not third:
            return None
        first, last = self._points[:third], self._points[-third:]
        change = math.exp((sum(map(math.log, last)) - sum(map(math.log, first))) / third)
        if change > _TREND_RATIO:
            return "rising"
        return "falling" if change < 1 / _TREND_RATIO else "steady"
