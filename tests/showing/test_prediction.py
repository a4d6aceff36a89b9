"""What `oomph predict` prints."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from predicting.test_assembly import predicted
from predicting.test_scaling import trace_of

from oomph.records.prediction import Prediction
from oomph.showing.predict import print_prediction
from oomph.units import GIB


def shown(prediction: Prediction, capsys: pytest.CaptureFixture[str]) -> str:
    print_prediction(prediction)
    return capsys.readouterr().out


FITTING = predicted(trace_of([GIB, 2 * GIB], [1, 2, -1, -2], 2))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "fits on a card: micro-batch 2 x 1, fp32"),
        ({"fits": "no"}, "does not fit on a card"),
        ({"fits": "uncertain"}, "may or may not fit on a card"),
        ({"num_retries": 3}, "with 3 allocator retries: slow"),
    ],
)
def test_the_verdict_stands_first(
    capsys: pytest.CaptureFixture[str], changes: dict[str, object], said: str
) -> None:
    first = shown(replace(FITTING, **changes), capsys).splitlines()[0]  # type: ignore[arg-type]
    assert said in first


def test_a_bar_that_ends_beyond_the_gpu_is_explained_where_it_fits_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    beyond = replace(FITTING, high_bytes=FITTING.capacity_bytes + 1)
    assert "torch then frees its cache, and the step still fits" in shown(beyond, capsys)
    assert "frees its cache" not in shown(replace(beyond, fits="uncertain"), capsys)
    assert "frees its cache" not in shown(FITTING, capsys)


def test_every_unknown_is_named_with_what_would_settle_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_prediction(FITTING, explains=True)
    text = capsys.readouterr().out
    assert "error bar: the CUDA context" in text
    assert "measure it with oomph calibrate" in text


def test_the_error_bar_is_one_line_unless_it_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    (line,) = (one for one in shown(FITTING, capsys).splitlines() if "error bar" in one)
    assert "the CUDA context" in line
    assert "--explain" in line
    assert "measure it with" not in line


def test_the_last_line_is_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    print_prediction(FITTING, then="oomph plan train.py --gpu t4")
    assert capsys.readouterr().out.splitlines()[-1] == "next: oomph plan train.py --gpu t4"


def test_the_bar_is_to_scale(capsys: pytest.CaptureFixture[str]) -> None:
    bar = shown(FITTING, capsys).splitlines()[2]
    assert len(bar) == 60
    assert bar.count("█") == round(60 * 3 / 16)


@pytest.mark.parametrize("columns", [30, 60, 120])
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown(FITTING, capsys)).splitlines()
    assert max(map(len, lines)) <= columns


def test_a_time_that_nobody_can_tell_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert "time:" not in shown(replace(FITTING, step_s=None, samples_per_s=None), capsys)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention": "sdpa"}, "fp32, sdpa"),
        ({"loss": "chunked"}, "fp32, chunked-loss"),
        ({"optimizer_in_backward": True}, "fp32, optimizer-in-backward"),
        ({"offload_activations": True}, "fp32, offload-activations"),
        ({"offload_optimizer": True}, "fp32, offload-optimizer"),
        ({"adapters": "qlora"}, "fp32, qlora"),
        ({"expandable_segments": True}, "fp32, expandable-segments"),
        ({"channels_last": True}, "fp32, channels-last"),
        ({"checkpointing": "blocks:0-3"}, "fp32, recompute 4 blocks"),
        ({"optimizer": "foreach"}, "fp32, foreach-optimizer"),
    ],
)
def test_the_verdict_names_what_is_not_as_it_was_given(
    capsys: pytest.CaptureFixture[str], changes: dict[str, object], said: str
) -> None:
    variant = replace(FITTING.variant, **changes)  # type: ignore[arg-type]
    assert said in shown(replace(FITTING, variant=variant), capsys).splitlines()[0]


def test_memory_of_the_host_is_told_where_something_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = shown(replace(FITTING, host_bytes=2 * GIB, bus_bytes=4 * GIB), capsys)
    assert "on the host 2.0 GiB; 4.0 GiB over the bus a step" in told
    assert "on the host" not in shown(FITTING, capsys)


def test_several_gpus_are_told_as_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    variant = replace(FITTING.variant, num_gpus=8, sharding="fsdp")
    text = shown(replace(FITTING, variant=variant), capsys)
    assert "fits on each of 8 x a card: micro-batch 2 x 1, fp32, fsdp" in text
    assert "on each device" in text
    assert "CUDA and NCCL" in text
