"""python -m benchmarks [--docs]: print every benchmark; --docs writes it into docs/costs.md."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import (
    agreeing,
    emulation,
    explaining,
    jobs,
    live,
    plan_costs,
    planning,
    reading,
    recording,
    scripts,
    start,
    stepping,
    tracing,
    watching,
    watching_steps,
)
from docs.generate import replace_block


def main() -> None:
    tables = []
    benchmarks = (
        start,
        reading,
        watching,
        watching_steps,
        live,
        tracing,
        planning,
        plan_costs,
        scripts,
        emulation,
        explaining,
        recording,
        stepping,
        agreeing,
        jobs,
    )
    for benchmark in benchmarks:
        table = benchmark.measure()
        print(table, flush=True)
        print()
        tables.append(table)
    if "--docs" in sys.argv[1:]:
        document = Path(__file__).resolve().parents[1] / "docs" / "costs.md"
        document.write_text(replace_block(document.read_text(), "bench", "\n\n".join(tables)))


main()
