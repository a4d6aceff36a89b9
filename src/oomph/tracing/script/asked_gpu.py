"""PretendedGpu -> the same, which notes what of it a script was told.

Whether a GPU is Ampere or later decides how everything runs, and is not noted: who keeps a
rehearsal keeps it for one kind of GPU.
"""

from __future__ import annotations

from typing import Any

from oomph.records.script import PretendedGpu


class AskedGpu:
    """Answers for a GPU; `fields` are those of PretendedGpu that were read."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu
        self.fields: set[str] = set()

    @property
    def name(self) -> str:
        return str(self._read("name"))

    @property
    def total_bytes(self) -> int:
        return int(self._read("total_bytes"))

    @property
    def capability(self) -> tuple[int, int]:
        major, minor = self._read("capability")
        return major, minor

    @property
    def multi_processor_count(self) -> int:
        return int(self._read("multi_processor_count"))

    def _read(self, name: str) -> Any:
        self.fields.add(name)
        return getattr(self._gpu, name)
