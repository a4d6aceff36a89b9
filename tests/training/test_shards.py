"""Models that a plan shards over several ranks train as on one, and go on where one cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import oomph
from oomph.errors import UsageError
from oomph.training.restarting import RestartFile

SCRIPT = Path(__file__).with_name("sharded.py")
TESTS = str(SCRIPT.parents[1])
SCENARIOS = ("planned", "precise", "resorts", "evaluated", "refused", "alone", "votes")
Found = dict[str, Any]


def started(folder: Path, num_ranks: int, *scenarios: str) -> list[Found]:
    """What each rank found."""
    folder.mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": TESTS}
    logs = [folder / f"{rank}.log" for rank in range(num_ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(SCRIPT), str(folder), str(rank), str(num_ranks), *scenarios]
        with log.open("w") as stream:
            processes.append(subprocess.Popen(command, env=env, stderr=stream))
    codes = [each.wait() for each in processes]
    assert not any(codes), "\n".join(log.read_text()[-2000:] for log in logs)
    return found_in(folder, num_ranks)


def found_in(folder: Path, num_ranks: int) -> list[Found]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("shards")
    return started(folder, 2, "by_one", *SCENARIOS)


def assert_same(state: Found, other: Found) -> None:
    for name, values in other.items():
        pairs = zip(state[name], values, strict=True)
        assert max(abs(one - two) for one, two in pairs) <= 1e-12, name


def test_a_plan_is_applied_and_trains_as_one_process_though_a_rank_runs_out_of_memory(
    two: list[Found],
) -> None:
    kinds = {"ddp": "ddp", "fsdp": "FSDPModule"}
    for rank, found in enumerate(two):
        for sharding, kind in kinds.items():
            assert found["planned"][sharding]["kind"] == kind
            assert found["planned"][sharding]["num_ooms"] == 3 * rank
            losses = found["planned"][sharding]["losses"]
            assert losses[::2] == pytest.approx(losses[1::2])  # of this rank's own examples
            assert_same(found["planned"][sharding]["state"], found["by_one"]["after 3"])
        assert found["planned"]["ddp"]["has_views"]


def test_parameters_may_be_on_the_host_and_computing_in_bf16_adds_up_in_fp32(
    two: list[Found],
) -> None:
    for found in two:
        assert found["precise"]["dtypes"] == ["torch.bfloat16", "torch.float32"]
        assert all(loss < 10 for loss in found["precise"]["losses"])
        assert found["precise"]["offload"] == "CPUOffloadPolicy"
        assert_same(found["precise"]["state"], found["by_one"]["after 3"])


@pytest.mark.parametrize("trick", ["checkpointing", "offload"])
def test_one_rank_may_switch_on_a_last_resort(trick: str, two: list[Found]) -> None:
    assert [found["resorts"][trick]["tricks"] for found in two] == [[trick], []]
    for found in two:
        assert_same(found["resorts"][trick]["state"], found["by_one"]["after 3"])


def test_each_rank_evaluates_in_pieces_of_its_own(two: list[Found]) -> None:
    for found in two:
        assert found["evaluated"]["pieces"] == pytest.approx(found["evaluated"]["whole"])
        assert_same(found["evaluated"]["state"], found["by_one"]["after 3"])
    said = [found["evaluated"]["said"] for found in two]
    assert said[0] == "of the user"
    assert "rank 0 failed" in said[1]


def test_what_one_rank_cannot_do_all_refuse_and_go_on(two: list[Found]) -> None:
    first, second = (found["refused"]["said"] for found in two)
    assert "1 of 5 examples at a time" in first[0]
    assert "rank 0 could not fit its part" in second[0]
    assert "NoneType cannot be split" in first[1]
    assert "rank 0 failed" in second[1]
    assert "at different points" in first[2]
    assert "at different points" in second[2]
    for found in two:
        assert_same(found["refused"]["state"], found["by_one"]["after 3"])


def test_a_rank_alone_recovers_as_well(two: list[Found]) -> None:
    for rank, found in enumerate(two):
        assert found["alone"]["num_ooms"] == 3 * (rank + 1)
        assert_same(found["alone"]["state"], found["by_one"]["after 3"])


def test_ranks_agree_before_each_pass_and_three_times_more(two: list[Found]) -> None:
    for found in two:
        # Two pieces of the first rank. The first step checks its split, and copies the weights.
        first, *others = found["votes"]["None"]
        assert others == [2 + 3, 2 + 3]
        assert first > 2 + 3 + 1
        assert found["votes"]["mean"][1:] == [2 + 4, 2 + 4]


@pytest.mark.slow
def test_a_hybrid_plan_copies_shards_and_trains_as_one_process(tmp_path: Path) -> None:
    for rank, found in enumerate(started(tmp_path, 4, "by_one", "planned")):
        for sharding in ("ddp", "fsdp", "hybrid"):
            assert found["planned"][sharding]["num_ooms"] == 3 * (rank == 3)
            assert_same(found["planned"][sharding]["state"], found["by_one"]["after 3"])
        assert "(Replicate(), Shard(dim=0))" in found["planned"]["hybrid"]["places"]


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    for number, num_ranks in enumerate((2, 4, 2)):
        for found in started(tmp_path, num_ranks, "by_one", "saved"):
            assert found["saved"]["begun"] == 3 * number
            assert found["saved"]["num_limits"] == min(number, 1)  # the sizes that were learnt
            whole = found["by_one"][f"after {3 * number + 3}"]
            assert_same(found["saved"]["state"], whole)


@pytest.mark.slow
def test_what_cannot_be_recovered_starts_again_smaller_from_the_checkpoint(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    scenarios = ("by_one", "restarted")
    done = subprocess.run(
        [sys.executable, *command, "--max-restarts", "1", str(SCRIPT), str(tmp_path), *scenarios],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": TESTS,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "this rank cannot finish the pass that the others are in" in done.stderr
    assert "torchrun --max-restarts" in done.stderr
    noted = RestartFile(tmp_path / "restart.json").micro_batch()
    assert noted is not None
    for found in found_in(tmp_path, 2):
        assert set(found["restarted"]["sizes"]) == {noted}
        assert_same(found["restarted"]["state"], found["by_one"]["after 3"])


# ---- the restart file ----------------------------------------------------------------------------


def test_a_restart_file_keeps_the_smallest_size_and_a_stepper_begins_with_it(
    tmp_path: Path,
) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "restart.json"
    assert RestartFile(path).micro_batch() is None
    for failed, noted in ((12, 6), (16, 6), (6, 3), (1, 1)):
        RestartFile(path).note(failed)
        assert RestartFile(path).micro_batch() == noted
    RestartFile(path).note(0)  # nothing has run
    path.write_text('{"micro_batch": 3}')
    model = torch.nn.Linear(4, 1)
    for given, size in ((None, 3), (2, 2), (5, 3)):
        step = oomph.Stepper(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model, batch: model(batch).square().mean(),
            micro_batch=given,
            restart_file=path,
        )
        assert step(torch.randn(6, 4)).micro_batch == size


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"micro_batch": "4"}', '{"micro_batch": 0}'])
def test_another_file_is_no_restart_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="not a restart file"):
        RestartFile(path).micro_batch()
