"""`python -m accuracy.peers`: a published measurement, and what other estimators say of the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accuracy.__main__ import score
from accuracy.rows import ROWS, Row
from oomph.units import MIB

README = Path(__file__).resolve().parents[1] / "README.md"
_BLOCK = "peers"


def asked_row() -> Row:
    """BERT-large in fp32 with Adam, as Hugging Face's page on one GPU measured it first."""
    return next(row for row in ROWS if row.model == "bert-large" and row.measured_mib)


def table(row: Row) -> list[str]:
    """Return the estimates beside the measurement."""
    scored = score(row)
    assert scored.prediction is not None
    assert row.measured_mib is not None
    measured = row.measured_mib * MIB
    said = {
        "oomph": scored.prediction.device_bytes,
        f"accelerate {_version('accelerate')}, estimate-memory": _accelerate(),
        f"DeepSpeed {_version('deepspeed')}, ZeRO-2 estimator": _deepspeed(),
    }
    what = f"{row.model}, {row.micro_batch} x {row.size} tokens, {row.precision}, {row.optimizer}"
    lines = [
        f"| {what} | says | error |",
        "|---|--:|--:|",
        f"| measured on a {row.source.gpu} | {measured / MIB:,.0f} MiB | |",
    ]
    for name, size_bytes in said.items():
        error = size_bytes / measured - 1
        lines.append(f"| {name} | {size_bytes / MIB:,.0f} MiB | {error:+.1%} |")
    return lines


def _model() -> Any:
    import torch

    from accuracy.workloads import workload_of

    with torch.device("meta"):
        return workload_of(asked_row()).model()


def _accelerate() -> int:
    """What `accelerate estimate-memory` prints as "Training using Adam"; it asks for no batch."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total_bytes, _ = calculate_maximum_sizes(_model())
    return int(max(estimate_training_usage(total_bytes, "float32").values()))


def _deepspeed() -> int:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    num_parameters = sum(parameter.numel() for parameter in _model().parameters())
    _, gpu_bytes = estimate_zero2_model_states_mem_needs(
        num_parameters, num_gpus_per_node=1, num_nodes=1, cpu_offload=False
    )
    return int(gpu_bytes)


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m accuracy.peers", description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write the table into README.md")
    options = parser.parse_args(arguments)
    lines = "\n".join(table(asked_row()))
    print(lines)
    if options.docs:
        from docs.generate import replace_block

        README.write_text(replace_block(README.read_text("utf-8"), _BLOCK, lines), "utf-8")


if __name__ == "__main__":
    main()
