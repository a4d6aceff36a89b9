"""What `oomph verify` prints: the answer first, each difference in words, no line too wide."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verifying.verifications import DIFFERENCE, PREDICTED, SEQUENCE, SITE, verified, zoo

from oomph.records.verification import FirstDifference, Verification, Verified
from oomph.showing.verify import print_verification
from oomph.units import GIB


def show(found: Verification, capsys: pytest.CaptureFixture[str], path: str | None = None) -> str:
    print_verification(found, path)
    return capsys.readouterr().out


def test_the_answer_comes_first_with_the_largest_error(capsys: pytest.CaptureFixture[str]) -> None:
    found = zoo(verified("gpt"), verified("unet", device_bytes=int(10.9 * GIB)))
    text = show(found, capsys, "oomph-verify.json")
    assert text.startswith(
        "oomph is right on NVIDIA A100-SXM4-80GB: 2 of 2 models are within their error bars;"
        " largest error +0.9% (unet, device).\n"
    )
    assert "Step times: 2 of 2 in the predicted range; median error 9%." in text
    assert "11.0 GiB 0.0%" in text
    assert "110 ms -9%" in text
    assert "driver 550.54, torch 2.13.0, CUDA 12.8, cuDNN 91002" in text
    assert "Written to oomph-verify.json" in text
    assert "Next: oomph verify train.py:workload" in text


def test_a_wrong_prediction_is_named_with_its_first_difference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = verified("unet", device_bytes=20 * GIB, sequence=SEQUENCE)
    text = show(zoo(verified(), wrong), capsys, "oomph-verify.json")
    assert text.startswith("oomph is wrong on NVIDIA A100-SXM4-80GB for 1 of 2 models (unet)")
    assert (
        "unet: First difference, in step 1: oomph predicts 4.0 MiB (4,194,304 B) for aten.mm in"
        " blocks.0.fc (forward); the GPU requests 8.0 MiB (8,388,608 B) at secret.py:12." in text
    )
    assert "Next: attach oomph-verify.json to an issue" in text
    assert "99.8%" in text


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        (
            replace(DIFFERENCE, predicted=None, after=DIFFERENCE.predicted),
            "at secret.py:12 that oomph does not, after aten.mm in blocks.0.fc (forward).",
        ),
        (
            replace(DIFFERENCE, recorded_bytes=None, recorded_at=None),
            "for aten.mm in blocks.0.fc (forward), and the GPU does not request it.",
        ),
    ],
)
def test_a_difference_of_one_side_says_which(
    capsys: pytest.CaptureFixture[str], difference: FirstDifference, said: str
) -> None:
    one = verified("t.py:w", sequence=replace(SEQUENCE, first_difference=difference))
    assert said in show(zoo(one, kind="workload"), capsys)


def test_one_model_has_a_row_per_figure_with_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(zoo(verified("train.py", sequence=SEQUENCE), kind="script"), capsys)
    assert text.startswith(
        "oomph is right on NVIDIA A100-SXM4-80GB: train.py is within the error bar; no error.\n"
    )
    assert "reserved    10.0 GiB   9.5 GiB to 10.5 GiB  10.0 GiB   0.0%" in text
    assert "999 of 1,001 on the GPU match the prediction's 1,000 in order (99.8%)." in text
    assert "in the error bar: 2 x 1.0 MiB (workspace of a convolution)" in text
    assert "only predicted: 1 x 4.0 MiB (aten.mm in blocks.0.fc)" in text


def test_what_is_not_known_is_not_shown_as_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    one = verified("train.py", device_bytes=None, step_s=None)
    lines = show(zoo(one, kind="script"), capsys).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith(("device", "step"))] == [
        "unknown",
        "unknown",
    ]


@pytest.mark.parametrize(
    ("fits", "said"),
    [
        ("yes", "wrong on NVIDIA A100-SXM4-80GB: t ran out of memory, and oomph said that it fits"),
        (
            "no",
            "right on NVIDIA A100-SXM4-80GB: t ran out of memory, and oomph said that it does not",
        ),
    ],
)
def test_running_out_of_memory_is_compared_with_what_was_said(
    capsys: pytest.CaptureFixture[str], fits: str, said: str
) -> None:
    text = show(zoo(verified("t", ran_out=True, fits=fits), kind="workload"), capsys)
    assert text.startswith(f"oomph is {said}")
    assert "over 10.0 GiB" in text


def test_a_model_that_fits_against_the_prediction_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = show(zoo(verified("t", fits="no"), kind="workload"), capsys)
    assert "t fits, and oomph said that it does not fit" in text


def test_ctrl_c_says_how_much_was_verified(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(zoo(verified(), num_asked=13, was_interrupted=True), capsys)
    assert "Interrupted: 1 of 13 models were verified." in text


def test_what_could_not_be_trained_is_said_and_does_not_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = Verified(
        name="vit",
        settings=None,
        predicted=PREDICTED,
        measured=None,
        sequence=None,
        problem="not trained: no kernel image",
    )
    text = show(zoo(failed, verified()), capsys)
    assert "1 of 1 models are within" in text
    assert "vit: not trained: no kernel image" in text
    nothing = show(zoo(failed, site=None), capsys)
    assert nothing.startswith("Nothing could be measured on this GPU.")


def test_an_emulated_gpu_is_said_to_prove_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = zoo(verified(), site=replace(SITE, is_emulated=True))
    assert "it says nothing about a real one" in show(found, capsys)


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("kind", ["zoo", "workload"])
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, kind: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    models = [verified("resnet-channels-last", sequence=SEQUENCE), verified(fits="no")]
    text = show(zoo(*models, kind=kind), capsys, "oomph-verify.json")
    assert max(map(len, text.splitlines())) <= columns
    assert "resnet-channels-last" in text
