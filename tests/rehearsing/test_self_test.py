"""A torch on which rehearsals go wrong is found out before it is believed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_predict import TRAIN

import oomph
from oomph.records.trace import Trace
from oomph.records.workload import Variant
from oomph.rehearsing import self_test, traces
from oomph.rehearsing.child import in_a_child
from oomph.rehearsing.rehearse import prepare
from oomph.rehearsing.self_test import Recording, first_difference
from oomph.rehearsing.traces import Request

AMPERE = (8, 0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def passes() -> list[Path]:
    return list(self_test._PASSED.directory.glob("*"))


def tested() -> str | None:
    return in_a_child(lambda: self_test.prepare_and_test(AMPERE))


def spoil(monkeypatch: pytest.MonkeyPatch, spoiled: Callable[[], None]) -> None:
    """Let rehearsals go wrong, as they might on a torch that nobody has tried."""

    def prepare_and_spoil(capability: tuple[int, int]) -> None:
        prepare(capability)
        spoiled()

    monkeypatch.setattr(self_test, "prepare", prepare_and_spoil)


def take_a_copy_more() -> None:
    functional: Any = torch.nn.functional
    gelu = functional.gelu
    functional.gelu = lambda x: gelu(x.clone())


def leave_one_out() -> None:
    functional: Any = torch.nn.functional
    functional.gelu = lambda x: x


def raise_an_error() -> None:
    def softmax(*_: Any, **__: Any) -> None:
        raise TypeError("softmax() got an unexpected\nkeyword")

    torch.Tensor.softmax = softmax  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("capability", [(7, 0), AMPERE, (9, 0)])
def test_this_torch_passes_and_that_is_remembered(capability: tuple[int, int]) -> None:
    assert in_a_child(lambda: self_test.prepare_and_test(capability)) is None
    (entry,) = passes()
    found = self_test._PASSED.read_json(entry.name)
    assert found == {"torch_version": str(torch.__version__)}


def test_a_version_is_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tested() is None
    spoil(monkeypatch, take_a_copy_more)
    assert tested() is None, "it passed before"
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert "torch 9.9.9 is not one" in (tested() or "")


def test_another_tracer_is_tested_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tested() is None
    monkeypatch.setattr(self_test, "surroundings", lambda: ["another"])
    assert tested() is None
    assert len(passes()) == 2


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        (take_a_copy_more, r"differs by \d+ bytes at aten\.\w+"),
        (leave_one_out, r"differs by \d+ bytes at aten\.\w+"),
        (raise_an_error, r"failed with TypeError: softmax\(\) got an unexpected keyword"),
    ],
)
def test_a_rehearsal_that_goes_wrong_is_a_doubt_that_names_the_op(
    monkeypatch: pytest.MonkeyPatch, spoiled: Callable[[], None], said: str
) -> None:
    spoil(monkeypatch, spoiled)
    found = tested()
    assert found is not None
    assert found.startswith(f"torch {torch.__version__} is not one that rehearsals were checked")
    assert re.search(said, found), found
    assert passes() == [], "it is tested again next time"


def test_a_cache_that_cannot_be_written_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert tested() is None


def test_what_the_users_file_has_set_is_not_touched_and_does_not_matter() -> None:
    def work() -> tuple[str | None, bool]:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        state = torch.random.get_rng_state()
        found = self_test.prepare_and_test(AMPERE)
        is_same = (
            torch.get_default_dtype() is torch.bfloat16
            and not torch.is_grad_enabled()
            and bool((torch.random.get_rng_state() == state).all())
        )
        return found, is_same

    assert in_a_child(work) == (None, True)


@pytest.fixture
def train(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


def test_a_trace_is_the_same_whether_the_test_ran_before_it_or_not(train: Path) -> None:
    place, wish = (train, "workload"), Request(tricks=Variant(micro_batch=1), micro_batch=4)
    first = traces.trace(place, wish, AMPERE)
    assert len(passes()) == 1
    assert traces.trace(place, wish, AMPERE) == first


def test_a_doubt_makes_the_verdict_uncertain_and_stays_with_the_kept_trace(
    train: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from oomph.cli import main

    with monkeypatch.context() as patched:
        spoil(patched, take_a_copy_more)
        told = oomph.predict(f"{train}:workload", gpu="a100-80gb")
    assert told.fits == "uncertain"
    assert "differs by" in (told.doubt or "")
    assert main(["predict", f"{train}:workload", "--gpu", "a100-80gb"]) == 3
    second_line = capsys.readouterr().out.splitlines()[1]
    assert second_line.startswith("Do not trust this: torch")


def test_a_doubt_does_not_make_anything_fit(train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, take_a_copy_more)
    assert oomph.predict(f"{train}:workload", gpu_memory="64MiB").fits == "no"


def test_a_doubt_is_kept_with_the_columns_of_a_trace() -> None:
    from predicting.test_scaling import trace_of

    from oomph.records.trace import from_columns, to_columns

    trace: Trace = replace(trace_of([512], [1, -1], 2), doubt="why")
    assert from_columns(to_columns(trace)) == trace


# ---- comparing recordings ----------------------------------------------------------------------

REAL = Recording([64, 32, 16], ["a", "b", "c"], [1, 2, -1, -2, 3])


@pytest.mark.parametrize(
    ("other", "op", "num_bytes"),
    [
        (replace(REAL, sizes=[64, 48, 16]), "b", 16),
        (replace(REAL, events=[1, 2, -1, 3]), "b", 32),
        (replace(REAL, events=[1, 2, -1, -2]), "c", 16),
        (replace(REAL, events=[1, 2, -1, -2, 3, -3]), "c", 16),
    ],
)
def test_the_first_difference_is_named(other: Recording, op: str, num_bytes: int) -> None:
    found = first_difference(REAL, other)
    assert found is not None
    assert (found.op, found.num_bytes) == (op, num_bytes)


def test_frees_that_follow_each_other_have_no_order() -> None:
    assert first_difference(REAL, replace(REAL, events=[1, 2, -2, -1, 3])) is None


def test_what_does_not_count_is_left_out_and_the_rest_numbered_anew() -> None:
    assert REAL.only(lambda number: number != 1) == Recording([64, 16], ["a", "c"], [1, -1, 2])
