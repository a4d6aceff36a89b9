"""Traces are kept by content: nothing stale is ever found, and nothing broken stops the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from predicting.test_scaling import convolved, trace_of

from oomph.records.trace import from_columns, to_columns
from oomph.records.workload import Variant
from oomph.rehearsing import trace_store
from oomph.rehearsing.traces import Request, Traced, variant_for_batch


def request(micro_batch: int, **tricks: Any) -> Request:
    return Request(tricks=Variant(micro_batch=1, **tricks), micro_batch=micro_batch)


REQUEST = request(4)
AMPERE = (8, 0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text("workload = 1\n")
    (tmp_path / "model.py").write_text("width = 64\n")
    return tmp_path / "train.py", "workload"


def traced(place: tuple[Path, str], wish: Request = REQUEST) -> Traced:
    variant = variant_for_batch(8, wish)
    sizes = dict.fromkeys((2, 3, variant.micro_batch))
    return Traced(
        variant=variant,
        traces=tuple(trace_of([512, 1024 * size], [1, 2, -1, -2], size) for size in sizes),
        files=(str(place[0]), str(place[0].with_name("model.py"))),
        batch_size=8,
    )


def test_a_trace_is_the_same_after_its_way_through_columns() -> None:
    trace = trace_of([512, 1024], [1, 2, -1, -2], 2, flops=7)
    assert from_columns(to_columns(trace)) == trace
    assert from_columns(to_columns(convolved(2))) == convolved(2)
    returned = [replace(trace.allocations[0], is_output=True), *trace.allocations[1:]]
    returning = replace(trace, allocations=returned)
    assert from_columns(to_columns(returning)) == returning


def test_what_was_kept_is_found_for_every_micro_batch(place: tuple[Path, str]) -> None:
    assert trace_store.find(place, REQUEST, AMPERE) is None
    trace_store.keep(place, REQUEST, AMPERE, traced(place))
    found = trace_store.find(place, request(2), AMPERE)
    assert found is not None
    assert found.variant.micro_batch == 2
    assert found.variant.accumulation == 4
    assert found.traces == traced(place).traces


def test_a_line_speaks_for_nothing_farther_than_it_was_held_against(
    place: tuple[Path, str],
) -> None:
    near = request(2)
    trace_store.keep(place, near, AMPERE, traced(place, near))
    assert trace_store.find(place, near, AMPERE) is not None
    assert trace_store.find(place, request(4), AMPERE) is None


def test_a_trace_of_one_micro_batch_alone_speaks_for_that_and_adds_to_the_others(
    place: tuple[Path, str],
) -> None:
    whole = traced(place)
    trace_store.keep(place, REQUEST, AMPERE, replace(whole, traces=whole.traces[-1:]))
    assert trace_store.find(place, REQUEST, AMPERE) is not None
    assert trace_store.find(place, request(2), AMPERE) is None
    near = request(2)
    trace_store.keep(place, near, AMPERE, traced(place, near))
    found = trace_store.find(place, REQUEST, AMPERE)
    assert found is not None
    assert found.traces == whole.traces


def test_one_example_and_no_accumulation_are_traced_apart(place: tuple[Path, str]) -> None:
    trace_store.keep(place, REQUEST, AMPERE, traced(place))
    assert trace_store.find(place, request(1), AMPERE) is None
    assert trace_store.find(place, request(8), AMPERE) is None
    trace_store.keep(place, request(8), AMPERE, traced(place, request(8)))
    assert trace_store.find(place, request(8), AMPERE) is not None
    assert trace_store.find(place, REQUEST, AMPERE) is not None


@pytest.mark.parametrize("file", ["train.py", "model.py"])
def test_a_file_that_has_changed_makes_it_untrue(place: tuple[Path, str], file: str) -> None:
    trace_store.keep(place, REQUEST, AMPERE, traced(place))
    place[0].with_name(file).write_text("workload = 2\n")
    assert trace_store.find(place, REQUEST, AMPERE) is None


@pytest.mark.parametrize(
    ("wish", "capability"),
    [
        (request(4, precision="bf16"), AMPERE),
        (request(4, checkpointing="blocks"), AMPERE),
        (REQUEST, (9, 0)),
    ],
)
def test_another_way_to_train_or_another_kind_of_gpu_is_another_trace(
    place: tuple[Path, str], wish: Request, capability: tuple[int, int]
) -> None:
    trace_store.keep(place, REQUEST, AMPERE, traced(place))
    assert trace_store.find(place, wish, capability) is None


@pytest.mark.parametrize("content", [b"", b"junk", b"\x1f\x8b\x08junk"])
def test_a_broken_entry_is_made_anew(place: tuple[Path, str], content: bytes) -> None:
    trace_store.keep(place, REQUEST, AMPERE, traced(place))
    (entry,) = trace_store._STORE.directory.iterdir()
    entry.write_bytes(content)
    assert trace_store.find(place, REQUEST, AMPERE) is None
    trace_store.keep(place, REQUEST, AMPERE, traced(place))
    assert trace_store.find(place, REQUEST, AMPERE) is not None


def test_a_cache_that_cannot_be_written_is_no_error(
    place: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place[0]))  # a file
    trace_store.keep(place, REQUEST, AMPERE, traced(place))
    assert trace_store.find(place, REQUEST, AMPERE) is None
