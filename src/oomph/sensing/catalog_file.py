"""catalog.json -> GpuModel, grouped into the products that share a name."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomph.records.catalog import GpuModel
from oomph.units import GIB, parse_bytes

# Longer than any name of a driver; keeps hostile input from costing time.
MAX_NAME_LENGTH = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU of the catalogue, with what its name is made of."""

    model: GpuModel
    form: str  # "SXM4"; empty where the product has only one
    size_gb: int
    sold_as_gb: int | None  # the size on the box, where less is usable

    @property
    def is_sxm(self) -> bool:
        return self.form.startswith("SXM")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The GPUs that share a name: every A100."""

    title: str
    spelling: str  # without the brand's words
    brand: tuple[str, ...]  # words in front that may be left out
    architecture: str
    cards: tuple[Card, ...]


def spell(text: str) -> str:
    """One spelling for all ways to write a name: no case, and a space only between two numbers.

    >>> spell("RTX-4070 Ti_SUPER"), spell("a100 80GB")
    ('rtx4070tisuper', 'a100 80gb')
    """
    runs = re.findall(r"[a-z]+|[0-9]+", text[:MAX_NAME_LENGTH].lower())
    return re.sub(r"(?<=[^0-9]) | (?=[^0-9])", "", " ".join(runs))


def without(words: Iterable[str], spelling: str) -> str:
    for word in words:
        spelling = spelling.removeprefix(word)
    return spelling


# --- reading the file --------------------------------------------------------------------------


def _giga(value: float) -> int:
    return round(value * 10**9)


def _tera(value: float) -> float:
    return float(round(value * 10**12))


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


# Key in the file -> field of GpuModel, and how the datasheet's unit becomes ours.
FIGURES: Mapping[str, tuple[str, Callable[[Any], object]]] = {
    "memory_gb": ("memory_bytes", lambda gb: gb * GIB),
    "measured": ("measured_bytes", parse_bytes),
    "bandwidth_gb_per_s": ("memory_bandwidth_bytes_per_s", _giga),
    "fp32_tflops": ("fp32_flops", _tera),
    "tf32_tflops": ("tf32_flops", _tera),
    "fp16_tflops": ("fp16_flops", _tera),
    "bf16_tflops": ("bf16_flops", _tera),
    "matmul_bf16_tflops": ("matmul_bf16_flops", _tera),
    "num_sms": ("num_sms", int),
    "compute_capability": ("compute_capability", _capability),
    "nvlink_gb_per_s": ("nvlink_bytes_per_s", _giga),
    "pcie": ("pcie", str),
}


@functools.cache
def file_content() -> dict[str, Any]:
    text = Path(__file__).with_name("catalog.json").read_text("utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@functools.cache
def products() -> tuple[Product, ...]:
    by_title: dict[str, list[dict[str, Any]]] = {}
    for entry in file_content()["gpus"]:
        by_title.setdefault(entry["product"], []).append(entry)
    return tuple(_product(title, entries) for title, entries in by_title.items())


def _product(title: str, entries: Sequence[dict[str, Any]]) -> Product:
    brand = tuple(entries[0].get("brand", "").split())
    return Product(
        title=title,
        spelling=without(brand, spell(title)),
        brand=brand,
        architecture=entries[0]["architecture"],
        cards=tuple(_card(entry) for entry in entries),
    )


def _card(entry: dict[str, Any]) -> Card:
    return Card(
        model=_model(entry),
        form=entry.get("form", ""),
        size_gb=entry["memory_gb"][0],
        sold_as_gb=entry.get("sold_as_gb"),
    )


def _model(entry: dict[str, Any]) -> GpuModel:
    figures: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, (name, convert) in FIGURES.items():
        written = entry.get(key)
        figures[name] = None
        if written == "none":
            origins[name] = "none: the hardware has no such unit, or no fast one"
        elif written is not None:
            value, origins[name] = written
            figures[name] = convert(value)
    return GpuModel(
        name=entry["name"],
        title=entry["title"],
        architecture=entry["architecture"],
        note=entry.get("note"),
        sources=origins,
        **figures,
    )
