"""Trace <-> plain columns, small enough to keep: names stand once, allocations are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oomph.records.trace import Allocation, Convolution, Op, Trace

_ALLOCATION = ("op", "module", "phase", "category")
_OP = ("name", "phase", "dtype", "module")
_CONVOLUTION = ("direction", "kind", "dtype")
_CONVOLUTION_NUMBERS = ("at_event", "input_bytes", "weight_bytes", "output_bytes")


def to_columns(trace: Trace) -> dict[str, Any]:
    """The trace as what JSON can write."""
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    return {
        "sizes": [allocation.size_bytes for allocation in trace.allocations],
        "streams": [allocation.stream for allocation in trace.allocations],
        "outputs": [place for place, each in enumerate(trace.allocations) if each.is_output],
        "allocations": [_numbers(trace.allocations, field, number) for field in _ALLOCATION],
        "events": list(trace.events),
        "step_starts": list(trace.step_starts),
        "phase_starts": [list(start) for start in trace.phase_starts],
        "flops": [op.flops for op in trace.ops],
        "moved_bytes": [op.moved_bytes for op in trace.ops],
        "num_pending": [op.num_pending for op in trace.ops],
        "ops": [_numbers(trace.ops, field, number) for field in _OP],
        "convolutions": [_numbers(trace.convolutions, field, number) for field in _CONVOLUTION],
        "convolution_numbers": [
            [getattr(each, field) for each in trace.convolutions] for field in _CONVOLUTION_NUMBERS
        ],
        "measures_convolutions": trace.measures_convolutions,
        "example_elements": trace.example_elements,
        "micro_batch": trace.micro_batch,
        "torch_version": trace.torch_version,
        "compute_capability": list(trace.compute_capability),
        "notes": list(trace.notes),
        "doubt": trace.doubt,
        "host_peak_bytes": trace.host_peak_bytes,
        "names": list(names),
    }


def from_columns(columns: dict[str, Any]) -> Trace:
    """The trace that these columns were made of."""
    names: list[str] = columns["names"]
    allocations = _rows(columns["allocations"], names, _ALLOCATION)
    outputs = set(columns["outputs"])
    ops = _rows(columns["ops"], names, _OP)
    return Trace(
        allocations=[
            Allocation(size_bytes=size_bytes, stream=stream, is_output=place in outputs, **fields)
            for place, (size_bytes, stream, fields) in enumerate(
                zip(columns["sizes"], columns["streams"], allocations, strict=True)
            )
        ],
        events=columns["events"],
        step_starts=columns["step_starts"],
        phase_starts=[(start, phase) for start, phase in columns["phase_starts"]],
        ops=[
            Op(flops=flops, moved_bytes=moved_bytes, num_pending=num_pending, **fields)
            for flops, moved_bytes, num_pending, fields in zip(
                columns["flops"],
                columns["moved_bytes"],
                columns["num_pending"],
                ops,
                strict=True,
            )
        ],
        micro_batch=columns["micro_batch"],
        torch_version=columns["torch_version"],
        compute_capability=(columns["compute_capability"][0], columns["compute_capability"][1]),
        notes=tuple(columns["notes"]),
        doubt=columns["doubt"],
        host_peak_bytes=columns["host_peak_bytes"],
        measures_convolutions=columns["measures_convolutions"],
        example_elements=columns["example_elements"],
        convolutions=tuple(
            Convolution(**names_of, **dict(zip(_CONVOLUTION_NUMBERS, numbers, strict=True)))
            for names_of, numbers in zip(
                _rows(columns["convolutions"], names, _CONVOLUTION),
                zip(*columns["convolution_numbers"], strict=True),
                strict=True,
            )
        ),
    )


def _numbers(records: Sequence[Any], field: str, number: Any) -> list[int]:
    return [number(getattr(record, field)) for record in records]


def _rows(columns: list[list[int]], names: list[str], fields: Sequence[str]) -> list[Any]:
    return [
        {field: names[place] for field, place in zip(fields, row, strict=True)}
        for row in zip(*columns, strict=True)
    ]
