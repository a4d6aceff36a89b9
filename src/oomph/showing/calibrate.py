"""Calibrated -> what `oomph calibrate` prints: each figure next to the one it replaces."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from oomph.records.gpu_model import Assumed, Calibrated, Calibration
from oomph.showing.terminal import Column, new_console, print_prose, print_table
from oomph.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

_TERA = 1e12
_GIGA = 1e9
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_HOW = {
    "process": "the driver reported the memory of the measuring process",
    "difference": "as a difference: the driver does not report memory per process",
}


def print_calibrations(found: tuple[Calibrated, ...]) -> None:
    """Print one table per measurement."""
    console = new_console()
    for number, one in enumerate(found):
        if number:
            console.print()
        _print_one(console, one)


def _print_one(console: Console, one: Calibrated) -> None:
    calibration, assumed = one.calibration, one.assumed
    print_prose(console, calibration.gpu_name, "bold")
    date = time.strftime("%Y-%m-%d", time.localtime(calibration.measured_at))
    print_prose(
        console,
        f"measured on {date} with driver {calibration.driver_version},"
        f" torch {calibration.torch_version}, CUDA {calibration.cuda_version};"
        f" {_HOW[calibration.measured_by]}",
        "dim",
    )
    rows = [*_memory_rows(calibration, assumed), *_rate_rows(calibration, assumed)]
    whats, measured, likely, bounds = zip(*rows, strict=True)
    columns = [
        Column("", whats, align="<"),
        Column("measured", measured),
        Column("assumed", likely, keep=2),
        Column("range", bounds, keep=1, align="<"),
    ]
    print_table(console, columns)
    print_prose(console, _use(calibration, assumed), "dim")


_Row = tuple[str, str, str, str]  # name, measured, assumed, range


def _memory_rows(calibration: Calibration, assumed: Assumed | None) -> list[_Row]:
    context, total = ("", ""), ("", "")
    if assumed:
        low, high = assumed.context_low_bytes, assumed.context_high_bytes
        context = (format_bytes(assumed.context_bytes), _between(low, high))
        low, high = assumed.total_low_bytes, assumed.total_high_bytes
        total = (format_bytes(assumed.total_bytes), _between(low, high))
    return [
        ("CUDA context", format_bytes(calibration.context_bytes), "", ""),
        ("with libraries", format_bytes(calibration.context_with_libraries_bytes), *context),
        ("card's memory", format_bytes(calibration.total_bytes), *total),
    ]


def _between(low_bytes: int, high_bytes: int) -> str:
    return f"{format_bytes(low_bytes)} to {format_bytes(high_bytes)}"


def _rate_rows(calibration: Calibration, assumed: Assumed | None) -> list[_Row]:
    sheet = assumed.matmul_flops if assumed else {}
    rows = [
        (f"{_DTYPES.get(dtype, dtype)} TFLOP/s", _tera(rate), _tera(sheet.get(dtype)), "")
        for dtype, rate in calibration.matmul_flops.items()
    ]
    if calibration.bandwidth_bytes_per_s:
        copied = assumed.bandwidth_bytes_per_s if assumed else None
        rows.append(("copying GB/s", _giga(calibration.bandwidth_bytes_per_s), _giga(copied), ""))
    return rows


def _tera(flops: float | None) -> str:
    return "" if flops is None else f"{flops / _TERA:.1f}"


def _giga(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else f"{bytes_per_s / _GIGA:.0f}"


def _use(calibration: Calibration, assumed: Assumed | None) -> str:
    rates = "" if calibration.matmul_flops else "; rates were not measured"
    if assumed is None:
        return f"the catalogue has no such GPU: oomph predict cannot use this{rates}"
    return (
        f"oomph predict --gpu {assumed.gpu} uses this with torch {calibration.torch_version},"
        f" in place of the assumed figures{rates}"
    )
