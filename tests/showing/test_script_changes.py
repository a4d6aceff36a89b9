"""What --diff says of its changes before it prints them: whole or a part, as planned or not."""

from __future__ import annotations

from typing import Any

import pytest

from oomph.records.script import Patched, ScriptChanges
from oomph.showing.script import print_changes, verdict_on

GIB = 1 << 30
_NEEDS = "the script needs 5.0 GiB and does not fit; the plan needs 4.0 GiB."
_DIFF = "--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-a\n+b\n"


def _patched(**settings: Any) -> Patched:
    given: dict[str, Any] = {
        "fits": "yes",
        "device_bytes": 4 * GIB,
        "planned_bytes": 4 * GIB,
        "differences": (),
        **settings,
    }
    return Patched(**given)


def _changes(patched: Patched | None, **settings: Any) -> ScriptChanges:
    given: dict[str, Any] = {"diff": _DIFF, "arguments": (), "by_hand": (), **settings}
    return ScriptChanges(patched=patched, **given)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (_changes(_patched()), ["The patched script needs 4.0 GiB, as planned."]),
        (
            _changes(_patched(device_bytes=3 * GIB)),
            ["The patched script needs 3.0 GiB, 1.0 GiB less than planned."],
        ),
        (
            _changes(_patched(differences=("the rate is 2",))),
            ["The patched script is not as planned (4.0 GiB, planned 4.0 GiB): the rate is 2."],
        ),
        (
            _changes(_patched(device_bytes=5 * GIB, fits="no"), by_hand=("do it",)),
            [f"These changes are only a part of the plan: with them alone {_NEEDS}"],
        ),
        (
            _changes(_patched(device_bytes=5 * GIB, fits="no"), by_hand=("do it",), diff=""),
            [f"The plan is left for you to make by hand: as it is, {_NEEDS}"],
        ),
        (
            _changes(_patched(device_bytes=None, fits=None, error="it failed")),
            ["The script with these changes could not be rehearsed: it failed"],
        ),
        (_changes(None), []),
    ],
)
def test_the_verdict_on_changes(changes: ScriptChanges, said: list[str]) -> None:
    assert verdict_on(changes, ()) == said


def test_the_verdict_comes_first_and_the_diff_last(capsys: pytest.CaptureFixture[str]) -> None:
    patched = _patched(device_bytes=5 * GIB, fits="no")
    changes = _changes(patched, by_hand=("do it",), arguments=("--amp",), tried=("--amp: tried",))
    print_changes(changes, ())
    printed = capsys.readouterr().out
    words = ["only a part", "by hand: do it", "--amp: tried", "these arguments: --amp", _DIFF]
    places = [printed.index(word) for word in words]
    assert places == sorted(places)
    assert printed.endswith(_DIFF)
