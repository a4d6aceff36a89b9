"""A prediction is judged by its own error bar, and a file that is posted holds nothing private."""

from __future__ import annotations

import getpass
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from verifying.verifications import MEASURED, PREDICTED, SEQUENCE, SITE, verified, zoo

from oomph.errors import Unreadable
from oomph.records.stored import as_json, from_json_file
from oomph.records.verification import Verification, Verified, without_private_parts
from oomph.units import GIB


def test_the_bar_of_each_figure_follows_from_the_devices() -> None:
    assert PREDICTED.bar("device") == (10 * GIB, 12 * GIB)
    assert PREDICTED.bar("reserved") == (9.5 * GIB, 10.5 * GIB)
    assert PREDICTED.bar("allocated") == (7.5 * GIB, 8.5 * GIB)


@pytest.mark.parametrize(
    ("figures", "outcome", "outside"),
    [
        ({}, "right", ()),
        ({"device_bytes": None}, "right", ()),
        ({"device_bytes": 13 * GIB}, "wrong", ("device",)),
        (
            {"allocated_bytes": 9 * GIB, "reserved_bytes": 11 * GIB},
            "wrong",
            ("allocated", "reserved"),
        ),
        ({"step_s": 100.0}, "right", ()),  # times do not count
        ({"ran_out": True}, "wrong", ()),
        ({"ran_out": True, "fits": "no"}, "right", ()),
        ({"ran_out": True, "fits": "uncertain"}, "right", ()),
        ({"fits": "no"}, "wrong", ()),
        ({"allocated_bytes": None, "reserved_bytes": None}, "not measured", ()),
    ],
)
def test_what_was_measured_decides_whether_oomph_was_right(
    figures: dict[str, Any], outcome: str, outside: tuple[str, ...]
) -> None:
    found = verified(**figures)
    assert found.outcome == outcome
    assert found.outside == outside


def test_a_model_that_could_not_be_trained_is_neither_right_nor_wrong() -> None:
    found = Verified(
        name="gpt",
        settings=None,
        predicted=PREDICTED,
        measured=None,
        sequence=None,
        problem="not trained: no kernel image",
    )
    assert found.outcome == "not measured"
    assert zoo(found).is_right is None
    assert zoo(found, verified()).is_right is True
    assert zoo(found, verified(device_bytes=1)).is_right is False


def test_errors_are_of_the_prediction_and_keep_their_sign() -> None:
    found = verified(reserved_bytes=8 * GIB)
    assert found.error_ratio("reserved") == 0.25
    assert found.error_ratio("device") == 0
    assert found.worst_error_ratio == 0.25
    assert verified(ran_out=True).worst_error_ratio is None


def test_the_time_is_judged_beside() -> None:
    assert verified().is_time_in_range is True
    assert verified(step_s=0.2).is_time_in_range is False
    assert verified(step_s=None).is_time_in_range is None


def test_explained_blocks_do_not_lower_the_share_that_matches() -> None:
    assert SEQUENCE.matched_ratio == 999 / 1001


def test_a_file_of_a_users_own_model_names_no_file_no_line_and_no_error(tmp_path: Path) -> None:
    own = replace(
        verified("train_secret.py:workload", sequence=SEQUENCE),
        problem="not trained: FileNotFoundError: /home/bob/data.bin",
        assumed=("values copied to the host: taken as 0, at secret.py:3",),
    )
    found = zoo(own, kind="workload")
    text = as_json(without_private_parts(found))
    for private in ("secret", "bob", "/", getpass.getuser(), platform.node()):
        assert private not in text, private
    path = tmp_path / "verify.json"
    path.write_text(text)
    read = from_json_file(Verification, path, what="verification")
    assert read == without_private_parts(found)
    assert read.verified[0].name == "a workload"
    assert read.verified[0].problem == "not trained"
    first = read.verified[0].sequence
    assert first is not None
    assert [(each.size_bytes, each.num_blocks) for each in first.only_recorded] == [(8 << 20, 2)]


def test_an_error_of_the_zoo_is_posted_without_its_paths() -> None:
    failed = replace(verified(), problem=r"not trained: no kernel image in /home/bob/t.so, C:\bob")
    posted = without_private_parts(zoo(failed)).verified[0].problem
    assert posted == "not trained: no kernel image in ... ..."


def test_the_figures_of_a_file_are_those_that_were_measured() -> None:
    found = without_private_parts(zoo(verified("gpt", sequence=SEQUENCE)))
    assert found.verified[0].name == "gpt"
    assert found.verified[0].measured == MEASURED
    assert found.site == SITE


@pytest.mark.parametrize("damage", ["", "[]", '{"schema": 9}', '{"schema": 1}'])
def test_a_file_that_is_not_a_verification_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "verify.json"
    path.write_text(damage)
    with pytest.raises(Unreadable, match="is not a verification"):
        from_json_file(Verification, path, what="verification")


def test_a_field_that_is_unknown_is_refused(tmp_path: Path) -> None:
    content = json.loads(as_json(zoo(verified())))
    content["verified"][0]["surprise"] = 1
    path = tmp_path / "verify.json"
    path.write_text(json.dumps(content))
    with pytest.raises(Unreadable):
        from_json_file(Verification, path, what="verification")
