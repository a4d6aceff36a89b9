"""python -m benchmarks [--readme]: print every benchmark, and write it into README.md if asked."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import (
    emulation,
    jobs,
    live,
    plan_costs,
    planning,
    reading,
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
        stepping,
        jobs,
    )
    for benchmark in benchmarks:
        table = benchmark.measure()
        print(table, flush=True)
        print()
        tables.append(table)
    if "--readme" in sys.argv[1:]:
        readme = Path(__file__).resolve().parents[1] / "README.md"
        readme.write_text(replace_block(readme.read_text(), "bench", "\n\n".join(tables)))


main()
