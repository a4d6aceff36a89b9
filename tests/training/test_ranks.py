"""Replicas on several ranks train as DDP has them train, whatever fails on some of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from training.injections import HALF, MENDED, MENDED_SHARDS, NOTED, SHARDED, STEPPED

SCRIPT, INJECTIONS = (Path(__file__).with_name(f"{name}.py") for name in ("replicas", "injections"))
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


def injected(folder: Path, num_ranks: int, seed: int, num_cases: int, backend: str) -> list[Any]:
    """What each rank found, of each case."""
    numbers = [str(each) for each in (num_ranks, seed, num_cases)]
    logs = [folder / f"{rank}.log" for rank in range(num_ranks)]
    started = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(INJECTIONS), str(folder), backend, str(rank), *numbers]
        with log.open("w") as stream:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(command, env=env, stderr=stream))
    codes = [each.wait() for each in started]
    assert not any(codes), "\n".join(log.read_text()[-2000:] for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def assert_together(calls: tuple[Found, ...], case: str) -> None:
    """One call of a case, on all ranks: all step or all raise, and all hold the same."""
    errors = [call["error"] for call in calls]
    told = (case, *calls)
    assert all(errors) or not any(errors), told
    assert len({call["has_stepped"] for call in calls}) == 1, told
    fired = [call["fired"] for call in calls]
    is_sharded = any(f"wrap={wrap!r}" in case for wrap in SHARDED)
    has_copies = "copies='always'" in case
    mended = MENDED_SHARDS if is_sharded and not has_copies else MENDED
    if (
        not all(fired)
        and max(map(len, fired)) <= 1
        and {each for f in fired for each in f} <= mended
    ):
        assert not any(errors), told
    is_half = any(text in each for each in errors for text in (HALF, NOTED))
    if is_half:  # no rank has made the update, and none has a copy: each says so, or has a cause
        assert all(fired) or (is_sharded and any(fired)), told
        return
    if any(errors) or calls[0]["has_stepped"]:
        assert len({call["digest"] for call in calls}) == 1, told  # bit by bit
    if not any(STEPPED in each for each in errors):
        assert max(call["off"] for call in calls) <= 1e-12, told
    struck = {rank for rank, call in enumerate(calls) if call["fired"]}
    for call in calls:
        if call["error"] and not call["fired"]:
            assert any(re.search(rf"rank {rank}\b", call["error"]) for rank in struck), told


def assert_all_together(ranks: list[Any]) -> int:
    """How many failures there were."""
    for cases in zip(*ranks, strict=True):
        for calls in zip(*(case["calls"] for case in cases), strict=True):
            assert_together(calls, cases[0]["case"])
    return sum(case["num_fired"] for rank in ranks for case in rank)


def test_whatever_fails_on_some_ranks_all_step_or_all_raise(tmp_path: Path) -> None:
    assert assert_all_together(injected(tmp_path, 2, 0, 80, "eager")) > 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "num_cases", "backend"),
    [(2, 500, "eager"), (4, 420, "eager"), (3, 100, "aot_eager"), (2, 10, "inductor")],
)
def test_the_same_holds_for_a_thousand_random_jobs(
    num_ranks: int, num_cases: int, backend: str, tmp_path: Path
) -> None:
    found = injected(tmp_path, num_ranks, 1000 * num_ranks, num_cases, backend)
    assert assert_all_together(found) > num_cases


def assert_close(some: Found, others: Found, *, but: tuple[str, ...] = ()) -> None:
    for name, values in some["state"].items():
        most = max(map(abs, others["state"][name]))
        if name not in but:
            pairs = zip(values, others["state"][name], strict=True)
            assert max(abs(one - other) for one, other in pairs) <= 1e-5 * most, name


@pytest.mark.slow
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


@pytest.mark.slow
def test_batches_are_accumulated_on_each_rank(ranks: list[Found]) -> None:
    first, second = ranks
    assert second["accumulated"]["num_ooms"] >= 1
    assert first["accumulated"]["state"] == second["accumulated"]["state"]
    # One process has seen the examples of both.
    assert_close(first["accumulated"], first["accumulated_by_one"], but=("num_seen",))


@pytest.mark.slow
def test_where_one_rank_finds_no_way_all_end_as_they_began(ranks: list[Found]) -> None:
    said = [rank["without_a_way"]["said"] for rank in ranks]
    assert all("one step does not fit into memory" in each for each in said)
    assert "rank 1 could not fit its part" in said[0]
    assert "1 of 1 examples at a time" in said[1]
    assert all(rank["without_a_way"]["is_as_before"] for rank in ranks)
    # And they go on together.
    assert ranks[0]["without_a_way"]["state"] == ranks[1]["without_a_way"]["state"]


def test_where_one_rank_refuses_to_split_all_end_as_they_began(ranks: list[Found]) -> None:
    said = [rank["coupled"]["said"] for rank in ranks]
    assert "rank 1 failed in this step, so no rank has updated" in said[0]
    assert "splitting this batch would change the training" in said[1]
    assert all(rank["coupled"]["is_as_before"] for rank in ranks)
    assert ranks[0]["coupled"]["state"] == ranks[1]["coupled"]["state"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("static_graph", "static_graph=True averages"),
        ("hook", "communication hook"),
        ("join", "within model.join()"),
        ("norm", "SyncBatchNorm waits"),
        ("builtin_hook", "communication hook"),
        ("late_hook", "communication hook"),
        ("fsdp_unsynced", "set_requires_gradient_sync(False)"),
        ("fsdp_late", "set_requires_gradient_sync(False)"),
        ("fsdp_kept", "set_reshard_after_backward(False)"),
        ("fsdp_norm", "SyncBatchNorm waits"),
        ("fsdp_in_part", "is not sharded"),
        ("fsdp_and_tensors", "tensor parallelism"),
        ("fsdp_scaler", "bf16"),
        ("fsdp1", "FullyShardedDataParallel"),
        ("replicate", "composable replicate()"),
        ("replicate_of_fsdp", "composable replicate()"),
        ("tensor_parallel", "tensor parallelism"),
        ("data_parallel", "torch.nn.DataParallel"),
        ("deepspeed", "DeepSpeed's engine"),
        ("apex", "apex.parallel.DistributedDataParallel"),
        ("zero", "ZeroRedundancyOptimizer"),
        ("norm_alone", "cannot train SyncBatchNorm"),
        ("two_groups", "different process groups"),
        ("late_wrapper", "DistributedDataParallel that oomph was not given"),
    ],
)
def test_what_would_leave_ranks_waiting_is_refused(
    what: str, reason: str, ranks: list[Found]
) -> None:
    for rank in ranks:
        assert reason in rank["refused"][what]


@pytest.mark.slow
def test_a_hook_that_one_rank_registers_stops_all(ranks: list[Found]) -> None:
    said = [rank["hook_of_one"]["said"] for rank in ranks]
    assert "rank 1 failed" in said[0]
    assert "communication hook" in said[1]


@pytest.mark.slow
def test_ranks_with_other_numbers_of_batches_raise_and_go_on_together(ranks: list[Found]) -> None:
    for rank in ranks:
        assert all("at different points" in said for said in rank["apart"]["said"])
    assert ranks[0]["apart"]["state"] == ranks[1]["apart"]["state"]


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_step_of_all(ranks: list[Found]) -> None:
    for rank in ranks:
        found = rank["overflown"]
        assert found["is_as_before"]
        assert found["scales"][1] < found["scales"][0]
        assert found["state"] == ranks[0]["overflown"]["state"]


@pytest.mark.slow
def test_ranks_agree_twice_in_a_step_and_once_more_where_gradients_are_clipped(
    ranks: list[Found],
) -> None:
    for rank in ranks:
        plain, clipped, accumulated = rank["votes"]["by_step"]
        # The first step copies the weights, and says that it has.
        assert plain == [3, 2, 2, 2]
        assert clipped == [3, 3, 3, 3]
        assert accumulated == [1, 3, 1, 2]  # calls; each second one steps
