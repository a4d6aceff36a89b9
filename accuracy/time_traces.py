"""TimeRow -> the ops of its step: rehearsed once in a child, then read from the store.

An entry is named by everything that decides the ops: the row's model and setting, and the code that
rehearses. The estimator is not a part of it, so that a changed estimator is scored in seconds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accuracy.time_rows import TimeRow
from oomph.errors import OomphError
from oomph.records.gpu_model import GpuModel
from oomph.records.trace import Op, from_columns, to_columns
from oomph.store import Store

_STORE = Store("time-rows", most_entries=4000)
_AT_ONCE = 25  # rows in one child
_HERE = Path(__file__).parent
# Which modules decide the ops of a family of models, beside those of all families.
_OF_ALL = ("time_models", "apex", "by_tensor")
_OF_FAMILY: Mapping[str, tuple[str, ...]] = {
    "attention": ("cs336",),
    "attention-fused": ("cs336",),
    "bart": ("bart",),
    "bert-squad": ("bert_squad",),
    "convnet": ("convnets", "libraries"),
    "cs336": ("cs336",),
    "cs336-by-heads": ("cs336",),
    "cs336-own": ("cs336",),
    "dynamo": ("dynamo",),
    "ssd": ("ssd", "libraries"),
    "torchvision": ("libraries",),
    "transformer-xl": ("transformer_xl",),
    "waveglow": ("waveglow",),
}
_ROOMS = ("pretending", "rehearsing", "tricks")


def ops_of(row: TimeRow, model: GpuModel) -> Sequence[Op] | str:
    """Return the ops of the step, or why it could not be rehearsed."""
    rehearse_missing([(row, model)])
    stored = _STORE.read_json(_name(row, model))
    if stored is None:
        return "its rehearsal could not be stored"
    if isinstance(stored, str):
        return stored
    return from_columns(stored).ops


def rehearse_missing(rows: Sequence[tuple[TimeRow, GpuModel]]) -> None:
    """Rehearse and store what is not stored, many in one child: it patches torch once."""
    missing: dict[str, tuple[TimeRow, GpuModel]] = {}
    for row, model in rows:
        if not (_STORE.directory / _name(row, model)).exists():
            missing.setdefault(_name(row, model), (row, model))
    for capability in {model.compute_capability for _, model in missing.values()}:
        of_it = [item for item in missing.items() if item[1][1].compute_capability == capability]
        for start in range(0, len(of_it), _AT_ONCE):
            _rehearse_and_store(dict(of_it[start : start + _AT_ONCE]))


def _rehearse_and_store(missing: Mapping[str, tuple[TimeRow, GpuModel]]) -> None:
    from oomph.rehearsing.child import in_a_child

    print(f"rehearsing {len(missing)} of the published runs", file=sys.stderr, flush=True)
    try:
        found = in_a_child(lambda: {name: _rehearsed(*item) for name, item in missing.items()})
    except OomphError as error:
        if len(missing) > 1:  # one of them ended the child
            for name, item in missing.items():
                _rehearse_and_store({name: item})
            return
        found = dict.fromkeys(missing, " ".join(str(error).split()))
    for name, stored in found.items():
        _STORE.write_json(name, stored)


def _rehearsed(row: TimeRow, model: GpuModel) -> dict[str, Any] | str:
    """In the child: a trace of the ops alone, or what went wrong."""
    import torch

    from accuracy.time_models import variant_of, workload_of
    from oomph.rehearsing.rehearse import rehearse

    _prepare(model.compute_capability)
    torch.backends.cudnn.benchmark = False
    assert model.compute_capability is not None
    try:
        trace = rehearse(workload_of(row), variant_of(row), model.compute_capability)
    except Exception as error:  # noqa: BLE001 - one model must not stop the others
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    nothing: dict[str, Any] = dict.fromkeys(
        ("allocations", "events", "step_starts", "phase_starts", "convolutions"), ()
    )
    return to_columns(replace(trace, **nothing))


@functools.cache
def _prepare(capability: tuple[int, int] | None) -> None:
    from oomph.rehearsing.rehearse import prepare

    assert capability is not None
    prepare(capability)


def _name(row: TimeRow, model: GpuModel) -> str:
    setting = [row.model, row.num_gpus, row.precision, row.is_channels_last, row.micro_batch]
    setting += [row.size, row.torch_version.partition(".")[0], model.compute_capability]
    decided_by = json.dumps([setting, _code(row.model.partition("/")[0])])
    return hashlib.sha256(decided_by.encode()).hexdigest()[:32]


@functools.cache
def _code(family: str) -> str:
    """Return a hash of the code that decides the ops of a family, and torch's version."""
    from importlib.metadata import version

    import oomph

    rooms = Path(oomph.__file__).parent
    files = [_HERE / f"{name}.py" for name in (*_OF_ALL, *_OF_FAMILY[family])]
    files += [rooms / "records" / "trace.py", rooms / "records" / "workload.py"]
    files += sorted(path for room in _ROOMS for path in (rooms / room).rglob("*.py"))
    whole = hashlib.sha256(version("torch").encode())
    for path in files:
        whole.update(path.read_bytes())
    return whole.hexdigest()
