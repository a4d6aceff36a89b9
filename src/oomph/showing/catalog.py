"""GpuModel -> the tables of `oomph gpus --catalog`."""

from __future__ import annotations

from collections.abc import Mapping

from oomph.records.catalog import Found, GpuModel
from oomph.showing.columns import Column, fitting, lines
from oomph.showing.terminal import new_console, print_line, print_prose, text_of
from oomph.units import format_gib

_TERA = 1e12
_GIGA = 1e9


def print_models(models: tuple[GpuModel, ...]) -> None:
    """One line per GPU."""
    console = new_console()
    rows = [_row(model) for model in models]
    cells = {heading: [row[i] for row in rows] for i, heading in enumerate(_HEADINGS)}
    columns = [
        Column(
            heading=heading,
            cells=cells[heading],
            align="<" if heading in ("name", "architecture") else ">",
            keep=_KEEP.get(heading),
        )
        for heading in _HEADINGS
    ]
    for pieces in lines(fitting(columns, console.width)):
        print_line(console, text_of(pieces))
    print_prose(
        console,
        f"{len(models)} GPUs; peak rates in dense TFLOP/s; ? is not known, - is not there. The"
        " source of each figure: oomph gpus --catalog NAME",
        "dim",
    )


_HEADINGS = ("name", "GB", "GB/s", "fp32", "tf32", "fp16", "bf16", "cc", "architecture")
_KEEP = {"architecture": 1, "tf32": 2, "fp32": 3, "fp16": 4, "cc": 5, "GB/s": 6, "bf16": 7}


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
    print_prose(console, f"{model.name}: {model.title} ({model.architecture})", "bold")
    if found.assumed:
        print_prose(console, found.assumed, "yellow")
    figures = _figures(model)
    columns = [
        Column(heading="", cells=[label for label, _, _ in figures], align="<"),
        Column(heading="figure", cells=[value for _, value, _ in figures]),
        Column(
            heading="source",
            cells=[model.sources.get(field, "") for _, _, field in figures],
            styles=["dim"] * len(figures),
            align="<",
        ),
    ]
    for pieces in lines(columns):
        print_line(console, text_of(pieces))
    if model.note:
        print_prose(console, f"note: {model.note}")
    for tag in sorted(_tags_of(model) & legend.keys()):
        print_prose(console, f"{tag}: {legend[tag]}", "dim")


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
