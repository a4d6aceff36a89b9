"""What it costs to compare ways to train, beside replaying every one of them in the same run."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.tables import Measured, as_table
from oomph.planning.choices import Choices, variants
from oomph.planning.ranking import Checked, search
from oomph.planning.rehearsal_store import RehearsalStore
from oomph.planning.rehearsals import choices_of
from oomph.predicting.combinations import Combinations
from oomph.records.generation import trace_capability
from oomph.records.plan import PlanOptions
from oomph.records.workload import Variant
from oomph.units import GIB
from oomph.verbs.gpus import find_gpu
from oomph.verbs.plan import plan

FLOOR = "replaying each of them (floor)"
BERT_LARGE = Path(__file__).resolve().parents[1] / "examples" / "bert_large.py"
GPU = "v100-16gb"
LIMIT_BYTES = 14 * GIB


def measure() -> str:
    with _empty_cache():
        budgets = ("15GiB", "13GiB")
        for budget in budgets:  # all that is to be rehearsed, is
            _plan(budget)
        again_ms = max(_timed(functools.partial(_plan, budget)) for budget in budgets)
        bench = _bench()
    floor_ms = _timed(bench.replay_all)  # and from now on the replays are known
    search_ms = min(_timed(bench.search) for _ in range(3))
    number = len(bench.every)
    rows = [
        Measured(FLOOR, floor_ms),
        Measured(f"comparing {number} ways ({number / search_ms * 1000:,.0f} a second)", search_ms),
        Measured("oomph.plan for another budget, nothing new to rehearse", again_ms),
    ]
    return as_table("plans of BERT-large, batch 64, on a V100", FLOOR, rows)


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get("XDG_CACHE_HOME")
    with TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory
        yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


def _plan(budget: str) -> object:
    return plan(f"{BERT_LARGE}:workload", gpu=GPU, gpu_memory=budget)


def _timed(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return (time.process_time() - began_s) * 1000


class CheckedWays(Combinations):
    """Answers whether a variant fits by what torch reserves, and nothing else."""

    def has_host_for(self, _: Variant) -> bool:
        return True

    def check(self, variant: Variant) -> Checked:
        size = self.reserved_bytes(variant)
        return Checked(device_bytes=size, fits="yes" if size <= LIMIT_BYTES else "no")


@dataclass(frozen=True)
class Bench:
    """What was rehearsed of BERT-large, and every way that it answers for."""

    ways: Combinations
    choices: Choices
    every: tuple[Variant, ...]

    def replay_all(self) -> None:
        self.ways.known_replays.clear()
        for variant in self.every:
            self.ways.reserved_bytes(variant)

    def search(self) -> None:
        """With nothing worked out but the replays: neither bounds of memory nor times."""
        ways = CheckedWays(
            pass_footprints=self.ways.pass_footprints,
            steps=self.ways.steps,
            model=self.ways.model,
            known_replays=self.ways.known_replays,
        )
        search(self.choices, ways, LIMIT_BYTES)


def _bench() -> Bench:
    model = find_gpu(GPU).model
    capability = model.compute_capability
    assert capability is not None
    known = RehearsalStore((BERT_LARGE, "workload"), trace_capability(capability)).find()
    assert known is not None
    ways = Combinations(pass_footprints=known.pass_footprints, steps=known.steps, model=model)
    choices = replace(choices_of(known, PlanOptions(), capability, 2), least_micro_batch=2)
    return Bench(ways, choices, tuple(filter(ways.knows, variants(choices))))
