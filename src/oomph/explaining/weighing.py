"""Values with how long each lasted -> means and quantiles over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oomph.records.report import Spread

Weighed = Sequence[tuple[float, float]]  # (value, seconds)


def mean(weighed: Weighed) -> float | None:
    """
    >>> mean([(1.0, 3.0), (0.0, 1.0)])
    0.75
    """
    if not weighed:
        return None
    weighed = _with_weights(weighed)
    total_s = sum(seconds for _, seconds in weighed)
    values = [value for value, _ in weighed]
    found = sum(value * seconds for value, seconds in weighed) / total_s
    return min(max(found, min(values)), max(values))  # rounding must not leave the values


def spread(weighed: Weighed) -> Spread | None:
    """Mean and quantiles; None of nothing."""
    middle = mean(weighed)
    if middle is None:
        return None
    p10, p50, p90 = _quantiles(weighed, (0.1, 0.5, 0.9))
    return Spread(mean=middle, p10=p10, p50=p50, p90=p90)


def _quantiles(weighed: Weighed, shares: Iterable[float]) -> list[float]:
    """For each share the value that for so much of the time was not exceeded."""
    by_value = sorted(_with_weights(weighed))
    total_s = sum(seconds for _, seconds in by_value)
    return [_at(by_value, share * total_s) for share in shares]


def _at(by_value: Weighed, wanted_s: float) -> float:
    passed_s = 0.0
    for value, seconds in by_value:
        passed_s += seconds
        if passed_s >= wanted_s:
            return value
    return by_value[-1][0]


def _with_weights(weighed: Weighed) -> Weighed:
    """Where nothing lasted, all count the same."""
    if any(seconds > 0 for _, seconds in weighed):
        return weighed
    return [(value, 1.0) for value, _ in weighed]
