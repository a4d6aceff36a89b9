"""Every way to read a value of a tensor gives the true one, is told as an assumption, or fails."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rehearsing.script.rehearsed import GPU, rehearsed, trained
from torch import nn

from oomph.errors import OomphError
from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.building import build
from oomph.rehearsing.child import in_a_child

Read = Callable[[Any], Any]

READS: dict[str, Read] = {
    "item": lambda t: t.max().item(),
    "int": lambda t: int(t.max()),
    "index": lambda t: list(range(40_000))[t.long().max()],
    "float": lambda t: float(t.max()),
    "bool": lambda t: bool((t > 3).any()),
    "all": lambda t: bool((t > 0).all()),
    "if": lambda t: 1 if t.max() > 4 else 2,
    "tolist": lambda t: t.tolist(),
    "iterating": lambda t: [int(one) for one in t],
    "numpy": lambda t: t.cpu().numpy().tolist(),
    "copied": lambda t: torch.zeros(3).copy_(t).tolist(),
    "nonzero": lambda t: len(t.nonzero()),
    "mask": lambda t: len(t[t > 3]),
    "masked_select": lambda t: len(t.masked_select(t > 3)),
    "unique": lambda t: len(t.unique()),
    "repeat_interleave": lambda t: len(t.repeat_interleave(t.long())),
    "bincount": lambda t: len(torch.bincount(t.long())),
    "equal": lambda t: torch.equal(t, t + 1),
    "allclose": lambda t: torch.allclose(t.float(), t.float() + 1),
    "is_nonzero": lambda t: torch.is_nonzero(t.max()),
    "aminmax": lambda t: [one.item() for one in t.aminmax()],
    "range": lambda t: len(range(int(t[1]))),
    "format": lambda t: f"{t.max():.1f}",
    "in": lambda t: 5 in t,
    "storage": lambda t: next(iter(t.long().untyped_storage())),
    "saved": lambda t: torch.save(t, io.BytesIO()),
}
# What a model's own values decide the size of is taken as the most that it can be, known or not:
# the sizes of a prediction for other batches lie on a line.
AT_MOST = {"nonzero", "mask", "masked_select"}
# They read nothing, or fail where they are on a GPU.
UNREAD = {"saved", "storage"}
MAKES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.tensor([3, 5, 4]),
    "full": lambda: torch.full((3,), 5),
    "computed": lambda: (torch.linspace(3, 5, 3) * 2).round() / 2 + torch.ones(3),
    "of numpy": lambda: torch.from_numpy(torch.arange(3, 6).numpy()),
}
UNKNOWN: dict[str, Callable[[], Any]] = {
    "whole": lambda: torch.randn(3, 40_000).argmax(1),
    "figures": lambda: torch.randn(3, 40_000).sum(1),
}


def outcomes(where: str, make: Callable[[], Any]) -> dict[str, tuple[str, Any]]:
    """Of each way: what was read and whether it was told, or that it failed."""

    def work() -> dict[str, tuple[str, Any]]:
        from oomph.rehearsing.rehearse import prepare, rehearse

        prepare(GPU.capability)
        found: dict[str, tuple[str, Any]] = {}
        for name, read in READS.items():
            try:
                values, trace = read_in(where, make, read, rehearse)
            except OomphError as error:  # noqa: PERF203 - each by itself
                found[name] = ("an oomph error", error.what)
            except Exception as error:  # noqa: BLE001 - whichever: it did not pass in silence
                found[name] = ("an error", str(error))
            else:
                found[name] = ("told" if trace.notes else "silent", values[-1])
        return found

    return in_a_child(work)


def read_in(
    where: str, make: Callable[[], Any], read: Read, rehearse: Any
) -> tuple[list[Any], Trace]:
    values: list[Any] = []

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.register_buffer("buffer", make())
            if where == "constructor":
                values.append(read(make()))

        def forward(self, x: Any) -> Any:
            if where == "buffer":
                values.append(read(self.buffer))
            if where == "output":
                values.append(read(self.layer(x).sum(0)[:3]))
            return self.layer(x).sum()

    def loss(model: Any, batch: Any) -> Any:
        if where == "batch":
            values.append(read(batch["lengths"]))
        return model(batch["x"])

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if where == "optimizer":
                values.append(read(self.param_groups[0]["params"][0].grad.sum(0)[:3]))
            return super().step(closure)

    workload = Workload(
        model=Reading,
        batch=lambda n: {"x": torch.zeros(n, 16), "lengths": make()},
        loss=loss,
        optimizer=lambda parameters: Optimizer(parameters, lr=0.1),
        batch_size=4,
    )
    return values, rehearse(workload, Variant(micro_batch=4), GPU.capability)


@pytest.mark.parametrize("kind", MAKES)
def test_what_a_constructor_makes_has_its_true_values(kind: str) -> None:
    make = MAKES[kind]
    found = outcomes("constructor", make)
    for name, read in READS.items():
        assert found[name] == ("silent", read(make())), name


@pytest.mark.parametrize("where", ["buffer", "batch"])
def test_what_goes_to_the_gpu_keeps_its_values(where: str) -> None:
    found = outcomes(where, MAKES["tensor"])
    for name, read in READS.items():
        if name in AT_MOST:
            assert found[name] == ("told", 3), name
        elif name not in UNREAD:
            assert found[name] == ("silent", read(MAKES["tensor"]())), name


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize("where", ["constructor", "buffer"])
def test_no_value_that_is_unknown_is_read_in_silence(where: str, kind: str) -> None:
    found = outcomes(where, UNKNOWN[kind])
    assert {name for name, (how, _) in found.items() if how == "silent"} <= UNREAD


@pytest.mark.parametrize("where", ["output", "optimizer"])
def test_no_value_of_a_model_is_read_in_silence(where: str) -> None:
    found = outcomes(where, MAKES["tensor"])
    assert {name for name, (how, _) in found.items() if how == "silent"} <= UNREAD


def test_a_width_never_comes_of_an_unknown_value() -> None:
    """Whole numbers of large tensors are no numbers here, and figures of them make none."""
    for kind in UNKNOWN:
        found = outcomes("constructor", UNKNOWN[kind])
        for name in ("int", "index", "range", "tolist", "iterating", "nonzero", "mask"):
            assert "error" in found[name][0], (kind, name)


class Stages(nn.Module):
    """As RegNet: the widths of its stages are computed with torch."""

    def __init__(self) -> None:
        super().__init__()
        continuous = torch.arange(4) * 8.5 + 16
        capacity = torch.round(torch.log(continuous / 16) / torch.log(torch.tensor(2.0)))
        widths = (torch.round(16 * torch.pow(2.0, capacity) / 8) * 8).int().tolist()
        self.layers = nn.Sequential(
            *(nn.Linear(a, b) for a, b in zip([16, *widths], widths, strict=False))
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def test_layers_are_as_wide_as_they_are() -> None:
    true = [tuple(p.shape) for p in Stages().parameters()]
    assert [tuple(p.shape) for p in build(Stages).parameters()] == true
    workload = Workload(
        model=Stages,
        batch=lambda n: torch.zeros(n, 16),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
    trace = trained(workload, Variant(micro_batch=4))
    sizes = sorted(one.size_bytes for one in trace.allocations if one.category == "parameters")
    assert sizes == sorted(4 * p.numel() for p in Stages().parameters())


def test_what_takes_in_an_unknown_value_is_unknown() -> None:
    def make() -> int:
        small, view = torch.arange(4), None
        view = small[:2]
        small += torch.randn(4, 40_000).argmax(1)
        return int(view[0])

    with pytest.raises(OomphError, match="unknown in a rehearsal"):
        build(make)


def test_what_is_written_over_as_a_whole_is_known_again() -> None:
    def make() -> int:
        small = torch.arange(4)
        small += torch.randn(4, 40_000).argmax(1)
        small.fill_(7)
        return int(small[0])

    assert build(make) == 7


def test_a_random_value_that_is_read_is_told() -> None:
    notes: list[str] = []
    assert build(lambda: int(torch.randint(3, 4, (1,))), notes.append) == 3
    assert [note.partition(",")[0] for note in notes] == [
        "the model's constructor reads a random value: your run draws another"
    ]


def test_tied_weights_that_were_made_for_real_stay_tied() -> None:
    def make() -> Any:
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        model[1].weight = model[0].weight
        return model

    first, second = build(make)
    assert first.weight is second.weight


def test_large_tables_are_made_without_memory_wherever_they_are_named_to_be() -> None:
    def make() -> Any:
        outer = torch.ones(10**6, 1) * torch.ones(1, 10**6)
        repeated = torch.ones(2).repeat(10**6, 10**6)
        return outer, torch.zeros(10**6, 10**6, device="cpu"), repeated

    assert all(one.is_meta for one in build(make))


def test_a_weight_is_replaced_by_one_of_another_kind() -> None:
    def make() -> Any:
        small, large = nn.Linear(8, 8), nn.Linear(8, 40_000)
        small.weight.data = large.weight.data[:100]
        large.weight.data = torch.ones(3, 8)
        return nn.ModuleList([small, large])

    first, second = build(make)
    assert (first.weight.shape, second.weight.shape) == ((100, 8), (3, 8))


SCRIPT = """
import json, torch
from torch import nn
from pretending.test_values import READS
model = nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
found = {}
def tried(name, tensor):
    try:
        found[name] = ["silent", READS[name](tensor)]
    except Exception as error:
        found[name] = ["an error", str(error)]
for step in range(3):
    out = model(torch.zeros(4, 16).cuda())
    if step == 0:
        KIND
        json.dump(found, open("found.json", "w"))
    out.sum().backward()
    optimizer.step()
"""
EACH = "".join(f"        tried({name!r}, TENSOR)\n" for name in READS).strip()


def outcomes_in_script(directory: Path, tensor: str) -> dict[str, tuple[str, Any]]:
    text = SCRIPT.replace("KIND", EACH).replace("TENSOR", tensor)
    _, seen = rehearsed(directory, text)
    lines = text.splitlines()
    reads = Path(__file__).read_text().splitlines()
    told = set()
    for one in seen.invented:  # of the script, or of the table above, which is no library
        line = (lines if one.file.endswith("train.py") else reads)[one.line - 1]
        told |= {name for name in READS if f"tried({name!r}" in line or f'"{name}": ' in line}
    found: dict[str, tuple[str, Any]] = json.loads((directory / "found.json").read_text())
    return {
        name: ("told" if name in told and how == "silent" else how, value)
        for name, (how, value) in found.items()
    }


def test_a_script_reads_what_it_put_on_the_gpu(tmp_path: Path) -> None:
    found = outcomes_in_script(tmp_path, "torch.tensor([3, 5, 4], device='cuda')")
    for name, read in READS.items():
        if name not in UNREAD:
            assert found[name] == ("silent", read(MAKES["tensor"]())), name


def test_a_script_reads_no_value_of_its_model_in_silence(tmp_path: Path) -> None:
    found = outcomes_in_script(tmp_path, "out.sum(0)[:3]")
    assert {name for name, (how, _) in found.items() if how == "silent"} <= UNREAD
