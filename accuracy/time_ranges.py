"""`python -m accuracy.time_ranges`: the range of a step's time, from published steps.

Kernels and the host have a factor each at both ends. They are quantiles of measured / predicted:
of the kernels where the host has little to do, of the host where the GPU waits for it. Every source
weighs the same, however many rows it has. Held-out sources take no part. Sources differ more than
the rows of one: the quantiles are raised to a power. The first table shows how much of a source is
then covered that was left out, the second how much of each lies in the printed range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from accuracy.time_rows import TimeRow, read_rows
from accuracy.time_traces import ops_of, rehearse_missing
from accuracy.times import of_part
from oomph.predicting.footprint import Work, work_of
from oomph.predicting.speed import BEST, WORST, Pace, StepTime, estimate
from oomph.records.gpu_model import GpuModel
from oomph.verbs.gpus import find_gpu

_TAIL = 0.05  # outside of the range, at each end
_POWERS = (1.0, 1.25, 1.5, 1.75, 2.0)
# The host decides nothing below the first share of the GPU's time, and all above the second.
_LITTLE, _MUCH = 0.5, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published step, and what is predicted for it."""

    row: TimeRow
    model: GpuModel
    work: Work
    time: StepTime

    @property
    def ratio(self) -> float:
        return self.row.measured_s / self.time.step_s

    @property
    def host_share(self) -> float:
        return self.time.host_s / max(self.time.gpu_busy_s, 1e-9)


def cases() -> list[Case]:
    rows = [row for row in read_rows() if not row.is_held_out and row.num_gpus == 1]
    rehearse_missing([(row, find_gpu(row.gpu).model) for row in rows])
    return [case for row in rows if (case := _case(row)) is not None]


def _case(row: TimeRow) -> Case | None:
    model = find_gpu(row.gpu).model
    ops = ops_of(row, model)
    if isinstance(ops, str):
        return None
    work = work_of(of_part(ops, row.part))
    time = _estimated(row, model, work)
    return None if time is None else Case(row=row, model=model, work=work, time=time)


def _estimated(
    row: TimeRow, model: GpuModel, work: Work, best: Pace = BEST, worst: Pace = WORST
) -> StepTime | None:
    return estimate(
        work,
        model,
        matmul_precision="tf32" if row.precision == "tf32" else "fp32",
        best=best,
        worst=worst,
    )


def paces_from(chosen: Sequence[Case]) -> tuple[Pace, Pace]:
    """Return the ends of the range that these steps ask for."""
    of_kernels = [case for case in chosen if case.host_share < _LITTLE]
    of_host = [case for case in chosen if case.host_share > _MUCH]
    best, worst = (
        Pace(kernels=_quantile(of_kernels, tail), host=_quantile(of_host, tail), beside=beside)
        for tail, beside in ((_TAIL, BEST.beside), (1 - _TAIL, WORST.beside))
    )
    return best, worst


def _quantile(chosen: Sequence[Case], tail: float) -> float:
    """Return a quantile of the ratios, each source weighing the same."""
    sources = [case.row.source.name for case in chosen]
    weighed = sorted((case.ratio, 1 / sources.count(case.row.source.name)) for case in chosen)
    whole, passed = sum(weight for _, weight in weighed), 0.0
    for ratio, weight in weighed:
        passed += weight
        if passed >= tail * whole:
            return ratio
    return math.nan


def coverage(chosen: Sequence[Case], best: Pace, worst: Pace) -> tuple[float, float]:
    """Return how many of the measurements lie in the range, and its median width."""
    inside, widths = 0, []
    for case in chosen:
        time = _estimated(case.row, case.model, case.work, best, worst)
        if time is not None:
            inside += time.low_s <= case.row.measured_s <= time.high_s
            widths.append(time.high_s / time.low_s)
    return inside / len(chosen), sorted(widths)[len(widths) // 2]


def widened(paces: tuple[Pace, Pace], power: float) -> tuple[Pace, Pace]:
    best, worst = (
        Pace(kernels=pace.kernels**power, host=pace.host**power, beside=pace.beside)
        for pace in paces
    )
    return best, worst


def covered_without(found: Sequence[Case], power: float) -> dict[str, float]:
    """Return how much of each source lies in the range that the others ask for."""
    shares = {}
    for name in dict.fromkeys(case.row.source.name for case in found):
        its = [case for case in found if case.row.source.name == name]
        others = paces_from([case for case in found if case.row.source.name != name])
        shares[name] = coverage(its, *widened(others, power))[0]
    return shares


def lines(found: Sequence[Case]) -> Iterator[str]:
    yield "| power | kernels | host | covered, each source left out | mean |"
    yield "|--:|---|---|---|--:|"
    for power in _POWERS:
        best, worst = widened(paces_from(found), power)
        shares = covered_without(found, power)
        mean = sum(shares.values()) / len(shares)
        kernels = f"{best.kernels:.2f} to {worst.kernels:.2f}"
        host = f"{best.host:.2f} to {worst.host:.2f}"
        each = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        yield f"| {power:.2f} | {kernels} | {host} | {each} | {mean:.0%} |"
    yield "\n| source | rows | in the printed range | width |\n|---|--:|--:|--:|"
    for name in dict.fromkeys(case.row.source.name for case in found):
        its = [case for case in found if case.row.source.name == name]
        share, width = coverage(its, BEST, WORST)
        yield f"| {name} | {len(its)} | {share:.0%} | {width:.1f} x |"


if __name__ == "__main__":
    print("\n".join(lines(cases())))
