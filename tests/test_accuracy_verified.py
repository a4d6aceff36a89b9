"""A verification is part of `make accuracy`: its models are rebuilt by name and predicted anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from verifying.verifications import verified, zoo

from accuracy.verified import kept_files, report, today
from oomph.errors import Unreadable
from oomph.verbs.verify import save_verification
from oomph.verifying.verifier import target_of_site


def test_a_file_is_printed_with_the_errors_of_then_and_now(tmp_path: Path) -> None:
    path = tmp_path / "a100.json"
    save_verification(zoo(verified("mlp")), path)
    lines = list(report([path]))
    assert lines[0] == "### verified: a100"
    assert "NVIDIA A100-SXM4-80GB, driver 550.54, torch 2.13.0" in lines
    (row,) = [line for line in lines if line.startswith("| mlp")]
    assert row.startswith("| mlp | 10.0 GiB | 11.0 GiB | 110 ms | +0.0 % | -")  # it takes 1 GiB
    assert row.endswith("| wrong |")


def test_todays_prediction_replaces_the_one_of_then() -> None:
    found = zoo(verified("mlp"))
    one = today(found.verified[0], found)
    assert one.predicted is not None
    assert one.predicted.reserved_bytes < 2 << 30
    assert one.measured == found.verified[0].measured


def test_a_model_that_the_zoo_no_longer_has_is_not_judged() -> None:
    found = zoo(verified("dodo"))
    assert today(found.verified[0], found).outcome == "not measured"


def test_a_users_own_model_cannot_be_rebuilt_and_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    save_verification(zoo(verified("mine"), kind="workload"), path)
    assert any("cannot be rebuilt" in line for line in report([path]))


def test_the_gpu_of_a_file_is_found_in_the_catalogue_or_described_by_the_file() -> None:
    site = zoo().site
    assert site is not None
    assert target_of_site(site).model.name == "a100-80gb"
    unheard_of = target_of_site(replace(site, gpu_name="Unheard-of 9000"))
    assert unheard_of.capability == (8, 0)
    assert unheard_of.model.num_sms == 108
    assert target_of_site(replace(site, is_emulated=True)).is_emulated


def test_the_files_of_the_repository_can_be_read() -> None:
    assert list(report(kept_files()))


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    save_verification(zoo(verified(), version=2), path)
    with pytest.raises(Unreadable, match="is not a verification"):
        list(report([path]))
