"""GpuModel -> the tables of `oomph gpus --catalog`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from oomph.records.catalog import Found, GpuModel
from oomph.showing.terminal import new_console
from oomph.units import format_gib

if TYPE_CHECKING:
    from rich.table import Table

_TERA = 1e12
_GIGA = 1e9


def print_models(models: tuple[GpuModel, ...]) -> None:
    """One line per GPU."""
    console = new_console()
    table = _new_table()
    for heading in ("GB", "GB/s", "fp32", "tf32", "fp16", "bf16"):
        table.add_column(heading, justify="right")
    table.add_column("cc", justify="right")
    table.add_column("architecture")
    for model in models:
        table.add_row(*_row(model))
    console.print(table, soft_wrap=False)
    console.print(
        f"{len(models)} GPUs; peak rates in dense TFLOP/s; ? is not known, - is not there."
        " The source of each figure: oomph gpus --catalog NAME",
        style="dim",
    )


def _new_table() -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    return table


def _row(model: GpuModel) -> list[str]:
    rates = ("fp32_flops", "tf32_flops", "fp16_flops", "bf16_flops")
    return [
        model.name,
        _memory(model.memory_bytes),
        _figure(model, "memory_bandwidth_bytes_per_s", _GIGA),
        *(_figure(model, rate, _TERA) for rate in rates),
        _capability(model.compute_capability),
        model.architecture,
    ]


def print_model(found: Found, legend: Mapping[str, str]) -> None:
    """One GPU: each figure with its source, and what the sources are."""
    model = found.model
    console = new_console()
    console.print(f"{model.name}: {model.title} ({model.architecture})", style="bold")
    if found.assumed:
        console.print(found.assumed, style="yellow")
    table = _new_table()
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("source", style="dim", overflow="fold")
    for label, value, field in _figures(model):
        table.add_row(label, value, model.sources.get(field, ""))
    console.print(table, soft_wrap=False)
    if model.note:
        console.print(f"note: {model.note}")
    for tag in sorted(_tags_of(model) & legend.keys()):
        console.print(f"{tag}: {legend[tag]}", style="dim", soft_wrap=False)


def _figures(model: GpuModel) -> list[tuple[str, str, str]]:
    bandwidth = _figure(model, "memory_bandwidth_bytes_per_s", _GIGA)
    nvlink = _figure(model, "nvlink_bytes_per_s", _GIGA)
    rates = (("peak fp32", "fp32"), ("peak tf32", "tf32"), ("peak fp16", "fp16"))
    return [
        ("memory", f"{_memory(model.memory_bytes)} GB", "memory_bytes"),
        ("memory that CUDA sees", _measured(model), "measured_bytes"),
        ("memory bandwidth", f"{bandwidth} GB/s", "memory_bandwidth_bytes_per_s"),
        *(
            (label, f"{_figure(model, f'{rate}_flops', _TERA)} TFLOP/s", f"{rate}_flops")
            for label, rate in (*rates, ("peak bf16", "bf16"), ("best bf16 matmul", "matmul_bf16"))
        ),
        ("SMs", str(model.num_sms or "?"), "num_sms"),
        ("compute capability", _capability(model.compute_capability), "compute_capability"),
        ("NVLink, both ways", f"{nvlink} GB/s", "nvlink_bytes_per_s"),
        ("PCIe", model.pcie or "?", "pcie"),
    ]


def _tags_of(model: GpuModel) -> set[str]:
    words = " ".join(model.sources.values()).replace("+", " ").split()
    return {word.strip("(),;") for word in words}


def _measured(model: GpuModel) -> str:
    return "?" if model.measured_bytes is None else f"{format_gib(model.measured_bytes)} GiB"


def _memory(memory_bytes: int | None) -> str:
    return "?" if memory_bytes is None else format_gib(memory_bytes, decimals=0)


def _figure(model: GpuModel, field: str, scale: float) -> str:
    value = getattr(model, field)
    if value is None:
        return "-" if model.sources.get(field, "").startswith("none") else "?"
    return f"{value / scale:g}"


def _capability(capability: tuple[int, int] | None) -> str:
    return "?" if capability is None else f"{capability[0]}.{capability[1]}"
