"""Memory snapshots of our own, in the schema of every era of torch, written by the replica."""

from __future__ import annotations

import gzip
import json
import pickle
import random
from pathlib import Path
from typing import Any, Literal

from predicting.recording import Recorder

from oomph.predicting.allocator import OutOfMemory
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.segments import UNLIMITED_BYTES
from oomph.units import MIB

Era = Literal["2.0", "2.1", "2.2", "2.3", "2.5", "2.8", "2.13", "list"]
ERAS: tuple[Era, ...] = ("2.0", "2.1", "2.2", "2.3", "2.5", "2.8", "2.13", "list")
FORWARD, OPTIMIZER, SCRIPT = 1, 2, 3
_AUTOGRAD = [
    {
        "filename": "/b/VariableType.cpp",
        "line": 1,
        "name": "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)",
    },
    {"filename": "??", "line": 0, "name": "torch::autograd::Engine::evaluate_function(int)"},
]


def stack(kind: str, line: int = 10) -> list[dict[str, Any]]:
    """A stack as torch records it, innermost first."""
    top = {"filename": "/home/me/train.py", "line": 90, "name": "<module>"}
    torch_file = "/env/site-packages/torch"
    if kind == "backward":
        return _AUTOGRAD
    if kind == "forward":
        return [
            {"filename": f"{torch_file}/nn/functional.py", "line": 5, "name": "linear"},
            {"filename": "/home/me/model.py", "line": line, "name": "forward"},
            {"filename": f"{torch_file}/nn/modules/module.py", "line": 9, "name": "_call_impl"},
            top,
        ]
    if kind == "relu":
        relu = {"filename": f"{torch_file}/nn/functional.py", "line": 7, "name": "relu"}
        return [relu, *stack("forward", line)[1:]]
    if kind == "optimizer":
        adam = {"filename": f"{torch_file}/optim/adamw.py", "line": 8, "name": "step"}
        return [adam, top]
    return [{**top, "line": line}]


class Writer(Recorder):
    """The replica, with the stacks and times of a training."""

    def __init__(
        self, settings: AllocatorSettings | None = None, free_bytes: int = UNLIMITED_BYTES
    ) -> None:
        super().__init__(settings, free_bytes)
        self.frames = stack("script")
        self.annotations: list[dict[str, Any]] = []
        self.stacks: dict[int, list[dict[str, Any]]] = {}

    def note(self, action: str, address: int, size_bytes: int, **more: int) -> None:
        super().note(action, address, size_bytes, **more)
        entry = self.trace[-1]
        entry["frames"] = self.frames
        entry["time_us"] = 1_000 + 10 * len(self.trace)
        if action == "oom":
            del entry["addr"]
        if action == "alloc":
            self.stacks[address] = self.frames

    def ask(self, size_bytes: int, kind: str = "script", line: int = 10, stream: int = 0) -> int:
        self.frames = stack(kind, line)
        return self.malloc(size_bytes, stream)

    def drop(self, address: int) -> None:
        self.frames = stack("script", 80)
        self.free(address)

    def annotate(self, stage: str, name: str) -> None:
        time_us = 1_005 + 10 * len(self.trace)
        self.annotations.append({"stage": stage, "name": name, "device": 0, "time_us": time_us})

    def snapshot(self, era: Era = "2.13") -> Any:
        """What `torch.cuda.memory._snapshot()` of that version returns."""
        segments = [self._written(segment, era) for segment in self.segments()]
        if era == "list":
            return segments
        trace = [self._event(event, era) for event in self.trace]
        if era == "2.0":
            trace = trace[-1:]
        found: dict[str, Any] = {"segments": segments, "device_traces": [trace]}
        if era not in ("2.0", "2.1", "2.2"):
            settings = self.settings
            found["allocator_settings"] = {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": settings.max_split_bytes or -1,
                "garbage_collection_threshold": settings.gc_threshold_ratio,
                "expandable_segments": settings.expandable_segments,
                "roundup_power2_divisions": {str(1 << n): 0 for n in range(16)},
            }
        if era in ("2.5", "2.8", "2.13"):
            found["external_annotations"] = self.annotations
        return found

    def _event(self, event: dict[str, Any], era: Era) -> dict[str, Any]:
        kept = dict(event)
        if era in ("2.0", "2.1"):
            del kept["time_us"]
        if era in ("2.8", "2.13"):
            kept["compile_context"] = "N/A"
        if era == "2.13":
            kept |= {"user_metadata": "", "pool_id": (0, 0)}
        return kept

    def _written(self, segment: dict[str, Any], era: Era) -> dict[str, Any]:
        blocks, address = [], segment["address"]
        for block in segment["blocks"]:
            frames = self.stacks.get(address, []) if block["state"] != "inactive" else []
            if era == "2.0":
                history = [
                    {"addr": address, "real_size": block["requested_size"], "frames": frames}
                ]
                blocks.append({"size": block["size"], "state": block["state"], "history": history})
            else:
                blocks.append({**block, "address": address, "frames": frames})
            address += block["size"]
        active = sum(block["size"] for block in blocks if block["state"] != "inactive")
        written = {**segment, "device": 0, "allocated_size": active, "active_size": active}
        written["blocks"] = blocks
        if era == "2.0":
            del written["is_expandable"]
        else:
            written["segment_pool_id"] = (0, 0)
        return written


def training(
    *,
    steps: int = 3,
    layers: int = 6,
    layer_bytes: int = 40 * MIB,
    settings: AllocatorSettings | None = None,
    free_bytes: int = UNLIMITED_BYTES,
    leak_bytes: int = 0,
    seed: int = 0,
) -> Writer:
    """A recorded training: parameters, forwards, backwards, an optimizer; it may run out."""
    choose = random.Random(seed)  # noqa: S311 - sizes of tensors
    writer = Writer(settings, free_bytes)
    try:
        for _ in range(layers):
            writer.ask(layer_bytes // 4, line=5)
        for step in range(steps):
            saved = []
            for layer in range(layers):
                writer.ask(512 + choose.randrange(2000), "forward", 30)
                saved.append(writer.ask(layer_bytes, "forward", 20 + 3 * (layer % 2)))
                saved.append(writer.ask(layer_bytes, "relu", 21 + 3 * (layer % 2)))
                writer.drop(writer.ask(layer_bytes // 2, "forward", 22 + 3 * (layer % 2)))
            gradients = [writer.ask(layer_bytes // 4, "backward") for _ in range(layers)]
            for address in reversed(saved):
                writer.drop(address)
            writer.annotate("START", "Optimizer.step#AdamW.step")
            if step == 0:
                for _ in range(2 * layers):
                    writer.ask(layer_bytes // 4, "optimizer")
            writer.drop(writer.ask(layer_bytes // 4, "optimizer"))
            writer.annotate("END", "Optimizer.step#AdamW.step")
            for address in gradients:
                writer.drop(address)
            if leak_bytes:
                writer.ask(leak_bytes, line=77)
    except OutOfMemory:
        pass
    return writer


def write(path: Path, content: Any, form: str = "pickle", protocol: int = 4) -> Path:
    """Write a snapshot in one of the forms that are read."""
    if form == "json":
        path.write_text(json.dumps(content))
    elif form == "gzip":
        path.write_bytes(gzip.compress(pickle.dumps(content, protocol)))
    else:
        path.write_bytes(pickle.dumps(content, protocol))
    return path
