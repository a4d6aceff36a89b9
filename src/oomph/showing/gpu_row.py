"""Device -> the cells of its row, the same in `oomph gpus` and in the live view."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from oomph.records.machine import NOBODYS_BYTES, Device, Machine, Owner
from oomph.showing.cells import Piece
from oomph.showing.safe import printable
from oomph.units import format_gib, format_ratio

OWNER_STYLES: dict[Owner, str] = {
    "this-run": "bold green",
    "mine": "green",
    "others": "yellow",
    "unknown": "magenta",
}
_PARTS = ("mine", "others", "rest", "free")
_PART_STYLES = {"mine": "green", "others": "yellow", "rest": "magenta", "free": "dim"}
_BRANDS = ("NVIDIA ", "GeForce ")


@dataclass(frozen=True, slots=True)
class Row:
    """A GPU or a slice, with its place in the first column."""

    device: Device
    label: str


def rows_of(machine: Machine) -> Iterator[Row]:
    for gpu in machine.gpus:
        yield Row(gpu, str(gpu.index))
        for part in gpu.slices:
            yield Row(part, f"{gpu.index}.{part.index}")


def name_of(device: Device, *, is_short: bool) -> str:
    name = printable(device.name or "unknown model")
    if device.is_slice and " MIG " in name:  # what tells slices apart
        return name[name.index(" MIG ") + 1 :]
    for brand in _BRANDS if is_short else ():
        name = name.removeprefix(brand)
    return name


def memory_of(device: Device) -> str:
    used, total = device.used_bytes, device.total_bytes
    if used is None or total is None:
        return "unknown"
    share = ratio_of(used / total if total else None)
    return f"{format_gib(used)} of {format_gib(total)} {share:>4}"


def ratio_of(ratio: float | None) -> str:
    return "?" if ratio is None else format_ratio(ratio)


def temperature_of(device: Device) -> str:
    return "" if device.temperature_c is None else f"{device.temperature_c} C"


def power_of(device: Device) -> str:
    return "" if device.power_w is None else f"{device.power_w:.0f} W"


def nobody_on(device: Device) -> str:
    """What to say where no process is listed."""
    if device.processes is None:
        return "could not be read"
    if device.processes or device.slices:
        return ""
    return "nobody" if device.is_free else "nobody in sight"


def bar_of(device: Device, width: int, glyphs: dict[str, str]) -> list[Piece] | None:
    """Its memory to scale, by whose it is; None where that is not known."""
    if device.used_bytes is None or not device.total_bytes:
        return None
    counts = _counts(device, width)
    return [(glyphs[part] * counts[part], _PART_STYLES[part]) for part in _PARTS]


def _counts(device: Device, width: int) -> dict[str, int]:
    """How many cells each part of the memory gets: to scale, and never none for something."""
    total, used = device.total_bytes or 1, device.used_bytes or 0
    mine, others = _held(device, "this-run", "mine"), _held(device, "others")
    rest = max(used - mine - others, 0)
    sizes = [mine, others, rest if rest > NOBODYS_BYTES else 0]
    ends = [min(end, total) for end in itertools.accumulate(sizes)]
    edges = [0, *(round(width * end / total) for end in ends)]
    counts = [after - before for before, after in itertools.pairwise(edges)]
    counts = [max(count, 1) if size else 0 for count, size in zip(counts, sizes, strict=True)]
    while sum(counts) > width:
        counts[counts.index(max(counts))] -= 1
    return dict(zip(_PARTS, [*counts, width - sum(counts)], strict=True))


def _held(device: Device, *owners: Owner) -> int:
    return sum(p.used_bytes or 0 for p in device.processes or () if p.owner in owners)
