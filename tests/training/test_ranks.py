"""Replicas on two ranks train as DDP has them train, though one of them runs out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("replicas.py")
Found = dict[str, Any]
NUM = 32


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What two real processes found, joined by gloo."""
    folder = tmp_path_factory.mktemp("ranks")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, str(SCRIPT), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def assert_close(some: Found, others: Found, *, but: tuple[str, ...] = ()) -> None:
    for name, values in some["state"].items():
        most = max(map(abs, others["state"][name]))
        if name not in but:
            pairs = zip(values, others["state"][name], strict=True)
            assert max(abs(one - other) for one, other in pairs) <= 1e-5 * most, name


@pytest.mark.parametrize("way", ["by_batches", "by_pieces"])
def test_an_error_of_one_rank_changes_nothing(way: str, ranks: list[Found]) -> None:
    first, second = ranks
    assert first[way]["num_ooms"] == 0
    assert first[way]["size"] == NUM  # the other's pieces are no matter of this one
    assert 1 <= second[way]["num_ooms"] <= 2
    assert second[way]["size"] < NUM
    assert first[way]["state"] == second[way]["state"]
    assert first[way]["norms"] == pytest.approx(first["by_torch"]["norms"], rel=1e-5)
    assert_close(first[way], first["by_torch"])


def test_batches_are_accumulated_on_each_rank(ranks: list[Found]) -> None:
    first, second = ranks
    assert second["accumulated"]["num_ooms"] >= 1
    assert first["accumulated"]["state"] == second["accumulated"]["state"]
    # One process has seen the examples of both.
    assert_close(first["accumulated"], first["accumulated_by_one"], but=("num_seen",))


def test_where_one_rank_finds_no_way_all_end_as_they_began(ranks: list[Found]) -> None:
    said = [rank["without_a_way"]["said"] for rank in ranks]
    assert all("one step does not fit into memory" in each for each in said)
    assert "another rank" in said[0]
    assert "1 of 1 examples at a time" in said[1]
    assert all(rank["without_a_way"]["is_as_before"] for rank in ranks)
    # And they go on together.
    assert ranks[0]["without_a_way"]["state"] == ranks[1]["without_a_way"]["state"]


def test_where_one_rank_refuses_to_split_all_end_as_they_began(ranks: list[Found]) -> None:
    said = [rank["coupled"]["said"] for rank in ranks]
    assert "another rank" in said[0]
    assert "cannot be split without changing the training" in said[1]
    assert all(rank["coupled"]["is_as_before"] for rank in ranks)
    assert ranks[0]["coupled"]["state"] == ranks[1]["coupled"]["state"]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("static_graph", "static_graph=True averages"),
        ("hook", "communication hook"),
        ("join", "within model.join()"),
        ("norm", "SyncBatchNorm waits"),
        ("fsdp", "divided over ranks"),
    ],
)
def test_what_would_leave_ranks_waiting_is_refused(
    what: str, reason: str, ranks: list[Found]
) -> None:
    for rank in ranks:
        assert reason in rank["refused"][what]
